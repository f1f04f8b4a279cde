"""Masked diffusion of flexible length (FlexMDM; Kim et al. 2025, arXiv 2509.01025).

Noise masks a token at a time M and deletes it at a time D, uniform on [0, 1]; M is uniform on [0, D] (the paper's T_1
is 1 − D, its T_2 is 1 − M). At t a token is missing with probability t, masked with −t·log t. In reverse each missing
token comes, as a mask, and each mask is revealed, at rate 1/t. The network says how many tokens are missing from each
gap, and what each mask stands for; position and identity are decided apart.
"""

import dataclasses
import math
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
from dilm_jax.sampling import Grid, Move, draw_tokens, fire_probability
from dilm_jax.schedules import SquareTimes, UniformTimes


@struct.dataclass
class Targets:
    """What the masks stand for, and what is missing."""

    masked: Bool[Array, "B L"]  # of the text's tokens
    missing: InsertionTargets


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
        return {"uniform": UniformTimes, "importance": SquareTimes}[self.time_sampling](eps=self.eps)

    def corrupt(self, key, x0, t):
        return self._at(t, x0, self._draw_events(key, x0))

    def _draw_events(self, key, x0):
        """[B, L, 2] the times D and M of each token."""
        u = jax.vmap(lambda k: jax.random.uniform(k, (x0.max_length, 2)))(key)
        return jnp.cumprod(u, axis=-1)

    def _at(self, t, x0, events):
        """Canvas and targets at t."""
        past = x0.free[..., None] & (events <= t[:, None, None])
        dropped, masked = past[..., 0], past[..., 1] & ~past[..., 0]
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
            length = losses.poisson_nll(losses.log_mean_length(log_p_left), jnp.log(left), jnp.zeros(left.shape))
        token = self._masked_nll(scores, targets) / targets.missing.t
        length = jnp.where(canvas.open_gap, length, 0.0).sum(-1) / targets.missing.t
        return {"loss": token + length, "loss_token": token, "loss_length": length}

    def nll_draws(self, network, key, place, x0, num_times):
        """A bound: ∫₀¹ 1/t·E[Σ −log p + Σ_gaps (g − G·log g − G)] dt. A path says of each insertion into which gap it
        goes, and with the text that says which token it was: the rates of paths are those of the gaps. Below eps the
        network is asked at eps, and the rate of insertions stays g/eps.

        Half of the draws are of a time with density 1/(max(t, eps)·Z), half of the time of one of the 2n events,
        uniformly drawn. With c tokens missing or masked both together have (1/(max(t, eps)·Z) + c/(2nt))/2 of the
        density of a state at a uniform time: no draw is large because t is small.
        """
        free = jnp.stack([x0.free, x0.free], axis=-1)
        num_events = free.sum((1, 2))
        log_range = -math.log(self.eps)

        def draw(key, u):
            k_events, k_which = canvas_lib.split_keys(key, 2)
            events = self._draw_events(k_events, x0)
            at_event = (u >= 0.5) & (num_events > 0)
            which = canvas_lib.choose(k_which, free.reshape(len(u), -1), at_event.astype(jnp.int32)).reshape(free.shape)
            place = jnp.mod(2 * u, 1.0) * (1 + log_range)
            t = self.eps * jnp.where(place < 1, place, jnp.exp(place - 1))
            t = jnp.where(at_event, (which * events).sum((1, 2)), t)
            t = jnp.clip(t, jnp.finfo(t.dtype).eps, 1.0)
            canvas, targets = self._at(t, x0, events)
            num_left = targets.missing.dropped.sum(-1) + targets.masked.sum(-1)
            asked, true_rate = jnp.maximum(t, self.eps), targets.missing.num_in_gap / t[:, None]
            density = 1 / (asked * (1 + log_range))
            density = jnp.where(num_events > 0, (density + num_left / jnp.maximum(num_events * t, 1e-30)) / 2, density)

            def value_of(scores):
                log_rate = losses.log_mean_length(self._log_p_left(scores, canvas)) - jnp.log(asked)[:, None]
                gaps = losses.poisson_nll(log_rate, jnp.log(true_rate), jnp.zeros(true_rate.shape))
                gaps = gaps - true_rate * (1 + jnp.log(t))[:, None]
                return self._masked_nll(scores, targets) / t + jnp.where(canvas.open_gap, gaps, 0.0).sum(-1)

            return network(canvas, asked, value_of) / density

        return likelihood.over_times(draw, key, place, num_times)

    def samplers(self, options):
        """Over t → s each mask is revealed with probability 1 − s/t. leap: a gap gets a mask with the exact probability
        that at least one is due. euler: with 1 − exp(−g·(t − s)/t). At most one a gap a step, so that the last one is
        repeated while it inserts, and until no mask is left."""

        def grid(fire):
            def draw(key, scores, canvas, t, s, filters):
                k_fire, k_reveal, k_token = canvas_lib.split_keys(key, 3)
                uniform = jax.vmap(lambda k: jax.random.uniform(k, canvas.tokens.shape[1:]))
                probability, due = fire(self._log_p_left(scores, canvas), t, s)
                masked = canvas.tokens == self.vocabulary.mask
                reveal = masked & (uniform(k_reveal) >= (s / t)[:, None])
                return Move(
                    insert=canvas.open_gap & (uniform(k_fire) < probability),
                    tokens=jnp.full_like(canvas.tokens, self.vocabulary.mask),
                    saturated=(canvas.open_gap & (due > 1)).any(-1),
                    reveal=reveal,
                    revealed=draw_tokens(k_token, scores.of_gaps, reveal, filters.token),
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
            return fire_probability(log_p_left, s / t)

        def euler(log_p_left, t, s):
            due = jnp.exp(losses.log_mean_length(log_p_left)) * ((t - s) / jnp.maximum(t, self.eps))[:, None]
            return -jnp.expm1(-due), due

        return {"leap": grid(leap), "euler": grid(euler)}

    def _log_p_left(self, scores, canvas):
        """log p_i(l) [B, S, K]."""
        return losses.log_gap_length_probs(scores, canvas, self.max_length)

    def _masked_nll(self, scores, targets):
        """Σ −log p over the masks [B]."""
        missing = targets.missing
        here = missing.x0.valid & ~missing.dropped
        column = canvas_lib.NUM_SPECIAL_COLUMNS + jnp.cumsum(here, axis=-1) - 1  # of a token that is on the canvas
        return losses.sum_nll(scores, missing.tokens, targets.masked, column)
