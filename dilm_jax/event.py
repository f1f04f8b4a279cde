"""Event-driven samplers: exact given the network, without a time grid (docs/MATH.md 6b).

An insertion process needs no small steps: what the length head says fixes the law of the next insertion's time. Each
row has a clock of its own; rows are at different times at the same network call. For t < eps the network is called at
eps; OrderStatistics uses the schedule's own total there, Thinning holds the rate at its value at eps.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dilm_jax import canvas as canvas_lib
from dilm_jax.canvas import Canvas, Example, InsertionTargets
from dilm_jax.sampling import Filters, Move, Noise, begin, categorical, conditioned, draw_every_gap, move, undo
from dilm_jax.scores import OfAllGaps

SEARCH_ROUNDS = 20  # of l given t and t given l, for a context
Times = Float[Array, " B"]
# (key, scores, canvas, fire [B], filters) → one insertion a row that fires, at most: insert [B, S] and tokens [B, S].
DrawOne = Callable[[Any, OfAllGaps, Canvas, Bool[Array, " B"], Filters], tuple[Array, Array]]
DrawGaps = Callable[[Any, OfAllGaps, Canvas, Int[Array, " B"], Filters], tuple[Array, Array]]  # `count` of them


@struct.dataclass
class Clock:
    time: Float[Array, " B"]  # of the last event or proposal
    # The next call is at a canvas not seen at this time: it proposes, and inserts only in OrderStatistics with calls=1
    # or, in Thinning, below eps.
    fresh: Bool[Array, " B"]


@struct.dataclass
class Searching(Clock):
    """`carry` of OrderStatistics."""

    rounds: Int[Array, " B"]  # still to go in the search for the time of a context
    left: Int[Array, " B"]  # how many tokens are missing, as last drawn
    began: Float[Array, " B"]  # the time of the context


@struct.dataclass
class Proposal(Clock):
    """`carry` of Thinning."""

    bound: Float[Array, " B"]  # the expected number missing that the pending proposal was drawn with


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderStatistics:
    """Draws how many tokens are missing, then the time of the next insertion given that number.

    At (x, t) the length head gives l, and `next_time` the time s of the first of l insertions; l = 0 ends the row. The
    gap and the token come from the network at (x, s), the next l from the one at (x', s): two calls a token, exact.
    With calls=1 gap and token come from the call at (x, t): an approximation. With events_per_call=k the next k
    insertions do, into k gaps, and s is the time of the last of them.

    A request's free tokens are a context that noise could have left at any time, which t = 1 would make far too late:
    its time is drawn first, by `time_of` given l and l given the time in turn (docs/MATH.md 6d).
    """

    max_length: int
    eps: float
    calls: int
    events_per_call: int
    log_p_left: Callable[[OfAllGaps, Canvas], Float[Array, "B K"]]
    # (key, canvas, l, t, k) → time of the k-th insertion, or of the first if k is None
    next_time: Callable[[Any, Canvas, Int[Array, " B"], Times, Int[Array, " B"] | None], Times]
    time_of: Callable[[Any, Int[Array, " B"]], Times]  # (key, l) → t of a canvas from which l tokens are missing
    draw: DrawGaps
    noise_since: Callable[[Any, Example, Times, Times], tuple[Canvas, InsertionTargets]]  # Noise, of paths begun at …

    decode = staticmethod(canvas_lib.content)

    def start(self, key, canvas, request=None):
        at_one = jnp.ones(canvas.length.shape, jnp.float32)
        rounds = SEARCH_ROUNDS * (canvas.num_free > 0) * (request is not None)
        return begin(
            key,
            canvas,
            request,
            self.max_length,
            carry=Searching(time=at_one, fresh=at_one > 0, rounds=rounds, left=rounds, began=at_one),
        )

    def go_back(self, key, state, t):
        clock = state.carry
        time = jnp.minimum(t, clock.began)

        def noise(key, x0, time):
            return self.noise_since(key, x0, time, clock.began)

        carry = dataclasses.replace(clock, time=time, fresh=jnp.ones_like(clock.fresh))
        return undo(key, state, noise, time, self.eps, self.max_length, carry)

    def advance(self, scores, state, filters):
        k_left, k_time, k_draw, k_place, k_next = canvas_lib.split_keys(state.key, 5)
        of_all = self.log_p_left(scores, state.canvas)
        scores, canvas, state = conditioned(scores, state, self.max_length)
        clock, active = state.carry, ~state.done
        searching = clock.rounds > 0
        log_p = jnp.where(searching[:, None], of_all, self.log_p_left(scores, canvas))
        left = jax.vmap(jax.random.categorical)(k_left, log_p)
        due = active & clock.fresh & (left > 0) & ~searching
        many = self.events_per_call > 1
        one_call = self.calls == 1 or many
        count = jnp.clip(left, 1, self.events_per_call)
        time = self.next_time(k_time, canvas, jnp.maximum(left, 1), clock.time, count if many else None)
        time = jnp.where(due, time, clock.time)
        if state.request is not None:
            time = jnp.where(active & searching, self.time_of(k_time, left), time)
            room = left if one_call else clock.left  # tokens owed are among those that are missing
            canvas = dataclasses.replace(canvas, open_gap=canvas.open_gap & state.request.may_fire(room))

        fire = due if one_call else active & ~clock.fresh
        insert, tokens = self.draw(k_draw, scores, canvas, jnp.where(fire, count, 0), filters)
        return move(
            state,
            k_place,
            Move(insert=insert, tokens=tokens, saturated=jnp.zeros_like(fire)),
            self.max_length,
            finished=clock.fresh & (left == 0) & ~searching,
            clock=jnp.maximum(time, self.eps),
            next_key=k_next,
            carry=Searching(
                time=time,
                fresh=clock.fresh if one_call else ~clock.fresh | searching,
                rounds=jnp.maximum(clock.rounds - 1, 0),
                left=left,
                began=jnp.where(searching, time, clock.began),
            ),
        )


@runtime_checkable
class Missing(Protocol):
    """The family's rate, as −d log M(t)/dt times the expected number of missing tokens."""

    def expected_left(self, scores: OfAllGaps, canvas: Canvas) -> Float[Array, " B"]:
        """How many tokens are missing, in expectation."""
        ...

    def earlier(self, t: Times, log_factor: Float[Array, " B"]) -> Times:
        """s with log M(s) = log M(t) + log_factor, log_factor ≤ 0."""
        ...

    def coefficient(self, t: Times) -> Float[Array, " B"]:
        """−d log M(t)/dt: insertions of each missing token per unit of time."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thinning:
    """Proposes times by the number missing at the last call, which falls as t falls, and accepts with the ratio.

    From (x, t) with Δl missing, M(s) = M(t)·U^{1/Δl} is proposed; at (x, s) it is accepted with probability
    Δl(x, s)/Δl(x, t), else the next proposal comes from there. After an insertion the network is called at (x', s): two
    calls a token, exact. With calls=1 the next proposal is drawn by Δl(x, s) instead, still exact wherever that is at
    least Δl(x', s'). Where a request closes gaps, Δl of all of them proposes and Δl of the open ones accepts: the sum
    over some gaps need not fall as t falls. A ratio above 1 cannot be made up for: it is counted as saturated. Below
    eps the rate is the one at eps, constant, so that events are drawn directly, one call each.
    """

    max_length: int
    eps: float
    calls: int
    law: Missing
    draw: DrawOne
    noise: Noise

    decode = staticmethod(canvas_lib.content)

    def start(self, key, canvas, request=None):
        return begin(key, canvas, request, self.max_length, carry=_at(jnp.ones(canvas.length.shape)))

    def go_back(self, key, state, t):
        time = jnp.full_like(state.clock, t)
        return undo(key, state, self.noise, time, self.eps, self.max_length, carry=_at(time))

    def advance(self, scores, state, filters):
        k_accept, k_wait, k_draw, k_place, k_next = canvas_lib.split_keys(state.key, 5)
        scores, canvas, state = conditioned(scores, state, self.max_length)
        pending, active = state.carry, ~state.done
        below = pending.time <= self.eps
        wait = jax.vmap(jax.random.exponential)(k_wait)
        expected, of_all = (self.law.expected_left(scores, x) for x in (canvas, state.canvas))
        owed = jnp.zeros_like(below) if state.request is None else state.request.least > 0

        constant_rate = self.law.coefficient(jnp.full_like(pending.time, self.eps)) * expected
        time_below = pending.time - wait / jnp.maximum(constant_rate, 1e-30)
        uniform = jax.vmap(jax.random.uniform)(k_accept)
        accept = ~pending.fresh & (uniform * pending.bound < expected)
        fire = active & jnp.where(below, (time_below > 0) | owed, accept)
        insert, tokens = self.draw(k_draw, scores, canvas, fire, filters)

        proposes = active & ~below & (~accept | (self.calls == 1))
        proposed = self.law.earlier(pending.time, -wait / jnp.maximum(of_all, 1e-30))
        time = jnp.where(proposes, jnp.maximum(proposed, self.eps), pending.time)
        time = jnp.where(active & below, jnp.maximum(time_below, 0.0), time)
        too_many = ~below & ~pending.fresh & (expected > pending.bound * (1 + 1e-4))
        return move(
            state,
            k_place,
            Move(insert=insert, tokens=tokens, saturated=too_many),
            self.max_length,
            finished=below & ~fire,
            clock=jnp.maximum(time, self.eps),
            next_key=k_next,
            carry=Proposal(time=time, fresh=~proposes, bound=of_all),
        )


def _at(time: Times) -> Proposal:
    """The next call is the first one at this time."""
    return Proposal(time=time, fresh=jnp.ones(time.shape, bool), bound=jnp.ones_like(time))


@runtime_checkable
class GapNumbers(Protocol):
    """What a family says of how many tokens are missing from each gap."""

    def log_p_left(self, scores: OfAllGaps, canvas: Canvas) -> Float[Array, "B S K"]:
        """log p_i(l) of each gap."""
        ...

    def earlier(self, t: Times, log_factor: Float[Array, " B"]) -> Times:
        """As in `Missing`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManyEvents:
    """The next k insertions, into k gaps, from one network call: an approximation.

    At (x, t) each gap draws how many tokens l are missing from it, as if gaps were independent: the first of them comes
    at M(s) = M(t)·U^{1/l}, the second at M(s)·U^{1/(l − 1)}. Insertions are made in the order of their times, up to k
    and until a gap would get a second one. The next call is at the time of the last. A row ends when nothing is missing
    from any gap.
    """

    max_length: int
    eps: float
    events_per_call: int
    law: GapNumbers
    noise: Noise

    decode = staticmethod(canvas_lib.content)

    def start(self, key, canvas, request=None):
        return begin(key, canvas, request, self.max_length, carry=jnp.ones(canvas.length.shape))

    def go_back(self, key, state, t):
        time = jnp.full_like(state.clock, t)
        return undo(key, state, self.noise, time, self.eps, self.max_length, carry=time)

    def advance(self, scores, state, filters):
        k_left, k_time, k_draw, k_place, k_next = canvas_lib.split_keys(state.key, 5)
        scores, canvas, state = conditioned(scores, state, self.max_length)
        left = categorical(k_left, self.law.log_p_left(scores, canvas))
        due = canvas.open_gap & (left > 0)
        wait = jax.vmap(lambda k: jax.random.exponential(k, (left.shape[1], 2)))(k_time)
        first = jnp.where(due, -wait[..., 0] / jnp.maximum(left, 1), -jnp.inf)  # log of M(s)/M(t)
        second = jnp.where(due & (left > 1), first - wait[..., 1] / jnp.maximum(left - 1, 1), -jnp.inf)
        kth = jnp.sort(first, axis=-1)[:, -min(self.events_per_call, first.shape[-1])]
        fire = due & (first >= kth[:, None]) & (first > second.max(-1, keepdims=True))
        insert, tokens = draw_every_gap(k_draw, scores, canvas, fire, filters)
        time = self.law.earlier(state.carry, jnp.where(fire, first, 0.0).min(-1))
        time = jnp.where(state.done, state.carry, time)
        return move(
            state,
            k_place,
            Move(insert=insert, tokens=tokens, saturated=jnp.zeros_like(state.done)),
            self.max_length,
            finished=~due.any(-1),
            clock=jnp.maximum(time, self.eps),
            next_key=k_next,
            carry=time,
        )
