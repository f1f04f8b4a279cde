"""Loss terms of insertion processes (docs/MATH.md 4, 4a and 4b), of which the families' losses are made.

A *kernel* p is the probability of the insertion (gap, token). Inserting w into any gap that touches a run of w's
gives the same text; the exact term scores the sum over those gaps, the paper's scores one of them (its Remark 2).

Token terms return Σ log p over the dropped tokens [B], length terms nats [B] or [B, S]. Weights are the caller's;
`poisson_nll` alone applies the one it is given. Everything is float32 and finite for rows with nothing dropped, nothing
kept, or no open gap.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dilm_jax import alignment
from dilm_jax import canvas as canvas_lib
from dilm_jax.canvas import Canvas, InsertionTargets
from dilm_jax.scores import OfAllGaps

NEG_INF = -jnp.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Which loss, of those in docs/MATH.md 4.

    Attributes:
      kernel: "exact" sums over equivalent gaps, "paper" does not.
      alignment: which gap a dropped token is missing from. "sampled": the one that the drawn mask says; "marginal":
        all gaps by their probability given the canvas (Rao–Blackwell: the same expectation, less variance). The
        counts that length heads learn from are the sampled mask's either way.
      length: "cross_entropy" fits the whole posterior p(l), "poisson_mean" (the paper's) its mean only.
      weighting: "elbo", "self_normalized" or "normalized". DILM-M's length cross-entropy is summed over the open gaps
        under "elbo", under the others it is their mean.
      max_weight: bound on the coefficient of "elbo"; the paper clips it at 100. inf leaves it alone.
      targets: "gather" asks for the scores of the targets; "dense" expands the targets to counts [B, S, V] on
        device, the readable definition (equal value and gradient). Of the sampled alignment.
    """

    kernel: Literal["exact", "paper"]
    alignment: Literal["sampled", "marginal"]
    length: Literal["cross_entropy", "poisson_mean"]
    weighting: Literal["elbo", "self_normalized", "normalized"]
    max_weight: float
    targets: Literal["gather", "dense"]


# --- The kernel: log p of (gap, token) -------------------------------------------------------------------------------


def log_normalizer(scores: OfAllGaps, canvas: Canvas) -> Float[Array, " B"]:
    """log Σ over open gaps and the vocabulary of exp score: the joint softmax's. 0 in rows without an open gap."""
    any_open = canvas.open_gap.any(-1)
    return _safe_logsumexp(jnp.where(canvas.open_gap, scores.lse(), NEG_INF), any_open)


def log_token_terms(
    scores: OfAllGaps,
    gap_offset: Float[Array, "B S"],
    gap_reference: Float[Array, "B S"],
    canvas: Canvas,
    targets: InsertionTargets,
    config: LossConfig,
) -> Float[Array, " B"]:
    """Σ over dropped tokens of log p(gap, token) − gap_reference[gap], where log p = score + gap_offset[gap].

    The offset is minus the joint log-normaliser (one value a row), or for independent gaps minus the gap's own
    plus the log of its rate; the reference is then that log rate.
    """
    terms = _marginal if config.alignment == "marginal" else _TOKEN_TERMS[config.targets]
    return terms(Cells(scores, gap_offset), gap_reference, canvas, targets, exact=config.kernel == "exact")


@dataclasses.dataclass(frozen=True)
class Cells:
    """log p of insertions, from the scores and an offset a gap; the same queries as Scores."""

    scores: OfAllGaps
    gap_offset: Float[Array, "B S"]

    def at(self, gap: Int[Array, "B Q"], token: Int[Array, "B Q"]) -> Float[Array, "B Q"]:
        return self.scores.at(gap, token) + jnp.take_along_axis(self.gap_offset, gap, axis=-1)

    def outer(self, token: Int[Array, "B Q"]) -> Float[Array, "B S Q"]:
        return self.scores.outer(token) + self.gap_offset[..., None]

    def dense(self) -> Float[Array, "B S V"]:
        return self.scores.dense() + self.gap_offset[..., None]


def _gathered(log_kernel, gap_reference, canvas, targets, *, exact):
    log_p = log_kernel.at(targets.gap, targets.tokens)
    if exact:
        in_run, column = find_run(canvas, targets.gap, targets.tokens)
        run_log_p = run_sums(log_kernel.at, canvas)
        log_p = jnp.where(in_run, jnp.take_along_axis(run_log_p, column, axis=-1), log_p)
    log_p = log_p - jnp.take_along_axis(gap_reference, targets.gap, axis=-1)
    return jnp.where(targets.dropped, log_p, 0.0).sum(-1)


def _dense(log_kernel, gap_reference, canvas, targets, *, exact):
    log_p = log_kernel.dense()
    counts = expand_targets(targets, *log_p.shape[1:])
    letters = jnp.arange(log_p.shape[-1])[None]
    return _expected(counts, log_p, letters, log_kernel, gap_reference, canvas, exact)


def _marginal(log_kernel, gap_reference, canvas, targets, *, exact):
    """Column k of the counts is original token k, not a letter: [B, S, L] whatever the vocabulary."""
    tokens = targets.x0.tokens
    counts = alignment.gap_posterior(targets.x0, canvas)
    return _expected(counts, log_kernel.outer(tokens), tokens, log_kernel, gap_reference, canvas, exact)


def _expected(counts, log_p, tokens, log_kernel, gap_reference, canvas, exact):
    if exact:
        log_p = put_run_sums(log_p, tokens, log_kernel.at, canvas)
    return (counts * jnp.where(counts > 0, log_p - gap_reference[..., None], 0.0)).sum((-2, -1))


_TOKEN_TERMS = {"gather": _gathered, "dense": _dense}


def expand_targets(targets: InsertionTargets, num_columns: int, vocab_size: int) -> Float[Array, "B S V"]:
    """How often each token is missing from each gap: the sparse targets as dense counts, on device."""
    B = targets.tokens.shape[0]
    counts = jnp.zeros((B, num_columns, vocab_size))
    return counts.at[jnp.arange(B)[:, None], targets.gap, targets.tokens].add(targets.dropped.astype(jnp.float32))


def run_sums(log_p_at: Callable[[Array, Array], Array], canvas: Canvas) -> Float[Array, "B S"]:
    """For each linked column, log of the summed kernel of inserting its token into the gaps of its run.

    `log_p_at(gap [B, Q], token [B, Q])` is the log kernel. A run of w at columns a..b has the gaps a−1..b: the cells
    (j, w) for a ≤ j ≤ b, and (a−1, w) at the run's first column only (docs/MATH.md 4a). 0 at columns that are not
    linked. O(S).
    """
    link, first = canvas_lib.linked(canvas), canvas_lib.run_starts(canvas)
    column = jnp.broadcast_to(jnp.arange(canvas.num_columns), canvas.tokens.shape)
    after = jnp.where(link, log_p_at(column, canvas.tokens), NEG_INF)
    before = jnp.where(first, log_p_at(jnp.maximum(column - 1, 0), canvas.tokens), NEG_INF)

    run = jnp.cumsum(first, axis=-1)  # 1-based; columns outside runs contribute -inf
    row = jnp.arange(run.shape[0])[:, None]
    largest = jnp.full(run.shape[:1] + (run.shape[1] + 1,), NEG_INF)
    largest = largest.at[row, run].max(jax.lax.stop_gradient(jnp.maximum(after, before)))[row, run]
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    summed = jnp.zeros(run.shape[:1] + (run.shape[1] + 1,))
    summed = summed.at[row, run].add(jnp.exp(after - largest) + jnp.exp(before - largest))[row, run]
    log_summed = jnp.where(summed > 0, jnp.log(jnp.where(summed > 0, summed, 1.0)), NEG_INF)
    return jnp.where(link, largest + log_summed, 0.0)


def find_run(
    canvas: Canvas, gap: Int[Array, "B Q"], token: Int[Array, "B Q"]
) -> tuple[Bool[Array, "B Q"], Int[Array, "B Q"]]:
    """Whether the insertion (gap, token) touches a run of that token, and a column of that run."""
    link = canvas_lib.linked(canvas)

    def extends(column):
        inside = jnp.take_along_axis(link, column, axis=-1)
        return inside & (jnp.take_along_axis(canvas.tokens, column, axis=-1) == token)

    following = jnp.minimum(gap + 1, canvas.num_columns - 1)
    left, right = extends(gap), extends(following)
    return left | right, jnp.where(left, gap, following)


def put_run_sums(
    log_p: Float[Array, "B S Q"], token: Int[Array, "#B Q"], log_p_at: Callable[[Array, Array], Array], canvas: Canvas
) -> Float[Array, "B S Q"]:
    """log p of the cells (gap i, token[q]), with the run's sum (see `run_sums`) in those that touch a run of that
    token."""
    run_log_p = run_sums(log_p_at, canvas)
    next_column = jnp.pad(run_log_p[:, 1:], ((0, 0), (0, 1)))
    after = canvas_lib.linked(canvas)[..., None] & (canvas.tokens[..., None] == token[:, None])
    before = jnp.pad(after[:, 1:], ((0, 0), (0, 1), (0, 0)))
    return jnp.where(after, run_log_p[..., None], jnp.where(before, next_column[..., None], log_p))


# --- Length heads ----------------------------------------------------------------------------------------------------


def log_length_probs(logits: Float[Array, "*B K"], room: Int[Array, "*B"]) -> Float[Array, "*B K"]:
    """log p(l), l = 0..K−1, with the l that would not fit masked out."""
    feasible = jnp.arange(logits.shape[-1]) <= room[..., None]
    return jax.nn.log_softmax(jnp.where(feasible, logits, NEG_INF), axis=-1)


def log_gap_length_probs(scores: OfAllGaps, canvas: Canvas, max_length: int) -> Float[Array, "B S K"]:
    """log p_i(l), l = 0..max_length, of a head for each gap: as many as still fit the text."""
    room = canvas_lib.room(canvas, max_length)
    return log_length_probs(jnp.asarray(scores.length_logits), jnp.broadcast_to(room[:, None], canvas.tokens.shape))


def log_mean(log_p: Float[Array, "*B K"], log_value: Float[Array, "*#B K"]) -> Float[Array, "*B"]:
    """log E_{l~p}[exp(log_value(l))]; −inf (with zero gradient) where that mean is 0."""
    terms = log_p + log_value
    return _safe_logsumexp(terms, jnp.isfinite(terms).any(-1), otherwise=NEG_INF)


def log_mean_length(log_p: Float[Array, "*B K"]) -> Float[Array, "*B"]:
    """log of the mean length."""
    return log_mean(log_p, jnp.log(jnp.arange(float(log_p.shape[-1]))))


def sum_nll(
    scores: OfAllGaps,
    token: Int[Array, "B Q"],
    asked: Bool[Array, "B Q"],
    column: Int[Array, "B Q"] | None = None,
) -> Float[Array, " B"]:
    """Σ −log p(token at column) over those asked for, in nats; the columns in order unless given."""
    column = jnp.broadcast_to(jnp.arange(token.shape[1]), token.shape) if column is None else column
    column = jnp.where(asked, column, 0)
    log_p = scores.at(column, token) - jnp.take_along_axis(scores.lse(), column, axis=-1)
    return -jnp.where(asked, log_p, 0.0).sum(-1)


def length_cross_entropy(log_p: Float[Array, "*B K"], n_left: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """−log p(n_left). Its optimum is the posterior of the length-to-go."""
    return -jnp.take_along_axis(log_p, n_left[..., None], axis=-1)[..., 0]


def poisson_nll(
    log_rate: Float[Array, "*B"], log_count: Float[Array, "*B"], log_weight: Float[Array, "*B"]
) -> Float[Array, "*B"]:
    """weight·(rate − count·log rate), the paper's length term; counts need not be whole numbers.

    Its optimum is rate = E[count]; it fixes no more than that. The weight comes as its log because rate and count
    may both underflow where their ratio matters (DILM-S on the empty canvas).
    """
    count = jnp.exp(log_weight + log_count)
    return jnp.exp(log_weight + log_rate) - count * jnp.where(count > 0, log_rate, 0.0)


# --- Weights ---------------------------------------------------------------------------------------------------------


def log_weights(
    config: LossConfig,
    log_coefficient: Float[Array, " B"],
    log_expected: Float[Array, " B"],
    n_left: Int[Array, " B"],
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Log weights in front of the token and the length term.

    elbo: the bound's coefficient, σ/σ̄ or γ. self_normalized: 1/(expected sum of the token term's unit weights).
    normalized: 1/(n − m), which is not a function of (t, x_t) and so never stands in front of the length term.
    Cross-entropy may have any positive function of (t, x_t) in front: 1 except for the bound.
    """
    expected = jnp.where(jnp.isfinite(log_expected), jax.lax.stop_gradient(log_expected), 0.0)
    token = _LOG_WEIGHTS[config.weighting](jnp.minimum(log_coefficient, jnp.log(config.max_weight)), expected, n_left)
    if config.weighting == "elbo":
        return token, token
    return token, jnp.zeros_like(expected) if config.length == "cross_entropy" else -expected


_LOG_WEIGHTS = {
    "elbo": lambda log_coefficient, log_expected, n_left: log_coefficient,
    "self_normalized": lambda log_coefficient, log_expected, n_left: -log_expected,
    "normalized": lambda log_coefficient, log_expected, n_left: -jnp.log(jnp.maximum(n_left, 1.0)),
}


def _safe_logsumexp(x, any_finite, otherwise=0.0):
    """logsumexp over the last axis; `otherwise`, with zero gradient, in rows that hold only −inf."""
    return jnp.where(any_finite, jax.nn.logsumexp(jnp.where(any_finite[..., None], x, 0.0), axis=-1), otherwise)
