"""Where the deleted tokens of a text may have been, given what is left of it (docs/MATH.md 4b).

Many masks leave the same canvas where letters repeat. All of them are equally likely under both noising processes,
so the law of a deleted token's gap follows from counts of masks: ways to read a canvas from a text, by dynamic
programming over prefixes and suffixes. Pure jnp: neither a schedule nor a network may be known here.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dilm_jax import canvas as canvas_lib
from dilm_jax.canvas import Canvas, Example

NEG_INF = -jnp.inf


def gap_posterior(x0: Example, canvas: Canvas) -> Float[Array, "B S L"]:
    """A[i, k]: the probability that token k of `x0` is missing from gap i, over all masks that turn x0 into `canvas`.

    Sums to n − m over gaps and tokens; 0 for tokens that are frozen or PAD. With F[k, i] the ways to read columns up
    to i from tokens before k, and B[k, i] those to read the columns after i from tokens k and later,
    A[i, k] = F[k, i]·B[k+1, i] / Σ_i F[k, i]·B[k, i] for a free token k; a frozen one is never missing.

    Two scans over the tokens, O(L·S), in log space: counts reach 2^L. Each step takes out its largest entry; the
    denominator is taken anew for each k, so that what was taken out cancels. A canvas that no mask of x0 gives has no
    posterior: NaN.
    """
    B, S = canvas.tokens.shape
    token, valid, free = (jnp.moveaxis(x, 1, 0) for x in (x0.tokens, x0.valid, x0.free))  # [L, B]
    content = canvas.occupied & (jnp.arange(S) >= canvas_lib.NUM_SPECIAL_COLUMNS)
    column = jnp.arange(S)

    def reads(token, valid, free) -> Bool[Array, "B S"]:
        """Which columns may hold this token."""
        return content & (canvas.tokens == token[:, None]) & (canvas.frozen == ~free[:, None]) & valid[:, None]

    def forward(log_ways, now):
        _, valid, free = now
        missing = jnp.where((free | ~valid)[:, None], log_ways, NEG_INF)
        read = jnp.where(reads(*now), _shift_right(log_ways), NEG_INF)
        return _normalize(jnp.logaddexp(missing, read)), log_ways

    def backward(log_ways, now_and_before):
        now, log_before = now_and_before
        _, valid, free = now
        missing = jnp.where((free | ~valid)[:, None], log_ways, NEG_INF)
        read = _shift_left(jnp.where(reads(*now), log_ways, NEG_INF))
        either = jnp.logaddexp(missing, read)
        log_all = jax.nn.logsumexp(log_before + either, axis=-1, keepdims=True)
        posterior = jnp.where(free[:, None], jnp.exp(log_before + missing - log_all), 0.0)
        return _normalize(either), posterior

    first = jnp.where(column == canvas_lib.BOS_COLUMN, 0.0, NEG_INF)
    last = jnp.where(column == canvas.length[:, None] - 1, 0.0, NEG_INF)
    _, log_before = jax.lax.scan(forward, jnp.broadcast_to(first, (B, S)), (token, valid, free))
    _, posterior = jax.lax.scan(backward, last, ((token, valid, free), log_before), reverse=True)
    return jnp.moveaxis(posterior, 0, -1)


def _normalize(log_ways):
    return log_ways - log_ways.max(-1, keepdims=True)


def _shift_right(x):
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)), constant_values=NEG_INF)


def _shift_left(x):
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=NEG_INF)
