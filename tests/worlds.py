"""A world of every short text over two letters, prompts included, and the truth about both families' noise in it.

All truths are float64 and computed from the definitions: the Kolmogorov equation of the chain, sums over all masks.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
import scipy.linalg

from dilm_jax import worlds
from dilm_jax.canvas import Canvas, Example, InsertionTargets
from dilm_jax.losses import LossConfig
from dilm_jax.processes.registry import make_process
from dilm_jax.schedules import LogLinear
from dilm_jax.scores import Scores
from dilm_jax.worlds import Text, delete, equivalent, insert, missing, plain, prompted, to_text  # noqa: F401

VOCABULARY = worlds.vocabulary(2)
LETTERS = (5, 6)
L, V = 3, VOCABULARY.size
S, K = L + 2, L + 1
SCHEDULE = LogLinear(sigma_min=0.5, sigma_max=650.0)  # σ̄_1 = 91, whose exponential is not a float32
EPS = 1e-3
FAMILIES = ("joint", "independent")


def insertions(text: Text) -> list[tuple[int, int]]:
    """All (open gap, letter)."""
    return worlds.insertions(text, len(LETTERS))


def rate_and_total(t: float) -> tuple[float, float]:
    """σ_t and σ̄_t of SCHEDULE in float64."""
    log_ratio = math.log(SCHEDULE.sigma_max / SCHEDULE.sigma_min)
    rate = SCHEDULE.sigma_min * math.exp(t * log_ratio)
    return rate, (rate - SCHEDULE.sigma_min) / log_ratio


def series_S(n: int, total: float) -> float:
    """S(n, σ̄) = Σ_k n!/(n+k)!·σ̄^k, term by term."""
    term, summed, k = 1.0, 0.0, 0
    while term > 1e-18 * summed:
        summed, k = summed + term, k + 1
        term *= total / (n + k)
    return summed


def mask_prob(family: str, n: int, num_dropped: int, total: float) -> float:
    """q(one given mask | x0) with n free tokens, of which num_dropped go (docs/MATH.md 2)."""
    if family == "independent":
        return (1 - math.exp(-total)) ** num_dropped * math.exp(-total) ** (n - num_dropped)
    poisson = [math.exp(-total) * total**k / math.factorial(k) for k in range(n)]
    return (1 - sum(poisson) if num_dropped == n else poisson[num_dropped]) / math.comb(n, num_dropped)


DELETION_RATE = {"joint": lambda m: 1 / m, "independent": lambda m: 1.0}  # of one token of m, in units of σ


class World(worlds.World):
    """A world of LETTERS with a random law, and what each family's noise makes of it."""

    def __init__(self, texts: list[Text], seed: int):
        super().__init__(texts, np.random.default_rng(seed).dirichlet(np.full(len(texts), 2.0)))

    def pair_probs(self, family: str, total: float) -> np.ndarray:
        """p(x0)·q(mask | x0) [P]."""
        masks = [mask_prob(family, len(text.free), len(dropped), total) for text, dropped in self.pairs]
        return self.law[self.pair_text] * masks

    def generator(self, family: str) -> np.ndarray:
        """Of the forward chain over states, in units of σ."""
        generator = np.zeros((len(self.states),) * 2)
        for x, state in enumerate(self.states):
            for k in state.free:
                rate = DELETION_RATE[family](len(state.free))
                generator[x, self.state_index[delete(state, k)]] += rate
                generator[x, x] -= rate
        return generator

    def marginal(self, family: str, total: float) -> np.ndarray:
        """q_t over states, by integrating the Kolmogorov equation."""
        start = np.zeros(len(self.states))
        for text, prob in zip(self.texts, self.law, strict=True):
            start[self.state_index[text]] += prob
        return start @ scipy.linalg.expm(total * self.generator(family))

    def reverse_rates(self, family: str, t: float) -> dict[tuple[int, int], float]:
        """{(x, y): R_t(x → y)} of the time-reversed chain, σ_t·q_t(y)·Q(y → x)/q_t(x)."""
        rate, total = rate_and_total(t)
        q, generator = self.marginal(family, total), self.generator(family)
        edges = np.argwhere(generator - np.diag(np.diag(generator)) > 0)
        return {(x, y): rate * q[y] * generator[y, x] / q[x] for y, x in edges.tolist()}

    def length_posterior(self, family: str, total: float) -> np.ndarray:
        """p(n − m | x_t) [N, K]."""
        counts = np.zeros((len(self.states), K))
        lengths = [len(dropped) for _, dropped in self.pairs]
        np.add.at(counts, (self.pair_state, lengths), self.pair_probs(family, total))
        return counts / counts.sum(-1, keepdims=True)

    def gap_posterior(self, family: str, total: float) -> np.ndarray:
        """p(|s_i| | x_t) for the gap after each canvas column [N, S, K]."""
        counts = np.zeros((len(self.states), S, K))
        column = np.arange(S)
        for x, pair, prob in zip(self.pair_state, self.pairs, self.pair_probs(family, total), strict=True):
            counts[x, column, np.bincount([gap for gap, _ in missing(*pair)], minlength=S)] += prob
        return counts / counts.sum(-1, keepdims=True)

    def kernel(self, family: str, total: float) -> np.ndarray:
        """The kernel that the paper's token term fits: how often w is missing from gap i, weighted by 1/S̃ (joint;
        normalised over all gaps and tokens) or not at all (independent; normalised gap by gap) [N, S, V]."""
        counts = np.zeros((len(self.states), S, V))
        for x, pair, prob in zip(self.pair_state, self.pairs, self.pair_probs(family, total), strict=True):
            empties_it = family == "joint" and not self.states[x].free
            for gap, token in missing(*pair):
                counts[x, gap, token] += prob / (series_S(len(pair[1]), total) if empties_it else 1)
        summed = counts.sum((-2, -1) if family == "joint" else -1, keepdims=True)
        return counts / np.where(summed > 0, summed, 1)


def log_p_left(length_logits: np.ndarray, state: Text) -> np.ndarray:
    """log p(l) of a length head: only as many can be missing as still fit."""
    logits = np.where(np.arange(K) <= L - len(state.tokens), length_logits, -np.inf)
    return logits - np.logaddexp.reduce(logits)


@functools.cache
def small_world() -> World:
    return World(worlds.small_texts(len(LETTERS), L), seed=7)


# --- Arrays ----------------------------------------------------------------------------------------------------------


def to_example(texts: list[Text], max_length: int = L, fill: int = VOCABULARY.pad) -> Example:
    return worlds.to_example(texts, max_length, fill)


def corrupted(pairs: list[tuple[Text, tuple[int, ...]]], t: np.ndarray) -> tuple[Canvas, InsertionTargets]:
    return worlds.corrupted(pairs, t, L, VOCABULARY)


def process(family: str, *, max_length: int = L, schedule=SCHEDULE, **loss_options):
    """A process over VOCABULARY; `loss_options` are LossConfig's."""
    options = {
        "kernel": "exact",
        "alignment": "sampled",
        "length": "cross_entropy",
        "weighting": "elbo",
        "max_weight": math.inf,
        "targets": "gather",
        **loss_options,
    }
    return make_process(
        family,
        vocabulary=VOCABULARY,
        max_length=max_length,
        schedule=schedule,
        eps=EPS,
        loss_config=LossConfig(**options),
        time_sampling="uniform",
        masking="log_linear",
        time_conditioning=False,
    )


def table_scores(table: dict, index: np.ndarray) -> Scores:
    """The scores of a network that is a table of logits: one entry for each `index`."""
    predictable = np.asarray(VOCABULARY.ordinary)
    return Scores(
        logits=jnp.where(predictable, table["logits"][index], -jnp.inf),
        length_logits=jnp.asarray(table["length"][index]),
        stop_logits=None,
    )


def random_table(family: str, num_entries: int, seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    length_shape = (num_entries, K) if family == "joint" else (num_entries, S, K)
    return {
        "logits": scale * rng.normal(size=(num_entries, S, V)).astype(np.float32),
        "length": scale * rng.normal(size=length_shape).astype(np.float32),
    }
