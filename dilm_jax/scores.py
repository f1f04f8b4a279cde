"""Scores of insertions, and the ways to hold them: all of them, or what they are made of.

The scores of a canvas are logits [S, V], a row for each gap: at training sizes far more numbers than all activations.
`FusedScores` answers the same questions without holding them: log-sums in chunks of the vocabulary, which the backward
pass computes anew, and single scores as dot products.

Shapes: B canvases of S columns, V vocabulary, D width, K length classes, Q queries a canvas; M rows of W columns, which
are the canvases or, packed, hold several each.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dilm_jax.packing import Packing

MAX_SHARDS = 8  # of the vocabulary: what a tensor axis of 2, 4 or 8 devices splits, chunks keep split


@struct.dataclass
class Scores:
    """What the heads say about a canvas, float32. Logits are −inf at ids that are not predictable.

    Losses ask for `lse`, `at` and `outer` alone, except with targets="dense", which also asks for `dense`; samplers for
    `lse` and `of_gaps`. Gradients through all of them are finite, but `at` and `outer` are −inf for an id that is not
    predictable, and of no meaning outside [0, S) x [0, V): mask such queries with a `where`.
    """

    logits: Float[Array, "B S V"]
    length_logits: Float[Array, "B K"] | Float[Array, "B S K"] | None  # one at CLS, or one per gap
    stop_logits: Float[Array, " B"] | None

    def lse(self) -> Float[Array, "B S"]:
        """log Σ_w exp s(i, w) for each column i."""
        return jax.nn.logsumexp(self.logits, axis=-1)

    def at(self, gap: Int[Array, "B Q"], token: Int[Array, "B Q"]) -> Float[Array, "B Q"]:
        """s(gap, token) for each query."""
        take = jax.vmap(lambda logits, i, w: logits.at[i, w].get(mode="fill", fill_value=jnp.nan))
        return take(self.logits, gap, token)

    def outer(self, token: Int[Array, "B Q"]) -> Float[Array, "B S Q"]:
        """s(i, token) for every column i and each query."""
        return jax.vmap(lambda logits, w: logits.at[:, w].get(mode="fill", fill_value=jnp.nan))(self.logits, token)

    def dense(self) -> Float[Array, "B S V"]:
        """All of them, for dense targets and tests."""
        return self.logits

    def of_gaps(self, gap: Int[Array, "B Q"]) -> Float[Array, "B Q V"]:
        """All scores of these gaps."""
        return jnp.take_along_axis(self.logits, gap[..., None], axis=1)

    def log_prob(self, gap: Int[Array, "B Q"], token: Int[Array, "B Q"]) -> Float[Array, "B Q"]:
        """log softmax of the gap's scores, at the token."""
        return self.at(gap, token) - jnp.take_along_axis(self.lse(), gap, axis=-1)

    def without(self, forbidden: Bool[Array, "B V"]) -> "Scores":
        """−inf at these tokens."""
        return dataclasses.replace(self, logits=jnp.where(forbidden[:, None], -jnp.inf, self.logits))


@struct.dataclass
class LastScores:
    """Those of each canvas's last gap alone, which is all that samplers that append ask for: a cached network computes
    no others. Whatever gap is named, it is that one."""

    logits: Float[Array, "B V"]

    def of_gaps(self, gap: Int[Array, "B Q"]) -> Float[Array, "B Q V"]:
        return jnp.broadcast_to(self.logits[:, None], (*gap.shape, self.logits.shape[-1]))

    def log_prob(self, gap: Int[Array, "B Q"], token: Int[Array, "B Q"]) -> Float[Array, "B Q"]:
        return jnp.take_along_axis(jax.nn.log_softmax(self.logits, axis=-1), token, axis=-1)

    def without(self, forbidden: Bool[Array, "B V"]) -> "LastScores":
        return dataclasses.replace(self, logits=jnp.where(forbidden, -jnp.inf, self.logits))


@dataclasses.dataclass(frozen=True)
class TokenHead:
    """How hidden states and a kernel make scores: which ids have any, the type of both factors (sums are float32), and
    the precision of the products."""

    predictable: tuple[bool, ...]
    dtype: str
    precision: str | None

    def scores(self, hidden: Float[Array, "*#B S D"], kernel: Float[Array, "D V"]) -> Float[Array, "*#B S V"]:
        return jnp.where(np.array(self.predictable), self.dot("...d,dv->...v", hidden, kernel), -jnp.inf)

    def mask(self, scores: Float[Array, "*B"], token: Int[Array, "*#B"]) -> Float[Array, "*B"]:
        return jnp.where(jnp.asarray(self.predictable)[token], scores, -jnp.inf)

    def dot(self, subscripts: str, a: Array, b: Array) -> Array:
        """float32, as are the sums of gradients that come back."""
        a, b = a.astype(self.dtype), b.astype(self.dtype)
        return jnp.einsum(subscripts, a, b, precision=self.precision, preferred_element_type=jnp.float32)


@struct.dataclass
class FusedScores:
    """The same from hidden states and the kernel of the token head, of canvases that may be packed. Of a packed canvas
    that lies nowhere, or has no such column, everything is finite (or −inf, of an id that is not predictable) and of no
    meaning."""

    hidden: Float[Array, "M W D"]
    kernel: Float[Array, "D V"]
    log_sums: Float[Array, "B S"]  # `fused_lse`, by canvas
    packing: Packing | None
    length_logits: Float[Array, "B K"] | Float[Array, "B S K"] | None
    stop_logits: Float[Array, " B"] | None
    head: TokenHead = struct.field(pytree_node=False)

    def lse(self) -> Float[Array, "B S"]:
        return self.log_sums

    @jax.checkpoint
    def at(self, gap: Int[Array, "B Q"], token: Int[Array, "B Q"]) -> Float[Array, "B Q"]:
        return self.head.mask(self.head.dot("bqd,dbq->bq", self._of_columns(gap), self._columns(token)), token)

    @jax.checkpoint
    def outer(self, token: Int[Array, "B Q"]) -> Float[Array, "B S Q"]:
        scores = self.head.dot("bsd,dbq->bsq", self._hidden(), self._columns(token))
        return self.head.mask(scores, token[:, None])

    def dense(self) -> Float[Array, "B S V"]:
        return self.head.scores(self._hidden(), self.kernel)

    def of_gaps(self, gap: Int[Array, "B Q"]) -> Float[Array, "B Q V"]:
        return self.head.scores(self._of_columns(gap), self.kernel)

    def log_prob(self, gap: Int[Array, "B Q"], token: Int[Array, "B Q"]) -> Float[Array, "B Q"]:
        return self.at(gap, token) - jnp.take_along_axis(self.log_sums, gap, axis=-1)

    def _of_columns(self, column):
        if self.packing is None:
            return jnp.take_along_axis(self.hidden, column[..., None], axis=1)
        return self.packing.at_columns(self.hidden, column)

    def _hidden(self):
        return self.hidden if self.packing is None else self.packing.canvases_of(self.hidden)

    def _columns(self, token):
        """Of the kernel [D, B, Q]. On a CPU a transpose would be a copy, of the gradient too, which so is scattered
        into that of the log-sums; elsewhere it is but a layout, and devices add both before they exchange them."""

        def transposed(kernel, token):
            return jnp.moveaxis(jnp.take(kernel.T, token, axis=0, mode="clip"), -1, 0)

        in_place = functools.partial(jnp.take, axis=1, mode="clip")
        return jax.lax.platform_dependent(self.kernel, token, cpu=in_place, default=transposed)


OfAllGaps = Scores | FusedScores


def num_chunks(num_columns: int, vocab_size: int, platform: str) -> int:
    """Into how many chunks a device should cut the scores of so many columns: so few that each is a large product, so
    many that one is small beside the activations (and on a CPU near its cache)."""
    at_once = 2**22 if platform == "cpu" else 2**26
    return max(1, -(-num_columns * vocab_size // at_once))


def fused_lse(
    hidden: Float[Array, "M W D"], kernel: Float[Array, "D V"], head: TokenHead, num_chunks: int
) -> Float[Array, "M W"]:
    """log Σ_w exp score(i, w), from about `num_chunks` parts of the vocabulary one after the other, in the backward
    pass too: neither holds more than M·W·V/num_chunks scores, rounded up to a few ids.

    Each part writes columns of the kernel's gradient that no other does: parts of the columns of a canvas would each
    add to all of it, and on some devices hold their own beside the sum. It is as large as the scores of D columns.
    """
    D, V = kernel.shape
    N = math.gcd(V, MAX_SHARDS)
    return _lse(hidden, kernel.reshape(D, N, -1) if N > 1 else kernel, head, num_chunks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lse(hidden, kernel, head, num_chunks):
    """Of a kernel [D, N, V/N], or [D, V]. A chunk is the same ids of each of the N parts, in order: what a mesh splits
    over the vocabulary stays so."""

    def of_chunk(chunk):
        scores, _ = _scores_of(chunk, hidden, kernel, head)
        return jax.nn.logsumexp(scores, axis=-1)

    return jax.nn.logsumexp(jax.lax.map(of_chunk, _chunks(kernel, head, num_chunks)), axis=0)


def _lse_forward(hidden, kernel, head, num_chunks):
    lse = _lse(hidden, kernel, head, num_chunks)
    return lse, (hidden, kernel, lse)


def _lse_backward(head, num_chunks, kept, g):
    hidden, kernel, lse = kept

    def add(total, chunk):
        of_hidden, of_kernel = total
        scores, columns = _scores_of(chunk, hidden, kernel, head)
        of_scores = jnp.exp(scores - lse[..., None]) * g[..., None]
        of_hidden = of_hidden + head.dot("msc,dc->msd", of_scores, columns)
        before = _slice_of(chunk, of_kernel)
        after = before + head.dot("msd,msc->dc", hidden, of_scores).reshape(before.shape)
        return (of_hidden, jax.lax.dynamic_update_slice_in_dim(of_kernel, after, chunk[0], axis=-1)), None

    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(kernel.shape, jnp.float32)
    (of_hidden, of_kernel), _ = jax.lax.scan(add, zeros, _chunks(kernel, head, num_chunks))
    return of_hidden.astype(hidden.dtype), of_kernel.astype(kernel.dtype)


def _chunks(kernel, head, num_chunks):
    """For each its first id in each part, and which of its ids [(N,) C] count: those that have a score and were in no
    chunk before. The last one begins earlier than it had to, so that all are of one size."""
    parts = np.array(head.predictable).reshape(kernel.shape[1:])
    length = parts.shape[-1]
    size = -(-length // min(num_chunks, length))
    due = np.arange(0, length, size)
    first = np.minimum(due, length - size)
    counted = [parts[..., i : i + size] & (np.arange(i, i + size) >= j) for i, j in zip(first, due, strict=True)]
    return jnp.asarray(first), jnp.asarray(np.stack(counted))


def _slice_of(chunk, kernel):
    """[D, (N,) C]"""
    first, counted = chunk
    return jax.lax.dynamic_slice_in_dim(kernel, first, counted.shape[-1], axis=-1)


def _scores_of(chunk, hidden, kernel, head):
    """[M, S, N·C], −inf where they do not count; and the columns [D, N·C] of the kernel."""
    columns = _slice_of(chunk, kernel).reshape(len(kernel), -1)
    return jnp.where(chunk[1].reshape(-1), head.dot("msd,dc->msc", hidden, columns), -jnp.inf), columns


_lse.defvjp(_lse_forward, _lse_backward)
