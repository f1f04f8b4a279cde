"""The negative log-likelihood: what a family that has one offers, its figures, and the bound of insertion processes
(docs/MATH.md 5).

The sampler starts empty, so the model's law is that of its reverse chain from the empty canvas, and the bound needs no
prior term: noise is drawn given that nothing is left at t = 1, and

  NELBO(x0) = ∫₀¹ dt E[ Σ_y R̂(x_t, y) − Σ_y r_y + Σ_y r_y log(r_y / R̂(x_t, y)) ]   nats,

y over the texts that one insertion makes, R̂ the model's rate to y, r_y the true one given x0. Both are sums over all
insertions (gap, token) that make y: a training loss, which scores one of them, is not a likelihood.
"""

from collections.abc import Callable
from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from dilm_jax import alignment, losses
from dilm_jax import canvas as canvas_lib
from dilm_jax.canvas import Canvas, Example, InsertionTargets, Vocabulary
from dilm_jax.schedules import LARGEST_U, TimeSampler
from dilm_jax.scores import OfAllGaps, Scores

ValueOf = Callable[[OfAllGaps], Float[Array, " B"]]
# (canvas, time, what is asked of the scores) → its values; canvases may be scored in several parts.
ScoredValues = Callable[[Canvas, Float[Array, " B"], ValueOf], Float[Array, " B"]]
BELOW_EPS_SHARE = 0.05  # of the draws of t, for [0, eps]


def at_once(score: Callable[[Canvas, Float[Array, " B"]], Scores]) -> ScoredValues:
    """All canvases in one part."""
    return lambda canvas, time, value_of: value_of(score(canvas, time))


@runtime_checkable
class Likelihood(Protocol):
    """A process that can score a text."""

    EXACT: ClassVar[bool]  # the draws are −log p itself, not an upper bound in expectation

    def nll_draws(
        self,
        network: ScoredValues,
        key: Key[Array, " B"],
        place: Float[Array, " B"],
        x0: Example,
        num_times: int,
    ) -> Float[Array, "T B"]:
        """Nats of each text's free tokens, given the frozen ones and its family's convention of how texts end: their
        mean is −log p, or at least that. T = num_times draws of noise, or one where there is no noise.

        Row b depends on key b, place b in [0, 1) and its text alone; texts whose places are spread
        (`schedules.evenly_spread`) together cover all times. `network` may be asked several times.
        """
        ...


@runtime_checkable
class Bounded(Protocol):
    """An insertion process whose likelihood this file bounds: what it must offer beside base.Process."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def eps(self) -> float:
        """For t < eps the model is the one at eps."""
        ...

    @property
    def importance_times(self) -> TimeSampler:
        """t on [eps, 1] where the bound has its mass."""
        ...

    def corrupt_to_empty(
        self, key: Key[Array, " B"], x0: Example, t: Float[Array, " B"]
    ) -> tuple[Canvas, InsertionTargets]:
        """An exact draw of X_t given X_0 and that X_1 has no free token."""
        ...

    def log_rates(self, scores: OfAllGaps, canvas: Canvas, t: Float[Array, " B"]) -> Float[Array, "B S"]:
        """log R̂(i, w) − score(i, w): the model's rate of inserting w into gap i."""
        ...

    def log_missing_rate(self, canvas: Canvas, n: Int[Array, " B"], t: Float[Array, " B"]) -> Float[Array, " B"]:
        """log of the true rate at which each missing token is inserted, given x0 with n free tokens."""
        ...

    @property
    def max_length(self) -> int: ...

    def start_nonempty(self, n: Int[Array, " B"]) -> Float[Array, " B"]:
        """P(N_1 > 0 | n free tokens): how often noise ends at other starts than the sampler's."""
        ...

    def kept_probs(self, n: Int[Array, " B"], t: Float[Array, ""]) -> Float[Array, "B K"]:
        """P(N_t = m | n free tokens), m = 0..max_length."""
        ...

    def one_missing(self, n: Int[Array, " B"], t: Float[Array, " B"]) -> Float[Array, " B"]:
        """P(N_t = n − 1 | n free tokens, and N_1 = 0)."""
        ...


def bound_sample(
    process: Bounded, network: ScoredValues, key: Key[Array, " B"], x0: Example, u: Float[Array, " B"]
) -> Float[Array, " B"]:
    """An unbiased estimate of NELBO(x0) in nats a row, from one draw of (t, X_t); u in [0, 1) says which t.

    Averaged over u uniform and over keys it is the integral, [0, eps] included.
    """
    t, weight = bound_times(process, u)
    canvas, targets, of_mask = noised(process, key, x0, t)
    value_of = integrand(process, canvas, targets)
    return weight * of_mask * network(canvas, jnp.maximum(t, process.eps), value_of)


def bound_samples(
    process: Bounded,
    network: ScoredValues,
    key: Key[Array, " B"],
    place: Float[Array, " B"],
    x0: Example,
    num_times: int,
) -> Float[Array, "T B"]:
    """`bound_sample` at T = num_times equally spaced u, the first at place/T. Row b depends on key b, place b and its
    text alone; with places that are spread over [0, 1) (`schedules.evenly_spread`) a corpus covers all of u even where
    T = 1."""

    return over_times(lambda key, u: bound_sample(process, network, key, x0, u), key, place, num_times)


def over_times(
    draw: Callable[[Key[Array, " B"], Float[Array, " B"]], Float[Array, " B"]],
    key: Key[Array, " B"],
    place: Float[Array, " B"],
    num_times: int,
) -> Float[Array, "T B"]:
    """`draw(key, u)` at T = num_times equally spaced u in [0, 1), the first at place/T, each with keys of its own."""

    def at(cell):
        cell_key = jax.vmap(lambda k: jax.random.fold_in(k, cell))(key)
        return draw(cell_key, jnp.minimum((cell + place) / num_times, LARGEST_U))

    return jax.lax.map(at, jnp.arange(num_times))


def summarize(
    draws: Float[np.ndarray, "T B"], n: Int[np.ndarray, " B"], num_bytes: Int[np.ndarray, " B"], exact: bool = False
) -> dict[str, float]:
    """Corpus figures from `nll_draws` of B texts with n free tokens each, in float64; `exact` ones have no error.

    nelbo_nats_per_token is their sum over all texts by the sum of n (texts without a token count with their nats), and
    nelbo_perplexity its exponential; nelbo_bits_per_byte is over the texts whose bytes are known (not −1).
    nelbo_stderr is the standard error of the nats per token that times and noise cause: from the spread of a text's
    own draws, which, as they come from different times, errs upwards; of fewer than three draws a text, from the spread
    between texts. nelbo_low and nelbo_high are the ends of its 95% confidence interval, corrected for skewness: rare
    draws are large.
    """
    draws, tokens = draws.astype(np.float64), max(int(n.sum()), 1)
    T, nats = len(draws), draws.mean(0)
    per_token = nats.sum() / tokens
    if exact:
        variance = third_moment = 0.0
    elif T > 2:
        of_draws = draws - nats
        variance = (of_draws**2).sum() / (T * (T - 1))
        third_moment = (of_draws**3).sum() / (T * (T - 1) * (T - 2))
    else:
        of_texts = nats - per_token * n
        variance, third_moment = (of_texts**2).sum(), (of_texts**3).sum()
    low, high = skewed_interval(variance, third_moment)
    results = {
        "nelbo_nats_per_token": per_token,
        "nelbo_stderr": np.sqrt(variance) / tokens,
        "nelbo_low": per_token + low / tokens,
        "nelbo_high": per_token + high / tokens,
        "nelbo_perplexity": np.exp(per_token),
    }
    known = num_bytes >= 0
    if num_bytes[known].any():
        results["nelbo_bits_per_byte"] = nats[known].sum() / np.log(2) / num_bytes[known].sum()
    return {name: float(value) for name, value in results.items()}


def skewed_interval(variance: float, third_moment: float, z: float = 1.96) -> tuple[float, float]:
    """Ends of a confidence interval about 0 of an estimate with these central moments, z standard errors wide but for
    its skewness (Hall, "On the removal of skewness by transformation", 1992). Where draws are skewed, samples without
    the rare large ones have a small spread and a small mean at once: an interval symmetric about them misses above."""
    if variance == 0:
        return 0.0, 0.0
    skewness = third_moment / variance**1.5
    if abs(skewness) < 1e-6:
        return -z * np.sqrt(variance), z * np.sqrt(variance)

    def quantile(z):
        return 3 / skewness * (np.cbrt(1 + skewness * (z - skewness / 6)) - 1)

    return -np.sqrt(variance) * quantile(z), -np.sqrt(variance) * quantile(-z)


def noised(
    process: Bounded, key: Key[Array, " B"], x0: Example, t: Float[Array, " B"]
) -> tuple[Canvas, InsertionTargets, Float[Array, " B"]]:
    """X_t given that nothing is left at t = 1, and the weight of the draw, which is 1 for t ≥ eps.

    Below eps a token is rarely missing, but where one is the integrand grows as 1/t: half of the draws there have one
    missing, which one uniform.
    """
    k_noise, k_which, k_one = canvas_lib.split_keys(key, 3)
    canvas, targets = process.corrupt_to_empty(k_noise, x0, t)
    one = canvas_lib.drop_at_random(k_one, x0, jnp.ones_like(x0.length), t, process.vocabulary)
    n = x0.free.sum(-1)
    below = (t < process.eps) & (n > 0)
    forced = below & (jax.vmap(jax.random.uniform)(k_which) < 1 / 2)
    canvas, targets = jax.tree.map(
        lambda x, y: jnp.where(forced.reshape(-1, *[1] * (x.ndim - 1)), y, x), (canvas, targets), one
    )
    p = process.one_missing(n, t)
    weight = jnp.where(targets.num_dropped == 1, 2 * p / (1 + p), 2.0)
    return canvas, targets, jnp.where(below, weight, 1.0)


def bound_times(process: Bounded, u: Float[Array, " B"]) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """t on [0, 1] and the weight that makes E[weight·f(t)] = ∫₀¹ f: importance-drawn above eps, uniform below it."""
    share, eps = BELOW_EPS_SHARE, process.eps
    above = jnp.clip((u - share) / (1 - share), 0.0, LARGEST_U)
    t_above, weight = process.importance_times(above)
    below = u < share
    t = jnp.where(below, eps * jnp.maximum(u / share, 1e-6), t_above)  # the coefficient is infinite at t = 0
    return t, jnp.where(below, eps / share, weight * (1 - eps) / (1 - share))


def integrand(process: Bounded, canvas: Canvas, targets: InsertionTargets) -> ValueOf:
    """Scores → Σ_y R̂ − Σ_y r_y + Σ_y r_y log(r_y/R̂) at one (t, x_t); +inf where the model cannot make a text that x0
    needs. What does not depend on the scores is computed here."""
    x0, t = targets.x0, targets.t
    log_c = process.log_missing_rate(canvas, x0.free.sum(-1), t)
    missing = alignment.gap_posterior(x0, canvas)
    log_true = log_c[:, None, None] + log_missing_cells(missing, canvas, x0)

    def value_of(scores):
        offset = process.log_rates(scores, canvas, jnp.maximum(t, process.eps))
        kernel = losses.Cells(scores, offset)
        log_model = losses.put_run_sums(kernel.outer(x0.tokens), x0.tokens, kernel.at, canvas)
        total = jnp.where(canvas.open_gap, jnp.exp(offset + scores.lse()), 0.0).sum(-1)
        log_ratio = jnp.where(missing > 0, log_true - log_model, 0.0)
        return total + jnp.exp(log_c) * ((missing * log_ratio).sum((-2, -1)) - targets.num_dropped)

    return value_of


def log_missing_cells(missing: Float[Array, "B S L"], canvas: Canvas, x0: Example) -> Float[Array, "B S L"]:
    """log of how many tokens are missing, in expectation, whose insertion makes the same text as x0's token k in gap
    i: those of the same letter, in that gap or in any gap of the run that it touches."""
    same = (x0.tokens[:, :, None] == x0.tokens[:, None, :]) & x0.free[:, :, None]
    log_missing = jnp.log(missing @ same.astype(jnp.float32))

    def at(gap, token):
        in_gap = jnp.take_along_axis(missing, gap[..., None], axis=1)
        return jnp.log((in_gap * (x0.tokens[:, None] == token[..., None])).sum(-1))

    return losses.put_run_sums(log_missing, x0.tokens, at, canvas)
