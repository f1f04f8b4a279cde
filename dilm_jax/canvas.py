"""Examples, canvases and targets: the arrays every process works on, and how tokens leave and enter them.

An `Example` is clean text. A `Canvas` is what the network reads: CLS, BOS, then the tokens that are
present, left-packed, then PAD. *Gap* i is the place right after canvas column i. Noise drops tokens from an
example onto a canvas; generation inserts tokens into the gaps of a canvas (docs/MATH.md 2 and 6a).

Pure jnp on arrays: neither a schedule nor a network may be known here.

Shapes: B batch, L content tokens at most, S = L + 2 columns.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

CLS_COLUMN, BOS_COLUMN = 0, 1
NUM_SPECIAL_COLUMNS = 2  # CLS and BOS precede the content


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Token ids: `size` of them in all, five of which are special and never part of the data. `reserved` are others
    that no data has, such as a tokenizer's special tokens that have no part here.

    Raises:
      ValueError: if two special tokens share an id, or one is outside [0, size).
    """

    size: int
    pad: int
    cls: int
    bos: int
    eos: int
    mask: int
    reserved: tuple[int, ...] = ()

    def __post_init__(self):
        if len(set(self.special)) < len(self.special):
            raise ValueError(f"special token ids must be distinct, got {self.special} (pad, cls, bos, eos, mask)")
        outside = [i for i in (*self.special, *self.reserved) if not 0 <= i < self.size]
        if outside:
            raise ValueError(f"special token ids {outside} are outside the vocabulary of {self.size} ids")

    @property
    def special(self) -> tuple[int, ...]:
        return self.pad, self.cls, self.bos, self.eos, self.mask

    @property
    def ordinary(self) -> np.ndarray:
        """Which ids are data: bool[V], False at special and reserved ids."""
        ordinary = np.ones(self.size, bool)
        ordinary[[*self.special, *self.reserved]] = False
        return ordinary


@struct.dataclass
class Example:
    """Clean texts. `frozen` tokens are never deleted (a prompt); `open_gap[j]` says whether tokens may be
    inserted before token j (entry `length` is the gap after the last token). Both gaps of a token that is not
    frozen are open (`validate_examples`)."""

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]  # number of content tokens
    frozen: Bool[Array, "B L"]
    open_gap: Bool[Array, "B L+1"]
    num_bytes: Int[Array, " B"]  # UTF-8 bytes of the raw text, for bits/byte; −1: not text, or truncated

    @property
    def max_length(self) -> int:
        return self.tokens.shape[-1]

    @property
    def valid(self) -> Bool[Array, "B L"]:
        return jnp.arange(self.max_length) < self.length[:, None]

    @property
    def free(self) -> Bool[Array, "B L"]:
        """Tokens that noise may delete; n of the docs is their number."""
        return self.valid & ~self.frozen


@struct.dataclass
class Canvas:
    """What the network sees: CLS, BOS, content, PAD. `open_gap[:, i]` is the gap right after column i."""

    tokens: Int[Array, "B S"]
    frozen: Bool[Array, "B S"]
    open_gap: Bool[Array, "B S"]
    position: Int[Array, "B S"]
    segment: Int[Array, "B S"]  # 0 at PAD; columns attend within their segment only
    length: Int[Array, " B"]  # occupied columns, CLS and BOS included

    @property
    def num_columns(self) -> int:
        return self.tokens.shape[-1]

    @property
    def occupied(self) -> Bool[Array, "B S"]:
        return jnp.arange(self.num_columns) < self.length[:, None]

    @property
    def free(self) -> Bool[Array, "B S"]:
        """Columns that hold a token which noise may delete; m of the docs is their number."""
        return self.occupied & ~self.frozen & (jnp.arange(self.num_columns) >= NUM_SPECIAL_COLUMNS)

    @property
    def num_free(self) -> Int[Array, " B"]:
        return self.free.sum(-1)


@struct.dataclass
class InsertionTargets:
    """What was deleted to make a canvas: `gap[k]` is the canvas column after which original token k belongs."""

    tokens: Int[Array, "B L"]
    gap: Int[Array, "B L"]  # 0 where nothing was dropped
    dropped: Bool[Array, "B L"]
    x0: Example
    t: jax.Array  # [B], noising time

    @property
    def num_dropped(self) -> Int[Array, " B"]:
        return self.dropped.sum(-1)

    @property
    def num_in_gap(self) -> Int[Array, "B S"]:
        """How many tokens are missing from each gap, |s_i|."""
        B, L = self.tokens.shape
        counts = jnp.zeros((B, L + NUM_SPECIAL_COLUMNS), jnp.int32)
        return counts.at[jnp.arange(B)[:, None], self.gap].add(self.dropped)


def validate_examples(example: Example, vocabulary: Vocabulary) -> None:
    """Checks concrete examples (host side).

    Raises:
      ValueError: naming the first offending row: a length outside [0, L], an id outside the vocabulary, a special
        id, or a free token beside a closed gap.
    """
    tokens, length = np.asarray(example.tokens), np.asarray(example.length)
    open_gap, free = np.asarray(example.open_gap), np.asarray(example.free)
    for row in np.flatnonzero((length < 0) | (length > tokens.shape[1])):
        raise ValueError(f"row {row}: length {length[row]} is outside [0, {tokens.shape[1]}]")
    valid = np.asarray(example.valid)
    for row, k in np.argwhere(valid & ((tokens < 0) | (tokens >= vocabulary.size))):
        raise ValueError(f"row {row}: token {k} is {tokens[row, k]}, outside the vocabulary of {vocabulary.size} ids")
    for row, k in np.argwhere(valid & np.isin(tokens, vocabulary.special)):
        raise ValueError(f"row {row}: token {k} is the special id {tokens[row, k]}, which may not occur in the data")
    for row, k in np.argwhere(free & ~(open_gap[:, :-1] & open_gap[:, 1:])):
        raise ValueError(f"row {row}: token {k} is free, but a gap beside it is closed; freeze it or open both gaps")


def drop_tokens(x0: Example, dropped: Bool[Array, "B L"], vocabulary: Vocabulary) -> tuple[Canvas, Int[Array, "B L"]]:
    """Deletes tokens. Returns the canvas and, for each original token, the gap it was in (0 where it stays).

    A gap of the canvas is open if any original gap that it merges is open. Column count S is L + 2.
    """
    B, L = x0.tokens.shape
    S = L + NUM_SPECIAL_COLUMNS
    row = jnp.arange(B)[:, None]
    kept = x0.valid & ~dropped
    kept_before = jnp.cumsum(kept, axis=-1) - kept  # [B, L]
    column = jnp.where(kept, NUM_SPECIAL_COLUMNS + kept_before, S)  # S is out of range: dropped by the scatter
    length = NUM_SPECIAL_COLUMNS + kept.sum(-1)

    tokens = jnp.full((B, S), vocabulary.pad, x0.tokens.dtype)
    tokens = tokens.at[:, CLS_COLUMN].set(vocabulary.cls).at[:, BOS_COLUMN].set(vocabulary.bos)
    tokens = tokens.at[row, column].set(x0.tokens, mode="drop")
    frozen = jnp.arange(S) < jnp.full((B, 1), NUM_SPECIAL_COLUMNS)
    frozen = frozen.at[row, column].set(x0.frozen, mode="drop")

    kept_before_gap = jnp.concatenate([kept_before, kept.sum(-1, keepdims=True)], axis=-1)  # [B, L + 1]
    gap_exists = jnp.arange(L + 1) <= x0.length[:, None]
    gap_column = jnp.where(gap_exists, BOS_COLUMN + kept_before_gap, S)
    open_gap = jnp.zeros((B, S), bool).at[row, gap_column].max(x0.open_gap, mode="drop")
    gap = jnp.where(dropped & x0.valid, BOS_COLUMN + kept_before, 0)
    return _layout(tokens, frozen, open_gap, length), gap


def drop_at_random(
    key: Key[Array, " B"], x0: Example, count: Int[Array, " B"], t: Float[Array, " B"], vocabulary: Vocabulary
) -> tuple[Canvas, InsertionTargets]:
    """Deletes `count` free tokens (all of them if there are fewer), which ones uniform."""
    dropped = choose(key, x0.free, count)
    canvas, gap = drop_tokens(x0, dropped, vocabulary)
    return canvas, InsertionTargets(tokens=x0.tokens, gap=gap, dropped=dropped, x0=x0, t=t)


def freeze_spans(key: Key[Array, " B"], x0: Example, fraction: float) -> Example:
    """Turns a `fraction` of the rows into infills: spans of free tokens become frozen, of three tokens on average as
    the spans between them, and a gap without a free token beside it closes three times out of four."""
    k_row, k_token, k_gap = split_keys(key, 3)
    chosen = (jax.vmap(jax.random.uniform)(k_row) < fraction)[:, None]
    u = jax.vmap(lambda k: jax.random.uniform(k, (x0.max_length + 1,)))(k_token)
    switches = jnp.cumsum(u[:, 1:] < 1 / 3, axis=-1) + (u[:, :1] < 1 / 2)
    frozen = x0.frozen | (chosen & x0.valid & (switches % 2 == 0))
    free = jnp.pad(x0.valid & ~frozen, ((0, 0), (1, 1)))
    stays_open = jax.vmap(lambda k: jax.random.uniform(k, (x0.max_length + 1,)))(k_gap) < 1 / 4
    open_gap = x0.open_gap & (free[:, :-1] | free[:, 1:] | stays_open | ~chosen)
    return dataclasses.replace(x0, frozen=frozen, open_gap=open_gap)


def to_canvas(x0: Example, vocabulary: Vocabulary) -> Canvas:
    """The canvas that holds every token of the example."""
    return drop_tokens(x0, jnp.zeros_like(x0.frozen), vocabulary)[0]


def insert_tokens(
    key: Key[Array, " B"], canvas: Canvas, insert: Bool[Array, "B S"], tokens: Int[Array, "B S"]
) -> tuple[Canvas, Bool[Array, "B S"], Bool[Array, " B"]]:
    """Inserts `tokens[:, i]` right after column i wherever `insert[:, i]` and gap i is open.

    Existing tokens move right and keep their order; nothing is overwritten. When more gaps fire than columns are
    free, a uniformly random subset of them is inserted.

    Returns the new canvas, the insertions that were made and, per row, whether one had to be left out.
    """
    S = insert.shape[-1]
    insert = insert & canvas.open_gap & canvas.occupied
    truncated = insert.sum(-1) > S - canvas.length
    insert = choose(key, insert, S - canvas.length)
    pad = canvas.tokens[:, -1:]  # read only where the row is not full, and then it is PAD
    after = _layout(
        carry_over(canvas, insert, canvas.tokens, tokens.astype(canvas.tokens.dtype), pad),
        carry_over(canvas, insert, canvas.frozen, False, False),
        carry_over(canvas, insert, canvas.open_gap, True, False),
        canvas.length + insert.sum(-1),
    )
    return after, insert, truncated


def carry_over(
    canvas: Canvas, insert: Bool[Array, "B S"], values: Shaped[Array, "B S"], at_new: ArrayLike, at_pad: ArrayLike
) -> Shaped[Array, "B S"]:
    """Values of the columns after insertions that fit: each moves with its token, a token inserted into gap i gets
    `at_new[:, i]`."""
    B, S = insert.shape
    row, shift = jnp.arange(B)[:, None], jnp.cumsum(insert, axis=-1)
    old = jnp.where(canvas.occupied, jnp.arange(S) + shift - insert, S)  # S is out of range: dropped by the scatter
    new = jnp.where(insert, jnp.arange(S) + shift, S)
    moved = jnp.full_like(values, at_pad).at[row, old].set(values, mode="drop")
    return moved.at[row, new].set(at_new, mode="drop")


def close_up(
    canvas: Canvas, dropped: Bool[Array, "B S"], values: Shaped[Array, "B S"], at_pad: ArrayLike
) -> Shaped[Array, "B S"]:
    """Values of the columns that are left when the tokens of some go."""
    B, S = dropped.shape
    left = canvas.occupied & ~dropped
    column = jnp.where(left, jnp.cumsum(left, axis=-1) - 1, S)  # S is out of range: dropped by the scatter
    return jnp.full_like(values, at_pad).at[jnp.arange(B)[:, None], column].set(values, mode="drop")


def spread_out(canvas: Canvas, number: Int[Array, "B S"]) -> tuple[Int[Array, "B S"], Bool[Array, "B S"]]:
    """Where `number[:, i]` columns are made after column i: the column that each was before, or after which it was
    made, and whether it was made. The sum must fit; of columns past the text it is of no meaning."""
    B, S = number.shape
    column = jnp.arange(S) + jnp.cumsum(number, axis=-1) - number
    column = jnp.where(canvas.occupied, column, S)  # S is out of range: dropped by the scatter
    is_old = jnp.zeros((B, S), bool).at[jnp.arange(B)[:, None], column].set(True, mode="drop")
    length = canvas.length + number.sum(-1)
    return jnp.cumsum(is_old, axis=-1) - 1, ~is_old & (jnp.arange(S) < length[:, None])


def to_example(canvas: Canvas, frozen: Bool[Array, "B S"]) -> Example:
    """The text on a canvas, with these columns frozen."""
    return Example(
        tokens=canvas.tokens[:, NUM_SPECIAL_COLUMNS:],
        length=canvas.length - NUM_SPECIAL_COLUMNS,
        frozen=frozen[:, NUM_SPECIAL_COLUMNS:],
        open_gap=canvas.open_gap[:, BOS_COLUMN:],
        num_bytes=jnp.zeros_like(canvas.length),
    )


def choose(key: Key[Array, " B"], eligible: Bool[Array, "B N"], count: Int[Array, " B"]) -> Bool[Array, "B N"]:
    """A uniformly random subset of `count` eligible entries of each row (all of them if there are fewer).

    One sort of random bits whose low bits are replaced by the index, so that no two are equal.
    """
    N = eligible.shape[-1]
    index_bits = max(1, (N - 1).bit_length())
    bits = jax.vmap(lambda k: jax.random.bits(k, (N,), jnp.uint32))(key)
    rank_key = (bits >> index_bits << index_bits) | jnp.arange(N, dtype=jnp.uint32)
    rank_key = jnp.where(eligible, rank_key, jnp.uint32(0xFFFFFFFF))
    threshold = jnp.take_along_axis(jnp.sort(rank_key, axis=-1), jnp.clip(count - 1, 0, N - 1)[:, None], axis=-1)
    return eligible & (rank_key <= threshold) & (count > 0)[:, None]


def room(canvas: Canvas, max_length: int) -> Int[Array, " B"]:
    """How many tokens still fit a text of `max_length` content tokens (whatever the canvas's size)."""
    return max_length + NUM_SPECIAL_COLUMNS - canvas.length


def split_keys(key: Key[Array, " B"], num: int) -> tuple[Key[Array, " B"], ...]:
    """`num` children of each row's key."""
    return tuple(jnp.moveaxis(jax.vmap(lambda k: jax.random.split(k, num))(key), 1, 0))


def linked(canvas: Canvas) -> Bool[Array, "B S"]:
    """Columns whose token makes the gaps on its two sides equivalent for an insertion of that same token: the
    token is free and both gaps are open. Frozen tokens and closed gaps end a run."""
    gap_before = jnp.pad(canvas.open_gap[:, :-1], ((0, 0), (1, 0)))
    return canvas.free & canvas.open_gap & gap_before


def run_starts(canvas: Canvas) -> Bool[Array, "B S"]:
    """The first column of each maximal run of equal linked tokens."""
    link = linked(canvas)
    same_as_before = (canvas.tokens == jnp.roll(canvas.tokens, 1, axis=-1)) & link & jnp.roll(link, 1, axis=-1)
    return link & ~same_as_before  # column 0 is CLS, never linked: the roll brings nothing around


def content(canvas: Canvas) -> tuple[Int[Array, "B L"], Int[Array, " B"]]:
    """The tokens after CLS and BOS, padded, and their number."""
    return canvas.tokens[:, NUM_SPECIAL_COLUMNS:], canvas.length - NUM_SPECIAL_COLUMNS


def _layout(tokens, frozen, open_gap, length) -> Canvas:
    """A canvas of one segment a row, positions counted from CLS."""
    column = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
    occupied = column < length[:, None]
    return Canvas(
        tokens=tokens,
        frozen=frozen & occupied,
        open_gap=open_gap & occupied,
        position=column,
        segment=occupied.astype(jnp.int32),
        length=length,
    )
