"""Joint noising, single insertions (DILM-S; Sec. 3.2.1, Cor. 1, Alg. 2; docs/MATH.md 2–4, 6a).

The chain deletes one uniformly chosen token at rate σ_t while any is left, so the number of deletions by time t is
min(Poisson(σ̄_t), n). In reverse one token is inserted at a time, at rate (σ_t/σ̄_t)·E[n − m | x_t], its gap and
identity from one softmax over all open gaps and the vocabulary.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from dilm_jax import canvas as canvas_lib
from dilm_jax import likelihood, losses
from dilm_jax.backbone import NetSpec
from dilm_jax.canvas import Vocabulary
from dilm_jax.event import OrderStatistics
from dilm_jax.losses import LossConfig
from dilm_jax.processes.base import Traits
from dilm_jax.sampling import Move, RevisableGrid, draw_gaps, draw_one_gap
from dilm_jax.schedules import TIME_SAMPLING, Schedule, concrete_total
from dilm_jax.special import log_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joint:
    """DILM-S for texts of up to `max_length` tokens. See base.Process for what each method must do."""

    EXACT: ClassVar[bool] = False
    TRAITS: ClassVar[Traits] = Traits(
        reads=("process.eps", "process.schedule", "loss"),
        samplers={
            "event": ("calls", "events_per_call"),
            "leap": ("num_steps",),
            "euler": ("num_steps", "rate_scale"),
        },
        gap_filter={},
        reads_posterior=("leap", "event"),
        from_context=("event",),
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
            length_head="cls",
            num_lengths=self.max_length + 1,
            stop_head=False,
            predictable=tuple(self.vocabulary.ordinary.tolist()),
        )

    @property
    def times(self):
        return TIME_SAMPLING[self.time_sampling](self.schedule, self.eps, lambda total: 1 / total)

    @property
    def importance_times(self):
        return dataclasses.replace(self, time_sampling="importance").times

    def corrupt(self, key, x0, t):
        """Deletes min(Poisson(σ̄_t), n) free tokens, which ones uniform."""
        k_count, k_which = canvas_lib.split_keys(key, 2)
        count = jax.vmap(jax.random.poisson)(k_count, self.schedule.total(t))
        return canvas_lib.drop_at_random(k_which, x0, count, t, self.vocabulary)

    def corrupt_to_empty(self, key, x0, t):
        """Given that the chain has rung K ≥ n times by t = 1, it has rung Binomial(K, σ̄_t/σ̄_1) times by t
        (docs/MATH.md 5)."""
        return self._corrupt_since(key, x0, t, jnp.ones_like(t))

    def _corrupt_since(self, key, x0, t, began):
        """The same for paths back to a context that was all that was left at `began` ≥ t. Below 1 that is not the empty
        canvas, so that the chain has rung n times by then and no more (docs/MATH.md 6d)."""
        k_all, k_count, k_which = canvas_lib.split_keys(key, 3)
        n, total_began = x0.free.sum(-1), self.schedule.total(began)
        rings = jnp.where(began < 1, n, n + self._rings_beyond(k_all, n, total_began))
        share = jnp.clip(self.schedule.total(t) / total_began, 0.0, 1.0)
        count = jax.vmap(jax.random.binomial)(k_count, rings.astype(jnp.float32), share).astype(n.dtype)
        return canvas_lib.drop_at_random(k_which, x0, count, t, self.vocabulary)

    def loss(self, scores, canvas, targets):
        """The token and length terms of docs/MATH.md 4; the token term keeps its 1/S̃ under every weighting."""
        config, t, n_left = self.loss_config, targets.t, targets.num_dropped
        n, empty = targets.x0.free.sum(-1), canvas.num_free == 0
        log_s = self._log_S(t)
        log_s_n = self._log_s_tilde(log_s, canvas, n)

        log_p_left = self._log_p_left(scores, canvas)
        log_expected = self._log_expected(log_p_left, canvas, log_s)
        log_w_token, log_w_length = losses.log_weights(
            config,
            jnp.log(self.coefficient(t)),
            jnp.where(empty, log_expected, jnp.maximum(log_expected, 0.0)),
            n_left,
        )
        gap_offset = jnp.broadcast_to(-losses.log_normalizer(scores, canvas)[:, None], canvas.tokens.shape)
        log_p = losses.log_token_terms(scores, gap_offset, jnp.zeros_like(gap_offset), canvas, targets, config)
        token = -jnp.exp(log_w_token - log_s_n) * log_p
        if config.length == "cross_entropy":
            length = jnp.exp(log_w_length) * losses.length_cross_entropy(log_p_left, n_left)
        else:
            length = losses.poisson_nll(log_expected, jnp.log(n_left) - log_s_n, log_w_length)
        return {"loss": token + length, "loss_token": token, "loss_length": length}

    def nll_draws(self, network, key, place, x0, num_times):
        """The bound of docs/MATH.md 5."""
        return likelihood.bound_samples(self, network, key, place, x0, num_times)

    def samplers(self, options):
        """event: one insertion at each time at which one happens; several of them with events_per_call.
        leap: as many insertions as come within the step, by one draw of how many tokens are missing, into as many gaps.
        euler: Algorithm 2, one insertion with probability rate·Δt."""

        def grid(draw, repeat_last):
            return RevisableGrid(
                num_steps=options.num_steps,
                eps=self.eps,
                max_length=self.max_length,
                draw=draw,
                repeat_last=repeat_last,
                noise=self.corrupt_to_empty,
            )

        def leap(key, scores, canvas, t, s, filters):
            k_count, k_draw = canvas_lib.split_keys(key, 2)
            count = self._count_within(k_count, scores, canvas, t, s)
            insert, tokens = draw_gaps(k_draw, scores, canvas, count, filters)
            return Move(insert=insert, tokens=tokens, saturated=count > insert.sum(-1))

        def euler(key, scores, canvas, t, s, filters):
            k_fire, k_draw = canvas_lib.split_keys(key, 2)
            due = self.insertion_rate(scores, canvas, jnp.maximum(t, self.eps)) * options.rate_scale * (t - s)
            count = (jax.vmap(jax.random.uniform)(k_fire) < due).astype(jnp.int32)
            insert, tokens = draw_one_gap(k_draw, scores, canvas, count, filters)
            return Move(insert=insert, tokens=tokens, saturated=due > 1)

        return {
            "event": OrderStatistics(
                max_length=self.max_length,
                eps=self.eps,
                calls=options.calls,
                events_per_call=options.events_per_call,
                log_p_left=self._log_p_left,
                next_time=self._next_time,
                time_of=self._time_of,
                draw=draw_one_gap if options.events_per_call == 1 else draw_gaps,
                noise_since=self._corrupt_since,
            ),
            "leap": grid(leap, True),
            "euler": grid(euler, False),
        }

    def insertion_rate(self, scores, canvas, t):
        """λ̂_t(x) [B] of the reverse chain: (σ_t/σ̄_t)·E_l[l], at m = 0 (σ_t/σ̄_t)·E_l[l/S(l, σ̄_t)]."""
        return jnp.exp(self._log_insertion_rate(scores, canvas, t))

    def log_rates(self, scores, canvas, t):
        """log of the rate of (gap, token), less its score [B, S]."""
        log_rate = self._log_insertion_rate(scores, canvas, t) - losses.log_normalizer(scores, canvas)
        return jnp.broadcast_to(log_rate[:, None], canvas.tokens.shape)

    def log_missing_rate(self, canvas, n, t):
        """log of σ_t/σ̄_t, over S(n, σ̄_t) on the empty canvas (docs/MATH.md 3)."""
        return jnp.log(self.coefficient(t)) - self._log_s_tilde(self._log_S(t), canvas, n)

    def start_nonempty(self, n):
        """P(Poisson(σ̄_1) < n)."""
        total = concrete_total(self.schedule, 1.0)
        return jnp.where(n > 0, jax.scipy.special.gammaincc(jnp.maximum(n, 1).astype(jnp.float32), total), 0.0)

    def one_missing(self, n, t):
        """P(one ring by t, and n − 1 at least in the rest), of n = 1 P(one ring by t at least), over P(n rings at
        least): with P(n rings at least by σ̄) = e^{−σ̄}·σ̄^n/n!·S(n, σ̄)."""
        total, total_1 = self.schedule.total(t), concrete_total(self.schedule, 1.0)
        rest, before = jnp.maximum(total_1 - total, 0.0), jnp.maximum(n - 1, 0)
        log_s_rest = jnp.take_along_axis(log_S(self.max_length, rest, total_1), before[:, None], axis=-1)[:, 0]
        log_s_all = log_S(self.max_length, jnp.float32([total_1]), total_1)[0, n]
        log_p = jnp.log(total * n / total_1) + before * jnp.log(rest / total_1) + log_s_rest - log_s_all
        return jnp.where(n > 1, jnp.exp(log_p), jnp.where(n == 1, jnp.expm1(-total) / math.expm1(-total_1), 0.0))

    def kept_probs(self, n, t):
        """P(min(Poisson(σ̄_t), n) = n − m)."""
        m, total = jnp.arange(self.max_length + 1), self.schedule.total(t)
        pmf = jax.scipy.stats.poisson.pmf(n[:, None] - m, total)
        all_gone = jnp.where(n > 0, jax.scipy.special.gammainc(jnp.maximum(n, 1).astype(jnp.float32), total), 1.0)
        return jnp.where(m == 0, all_gone[:, None], pmf)

    def _log_insertion_rate(self, scores, canvas, t):
        log_expected = self._log_expected(self._log_p_left(scores, canvas), canvas, self._log_S(t))
        return log_expected + jnp.log(self.coefficient(t))

    def coefficient(self, t):
        """σ_t/σ̄_t."""
        return self.schedule.rate(t) / self.schedule.total(t)

    def _count_within(self, key, scores, canvas, t, s):
        """How many insertions come in (s, t] [B]: given l missing none if the first comes before s, else it and
        Binomial(l − 1, 1 − σ̄_s/σ̄_first) of the others (docs/MATH.md 6a)."""
        k_left, k_first, k_others = canvas_lib.split_keys(key, 3)
        left = jax.vmap(jax.random.categorical)(k_left, self._log_p_left(scores, canvas))
        first = self._first_total(k_first, canvas, jnp.maximum(left, 1), self.schedule.total(t))
        total = self.schedule.total(s)
        share = jnp.clip(1 - total / first, 0.0, 1.0)
        others = jax.vmap(jax.random.binomial)(k_others, jnp.maximum(left - 1, 0).astype(jnp.float32), share)
        return jnp.where((left > 0) & (first > total), 1 + others.astype(left.dtype), 0)

    def _next_time(self, key, canvas, left, t, count=None):
        """Time of the next insertion given that `left` tokens are missing at t, or of the `count`-th, 1 ≤ count ≤ left:
        those after the first rang at uniform times below its own."""
        k_first, k_others = canvas_lib.split_keys(key, 2)
        first = self._first_total(k_first, canvas, left, self.schedule.total(t))
        if count is None:
            return self.schedule.inverse_total(first)
        of_others = jax.vmap(jax.random.beta)(k_others, left - count + 1.0, jnp.maximum(count - 1.0, 1.0))
        return self.schedule.inverse_total(first * jnp.where(count > 1, of_others, 1.0))

    def _first_total(self, key, canvas, left, total):
        """σ̄ at the next insertion given that `left` tokens are missing at σ̄ = total (docs/MATH.md 6b).

        All that are missing rang at uniform times below σ̄_t, the next insertion at the last of them: σ̄_t·U^{1/l}.
        On the empty canvas the l-th ring emptied it, and K − l more may have followed: K ~ Poisson(σ̄_t) given K ≥ l,
        and the l-th of K uniform times is Beta(l, K − l + 1).
        """
        k_more, k_beta = canvas_lib.split_keys(key, 2)
        more = jnp.where(canvas.num_free == 0, self._rings_beyond(k_more, left, total), 0)
        return total * jax.vmap(jax.random.beta)(k_beta, left.astype(jnp.float32), more + 1.0)

    def _time_of(self, key, left):
        """t given that `left` tokens are missing: σ̄_t ~ Gamma(l + 1) given that it is at most σ̄_1, by bisection."""
        shape, total_1 = left + 1.0, concrete_total(self.schedule, 1.0)
        target = jax.vmap(jax.random.uniform)(key) * jax.scipy.special.gammainc(shape, total_1)

        def halve(_, ends):
            low, high = ends
            middle = (low + high) / 2
            above = jax.scipy.special.gammainc(shape, middle) > target
            return jnp.where(above, low, middle), jnp.where(above, middle, high)

        _, high = jax.lax.fori_loop(0, 40, halve, (jnp.zeros_like(shape), jnp.full_like(shape, total_1)))
        return self.schedule.inverse_total(high)

    def _rings_beyond(self, key, n, total):
        """K − n for K ~ Poisson(total) given K ≥ n."""
        total_1 = concrete_total(self.schedule, 1.0)
        more = jnp.arange(math.ceil(total_1 + 10 * math.sqrt(total_1)) + 64.0)  # beyond, float32 has no mass
        log_prob = more * jnp.log(total)[:, None] - jax.lax.lgamma(n[:, None] + more + 1)
        return jax.vmap(jax.random.categorical)(key, log_prob)

    def _log_p_left(self, scores, canvas):
        """log p(l), l = 0..max_length."""
        return losses.log_length_probs(scores.length_logits, canvas_lib.room(canvas, self.max_length))

    def _log_expected(self, log_p_left, canvas, log_s):
        """log E_l[l], at m = 0 log E_l[l/S(l, σ̄_t)]: the insertion rate over σ_t/σ̄_t."""
        log_left = jnp.log(jnp.arange(self.max_length + 1.0))
        empty = (canvas.num_free == 0)[:, None]
        return losses.log_mean(log_p_left, jnp.where(empty, log_left - log_s, log_left))

    def _log_s_tilde(self, log_s, canvas, n):
        """log S̃ [B]: log S(n, σ̄_t) on the empty canvas, else 0."""
        return jnp.where(canvas.num_free == 0, jnp.take_along_axis(log_s, n[:, None], axis=-1)[:, 0], 0.0)

    def _log_S(self, t):
        """log S(l, σ̄_t) [B, K], l = 0..max_length."""
        return log_S(self.max_length, self.schedule.total(t), concrete_total(self.schedule, 1.0))
