"""Independent noising, many insertions (DILM-M; Sec. 3.2.2, Cor. 2, Alg. 3; docs/MATH.md 2–4, 6a).

Every token is deleted at rate σ_t, so each is kept with probability ρ_t = e^{−σ̄_t}. In reverse each gap i receives
tokens at rate γ_t·E[|s_i| | x_t], γ_t = σ_t/(e^{σ̄_t} − 1), their identity from the gap's own softmax.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dilm_jax import canvas as canvas_lib
from dilm_jax import likelihood, losses
from dilm_jax.backbone import NetSpec
from dilm_jax.canvas import Vocabulary
from dilm_jax.event import ManyEvents, Thinning
from dilm_jax.losses import LossConfig
from dilm_jax.processes.base import Traits
from dilm_jax.sampling import Move, RevisableGrid, draw_every_gap, draw_insertion, fire_probability
from dilm_jax.schedules import TIME_SAMPLING, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Independent:
    """DILM-M for texts of up to `max_length` tokens. See base.Process for what each method must do."""

    EXACT: ClassVar[bool] = False
    TRAITS: ClassVar[Traits] = Traits(
        reads=("process.eps", "process.schedule", "loss"),
        samplers={
            "event": ("calls", "events_per_call"),
            "leap": ("num_steps",),
            "euler": ("num_steps", "rate_scale"),
        },
        gap_filter={"sampling.sampler": ("event",), "sampling.events_per_call": (1,)},
        reads_posterior=("leap",),
        from_context=("event", "leap", "euler"),
        revises=True,
    )

    vocabulary: Vocabulary
    max_length: int
    schedule: Schedule
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
        return TIME_SAMPLING[self.time_sampling](
            self.schedule, self.eps, lambda total: np.exp(-total) / -np.expm1(-total)
        )

    @property
    def importance_times(self):
        return dataclasses.replace(self, time_sampling="importance").times

    def corrupt(self, key, x0, t):
        """Deletes Binomial(n, 1 − ρ_t) free tokens, which ones uniform."""
        return self._drop(key, self._drop_prob(t), x0, t)

    def corrupt_to_empty(self, key, x0, t):
        """Each token stays with probability (ρ_t − ρ_1)/(1 − ρ_1), its share given that it goes by t = 1
        (docs/MATH.md 5)."""
        return self._drop(key, jnp.minimum(self._drop_prob(t) / self._drop_prob(jnp.ones_like(t)), 1.0), x0, t)

    def _drop(self, key, probability, x0, t):
        k_count, k_which = canvas_lib.split_keys(key, 2)
        n = x0.free.sum(-1)
        count = jax.vmap(jax.random.binomial)(k_count, n.astype(jnp.float32), probability)
        return canvas_lib.drop_at_random(k_which, x0, count.astype(n.dtype), t, self.vocabulary)

    def loss(self, scores, canvas, targets):
        """The token and length terms of docs/MATH.md 4.

        Under the exact kernel the token term is −log of Σ over the run's gaps of Δl_i·p(w|i), relative to the
        target gap's own Δl: with the length term the bound's, and never above the paper's. Δl is held constant in
        it when cross-entropy fits the length head: the run sums then have the same optimum.
        """
        config, t, n_left = self.loss_config, targets.t, targets.num_dropped
        log_p_left = self.log_p_left(scores, canvas)
        log_mean_left = losses.log_mean_length(log_p_left)  # log Δl_i
        log_total_left = jax.nn.logsumexp(jnp.where(canvas.open_gap, log_mean_left, -jnp.inf), axis=-1)
        log_w_token, log_w_length = losses.log_weights(
            config, jnp.log(self.coefficient(t)), jnp.maximum(log_total_left, 0.0), n_left
        )

        left = targets.num_in_gap
        log_gap_rate = jnp.where(jnp.isfinite(log_mean_left), log_mean_left, 0.0)
        if config.length == "cross_entropy":
            length = losses.length_cross_entropy(log_p_left, left)
            log_mean_left = jax.lax.stop_gradient(log_mean_left)
            log_gap_rate = jax.lax.stop_gradient(log_gap_rate)
            if config.weighting != "elbo":
                length = length / jnp.maximum(canvas.open_gap.sum(-1, keepdims=True), 1)
            length = jnp.exp(log_w_length)[:, None] * length
        else:
            log_w_gap = jnp.broadcast_to(log_w_length[:, None], left.shape)
            length = losses.poisson_nll(log_mean_left, jnp.log(left), log_w_gap)
        length = jnp.where(canvas.open_gap, length, 0.0).sum(-1)

        gap_offset = log_mean_left - scores.lse()
        log_p = losses.log_token_terms(scores, gap_offset, log_gap_rate, canvas, targets, config)
        token = -jnp.exp(log_w_token) * log_p
        return {"loss": token + length, "loss_token": token, "loss_length": length}

    def nll_draws(self, network, key, place, x0, num_times):
        """The bound of docs/MATH.md 5."""
        return likelihood.bound_samples(self, network, key, place, x0, num_times)

    def samplers(self, options):
        """event: one insertion at each time at which one happens, by thinning; several of them with events_per_call.
        leap: each gap gets a token with the exact probability that at least one is due in it within the step.
        euler: Algorithm 3, with probability 1 − exp(−rate·Δt). At most one token a gap a step."""

        def grid(fire, repeat_last):
            def draw(key, scores, canvas, t, s, filters):
                k_fire, k_draw = canvas_lib.split_keys(key, 2)
                probability, due = fire(scores, canvas, t, s)
                fires = jax.vmap(lambda k: jax.random.uniform(k, probability.shape[1:]))(k_fire) < probability
                insert, tokens = draw_every_gap(k_draw, scores, canvas, fires, filters)
                saturated = (canvas.open_gap & (due > 1)).any(-1)
                return Move(insert=insert, tokens=tokens, saturated=saturated)

            return RevisableGrid(
                num_steps=options.num_steps,
                eps=self.eps,
                max_length=self.max_length,
                draw=draw,
                repeat_last=repeat_last,
                noise=self.corrupt_to_empty,
            )

        def euler(scores, canvas, t, s):
            rate = self.insertion_rate(scores, canvas, jnp.maximum(t, self.eps)) * options.rate_scale
            due = rate * (t - s)[:, None]
            return -jnp.expm1(-due), due

        def draw_one(key, scores, canvas, fire, filters):
            return draw_insertion(key, self._log_mean_left(scores, canvas), scores, canvas, fire, filters)

        common = {"max_length": self.max_length, "eps": self.eps, "law": self, "noise": self.corrupt_to_empty}
        many = ManyEvents(events_per_call=options.events_per_call, **common)
        return {
            "event": many if options.events_per_call > 1 else Thinning(calls=options.calls, draw=draw_one, **common),
            "leap": grid(self._fire_probability, True),
            "euler": grid(euler, False),
        }

    def expected_left(self, scores, canvas):
        """Σ_i Δl_i over open gaps [B]."""
        return self._mean_left(scores, canvas).sum(-1)

    def earlier(self, t, log_factor):
        """s with 1 − ρ_s = (1 − ρ_t)·exp(log_factor)."""
        gone = self._drop_prob(t) * jnp.exp(log_factor)  # 1 − ρ_s
        kept = -jnp.expm1(log_factor) + jnp.exp(log_factor - self.schedule.total(t))  # ρ_s, where that is near 0
        total = jnp.where(gone < 0.5, -jnp.log1p(-jnp.minimum(gone, 0.5)), -jnp.log(kept))
        return jnp.minimum(self.schedule.inverse_total(total), t)

    def coefficient(self, t):
        """γ_t = σ_t·ρ_t/(1 − ρ_t)."""
        return self.schedule.rate(t) / jnp.expm1(self.schedule.total(t))

    def insertion_rate(self, scores, canvas, t):
        """λ̂_t(x, i) = γ_t·Δl_i [B, S] of the reverse chain; 0 at closed gaps."""
        return self.coefficient(t)[:, None] * self._mean_left(scores, canvas)

    def log_rates(self, scores, canvas, t):
        """log of the rate of (gap, token), less its score [B, S]."""
        return jnp.log(self.coefficient(t))[:, None] + self._log_mean_left(scores, canvas) - scores.lse()

    def log_missing_rate(self, canvas, n, t):
        """log γ_t."""
        del canvas, n
        return jnp.log(self.coefficient(t))

    def start_nonempty(self, n):
        """1 − (1 − ρ_1)^n."""
        return -jnp.expm1(n * jnp.log1p(-jnp.exp(-self.schedule.total(jnp.float32(1.0)))))

    def one_missing(self, n, t):
        """n·q·(1 − q)^{n−1}, q = (1 − ρ_t)/(1 − ρ_1)."""
        gone = jnp.minimum(self._drop_prob(t) / self._drop_prob(jnp.ones_like(t)), 1.0)
        return n * gone * (1 - gone) ** jnp.maximum(n - 1, 0)

    def kept_probs(self, n, t):
        """Binomial(n, ρ_t)."""
        m = jnp.arange(self.max_length + 1)
        return jax.scipy.stats.binom.pmf(m, n[:, None], jnp.exp(-self.schedule.total(t)))

    def _fire_probability(self, scores, canvas, t, s):
        """Of an insertion in (s, t], and the expected number, both [B, S]: 1 − q, q = (ρ_s − ρ_t)/(1 − ρ_t), of what is
        missing at t still is at s."""
        return fire_probability(self.log_p_left(scores, canvas), self._drop_prob(s) / self._drop_prob(t))

    def log_p_left(self, scores, canvas):
        """log p_i(l) [B, S, K], l = 0..max_length."""
        return losses.log_gap_length_probs(scores, canvas, self.max_length)

    def _mean_left(self, scores, canvas):
        """Δl_i [B, S], 0 at closed gaps."""
        return jnp.where(canvas.open_gap, jnp.exp(self._log_mean_left(scores, canvas)), 0.0)

    def _log_mean_left(self, scores, canvas):
        """log Δl_i [B, S]."""
        return losses.log_mean_length(self.log_p_left(scores, canvas))

    def _drop_prob(self, t):
        """1 − ρ_t."""
        return -jnp.expm1(-self.schedule.total(t))
