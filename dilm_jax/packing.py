"""Several canvases to a row, so that the network computes on few columns that hold nothing.

Noise leaves most columns of a canvas empty. A `Packing` says where each canvas of a batch lies in fewer rows; the
network computes in those rows and answers by canvas (scores.FusedScores). What lies in one row is kept apart by
segments, and positions start anew at each CLS, so that no score changes.

How many rows there are is fixed at compile time. In training canvases are packed tightly, and those that find no room
wait for another pass of the same rows: see `in_passes`. In sampling, where they are packed anew at each call, they go
into slots of a few sizes: see `in_slots`. Canvases stay on the device shard that their example is on.

Pure jnp on arrays: neither a network nor a loss may be known here.

Shapes: B canvases of S columns on P shards, b = B/P of them on each; R rows of W columns a shard, M = P·R in all (W = S
in training).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Shaped

from dilm_jax.canvas import Canvas

NOWHERE = 2**30  # past the columns of any rows


@struct.dataclass
class Packing:
    """Where the columns of canvases lie in rows, by shard. Each array is the inverse of the other, where there is
    something; but several canvases may be read from the place of one that is the same, without a gradient."""

    source: Int[Array, "P R W"]  # which column of the shard's canvases, b·S of them, lies here; b·S: none
    place: Int[Array, "P b S"]  # where a canvas's column lies, of R·W; R·W: nowhere

    @property
    def placed(self) -> Bool[Array, " B"]:
        """Whether a canvas lies anywhere."""
        return (self.place[..., 0] < self.source[0].size).reshape(-1)

    def pack(self, canvas: Canvas) -> Canvas:
        """The rows [M, W]: each canvas a segment of its own, positions counted from its CLS."""
        B = len(canvas.length)
        return Canvas(
            tokens=self.rows_of(canvas.tokens, 0),
            frozen=self.rows_of(canvas.frozen, False),
            open_gap=self.rows_of(canvas.open_gap, False),
            position=self.rows_of(canvas.position, 0),
            segment=self.rows_of(jnp.broadcast_to(jnp.arange(1, B + 1)[:, None], canvas.tokens.shape), 0),
            length=(self.source < self.place[0].size).sum(-1).reshape(-1),
        )

    def rows_of(self, values: Shaped[Array, "B S ..."], empty: Any) -> Shaped[Array, "M W ..."]:
        """Values of the canvases' columns, where those lie."""
        return _take(self._by_shard(values, 2), self.source, empty)

    def canvases_of(self, values: Shaped[Array, "M W ..."]) -> Shaped[Array, "B S ..."]:
        """Values of the rows' columns, by canvas; 0 where a canvas has no column."""
        return _canvases_of(self, values)

    def at_columns(self, values: Shaped[Array, "M W ..."], column: Int[Array, "B Q"]) -> Shaped[Array, "B Q ..."]:
        """Values of these columns of each canvas; 0 where it has no such column."""
        place = jnp.take_along_axis(self.place, self._by_shard(column, 1), axis=-1)
        return _take(self._by_shard(values, 2), place)

    def first_of(self, values: Shaped[Array, "M W ..."]) -> Shaped[Array, "B ..."]:
        """Values of the canvases' first columns; 0 where one lies nowhere."""
        return _first_of(self, values)

    def spread(self, values: Shaped[Array, "B ..."]) -> Shaped[Array, "M W ..."]:
        """To each column the value of its canvas; 0 where there is none."""
        return _spread(self, values)

    def _by_shard(self, values: Array, num_axes: int) -> Array:
        """[P, …], the first `num_axes` axes of a shard merged."""
        return values.reshape(len(self.source), -1, *values.shape[num_axes:])


def _take(values, index, empty=0):
    """values[p, index[p]], the first two axes merged; `empty` where there is no such place."""
    taken = jax.vmap(lambda values, index: values.at[index].get(mode="fill", fill_value=empty))(values, index)
    return taken.reshape(-1, *taken.shape[2:])


# `source` and `place` are inverses: the transpose of taking by one is taking by the other. Autodiff would scatter.


def _gather(take: Callable[[Packing, Array], Array], transpose: Callable[[Packing, Array], Array]):
    """`take` with this transpose."""
    gather = jax.custom_vjp(take)
    gather.defvjp(
        lambda packing, values: (take(packing, values), packing), lambda packing, g: (None, transpose(packing, g))
    )
    return gather


def _take_columns(packing: Packing, values):
    return _take(packing._by_shard(values, 2), packing.place)


def _take_first(packing: Packing, values):
    return _take(packing._by_shard(values, 2), packing.place[..., 0])


def _put_first(packing: Packing, values):
    b, S = packing.place.shape[1:]
    return _take(packing._by_shard(values, 1), jnp.where(packing.source % S == 0, packing.source // S, b))


def _take_owner(packing: Packing, values):
    return _take(packing._by_shard(values, 1), packing.source // packing.place.shape[2])


_canvases_of = _gather(_take_columns, lambda packing, g: packing.rows_of(g, 0))
_first_of = _gather(_take_first, _put_first)
_spread = _gather(_take_owner, lambda packing, g: _take_columns(packing, g).sum(1))


def first_fit(
    length: Int[Array, " B"], waiting: Bool[Array, " B"], num_columns: int, num_rows: int, num_shards: int
) -> Packing:
    """The packing of the canvases that wait, as many as find room in `num_rows` rows of each shard: longest first,
    each into the first row that has room (first-fit decreasing). The longest always finds some."""
    length, waiting = length.reshape(num_shards, -1), waiting.reshape(num_shards, -1)

    def put(room, b_length_waits):
        length, waits = b_length_waits
        fits = waits & (room >= length)
        row = jnp.argmax(fits)
        at = jnp.where(fits[row], row * num_columns + num_columns - room[row], num_rows * num_columns)
        return room.at[row].add(-jnp.where(fits[row], length, 0)), at

    def of_shard(length, waiting):
        order = jnp.argsort(-length)
        room = jnp.full(num_rows, num_columns, length.dtype)
        _, start = jax.lax.scan(put, room, (length[order], waiting[order]))
        return jnp.zeros_like(start).at[order].set(start)

    start = jax.vmap(of_shard)(length, waiting)
    return _laid(start, start, length, num_columns, num_rows, num_columns)


def _laid(begins, reads, length, num_columns, num_rows, width) -> Packing:
    """Canvases that begin at these columns of a shard's rows, or nowhere, and are read at those, [P, b] each."""
    nowhere, column = num_rows * width, jnp.arange(num_columns)

    def columns(start):
        there = (column < length[..., None]) & (start < nowhere)[..., None]
        return jnp.where(there, start[..., None] + column, nowhere)

    def inverse(place):
        return jnp.full(nowhere, place.size).at[place.reshape(-1)].set(jnp.arange(place.size), mode="drop")

    source = jax.vmap(inverse)(columns(begins)).reshape(-1, num_rows, width)
    return Packing(source=source, place=columns(reads))


@struct.dataclass
class Slots:
    """Where canvases begin in rows, and how many rows hold any."""

    begins: Int[Array, "P b"]  # column of the shard's rows; NOWHERE: it does not
    reads: Int[Array, "P b"]  # the same; where one begins that is the same
    rows_needed: Int[Array, ""]  # of the neediest shard

    def packing(self, length: Int[Array, " B"], num_columns: int, num_rows: int, width: int) -> Packing:
        """In so many rows, which must be as many as are needed."""
        return _laid(self.begins, self.reads, length.reshape(self.begins.shape), num_columns, num_rows, width)


def in_slots(length: Int[Array, " B"], waiting: Bool[Array, " B"], what: Any, width: int, num_shards: int) -> Slots:
    """The canvases that wait in slots of rows of `width` columns. Those for which `what` (a pytree of arrays [B, …]) is
    as for the first one of a shard share its slot.

    Slots are as long as the longest canvas (rounded up to a multiple of eight), or a half, a quarter or an eighth of
    that. The longest come first, so that no slot crosses the end of a row; a scan as `first_fit`'s is not needed.
    """
    unit = -(-jnp.where(waiting, length, 1).max() // 8)
    of_row = width // (8 * unit) * 8 * unit  # columns of a row that slots take
    units = -(-length // unit)
    size = unit * jnp.where(units > 4, 8, jnp.where(units > 2, 4, units))
    by_shard = lambda x: x.reshape(num_shards, -1, *x.shape[1:])  # noqa: E731

    def of_shard(waiting, size, what):
        first = jnp.argmax(waiting)
        same = waiting
        for x in jax.tree.leaves(what):
            same = same & (x == x[first]).reshape(len(x), -1).all(-1)
        alone = waiting & (~same | (jnp.arange(len(same)) == first))
        size = jnp.where(alone, size, 0)
        order = jnp.argsort(-size)
        before = jnp.cumsum(size[order]) - size[order]
        before = jnp.zeros_like(before).at[order].set(before)
        begins = jnp.where(alone, before // of_row * width + before % of_row, NOWHERE)
        return begins, jnp.where(same, begins[first], begins), -(-size.sum() // of_row)

    begins, reads, rows = jax.vmap(of_shard)(by_shard(waiting), by_shard(size), jax.tree.map(by_shard, what))
    return Slots(begins=begins, reads=reads, rows_needed=rows.max())


def in_passes(
    visit: Callable[[Any, Packing], Any],
    total: Any,
    length: Int[Array, " B"],
    num_columns: int,
    num_rows: int,
    num_shards: int,
) -> tuple[Any, Int[Array, ""]]:
    """total = visit(total, packing), once for each packing, until every canvas was in one of them; and how many there
    were. All shards do as many. Lengths are those of canvases, 2 to S: what fits no empty row would wait for ever."""

    def step(carry):
        total, waiting, count = carry
        packing = first_fit(length, waiting, num_columns, num_rows, num_shards)
        return visit(total, packing), waiting & ~packing.placed, count + 1

    waiting = jnp.ones(length.shape, bool)
    total, _, count = jax.lax.while_loop(lambda carry: carry[1].any(), step, (total, waiting, jnp.int32(0)))
    return total, count


def rows_needed(length: Int[Array, " B"], num_columns: int, num_shards: int) -> Int[Array, " P"]:
    """How many rows of its own each shard would need to place all of its canvases at once."""
    b = len(length) // num_shards
    packing = first_fit(length, jnp.ones(length.shape, bool), num_columns, b, num_shards)
    return (packing.source < packing.place[0].size).any(-1).sum(-1)
