"""Masked diffusion of flexible length (FlexMDM; Kim et al. 2025, arXiv 2509.01025).

Noise masks a token at a time M and deletes it at a time D, uniform on [0, 1]; M is uniform on [0, D] (the paper's T_1
is 1 − D, its T_2 is 1 − M). At t a token is missing with probability t, masked with −t·log t. In reverse each missing
token comes, as a mask, and each mask is revealed, at rate 1/t. The network says how many tokens are missing from each
gap, and what each mask stands for; position and identity are decided apart.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool

from dilm_jax import canvas as canvas_lib
from dilm_jax import likelihood, losses
from dilm_jax.backbone import NetSpec
from dilm_jax.canvas import InsertionTargets, Vocabulary
from dilm_jax.losses import LossConfig
from dilm_jax.processes.base import Traits
from dilm_jax.sampling import Grid, Move, categorical
from dilm_jax.schedules import UniformTimes


@struct.dataclass
class Targets:
    """What the masks stand for, and what is missing."""

    masked: Bool[Array, "B L"]  # of the text's tokens
    missing: InsertionTargets


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquareTimes:
    """t = u² on [eps, 1]: more small times, where the rate 1/t is large."""

    eps: float

    def __call__(self, u):
        low = self.eps**0.5
        root = low + (1 - low) * u
        return root**2, 2 * root * (1 - low) / (1 - self.eps)


def _draw_events(key, x0):
    """[B, 2, L] the times D and M of each token."""
    u = jax.vmap(lambda k: jax.random.uniform(k, (2, x0.max_length)))(key)
    return jnp.stack([u[:, 0], u[:, 0] * u[:, 1]], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexMDM:
    """See base.Process for what each method must do."""

    EXACT: ClassVar[bool] = False
    TRAITS: ClassVar[Traits] = Traits(
        reads=("process.eps", "loss.length", "loss.time_sampling"),
        samplers={"leap": ("num_steps",), "euler": ("num_steps",)},
        reads_posterior=("leap",),
        from_context=("leap", "euler"),
    )

    vocabulary: Vocabulary
    max_length: int
    eps: float
    loss_config: LossConfig
    time_sampling: str

    @property
    def spec(self):
        return NetSpec(
            causal=False,
            uses_time=True,
            append_only=False,
            length_head="gap",
            num_lengths=self.max_length + 1,
            stop_head=False,
            predictable=tuple(self.vocabulary.ordinary.tolist()),
        )

    @property
    def times(self):
        return (SquareTimes if self.time_sampling == "importance" else UniformTimes)(eps=self.eps)

    def corrupt(self, key, x0, t):
        return self._at(t, x0, _draw_events(key, x0))

    def _at(self, t, x0, events):
        """Canvas and targets at t, of events [B, 2, L]."""
        past = x0.free[:, None] & (events <= t[:, None, None])
        dropped, masked = past[:, 0], past[:, 1] & ~past[:, 0]
        seen = dataclasses.replace(x0, tokens=jnp.where(masked, self.vocabulary.mask, x0.tokens))
        canvas, gap = canvas_lib.drop_tokens(seen, dropped, self.vocabulary)
        missing = InsertionTargets(tokens=x0.tokens, gap=gap, dropped=dropped, x0=x0, t=t)
        return canvas, Targets(masked=masked, missing=missing)

    def loss(self, scores, canvas, targets):
        """1/t·[Σ −log p over the masks + Σ_gaps (g − G·log g)], g the expected number G that is missing from a gap; or,
        with length "cross_entropy", −log p(G) in place of the latter, whose optimum has the same mean."""
        log_p_left, left = self._log_p_left(scores, canvas), targets.missing.num_in_gap
        if self.loss_config.length == "cross_entropy":
            length = losses.length_cross_entropy(log_p_left, left)
        else:
            length = losses.poisson_nll(self._log_mean_left(log_p_left), jnp.log(left), jnp.zeros(left.shape))
        token = self._masked_nll(scores, targets) / targets.missing.t
        length = jnp.where(canvas.open_gap, length, 0.0).sum(-1) / targets.missing.t
        return {"loss": token + length, "loss_token": token, "loss_length": length}

    def nll_draws(self, network, key, place, x0, num_times):
        """A bound: ∫₀¹ 1/t·E[Σ −log p + Σ_gaps (g − G·log g − G)] dt. A path says of each insertion into which gap it
        goes, and with the text that says which token it was: the rates of paths are those of the gaps. Below eps the
        network is asked at eps, and the rate of insertions stays g/eps.

        Half of the draws are of a uniform time, half of the time of one of the 2n events, uniformly drawn. With c
        tokens missing or masked the density of a state is (1 + c/(2nt))/2 of what it is at a uniform time: no draw is
        large because t is small.
        """
        free = jnp.stack([x0.free, x0.free], axis=1)
        num_events = free.sum((1, 2))

        def draw(key, u):
            k_events, k_which = canvas_lib.split_keys(key, 2)
            events = _draw_events(k_events, x0)
            one = ((u >= 0.5) & (num_events > 0)).astype(jnp.int32)
            which = canvas_lib.choose(k_which, free.reshape(len(u), -1), one).reshape(free.shape)
            t = jnp.where(one > 0, (which * events).sum((1, 2)), jnp.mod(2 * u, 1.0))
            t = jnp.maximum(t, jnp.finfo(t.dtype).eps)
            canvas, targets = self._at(t, x0, events)
            num_left = targets.missing.dropped.sum(-1) + targets.masked.sum(-1)
            density = jnp.where(num_events > 0, (1 + num_left / jnp.maximum(num_events * t, 1e-30)) / 2, 1.0)
            asked, true_rate = jnp.maximum(t, self.eps), targets.missing.num_in_gap / t[:, None]

            def value_of(scores):
                log_rate = self._log_mean_left(self._log_p_left(scores, canvas)) - jnp.log(asked)[:, None]
                gaps = losses.poisson_nll(log_rate, jnp.log(true_rate), jnp.zeros(true_rate.shape))
                gaps = gaps - true_rate * (1 + jnp.log(t))[:, None]
                return self._masked_nll(scores, targets) / t + jnp.where(canvas.open_gap, gaps, 0.0).sum(-1)

            return network(canvas, asked, value_of) / density

        return likelihood.over_times(draw, key, place, num_times)

    def samplers(self, options):
        """Over t → s each mask is revealed with probability 1 − s/t. leap: a gap gets a mask with the probability that
        at least one comes, 1 − E_l[(s/t)^l]. euler: with 1 − exp(−g·(t − s)/t). At most one a gap a step."""

        def grid(fire):
            def draw(key, scores, canvas, t, s, filters):
                k_fire, k_reveal, k_token = canvas_lib.split_keys(key, 3)
                uniform = jax.vmap(lambda k: jax.random.uniform(k, canvas.tokens.shape[1:]))
                probability = fire(self._log_p_left(scores, canvas), t[:, None], s[:, None])
                masked = canvas.tokens == self.vocabulary.mask
                return Move(
                    insert=canvas.open_gap & (uniform(k_fire) < probability),
                    tokens=jnp.full_like(canvas.tokens, self.vocabulary.mask),
                    saturated=jnp.zeros(canvas.length.shape, bool),
                    reveal=masked & (uniform(k_reveal) >= (s / t)[:, None]),
                    revealed=categorical(k_token, filters.token(scores.dense())),
                )

            return Grid(
                num_steps=options.num_steps,
                eps=self.eps,
                max_length=self.max_length,
                draw=draw,
                repeat_last=True,
                mask=self.vocabulary.mask,
            )

        def leap(log_p_left, t, s):
            left = jnp.arange(log_p_left.shape[-1])
            none = jnp.where(left > 0, (s / t)[..., None] ** left, 1.0)
            return (jnp.exp(log_p_left) * (1 - none)).sum(-1)

        def euler(log_p_left, t, s):
            return -jnp.expm1(-jnp.exp(self._log_mean_left(log_p_left)) * (t - s) / t)

        return {"leap": grid(leap), "euler": grid(euler)}

    def _log_p_left(self, scores, canvas):
        """log p_i(l) [B, S, K]."""
        return losses.log_gap_length_probs(scores, canvas, self.max_length)

    def _log_mean_left(self, log_p_left):
        """log g_i [B, S]."""
        return losses.log_mean(log_p_left, jnp.log(jnp.arange(self.max_length + 1.0)))

    def _masked_nll(self, scores, targets):
        """Σ −log p over the masks [B]."""
        missing = targets.missing
        here = missing.x0.valid & ~missing.dropped
        column = canvas_lib.NUM_SPECIAL_COLUMNS + jnp.cumsum(here, axis=-1) - 1  # of a token that is on the canvas
        column = jnp.where(targets.masked, column, 0)
        log_p = scores.at(column, missing.tokens) - jnp.take_along_axis(scores.lse(), column, axis=-1)
        return -jnp.where(targets.masked, log_p, 0.0).sum(-1)
