"""Generation: one loop, token and gap filters, and the grid samplers (docs/MATH.md 6).

While any row is unfinished the network is called at (canvas, clock) and the sampler advances by one reverse
move. A sampler knows the family's law of insertions; the loop knows neither family nor network. Row b depends on
key b and its own canvas alone, but for the rounding of sums: beside which others a network computes it may differ
(`Packed`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from dilm_jax import canvas as canvas_lib
from dilm_jax import packing as packing_lib
from dilm_jax import request as request_lib
from dilm_jax.canvas import Canvas, Example, InsertionTargets
from dilm_jax.packing import Packing
from dilm_jax.request import Request
from dilm_jax.scores import LastScores, OfAllGaps

FOR_NUMBERS, FOR_PLACES = 2**16, 2**16 + 1  # children of a row's key that requests draw from
LEAST_COLUMNS = 512  # that a call of a packed network computes on a shard
AT_ONCE = 8  # columns of a row whose tokens are drawn at a time
Network = Callable[[Canvas, Float[Array, " B"]], OfAllGaps]
# (scores, canvas, t) → log of the rate at which each gap gets tokens, a unit of noising time
LogGapRates = Callable[[Any, Canvas, Float[Array, " B"]], Float[Array, "B S"]]


# --- Filters ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filter:
    """How to draw from logits, with the semantics of Hugging Face's warpers, applied in this order. Entries that tie
    with the smallest one kept are kept too.

    Attributes:
      temperature: divides the logits; 0 takes the argmax.
      top_k: keeps the k largest; 0 keeps all.
      top_p: keeps the smallest set of largest entries whose probability reaches p, the one that crosses p included.

    Raises ValueError for a value out of range, and for top_k or top_p at temperature 0.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6):  # what float32 logits can be divided by
            raise ValueError(f"temperature must be 0 or in [1e-6, 1e6], got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or larger, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise ValueError(
                f"top_k {self.top_k} and top_p {self.top_p:g} have no effect at temperature 0, which takes the argmax; "
                "give a temperature above 0 with them"
            )

    def __call__(self, logits: Float[Array, "*B N"]) -> Float[Array, "*B N"]:
        """Logits of the filtered distribution; −inf where it is 0."""
        logits = logits.astype(jnp.float32)
        if self.temperature == 0:
            best = jnp.argmax(logits, axis=-1, keepdims=True)
            return jnp.where(jnp.arange(logits.shape[-1]) == best, 0.0, -jnp.inf)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            kth = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits >= kth, logits, -jnp.inf)
        if self.top_p < 1:
            logits = jnp.where(_in_top_p(logits, self.top_p), logits, -jnp.inf)
        return logits


def _in_top_p(logits: Float[Array, "*B N"], top_p: float) -> Bool[Array, "*B N"]:
    """Whether all larger entries have less than p of the probability. The smallest such entry is found by halving the
    range of float32, whose bits order them as integers: 32 sums, where a sort is many times as slow."""
    probs = jax.nn.softmax(logits, axis=-1)
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.uint32)  # −0 is no less than 0
    order = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def halve(_, bounds):
        low, high = bounds  # the entry is in [low, high]
        middle = low + (high - low) // 2
        larger = jnp.where(order > middle, probs, 0.0).sum(-1, keepdims=True)
        return jnp.where(larger < top_p, low, middle + 1), jnp.where(larger < top_p, middle, high)

    low = jnp.zeros_like(order[..., :1])
    smallest, _ = jax.lax.fori_loop(0, 32, halve, (low, jnp.full_like(low, 2**32 - 1)))
    return order >= smallest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filters:
    """The filters of the gap and of the token."""

    gap: Filter = Filter()
    token: Filter = Filter()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cached:
    """A network for samplers that only append, which computes new columns alone. The loop owns what it keeps.

    Attributes:
      prefill: (canvas, clock) → keys and values of its columns.
      extend: (canvas, clock, those) → scores of the last gap, and those with the last column's.
    """

    prefill: Callable[[Canvas, Float[Array, " B"]], Any]
    extend: Callable[[Canvas, Float[Array, " B"], Any], tuple[LastScores, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A network for canvases that fill little by little: of each call it computes the unfinished rows alone, several of
    them in a row of its own, and one for all that show it the same (as empty canvases at t = 1 do).

    Attributes:
      call: (canvas, clock, packing or None) → scores.
      num_shards: over which rows are spread, evenly.
    """

    call: Callable[[Canvas, Float[Array, " B"], Packing | None], OfAllGaps]
    num_shards: int

    def with_scores(self, state: "State", move_by: Callable[[OfAllGaps, "State"], "State"]) -> "State":
        """`move_by` the scores of a state. There is a program for each of a few numbers of rows, and one with a canvas
        a row; the first that has room for all is run."""
        canvas, clock = state.canvas, state.clock
        counts, width = self.sizes(*canvas.tokens.shape)
        slots = packing_lib.in_slots(canvas.length, ~state.done, (canvas, clock), width, self.num_shards)

        def program(num_rows):
            def run(state):
                packing = num_rows and slots.packing(canvas.length, canvas.num_columns, num_rows, width)
                return move_by(self.call(canvas, clock, packing), state)

            return run

        chosen = (slots.rows_needed > jnp.array(counts)).sum()
        return jax.lax.switch(chosen, [program(num_rows) for num_rows in (*counts, None)], state)

    def sizes(self, num_canvases: int, num_columns: int) -> tuple[list[int], int]:
        """Numbers of packed rows on a shard, each twice the one before, and the columns of such a row: room for two of
        the longest canvases, so that of those just longer than a half of one three fit. Few canvases are not packed:
        each number is a program more to compile."""
        width, columns = 2 * (num_columns + -num_columns % 8), num_canvases // self.num_shards * num_columns
        if columns < 8 * LEAST_COLUMNS:
            return [], width
        counts = {-(-(LEAST_COLUMNS << i) // width) for i in range(columns.bit_length())}
        return sorted(count for count in counts if count * width < columns), width


# --- Drawing insertions ----------------------------------------------------------------------------------------------


@struct.dataclass
class Move:
    """One reverse move: `tokens[:, i]` goes into gap i where `insert[:, i]`. Where a canvas has masks, those of the
    columns `reveal` first become `revealed`, in place."""

    insert: Bool[Array, "B S"]
    tokens: Int[Array, "B S"]
    saturated: Bool[Array, " B"]  # more insertions were due than this move can make
    reveal: Bool[Array, "B S"] | None = None
    revealed: Int[Array, "B S"] | None = None


def draw_one_gap(
    key: Key[Array, " B"], scores: OfAllGaps, canvas: Canvas, count: Int[Array, " B"], filters: Filters
) -> tuple[Bool[Array, "B S"], Int[Array, "B S"]]:
    """(gap, token) of one insertion a row from the joint softmax where `count` is above 0: the gap from the logsumexp
    over tokens, then the token. A flat argmax over gaps × vocabulary ties in float32 (docs/MATH.md 6c)."""
    return draw_insertion(key, scores.lse(), scores, canvas, count > 0, filters)


def draw_insertion(
    key: Key[Array, " B"],
    gap_logits: Float[Array, "B S"],
    scores: OfAllGaps,
    canvas: Canvas,
    fire: Bool[Array, " B"],
    filters: Filters,
) -> tuple[Bool[Array, "B S"], Int[Array, "B S"]]:
    """One insertion a row: an open gap by its logit, then the token from the gap's softmax."""
    k_gap, k_token = canvas_lib.split_keys(key, 2)
    gap = categorical(k_gap, filters.gap(jnp.where(canvas.open_gap, gap_logits, -jnp.inf)))
    token = categorical(k_token, filters.token(scores.of_gaps(gap[:, None])[:, 0]))
    insert = (jnp.arange(canvas.num_columns) == gap[:, None]) & (fire & canvas.open_gap.any(-1))[:, None]
    return insert, jnp.broadcast_to(token[:, None], insert.shape)


def draw_gaps(
    key: Key[Array, " B"], scores: OfAllGaps, canvas: Canvas, count: Int[Array, " B"], filters: Filters
) -> tuple[Bool[Array, "B S"], Int[Array, "B S"]]:
    """`count` insertions a row: repeated draws from the joint softmax, but those into a gap that was drawn before (the
    largest of perturbed logits are such draws). Fewer where fewer gaps are open, or left by the filter."""
    k_gap, k_token = canvas_lib.split_keys(key, 2)
    noisy = _perturbed(k_gap, filters.gap(jnp.where(canvas.open_gap, scores.lse(), -jnp.inf)))
    rank = jnp.argsort(jnp.argsort(-noisy, axis=-1), axis=-1)
    fire = (rank < count[:, None]) & (noisy > -jnp.inf)
    return draw_every_gap(k_token, scores, canvas, fire, filters)


def draw_every_gap(
    key: Key[Array, " B"], scores: OfAllGaps, canvas: Canvas, fire: Bool[Array, "B S"], filters: Filters
) -> tuple[Bool[Array, "B S"], Int[Array, "B S"]]:
    """A token for each gap that fires, from the gap's own softmax."""
    fire = fire & canvas.open_gap
    return fire, draw_tokens(key, scores.of_gaps, fire, filters.token)


def draw_tokens(
    key: Key[Array, " B"],
    logits_of: Callable[[Int[Array, "B Q"]], Float[Array, "B Q V"]],
    fire: Bool[Array, "B S"],
    filter: Filter,
) -> Int[Array, "B S"]:
    """A token for each column that fires, from the column's own softmax; 0 at the others.

    Few columns of a row fire in a move: AT_ONCE of each are drawn at a time, as often as it takes. What column i gets
    depends on the row's key and i alone.
    """
    B, S = fire.shape
    row, num = jnp.arange(B)[:, None], min(AT_ONCE, S)

    def draw(tokens_left):
        tokens, left = tokens_left
        column = jax.vmap(lambda left: jnp.flatnonzero(left, size=num, fill_value=S))(left)
        logits = filter(logits_of(jnp.minimum(column, S - 1)))
        of_column = jax.vmap(lambda k, columns: jax.vmap(lambda i: jax.random.fold_in(k, i))(columns))(key, column)
        token = categorical(of_column.reshape(-1), logits.reshape(B * num, -1)).reshape(B, num)
        return tokens.at[row, column].set(token, mode="drop"), left.at[row, column].set(False, mode="drop")

    return jax.lax.while_loop(lambda carry: carry[1].any(), draw, (jnp.zeros(fire.shape, jnp.int32), fire))[0]


def fire_probability(
    log_p_left: Float[Array, "B S K"], stays: Float[Array, " B"]
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """P(at least one of a gap's missing tokens comes) = 1 − E_l[stays^l], where each by itself stays away with
    probability `stays`, and the expected number that come (docs/MATH.md 6a)."""
    p_left, left, stays = jnp.exp(log_p_left), jnp.arange(log_p_left.shape[-1]), stays[:, None]
    none = jnp.where(left > 0, stays[..., None] ** left, 1.0)
    return (p_left * (1 - none)).sum(-1), (p_left * left).sum(-1) * (1 - stays)


def categorical(key: Key[Array, " B"], logits: Float[Array, " B *N V"]) -> Int[Array, " B *N"]:
    """One draw from each distribution, by Gumbel-argmax."""
    return jnp.argmax(_perturbed(key, logits), axis=-1)


def _perturbed(key: Key[Array, " B"], logits: Float[Array, " B *N V"]) -> Float[Array, " B *N V"]:
    """With Gumbel noise. It is drawn flat: XLA takes twenty times as long to compile it in two dimensions. That of the
    first entries does not depend on how many there are, but for its lowest bits."""
    noise = jax.vmap(lambda k: jax.random.gumbel(k, (logits[0].size,), mode="high"))(key)
    return logits + noise.reshape(logits.shape)


# --- The loop --------------------------------------------------------------------------------------------------------


@struct.dataclass
class Trace:
    """How the token of each column came, as the network saw it at the call that inserted it, before filters and
    requests; 0 where it was there from the start, and at PAD."""

    time: Float[Array, "B S"]  # noising time at which the network was called
    log_prob: Float[Array, "B S"]  # log softmax of the scores of the token's gap, at the token: nats
    log_rate: Float[Array, "B S"]  # log of the rate at which that gap gets tokens


@struct.dataclass
class State:
    """Where each row is."""

    canvas: Canvas
    clock: Float[Array, " B"]  # noising time at which the network is called next
    key: Key[Array, " B"]
    nfe: Int[Array, " B"]  # network calls made while the row was unfinished
    saturated: Int[Array, " B"]  # moves in which more insertions were due than could be made
    truncated: Bool[Array, " B"]  # an insertion was left out because the canvas was full
    rounds: Int[Array, " B"]  # of the corrector, still to go
    born: Int[Array, "B S"]  # of each column, the row's call that its token came at, from 1; 0: there from the start
    scored: Int[Array, "B S"]  # the column of the canvas before the last move whose scores each token came from
    done: Bool[Array, " B"]
    carry: Any  # the sampler's own pytree
    request: Request | None  # what is asked for beside the law
    trace: Trace | None = None  # the loop's, if it records; samplers need not pass it on


@runtime_checkable
class Sampler(Protocol):
    """One way to run a process backwards."""

    def start(self, key: Key[Array, " B"], canvas: Canvas, request: Request | None = None) -> State: ...

    def advance(self, scores: Any, state: State, filters: Filters) -> State:
        """One reverse move of every unfinished row, by `Scores` or `FusedScores`; `LastScores` where the network is
        cached."""
        ...

    def decode(self, canvas: Canvas) -> tuple[Int[Array, "B L"], Int[Array, " B"]]:
        """The texts: content tokens and their number."""
        ...


@runtime_checkable
class Revisable(Protocol):
    """A sampler that can go back."""

    def go_back(self, key: Key[Array, " B"], state: State, t: float) -> State:
        """The state at noising time t of a path that ended at the state, without the tokens that noise has deleted by
        then; those from before the first call stay. Raises ValueError where the sampler has no such time."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corrector:
    """Revision of finished texts: noise to time `strength` and generation from there, `steps` times over.

    Noise is drawn given that the path began at the sampler's start, so that each round keeps the law that the sampler
    returns, if it is exact (docs/MATH.md 6d). Raises ValueError for a value out of range.
    """

    steps: int = 0
    strength: float = 0.1

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError(f"sampling.corrector_steps must not be negative, got {self.steps}")
        if not 0 < self.strength <= 1:
            raise ValueError(f"sampling.corrector_strength must be in (0, 1], got {self.strength}")


def generate(
    network: Network | Packed | Cached,
    sampler: Sampler,
    key: Key[Array, " B"],
    canvas: Canvas,
    filters: Filters,
    request: Request | None = None,
    corrector: Corrector = Corrector(),
    log_gap_rates: LogGapRates | None = None,
) -> State:
    """Runs the sampler until every row is done, and revised. Jittable; shapes are static. With `log_gap_rates` it
    records: the last state has a trace.

    Raises ValueError for a corrector where the sampler cannot go back.
    """
    if corrector.steps and not isinstance(sampler, Revisable):
        raise ValueError(f"{type(sampler).__name__} cannot go back: leave sampling.corrector_steps at 0")

    def move_by(scores, state):
        after = sampler.advance(scores, state, filters)
        if log_gap_rates is None:
            return after
        return dataclasses.replace(after, trace=record(scores, log_gap_rates, state, after))

    def advance(state_and_kept):
        state, kept = state_and_kept
        if corrector.steps and isinstance(sampler, Revisable):
            state = _revise(sampler, state, corrector.strength)
        if isinstance(network, Cached):
            scores, kept = network.extend(state.canvas, state.clock, kept)
            return move_by(scores, state), kept
        if isinstance(network, Packed):
            return network.with_scores(state, move_by), kept
        return move_by(network(state.canvas, state.clock), state), kept

    state = sampler.start(key, canvas, request)
    state = dataclasses.replace(state, rounds=jnp.where(state.done, 0, corrector.steps))
    if log_gap_rates is not None:
        nothing = jnp.zeros(canvas.tokens.shape, jnp.float32)
        state = dataclasses.replace(state, trace=Trace(nothing, nothing, nothing))
    kept = network.prefill(state.canvas, state.clock) if isinstance(network, Cached) else None
    return jax.lax.while_loop(lambda s: ~(s[0].done & (s[0].rounds == 0)).all(), advance, (state, kept))[0]


def _revise(sampler: Revisable, state: State, strength: float) -> State:
    """With the rows that are done, and have rounds to go, back at time `strength`."""
    goes_back = state.done & (state.rounds > 0)

    def go_back():
        k_noise, k_next = canvas_lib.split_keys(state.key, 2)
        back = sampler.go_back(k_noise, state, strength)
        back = dataclasses.replace(back, key=k_next, rounds=state.rounds - 1)
        return jax.tree.map(
            lambda new, old: jnp.where(goes_back.reshape(-1, *[1] * (old.ndim - 1)), new, old), back, state
        )

    return jax.lax.cond(goes_back.any(), go_back, lambda: state)


def record(scores: OfAllGaps | LastScores, log_gap_rates: LogGapRates, before: State, after: State) -> Trace:
    """The trace of `after`, which one move has made of `before`."""
    new, column = after.born > before.nfe[:, None], after.scored
    log_prob = scores.log_prob(column, after.canvas.tokens)
    log_rate = log_gap_rates(scores, before.canvas, before.clock)

    def put(at_new, old):
        return jnp.where(new, at_new, jnp.take_along_axis(old, column, axis=-1))

    trace: Any = before.trace
    return Trace(
        time=put(before.clock[:, None], trace.time),
        log_prob=put(log_prob, trace.log_prob),
        log_rate=put(jnp.take_along_axis(log_rate, column, axis=-1), trace.log_rate),
    )


def begin(
    key: Key[Array, " B"],
    canvas: Canvas,
    request: Request | None,
    max_length: int,
    carry: Any,
    mask: int | None = None,
) -> State:
    """Every row at t = 1; done where no insertion can be due, and no token is the `mask` of families that have one."""
    B = canvas.length.shape[0]
    zeros = jnp.zeros(B, jnp.int32)
    return State(
        canvas=canvas,
        clock=jnp.ones(B, jnp.float32),
        key=key,
        nfe=zeros,
        saturated=zeros,
        truncated=jnp.zeros(B, bool),
        rounds=zeros,
        born=jnp.zeros(canvas.tokens.shape, jnp.int32),
        scored=jnp.zeros(canvas.tokens.shape, jnp.int32),
        done=_nothing_due(canvas, request, max_length) & ~_any_masked(canvas, mask),
        carry=carry,
        request=request,
    )


def conditioned(scores, state: State, max_length: int) -> tuple[Any, Canvas, State]:
    """Scores and canvas as the request wants them, and the state with the request's numbers drawn."""
    if state.request is None:
        return scores, state.canvas, state
    key = _child(state.key, FOR_NUMBERS)
    scores, canvas, request = request_lib.condition(key, scores, state.canvas, state.request, max_length)
    return scores, canvas, dataclasses.replace(state, request=request)


def move(
    state: State,
    key: Key[Array, " B"],
    drawn: Move,
    max_length: int,
    *,
    finished: Bool[Array, " B"],
    clock: Float[Array, " B"],
    next_key: Key[Array, " B"],
    carry: Any,
    mask: int | None = None,
) -> State:
    """Makes the move of the unfinished rows (`key` says which insertions, where they do not all fit) and counts the
    call.

    A row is then done if the sampler has `finished` it and nothing that was asked for is owed, if its text is as long
    as the family allows, if nothing may be inserted, or if an insertion was left out; not while a token is the `mask`.
    """
    active = ~state.done
    nfe = state.nfe + active
    insert = drawn.insert & active[:, None]
    request, before, born = state.request, state.canvas, state.born
    if drawn.reveal is not None:
        reveal = drawn.reveal & active[:, None]
        revealed: Any = drawn.revealed
        before = dataclasses.replace(before, tokens=jnp.where(reveal, revealed, before.tokens))
        born = jnp.where(reveal, nfe[:, None], born)
    if request is not None:
        room = canvas_lib.room(state.canvas, max_length)
        insert = request_lib.cap(_child(state.key, FOR_PLACES), request, insert, room)
        finished = finished & (request.least == 0)
    canvas, insert, truncated = canvas_lib.insert_tokens(key, before, insert, drawn.tokens)
    if request is not None:
        request = request_lib.after(request, before, insert)
    column = jnp.broadcast_to(jnp.arange(canvas.num_columns), insert.shape)
    ends = finished | truncated | _nothing_due(canvas, request, max_length)
    return State(
        canvas=canvas,
        clock=clock,
        key=next_key,
        nfe=nfe,
        saturated=state.saturated + (drawn.saturated & active),
        truncated=state.truncated | truncated,
        rounds=state.rounds,
        born=canvas_lib.carry_over(before, insert, born, nfe[:, None], 0),
        scored=canvas_lib.carry_over(before, insert, column, column, 0),
        done=state.done | (ends & ~_any_masked(canvas, mask)),
        carry=carry,
        request=request,
    )


# (key, clean texts, t) → an exact draw of X_t given that no free token is left at the sampler's start, and the loss's
# targets.
Noise = Callable[[Key[Array, " B"], Example, Float[Array, " B"]], tuple[Canvas, InsertionTargets]]


def undo(
    key: Key[Array, " B"], state: State, noise: Noise, t: Float[Array, " B"], eps: float, max_length: int, carry: Any
) -> State:
    """At time t, without what noise deletes of the tokens that were inserted."""
    locked = state.born == 0
    canvas, targets = noise(key, canvas_lib.to_example(state.canvas, locked), t)
    dropped = jnp.pad(targets.dropped, ((0, 0), (canvas_lib.NUM_SPECIAL_COLUMNS, 0)))

    def left(values):
        return canvas_lib.close_up(state.canvas, dropped, values, 0)

    canvas = dataclasses.replace(canvas, frozen=left(state.canvas.frozen))
    request = None if state.request is None else request_lib.without(state.request, state.canvas, dropped)
    return dataclasses.replace(
        state,
        canvas=canvas,
        clock=jnp.maximum(t, eps),
        born=left(state.born),
        scored=left(state.scored),
        trace=jax.tree.map(left, state.trace),
        done=_nothing_due(canvas, request, max_length),
        carry=carry,
        request=request,
    )


def _child(key: Key[Array, " B"], number: int) -> Key[Array, " B"]:
    """Of each row's key; with a number that `split_keys` never comes to."""
    return jax.vmap(lambda k: jax.random.fold_in(k, number))(key)


def _nothing_due(canvas: Canvas, request: Request | None, max_length: int) -> Bool[Array, " B"]:
    """Rows whose text is as long as the family allows, or without a gap that may fire."""
    room = canvas_lib.room(canvas, max_length)
    may_fire = canvas.open_gap if request is None else canvas.open_gap & request.may_fire(room)
    return (room <= 0) | ~may_fire.any(-1)


def _any_masked(canvas: Canvas, mask: int | None) -> Bool[Array, " B"]:
    """Rows that hold the mask."""
    return jnp.zeros(canvas.length.shape, bool) if mask is None else (canvas.tokens == mask).any(-1)


# --- Grid samplers ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """What a family's samplers can be told.

    Attributes:
      num_steps: steps of the time grid (the paper's MaxSteps).
      calls: network calls a token of "event": 2 is exact, 1 takes gap and token (DILM-S) or the next proposal (DILM-M)
        from the call before.
      events_per_call: insertions of "event" from one network call, into as many gaps; above 1 `calls` is not read.
      rate_scale: multiplies the insertion rate of "euler". 1 is right; ln(σmax/σmin) reproduces samples of code
        whose rate is not the derivative of its total noise.
      stop_threshold: of "one_by_one": a text ends where its stop probability is above; 0 draws whether it ends.

    Raises ValueError for a value out of range.
    """

    num_steps: int
    rate_scale: float = 1.0
    calls: int = 2
    events_per_call: int = 1
    stop_threshold: float = 0.9

    def __post_init__(self):
        if not 0 <= self.stop_threshold < 1:
            raise ValueError(f"sampling.stop_threshold must be in [0, 1), got {self.stop_threshold}")
        if self.events_per_call < 1:
            raise ValueError(f"sampling.events_per_call must be at least 1, got {self.events_per_call}")
        if self.calls not in (1, 2):
            raise ValueError(f"sampling.calls must be 1 or 2, got {self.calls}")
        if self.num_steps < 1:
            raise ValueError(f"sampling.num_steps must be at least 1, got {self.num_steps}")
        if not self.rate_scale > 0:
            raise ValueError(f"sampling.rate_scale must be positive, got {self.rate_scale}")


@runtime_checkable
class DrawStep(Protocol):
    """The family's law of one step from time t back to s < t (both [B])."""

    def __call__(
        self,
        key: Key[Array, " B"],
        scores: OfAllGaps,
        canvas: Canvas,
        t: Float[Array, " B"],
        s: Float[Array, " B"],
        filters: Filters,
    ) -> Move: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Marches t = 1, 1 − 1/N, …, 0. With `repeat_last` the step that ends at 0 is repeated while it inserts, so
    that nothing the length head still expects is left out. For t < eps the network is called at eps.
    """

    num_steps: int
    eps: float
    max_length: int  # content tokens; the canvas may have fewer columns, or more
    draw: DrawStep
    repeat_last: bool
    mask: int | None = None  # the token that stands for one not yet revealed, in families that have it

    decode = staticmethod(canvas_lib.content)

    def start(self, key, canvas, request=None):
        first = jnp.zeros(canvas.length.shape, jnp.int32)  # index of the step
        return begin(key, canvas, request, self.max_length, carry=first, mask=self.mask)

    def advance(self, scores, state, filters):
        step = state.carry
        t, s = self._time(step), self._time(step + 1)
        k_draw, k_place, k_next = canvas_lib.split_keys(state.key, 3)
        scores, canvas, state = conditioned(scores, state, self.max_length)
        drawn = self.draw(k_draw, scores, canvas, t, s, filters)
        last = step == self.num_steps - 1
        next_step = jnp.where(state.done, step, jnp.minimum(step + 1, self.num_steps - 1))
        return move(
            state,
            k_place,
            drawn,
            self.max_length,
            finished=last & ~drawn.insert.any(-1) if self.repeat_last else last,
            clock=jnp.maximum(self._time(next_step), self.eps),
            next_key=k_next,
            carry=next_step,
            mask=self.mask,
        )

    def _time(self, step):
        # Not 1 − step/N: compiled to a fused multiply-add by 1/N, that ends just below 0 for some N.
        return (self.num_steps - step).astype(jnp.float32) / self.num_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class RevisableGrid(Grid):
    """A grid that can go back."""

    noise: Noise

    def go_back(self, key, state, t):
        """To the last time of the grid that is not above t."""
        step = math.ceil((1 - t) * self.num_steps - 1e-6)
        if step == self.num_steps:
            raise ValueError(f"sampling.corrector_strength {t} is less than one of {self.num_steps} steps")
        carry = jnp.full_like(state.carry, step)
        return undo(key, state, self.noise, self._time(carry), self.eps, self.max_length, carry)
