"""Oracle networks: the true posterior of a small law of texts in place of a trained network (docs/MATH.md 2 and 4).

Everything comes from enumerating the 2^n masks of every text, and from the schedule's formula written again here:
nothing is borrowed from the code under test but the types. Texts are strings over 'a', 'b', ….
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
import scipy.stats
from flax import struct
from jaxtyping import Array, Float, Int

from dilm_jax.canvas import Example, Vocabulary, to_canvas
from dilm_jax.losses import LossConfig
from dilm_jax.processes.registry import PROCESSES
from dilm_jax.schedules import LogLinear
from dilm_jax.scores import Scores

NUM_SPECIAL = 5
SIGMA_MIN, SIGMA_MAX = 3.0, 30.0
EPS = 1e-4
FAMILIES = ("joint", "independent")
MAX_EVENTS = 64  # of the noise; σ̄_1 is 11.7


def vocabulary(num_letters):
    return Vocabulary(size=NUM_SPECIAL + num_letters, pad=0, cls=1, bos=2, eos=3, mask=4)


def make_process(family, num_letters, max_length, eps=EPS):
    config = LossConfig(
        kernel="exact",
        alignment="sampled",
        length="cross_entropy",
        weighting="self_normalized",
        max_weight=math.inf,
        targets="gather",
    )
    return PROCESSES[family](
        vocabulary=vocabulary(num_letters),
        max_length=max_length,
        schedule=LogLinear(sigma_min=SIGMA_MIN, sigma_max=SIGMA_MAX),
        eps=eps,
        loss_config=config,
        time_sampling="uniform",
    )


def total(t):
    """σ̄_t."""
    log_ratio = math.log(SIGMA_MAX / SIGMA_MIN)
    expm1 = jnp.expm1 if isinstance(t, jax.Array) else np.expm1
    return SIGMA_MIN / log_ratio * expm1(t * log_ratio)


def rate(t):
    """σ_t."""
    return SIGMA_MIN * (SIGMA_MAX / SIGMA_MIN) ** t


def encode(text):
    return [NUM_SPECIAL + ord(letter) - ord("a") for letter in text]


def example_of(texts, max_length):
    """Examples that hold the texts, every token free and every gap open."""
    tokens = [encode(text) + [0] * (max_length - len(text)) for text in texts]
    B, L = len(texts), max_length
    return Example(
        tokens=jnp.asarray(tokens, jnp.int32).reshape(B, L),
        length=jnp.asarray([len(text) for text in texts], jnp.int32),
        frozen=jnp.zeros((B, L), bool),
        open_gap=jnp.ones((B, L + 1), bool),
        num_bytes=jnp.zeros(B, jnp.int32),
    )


def canvas_of(texts, num_letters, max_length):
    return to_canvas(example_of(texts, max_length), vocabulary(num_letters))


def row_keys(seed, batch_size):
    return jax.random.split(jax.random.key(seed), batch_size)


class World:
    """A law of texts {text: probability}, its subsequences (`states`), and what noise makes of it.

    State `outside` stands for every canvas that is no subsequence. Arrays have room for `num_states` others.
    """

    def __init__(self, law, *, num_letters, max_length, num_states):
        assert abs(sum(law.values()) - 1) < 1e-12
        self.law, self.outside = law, num_states
        self.states = sorted({kept for text in law for kept, _ in _masks(text)}, key=lambda text: (len(text), text))
        X, K, S, V = num_states + 1, max_length + 1, max_length + 2, NUM_SPECIAL + num_letters
        self.tokens = np.full((X, max_length), -1)
        self.num_kept = np.zeros(X, int)
        self.num_masks = np.zeros((X, K))  # Σ p(x0) over texts of length n and their masks that leave x
        self.missing = np.zeros((X, K, S, V))  # … of the missing tokens w in gap i
        self.gap_left = np.zeros((X, K, S, K))  # … where gap i misses l tokens
        for x, text in enumerate(self.states):
            self.tokens[x], self.num_kept[x] = encode(text) + [0] * (max_length - len(text)), len(text)
        for text, p in law.items():
            for kept, dropped in _masks(text):
                x, n = self.find(kept), len(text)
                self.num_masks[x, n] += p
                left = np.zeros(S, int)
                for gap, letter in dropped:
                    self.missing[x, n, gap, encode(letter)] += p
                    left[gap] += 1
                self.gap_left[x, n, np.arange(S), left] += p

    def find(self, text):
        return self.states.index(text)

    def forward(self, family, t):
        """q_t(x) [X], float64; t = 0 gives the law itself."""
        m, n = self.num_kept[:, None], np.arange(self.num_masks.shape[1])
        return (self.num_masks * _MASK_PROB[family](np.maximum(n, m), m, total(t))).sum(-1)


@struct.dataclass
class Tables:
    """The arrays of each row's world. A pytree, so that one compiled function serves many worlds."""

    world: Int[Array, " B"]
    tokens: Int[Array, "W X L"]
    num_kept: Int[Array, "W X"]
    num_masks: Float[Array, "W X K"]
    missing: Float[Array, "W X K S V"]
    gap_left: Float[Array, "W X K S K"]

    def find(self, canvas):
        """The state of each row [B]."""
        same = (canvas.tokens[:, None, 2:] == self.tokens[self.world]).all(-1)
        return jnp.where(same.any(-1), same.argmax(-1), same.shape[-1] - 1)


def tables(worlds, num_rows):
    """The tables of a batch: so many rows of one world, then of the next."""
    names = ["tokens", "num_kept", "num_masks", "missing", "gap_left"]
    stacked = {name: np.stack([getattr(world, name) for world in worlds]) for name in names}
    world = np.repeat(np.arange(len(worlds)), num_rows)
    return jax.tree.map(_to_device, Tables(world=world, **stacked))


def oracle(family, tables):
    """(canvas, clock) → Scores at the optimum of the family's loss; nothing is missing from what is outside.

    For grids: unfinished rows share one clock, the smallest.
    """

    def network(canvas, clock):
        t, m, n = clock.min(), tables.num_kept[..., None], jnp.arange(tables.num_masks.shape[-1])
        of_length, of_token = (jnp.where(n >= m, w, 0.0) for w in _MASK_WEIGHTS[family](n, m, total(t)))
        of_length, of_token = (w / w.sum(-1, keepdims=True) for w in (of_length, of_token))
        token = (of_token[..., None, None] * tables.missing).sum(-3)  # [W, X, S, V]
        letter = jnp.arange(token.shape[-1]) >= NUM_SPECIAL
        if family == "joint":
            by_n = jnp.pad(of_length * tables.num_masks, ((0, 0), (0, 0), (0, len(n))))
            left = jnp.take_along_axis(by_n, n + m, axis=-1)  # [W, X, K]
            token = jnp.where(token.sum((-2, -1), keepdims=True) > 0, token, letter)
        else:
            left = (of_length[..., None, None] * tables.gap_left).sum(-3)  # [W, X, S, K]
            token = jnp.where(token.sum(-1, keepdims=True) > 0, token, letter)
        left = jnp.where(left.sum(-1, keepdims=True) > 0, left, n == 0)
        x = tables.find(canvas)
        return Scores(
            logits=jnp.log(token)[tables.world, x], length_logits=jnp.log(left)[tables.world, x], stop_logits=None
        )

    return network


def oracle_of_rows(family, tables):
    """The same with a clock of its own for each row."""

    def scores(t, m, num_masks, missing, gap_left):
        n = jnp.arange(len(num_masks))
        of_length, of_token = (jnp.where(n >= m, w, 0.0) for w in _MASK_WEIGHTS[family](n, m[None], total(t)))
        of_length, of_token = of_length / of_length.sum(), of_token / of_token.sum()
        token = jnp.einsum("k,ksv->sv", of_token, missing)
        axis = (-2, -1) if family == "joint" else -1
        token = jnp.where(token.sum(axis, keepdims=True) > 0, token, jnp.arange(token.shape[-1]) >= NUM_SPECIAL)
        if family == "joint":
            left = jnp.pad(of_length * num_masks, (0, len(n)))[n + m]
        else:
            left = jnp.einsum("k,ksl->sl", of_length, gap_left)
        left = jnp.where(left.sum(-1, keepdims=True) > 0, left, n == 0)
        return jnp.log(token), jnp.log(left)

    def network(canvas, clock):
        at = tables.world, tables.find(canvas)
        arrays = (tables.num_kept, tables.num_masks, tables.missing, tables.gap_left)
        logits, lengths = jax.vmap(scores)(clock, *(array[at] for array in arrays))
        return Scores(logits=logits, length_logits=lengths, stop_logits=None)

    return network


def tv_and_bound(draws, probs, *, allowance):
    """Total variation of the draws' histogram from `probs`, and a bound that sampling error passes at p > 1e-4.

    The bound is the mean for N draws, at most ½·Σ sqrt(2p(1−p)/πN), plus McDiarmid's sqrt(ln 1e4 / 2N), plus the
    allowance for what the sampler is not meant to get right.
    """
    N = len(draws)
    histogram = np.bincount(draws, minlength=len(probs)) / N
    mean = 0.5 * np.sqrt(2 * probs * (1 - probs) / (np.pi * N)).sum()
    return 0.5 * np.abs(histogram - probs).sum(), mean + math.sqrt(math.log(1e4) / (2 * N)) + allowance


def _masks(text):
    """Each way to delete tokens: (what is left, [(gap column, letter) of each deleted token])."""
    for keep in itertools.product([False, True], repeat=len(text)):
        kept_before = np.cumsum(keep, dtype=int) - np.array(keep, int)
        kept = "".join(letter for letter, k in zip(text, keep, strict=True) if k)
        yield kept, [(1 + kept_before[k], text[k]) for k in range(len(text)) if not keep[k]]


def _to_device(x):
    return jnp.asarray(x, jnp.int32 if x.dtype.kind == "i" else jnp.float32)


# P(one given mask that keeps m of n tokens), n ≥ m, float64.
_MASK_PROB = {
    "joint": lambda n, m, total: (
        np.where(m > 0, scipy.stats.poisson.pmf(n - m, total), scipy.stats.poisson.sf(n - 1, total))
        / scipy.special.comb(n, m)
    ),
    "independent": lambda n, m, total: np.exp(-total * m) * (-np.expm1(-total)) ** (n - m),
}


def _weights_joint(n, m, total):
    """What a text of length n counts for: P(mask) in the length posterior; P(mask)/S̃ in the kernel, which is the
    Poisson probability of n − m, on the empty canvas too. float32 on device."""
    events = np.arange(MAX_EVENTS)
    poisson = jnp.exp(events * jnp.log(total) - scipy.special.gammaln(events + 1) - total)
    tail = jnp.cumsum(poisson[::-1])[::-1]
    size = n.shape[-1]
    choose = jnp.asarray(scipy.special.comb(np.arange(size), np.arange(size)[:, None]), jnp.float32)[m[..., 0]]
    exactly = poisson[jnp.maximum(n - m, 0)] / choose
    return jnp.where(m > 0, exactly, tail[n]), exactly


def _weights_independent(n, m, total):
    weight = jnp.exp(-total * m) * (-jnp.expm1(-total)) ** jnp.maximum(n - m, 0)
    return weight, weight


_MASK_WEIGHTS = {"joint": _weights_joint, "independent": _weights_independent}
