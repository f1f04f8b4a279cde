"""What is asked of a sample beyond its law: into which gaps tokens may go, how many, and which may not (docs/MATH.md
6d).

A request conditions what the length head says; nothing is cut off or padded afterwards, and numbers are always those
asked for. Without numbers, with all gaps open and under `event`, the law is known: that of the texts, times the number
of ways to delete each to the context, times a weight of its length (docs/MATH.md 6d). Gaps that are closed, where the
network was not trained on closed ones, are an approximation. So are numbers, because the token scores are still the
network's own, which mix over all lengths: in selfcheck's world,
where letters say much about the length, texts of two, three and four letters are 0.29, 0.10 and 0.83 (DILM-S) and 0.35,
0.18 and 0.74 (DILM-M) in total variation from the law given that length (tests/test_request.py). Where letters say
little about the length that vanishes.

Works on scores and canvases: neither a family nor a schedule may be known here. One length posterior a row (DILM-S) and
one a gap (DILM-M) are told apart by their shape.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.scipy.stats import binom
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from dilm_jax import canvas as canvas_lib
from dilm_jax.canvas import Canvas
from dilm_jax.scores import FusedScores, LastScores, OfAllGaps

NO_GROUP = -1
UNBOUNDED = 2**20  # as at_most
LEAST = 1e-12  # of a number's probability, over that of the likeliest: what is asked for is never impossible


@struct.dataclass
class Request:
    """Per row. A group is what one gap of the first canvas grows into; G is the number of groups.

    Bounds are on the number of tokens inserted, of a group and of all.
    """

    group: Int[Array, "B S"]  # of each gap; NO_GROUP where nothing may be inserted
    at_least: Int[Array, "B G"]
    at_most: Int[Array, "B G"]
    total_at_least: Int[Array, " B"]
    total_at_most: Int[Array, " B"]
    drawn: Bool[Array, "B G"]  # at_least = at_most is a number that was drawn, or asked for
    inserted: Int[Array, "B G"]  # so far
    forbidden: Bool[Array, "B V"] | None  # tokens that are never inserted

    @property
    def owed(self) -> Int[Array, "B G"]:
        """Tokens that a group must still get."""
        return jnp.maximum(self.at_least - self.inserted, 0)

    @property
    def places(self) -> Int[Array, "B G"]:
        """Tokens that a group may still get."""
        return self.at_most - self.inserted

    @property
    def least(self) -> Int[Array, " B"]:
        """Tokens still owed."""
        return jnp.maximum(self.owed.sum(-1), self.total_at_least - self.inserted.sum(-1))

    @property
    def most(self) -> Int[Array, " B"]:
        """Tokens that may still come."""
        return jnp.minimum(self.places.sum(-1), self.total_at_most - self.inserted.sum(-1))

    def may_fire(self, room: Int[Array, " B"]) -> Bool[Array, "B S"]:
        """Gaps that may get the next token, if `room` more come: those that other gaps are owed must be among them."""
        return self.of_gap((self.places > 0) & ((self.spare(room) > 0)[:, None] | (self.owed > 0))) & self.inside

    def spare(self, room: Int[Array, " B"]) -> Int[Array, " B"]:
        """Tokens that no gap is owed, if `room` more come."""
        return jnp.minimum(self.total_at_most - self.inserted.sum(-1), room) - self.owed.sum(-1)

    @property
    def inside(self) -> Bool[Array, "B S"]:
        """Gaps of groups that are not full."""
        return self.of_gap(self.places > 0) & (self.group != NO_GROUP)

    def of_gap(self, of_group: Shaped[Array, "B G"]) -> Shaped[Array, "B S"]:
        """[B, S] of each gap what is of its group; of no meaning where it has none."""
        return jnp.take_along_axis(of_group, jnp.maximum(self.group, 0), axis=-1)


def build(
    num_columns: int,
    vocab_size: int,
    gaps: list[list[tuple[int, int, int]]],
    total: list[tuple[int, int]],
    forbidden: list[list[int]],
    num_groups: int,
) -> Request:
    """A request a row, in numpy: `gaps` are up to `num_groups` of (column, at least, at most), `total` is (at least, at
    most), in tokens to be inserted. Gaps that are not named get none. `forbidden` are token ids."""
    B, G = len(gaps), num_groups
    group = np.full((B, num_columns), NO_GROUP, np.int32)
    bounds = np.zeros((2, B, G), np.int32)
    for b, of_row in enumerate(gaps):
        for g, (column, *at) in enumerate(of_row):
            group[b, column] = g
            bounds[:, b, g] = at
    of_total = np.array(total, np.int32).reshape(B, 2)
    fields: dict[str, Any] = {"group": group, "at_least": bounds[0], "at_most": bounds[1]}
    fields |= {"total_at_least": of_total[:, 0], "total_at_most": of_total[:, 1], "drawn": np.zeros((B, G), bool)}
    fields["inserted"] = np.zeros((B, G), np.int32)
    never = np.zeros((B, vocab_size), bool)
    for b, ids in enumerate(forbidden):
        never[b, ids] = True
    fields["forbidden"] = never if never.any() else None
    return Request(**fields)


def cap(
    key: Key[Array, " B"], request: Request, insert: Bool[Array, "B S"], room: Int[Array, " B"]
) -> Bool[Array, "B S"]:
    """Without insertions that no group has a place for, or that would take the place of what another group is owed;
    which ones stay is uniform. A group that is owed tokens gets no more than those in one move."""
    *keys, k_spare = canvas_lib.split_keys(key, request.inserted.shape[-1] + 1)
    places = jnp.where(request.owed > 0, request.owed, request.places)
    kept = jnp.zeros_like(insert)
    for g, k in enumerate(keys):
        kept = kept | canvas_lib.choose(k, insert & (request.group == g), places[:, g])
    owed = request.of_gap(request.owed > 0)
    return (kept & owed) | canvas_lib.choose(k_spare, kept & ~owed, jnp.maximum(request.spare(room), 0))


def after(request: Request, canvas: Canvas, insert: Bool[Array, "B S"]) -> Request:
    """With the insertions made into the canvas. A new token's gap is of the group that it was inserted into."""
    return dataclasses.replace(
        request,
        group=canvas_lib.carry_over(canvas, insert, request.group, request.group, NO_GROUP),
        inserted=request.inserted + by_group(request, insert),
    )


def without(request: Request, canvas: Canvas, dropped: Bool[Array, "B S"]) -> Request:
    """With inserted tokens taken out of the canvas again: their groups may get as many more."""
    return dataclasses.replace(
        request,
        group=canvas_lib.close_up(canvas, dropped, request.group, NO_GROUP),
        inserted=request.inserted - by_group(request, dropped),
    )


def by_group(request: Request, columns: Bool[Array, "B S"]) -> Int[Array, "B G"]:
    """How many of the columns are of each group."""
    G = request.inserted.shape[-1]
    counted = columns & (request.group != NO_GROUP)
    row = jnp.arange(columns.shape[0])[:, None]
    return jnp.zeros_like(request.inserted).at[row, jnp.where(counted, request.group, G)].add(1, mode="drop")


def condition(
    key: Key[Array, " B"], scores: OfAllGaps | LastScores, canvas: Canvas, request: Request, max_length: int
) -> tuple[OfAllGaps | LastScores, Canvas, Request]:
    """Scores whose length posterior (where there is one) is that of the request, without forbidden tokens, the canvas
    whose open gaps are those that may fire, and the request, with numbers drawn that one posterior a gap needs drawn
    once."""
    room = canvas_lib.room(canvas, max_length)
    if request.forbidden is not None:
        assert not isinstance(scores, FusedScores)
        scores = scores.without(request.forbidden)
    if not isinstance(scores, LastScores) and scores.length_logits is not None:
        logits = scores.length_logits
        if logits.ndim == 2:
            logits = _of_row(logits, scores.lse(), canvas, request, room)
        else:
            request = jax.lax.cond(
                _pending(request).any(), lambda: _draw_numbers(key, logits, request, room), lambda: request
            )
            logits = _of_gaps(logits, canvas, request)
        scores = dataclasses.replace(scores, length_logits=logits)
    return scores, dataclasses.replace(canvas, open_gap=canvas.open_gap & request.may_fire(room)), request


def _of_row(logits, score_lse, canvas: Canvas, request: Request, room: Int[Array, " B"]) -> Float[Array, "B K"]:
    """log p(l) of the tokens that go into groups that are not full, within the range asked for.

    Each missing token is in one of them with their share of the joint softmax: l of them are Binomial of all.
    """
    number = jnp.arange(logits.shape[-1])
    fits = number <= room[:, None]
    p = jax.nn.softmax(jnp.where(fits, logits, -jnp.inf), axis=-1)
    lse = jnp.where(canvas.open_gap, score_lse, -jnp.inf)
    inside = jnp.minimum(jnp.where(request.inside, jax.nn.softmax(lse, axis=-1), 0.0).sum(-1), 1.0)
    outside = (canvas.open_gap & ~request.inside).any(-1)

    def thin(p):
        inside_of = jax.vmap(lambda q: binom.pmf(number, number[:, None], q))(inside)  # [B, of, inside]
        return jnp.where(outside[:, None], jnp.einsum("bn,bnk->bk", p, inside_of), p)

    p = jax.lax.cond(outside.any(), thin, lambda p: p, p)
    asked = fits & (number >= request.least[:, None]) & (number <= request.most[:, None])
    return jnp.log(_relative(p, asked))


def _draw_numbers(key, logits, request: Request, room: Int[Array, " B"]) -> Request:
    """Draws how many tokens each group gets that is bounded, or all of them where their total is, once: from the
    posteriors of the gaps that they still are, given their bounds and the total."""
    B, G = request.inserted.shape
    number, pending = jnp.arange(logits.shape[-1]), _pending(request)
    limit = jnp.minimum(request.most, room)

    row = jnp.arange(B)[:, None]
    gap_of = jnp.argmax(request.group[:, None, :] == jnp.arange(G)[:, None], axis=-1)  # while a group is one gap
    p = jax.nn.softmax(logits[row, gap_of], axis=-1)  # [B, G, K]
    asked = (number >= request.owed[..., None]) & (number <= request.places[..., None])
    log_p = jnp.log(_relative(p, asked))
    rest = [jnp.broadcast_to(jnp.where(number == 0, 0.0, -jnp.inf), log_p[:, 0].shape)]  # of the groups after g
    for g in reversed(range(G)):
        rest.insert(0, _log_convolve(log_p[:, g], rest[0]))
    in_total = (number >= request.least[:, None]) & (number <= limit[:, None])
    keys = canvas_lib.split_keys(key, G + 1)

    draw = jax.vmap(jax.random.categorical)
    left = draw(keys[0], jnp.where(in_total, rest[0], -jnp.inf))
    drawn = []
    for g in range(G):
        others = jnp.take_along_axis(rest[g + 1], jnp.maximum(left[:, None] - number, 0), axis=-1)
        drawn.append(draw(keys[g + 1], jnp.where(number <= left[:, None], log_p[:, g] + others, -jnp.inf)))
        left = left - drawn[-1]
    numbers = request.inserted + jnp.stack(drawn, axis=-1)
    return dataclasses.replace(
        request,
        at_least=jnp.where(pending, numbers, request.at_least),
        at_most=jnp.where(pending, numbers, request.at_most),
        drawn=request.drawn | pending,
    )


def _of_gaps(logits, canvas: Canvas, request: Request) -> Float[Array, "B S K"]:
    """log p_i(l): in a group whose number R is drawn, Binomial(R, share of the group's expected number), which is right
    where the gaps' numbers are independent Poisson."""
    number = jnp.arange(logits.shape[-1])
    mean = (jax.nn.softmax(logits, axis=-1) * number).sum(-1)
    inside = canvas.open_gap & (request.group != NO_GROUP)
    mean = jnp.where(inside, jnp.maximum(mean, 1e-30), 0.0)
    row, G = jnp.arange(mean.shape[0])[:, None], request.inserted.shape[-1]
    total = jnp.zeros((mean.shape[0], G)).at[row, jnp.where(inside, request.group, G)].add(mean, mode="drop")
    share = jnp.where(inside, mean / jnp.where(inside, request.of_gap(total), 1.0), 0.0)
    given = binom.logpmf(number, request.of_gap(request.places)[..., None], share[..., None])
    return jnp.where((request.of_gap(request.drawn) & inside)[..., None], given, logits)


def _pending(request: Request) -> Bool[Array, "B G"]:
    """Groups whose number must be drawn, and is not."""
    bounded_total = (request.total_at_least > 0) | _bounded(request.total_at_most)
    return ((request.at_least > 0) | _bounded(request.at_most) | bounded_total[:, None]) & ~request.drawn


def _bounded(at_most):
    return at_most < UNBOUNDED


def _log_convolve(a: Float[Array, "B K"], b: Float[Array, "B K"]) -> Float[Array, "B K"]:
    """log Σ_j exp(a_j + b_{k−j}), k = 0..K−1."""
    number = jnp.arange(a.shape[-1])
    other = number[:, None] - number
    return jax.nn.logsumexp(a[:, None, :] + jnp.where(other >= 0, b[:, jnp.maximum(other, 0)], -jnp.inf), axis=-1)


def _relative(p, asked):
    """p over its largest where it is asked for, at least LEAST; 0 elsewhere."""
    p = jnp.where(asked, p, 0.0)
    return jnp.where(asked, jnp.maximum(p / jnp.maximum(p.max(-1, keepdims=True), 1e-30), LEAST), 0.0)
