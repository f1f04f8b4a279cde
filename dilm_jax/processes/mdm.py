"""Masked diffusion (MDM; Sahoo et al. 2024, arXiv 2406.07524; a baseline of the paper's tables).

Noise turns each token into MASK, which it is at t with probability 1 − α_t; in reverse masks are revealed, each by its
column's own softmax. The canvas has a fixed size: the text, EOS, then PAD up to `max_length`, and a text of that length
has neither. EOS and PAD are ordinary tokens: noised, predicted, and paid for in the loss and in the bound. A sample
ends before its first EOS or PAD. A prompt is never masked.

The optimal network does not depend on t (only on what is masked), so by default it is not told.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dilm_jax import canvas as canvas_lib
from dilm_jax import likelihood, losses
from dilm_jax import request as request_lib
from dilm_jax.backbone import NetSpec
from dilm_jax.canvas import Canvas, Vocabulary
from dilm_jax.processes.base import Traits
from dilm_jax.request import Request
from dilm_jax.sampling import Move, State, begin, categorical, conditioned, draw_tokens, move
from dilm_jax.schedules import MASKING, UniformTimes


@struct.dataclass
class MaskTargets:
    """What the masks stand for."""

    tokens: Int[Array, "B S"]
    masked: Bool[Array, "B S"]
    t: Float[Array, " B"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MDM:
    """See base.Process for what each method must do.

    Attributes:
      masking: a key of schedules.MASKING: how the share of masks grows with t.
      time_conditioning: whether the network is told t.
    """

    EXACT: ClassVar[bool] = False
    TRAITS: ClassVar[Traits] = Traits(
        reads=("process.eps", "process.masking", "process.time_conditioning"),
        samplers={"ancestral": ("num_steps",), "confidence": ("num_steps",), "first_hitting": ()},
        from_context=("ancestral", "confidence", "first_hitting"),
        fills="known",
        grows=False,
    )

    vocabulary: Vocabulary
    max_length: int
    eps: float
    masking: str
    time_conditioning: bool

    @property
    def spec(self):
        predictable = self.vocabulary.ordinary
        predictable[[self.vocabulary.eos, self.vocabulary.pad]] = True
        return NetSpec(
            causal=False,
            uses_time=self.time_conditioning,
            append_only=False,
            length_head=None,
            num_lengths=0,
            stop_head=False,
            predictable=tuple(predictable.tolist()),
        )

    @property
    def times(self):
        return UniformTimes(eps=self.eps)

    def corrupt(self, key, x0, t):
        """Each free column becomes MASK with probability 1 − α_t."""
        canvas, free = self._fixed(canvas_lib.to_canvas(x0, self.vocabulary))
        u = jax.vmap(lambda k: jax.random.uniform(k, free.shape[1:]))(key)
        return self._mask(canvas, free & (u < self.law.masked(t)[:, None]), t)

    def loss(self, scores, canvas, targets):
        """−α'_t/(1 − α_t)·Σ −log p over the masks: the bound's integrand."""
        del canvas
        loss = self.law.reveal_rate(targets.t) * _masked_nll(scores, targets)
        return {"loss": loss, "loss_token": loss}

    def nll_draws(self, network, key, place, x0, num_times):
        """The bound ∫₀¹ −α'_t/(1 − α_t)·E[Σ −log p] dt, by the number of masks: of N free columns m are masked with
        weight ∫ −α'/(1 − α)·P(m at t) dt = 1/m, so that it is E[N/m·Σ −log p], m uniform on 1..N. Then 1 − α_t is
        Beta(m, N − m + 1), whatever the schedule."""
        canvas, free = self._fixed(canvas_lib.to_canvas(x0, self.vocabulary))
        num_free = free.sum(-1)

        def draw(key, u):
            k_which, k_time = canvas_lib.split_keys(key, 2)
            count = jnp.minimum(1 + jnp.floor(u * num_free).astype(num_free.dtype), num_free)
            share = jax.vmap(jax.random.beta)(k_time, jnp.maximum(count, 1.0), num_free - count + 1.0)
            t = self.law.inverse(share)
            noised, targets = self._mask(canvas, canvas_lib.choose(k_which, free, count), t)
            nll = network(noised, jnp.maximum(t, self.eps), lambda scores: _masked_nll(scores, targets))
            return num_free / jnp.maximum(count, 1.0) * nll

        return likelihood.over_times(draw, key, place, num_times)

    def samplers(self, options):
        """ancestral: on a grid of times, each mask with the probability of its being revealed within the step.
        confidence: as many in each of the steps, those that the network is surest of. first_hitting: one after the
        other, at the times at which they are revealed: no grid, exact."""
        common = {"process": self, "num_steps": options.num_steps}
        return {
            "ancestral": Ancestral(**common),
            "confidence": Confidence(**common),
            "first_hitting": FirstHitting(process=self),
        }

    @property
    def law(self):
        return MASKING[self.masking]

    def _fixed(self, canvas: Canvas) -> tuple[Canvas, Bool[Array, "B S"]]:
        """With EOS and PAD after the text, seen like any tokens; and which columns noise may mask. Those after the text
        are given where the gap at its end is closed."""
        column = jnp.arange(canvas.num_columns)
        end = canvas.length[:, None]
        open_end = jnp.take_along_axis(canvas.open_gap, end - 1, axis=-1)
        tokens = jnp.where(column == end, self.vocabulary.eos, canvas.tokens)  # PAD follows, as on any canvas
        fixed = _whole(canvas, tokens, canvas.frozen | ((column >= end) & ~open_end))
        return fixed, fixed.free

    def _mask(self, canvas: Canvas, masked, t) -> tuple[Canvas, MaskTargets]:
        noised = dataclasses.replace(canvas, tokens=jnp.where(masked, self.vocabulary.mask, canvas.tokens))
        return noised, MaskTargets(tokens=canvas.tokens, masked=masked, t=t)


def _whole(canvas: Canvas, tokens, frozen) -> Canvas:
    """All columns are seen, and no gap is open."""
    full = jnp.full_like(canvas.length, canvas.num_columns)
    one_segment, none_open = jnp.ones_like(canvas.segment), jnp.zeros_like(canvas.open_gap)
    return dataclasses.replace(
        canvas, tokens=tokens, frozen=frozen, open_gap=none_open, segment=one_segment, length=full
    )


def _masked_nll(scores, targets: MaskTargets) -> Float[Array, " B"]:
    return losses.sum_nll(scores, targets.tokens, targets.masked)


# --- Samplers --------------------------------------------------------------------------------------------------------


@struct.dataclass
class Revealing:
    """`carry` of the samplers."""

    step: Int[Array, " B"]
    total: Int[Array, " B"]  # masks at the start
    inner: Bool[Array, "B S"]  # columns within the text: neither EOS nor PAD


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sampler:
    """From masks wherever tokens may go to none."""

    process: MDM

    @property
    def vocabulary(self) -> Vocabulary:
        return self.process.vocabulary

    @property
    def _ends(self) -> np.ndarray:
        """Which ids end a text: bool[V]."""
        return np.isin(np.arange(self.vocabulary.size), (self.vocabulary.eos, self.vocabulary.pad))

    def start(self, key, canvas, request=None):
        """The gap at the end takes all that fits, or that is asked for; the others the number that is asked for."""
        number, owed = self._numbers(canvas, request)
        source, is_new = canvas_lib.spread_out(canvas, number)
        column, length = jnp.arange(canvas.num_columns), (canvas.length + number.sum(-1))[:, None]
        last = canvas.length[:, None] - 1

        def take(values):
            return jnp.take_along_axis(values, source, axis=-1)

        tokens = jnp.where(is_new, self.vocabulary.mask, take(canvas.tokens))
        tokens = jnp.where(
            column < length, tokens, jnp.where(column == length, self.vocabulary.eos, self.vocabulary.pad)
        )
        given_end = ~jnp.take_along_axis(canvas.open_gap, last, axis=-1)
        frozen = jnp.where(column < length, take(canvas.frozen) & ~is_new, given_end)
        owed_before = length - jnp.take_along_axis(number, last, axis=-1) + owed[:, None]
        inner = is_new & ((source < last) | (column < owed_before))
        if request is not None:
            group = jnp.where(column < length, take(request.group), request_lib.NO_GROUP)
            request = dataclasses.replace(request, group=group)
            request = dataclasses.replace(request, inserted=request_lib.by_group(request, is_new))
        carry = Revealing(step=jnp.zeros_like(canvas.length), total=number.sum(-1), inner=inner)
        whole = _whole(canvas, tokens, frozen)
        return begin(key, whole, request, self.process.max_length, carry, self.vocabulary.mask)

    def decode(self, canvas):
        """What stands before the first EOS or PAD."""
        tokens, _ = canvas_lib.content(canvas)
        before = jnp.cumsum(jnp.asarray(self._ends)[tokens], axis=-1) == 0
        return jnp.where(before, tokens, self.vocabulary.pad), before.sum(-1)

    def _logits(self, scores, carry: "Revealing", column: Int[Array, "B Q"]) -> Float[Array, "B Q V"]:
        """Of these columns: within the text none that ends it."""
        inner = jnp.take_along_axis(carry.inner, column, axis=-1)
        return jnp.where(self._ends & inner[..., None], -jnp.inf, scores.of_gaps(column))

    def _numbers(self, canvas: Canvas, request: Request | None) -> tuple[Int[Array, "B S"], Int[Array, " B"]]:
        """How many masks go into each gap, and how many of those at the end are within the text."""
        room = canvas_lib.room(canvas, self.process.max_length)[:, None]
        at_end = canvas.open_gap & (jnp.arange(canvas.num_columns) == canvas.length[:, None] - 1)
        if request is None:
            return jnp.where(at_end, room, 0), jnp.zeros_like(canvas.length)
        at_end = at_end & request.inside
        inside = jnp.where(request.inside & ~at_end, request.of_gap(request.at_least), 0)
        rest = inside.sum(-1, keepdims=True)
        most = jnp.minimum(request.of_gap(request.at_most), jnp.minimum(request.total_at_most[:, None], room) - rest)
        least = jnp.maximum(request.of_gap(request.at_least), request.total_at_least[:, None] - rest)
        return jnp.where(at_end, most, inside), jnp.where(at_end, least, 0).sum(-1)

    def _move(self, state: State, k_place, k_next, reveal, tokens, clock) -> State:
        drawn = Move(
            insert=jnp.zeros_like(reveal),
            tokens=tokens,
            saturated=jnp.zeros_like(state.done),
            reveal=reveal,
            revealed=tokens,
        )
        return move(
            state,
            k_place,
            drawn,
            self.process.max_length,
            finished=jnp.ones_like(state.done),  # as soon as nothing is masked
            clock=jnp.maximum(clock, self.process.eps),
            next_key=k_next,
            carry=dataclasses.replace(state.carry, step=state.carry.step + ~state.done),
            mask=self.vocabulary.mask,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Steps(_Sampler):
    """Reveals some of the masks in each of `num_steps` calls at most."""

    num_steps: int

    def advance(self, scores, state, filters):
        k_token, k_which, k_place, k_next = canvas_lib.split_keys(state.key, 4)
        scores, _, state = conditioned(scores, state, self.process.max_length)
        logits_of = functools.partial(self._logits, scores, state.carry)
        masked = state.canvas.tokens == self.vocabulary.mask
        reveal, clock = self._which(k_which, state.carry, masked, logits_of)
        tokens = draw_tokens(k_token, logits_of, reveal, filters.token)
        return self._move(state, k_place, k_next, reveal, tokens, clock)

    def _which(self, key, carry: Revealing, masked, logits_of):
        """Which masks are revealed, and the time after."""
        raise NotImplementedError


class Ancestral(_Steps):
    """t = 1, 1 − 1/N, …, 0: over t → s a mask is revealed with probability (α_s − α_t)/(1 − α_t)."""

    def _which(self, key, carry, masked, logits_of):
        share = self.process.law.masked
        t = jnp.maximum(self.num_steps - carry.step, 1).astype(jnp.float32) / self.num_steps
        s = t - 1 / self.num_steps
        s = jnp.where(carry.step >= self.num_steps - 1, 0.0, s)
        u = jax.vmap(lambda k: jax.random.uniform(k, masked.shape[1:]))(key)
        return masked & (u >= (share(s) / share(t))[:, None]), s


class Confidence(_Steps):
    """In each step an equal part of the masks that are left, those columns that have the likeliest token. (Not whose
    drawn token is likeliest: that would change the law of what is drawn.)"""

    def _which(self, key, carry, masked, logits_of):
        left = masked.sum(-1)
        count = -(-left // jnp.maximum(self.num_steps - carry.step, 1))
        column = jnp.broadcast_to(jnp.arange(masked.shape[-1]), masked.shape)
        log_p = jax.nn.log_softmax(logits_of(column), axis=-1).max(-1)
        rank = jnp.argsort(jnp.argsort(jnp.where(masked, -log_p, jnp.inf), axis=-1), axis=-1)
        share = (left - count) / jnp.maximum(carry.total, 1)
        return masked & (rank < count[:, None]), self.process.law.inverse(share)


class FirstHitting(_Sampler):
    """One mask a call, which one uniform, at the time at which it is the first of m to be revealed: 1 − α_s =
    (1 − α_t)·U^{1/m} (Zheng et al. 2024, arXiv 2409.02908)."""

    def start(self, key, canvas, request=None):
        k_first, k_next = canvas_lib.split_keys(key, 2)
        state = super().start(k_next, canvas, request)
        return dataclasses.replace(state, clock=self._next(k_first, state.clock, state.carry.total))

    def advance(self, scores, state, filters):
        k_token, k_which, k_time, k_place, k_next = canvas_lib.split_keys(state.key, 5)
        scores, _, state = conditioned(scores, state, self.process.max_length)
        masked = state.canvas.tokens == self.vocabulary.mask
        reveal = canvas_lib.choose(k_which, masked, jnp.ones_like(state.nfe))
        column = jnp.argmax(reveal, axis=-1)[:, None]
        token = categorical(k_token, filters.token(self._logits(scores, state.carry, column)[:, 0]))
        clock = self._next(k_time, state.clock, masked.sum(-1) - 1)
        return self._move(state, k_place, k_next, reveal, jnp.broadcast_to(token[:, None], reveal.shape), clock)

    def _next(self, key, t, left):
        u = jax.vmap(jax.random.uniform)(key)
        return self.process.law.inverse(self.process.law.masked(t) * u ** (1 / jnp.maximum(left, 1)))
