"""Scores of insertions, and the ways to hold them: all of them, for samplers; or what they are made of, for losses.

The scores of a canvas are logits [S, V], a row for each gap: at training sizes far more numbers than all activations.
`FusedScores` answers the same questions without holding them: log-sums in chunks of columns, which the backward pass
computes anew, and single scores as dot products.

Shapes: B canvases of S columns, V vocabulary, D width, K length classes, Q queries a canvas; M rows, which are
the canvases or, packed, hold several each.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dilm_jax.packing import Packing


@struct.dataclass
class Scores:
    """What the heads say about a canvas, float32. Logits are −inf at ids that are not predictable.

    Losses ask for `lse`, `at` and `outer` alone, except with targets="dense", which also asks for `dense`. Gradients
    through all of them are finite, but `at` and `outer` are −inf for an id that is not predictable, and of no meaning
    outside [0, S) x [0, V): mask such queries with a `where`.
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
        """All of them, for samplers, dense targets and tests."""
        return self.logits

    def of_gap(self, gap: Int[Array, " B"]) -> Float[Array, "B V"]:
        """All scores of one gap a canvas, for samplers."""
        return jnp.take_along_axis(self.logits, gap[:, None, None], axis=1)[:, 0]

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

    def of_gap(self, gap: Int[Array, " B"]) -> Float[Array, "B V"]:
        return self.logits

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

    hidden: Float[Array, "M S D"]
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
        if self.packing is None:
            hidden = jnp.take_along_axis(self.hidden, gap[..., None], axis=1)
        else:
            hidden = self.packing.at_columns(self.hidden, gap)
        return self.head.mask(self.head.dot("bqd,bqd->bq", hidden, self._embed(token)), token)

    @jax.checkpoint
    def outer(self, token: Int[Array, "B Q"]) -> Float[Array, "B S Q"]:
        scores = self.head.dot("bsd,bqd->bsq", self._hidden(), self._embed(token))
        return self.head.mask(scores, token[:, None])

    def dense(self) -> Float[Array, "B S V"]:
        return self.head.scores(self._hidden(), self.kernel)

    def _hidden(self):
        return self.hidden if self.packing is None else self.packing.canvases_of(self.hidden)

    def _embed(self, token):
        return self.kernel.T.at[token].get(mode="clip")


def num_chunks(num_columns: int, vocab_size: int) -> int:
    """Into how many chunks a device should cut the scores of so many columns: few enough that each reads the kernel for
    many columns, so many that one is small beside the activations (and on a CPU near its cache)."""
    at_once = 2**22 if jax.default_backend() == "cpu" else 2**26
    return max(1, -(-num_columns * vocab_size // at_once))


def fused_lse(
    hidden: Float[Array, "M S D"], kernel: Float[Array, "D V"], head: TokenHead, num_chunks: int
) -> Float[Array, "M S"]:
    """log Σ_w exp score(i, w), from at most `num_chunks` parts of the columns one after the other, in the backward pass
    too: neither holds more than M·⌈S/num_chunks⌉·V scores."""
    S = hidden.shape[1]
    size = -(-S // min(num_chunks, S))
    padded = jnp.pad(hidden, ((0, 0), (0, -S % size), (0, 0)))
    parts = jnp.moveaxis(padded.reshape(padded.shape[0], -1, size, padded.shape[2]), 1, 0)
    lse = _lse(parts, kernel, head)
    return jnp.moveaxis(jnp.asarray(lse), 0, 1).reshape(padded.shape[:2])[:, :S]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _lse(parts, kernel, head):
    """Of parts [number, M, columns, D]."""
    kernel = kernel.astype(head.dtype)
    return jax.lax.map(lambda part: jax.nn.logsumexp(head.scores(part, kernel), axis=-1), parts)


def _lse_forward(parts, kernel, head):
    lse = _lse(parts, kernel, head)
    return lse, (parts, kernel, lse)


def _lse_backward(head, kept, g):
    parts, kernel, lse = kept
    in_dtype = kernel.astype(head.dtype)

    def add(total, part_lse_g):
        part, lse, g = part_lse_g
        of_scores = jnp.exp(head.scores(part, in_dtype) - lse[..., None]) * g[..., None]
        total = total + head.dot("mcd,mcv->dv", part, of_scores)
        return total, head.dot("mcv,dv->mcd", of_scores, in_dtype).astype(part.dtype)

    of_kernel, of_parts = jax.lax.scan(add, jnp.zeros(kernel.shape, jnp.float32), (parts, lse, g))
    return of_parts, of_kernel.astype(kernel.dtype)


_lse.defvjp(_lse_forward, _lse_backward)
