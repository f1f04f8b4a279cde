"""Checks every family against brute force: `python -m dilm_jax.selfcheck [--family=… --only=… --json=FILE]`.

Two small worlds whose masks can all be enumerated: texts of up to four letters, of two with prompts in the first, of
three in the second. A row an identity, exit status 1 if a row fails. Truth follows from two things that a process
states itself: `kept_probs`, that noise keeps m of n tokens, which ones uniform, and `log_missing_rate`, the rate at
which a missing token comes back. That both belong to one Markov chain is checked first; that `corrupt` draws from it,
that the loss has its optimum there, that the bound is the entropy of the data and that samplers return the data, then
follow by Bayes' rule alone.

Of a process that does not state these, whose noise is of another kind, less is known: a network that is a table is
fitted to its loss, and must then have the entropy of the data as its −log p, and return the data from every sampler.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse.linalg
import scipy.special
import scipy.stats
from absl import flags
from flax import struct
from jaxtyping import Array, Float

from dilm_jax import alignment, cli, config, likelihood, sampling, schedules, special, worlds
from dilm_jax import canvas as canvas_lib
from dilm_jax.canvas import Canvas
from dilm_jax.losses import LossConfig
from dilm_jax.processes.registry import PROCESSES, make_process
from dilm_jax.sampling import Filters, SamplingOptions
from dilm_jax.schedules import LogLinear
from dilm_jax.scores import Scores
from dilm_jax.worlds import NUM_SPECIAL, Text, World, insert, insertions, missing, plain

_ONLY = flags.DEFINE_string("only", "", "Only identities that contain this.")
_FAMILY = flags.DEFINE_string("family", None, "The one to check; all unless given.")
_JSON = flags.DEFINE_string("json", None, "Write the rows here too.")

NUM_LETTERS, L = 3, 4
S, K, V = L + canvas_lib.NUM_SPECIAL_COLUMNS, L + 1, NUM_SPECIAL + NUM_LETTERS
VOCABULARY = worlds.vocabulary(NUM_LETTERS)
SCHEDULE = LogLinear(sigma_min=0.5, sigma_max=5.0)  # σ̄_1 = 2.0: noise often does not end empty
EPS = 1e-2  # so large that the bound's part below it counts
ELBO = LossConfig(
    kernel="exact",
    alignment="sampled",
    length="cross_entropy",
    weighting="elbo",
    max_weight=math.inf,
    targets="gather",
)
NUM_GRID = 300  # steps of a Kolmogorov equation
NUM_NODES = 100  # times of the bound; a whole number of them is for [0, eps]
NUM_DRAWS, NUM_STEPS, GRID_ALLOWANCE = 1500, 24, 0.03  # rows of a sampler, its grid, the total variation that may cost
NUM_FLAT = 40_000  # draws from equal scores
NUM_KNOTS, FIT_STEPS, FIT_BATCH, FIT_RATE = 3, 800, 1024, 0.2  # a table's times; how it is fitted
FITTED_STEPS, FITTED_ALLOWANCE = 96, 0.03  # of its grid; total variation that this and what is left of fitting may cost
P_VALUE = 1e-4  # at fixed keys
QUICK_COMPILES = (  # each program runs once or twice; a flag that XLA does not know would end the process
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
    * importlib.metadata.version("jaxlib").startswith("0.10.")
)
IMPOSSIBLE = -40.0  # log of a probability of 0, whose gradient is finite

Check = tuple[str, Callable[[], Any], float | None]  # identity, function that gives its error, limit


@dataclasses.dataclass(frozen=True)
class Row:
    """One identity. It holds where |error| ≤ limit; where `limit` is None the error is a p-value, at least P_VALUE."""

    family: str
    identity: str
    error: float
    limit: float | None

    @property
    def holds(self) -> bool:
        return self.error >= P_VALUE if self.limit is None else abs(self.error) <= self.limit  # a NaN does not hold


def main() -> None:
    if _FAMILY.value not in (None, *PROCESSES):
        raise ValueError(f"--family={_FAMILY.value} is not in the registry: it has {', '.join(PROCESSES)}")
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + QUICK_COMPILES  # read when the first program compiles
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share the devices
    families = [_FAMILY.value] if _FAMILY.value else list(PROCESSES)
    here, there = families[::2], [SHARED, *families[1::2]]  # a family's rows in one process: they share programs
    wanted = {family: [name for name in checks_of(family) if _ONLY.value in name] for family in (*here, *there)}
    if not any(wanted.values()):
        raise ValueError(f"--only={_ONLY.value}: no identity contains it")
    rows = []

    def add(row):
        rows.append(row)
        print(format_row(row), flush=True)

    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        pending = [other.submit(find_row, family, name) for family in there for name in wanted[family]]
        for future in pending:
            future.add_done_callback(lambda done: done.exception() or add(done.result()))
        for family in here:
            for name in wanted[family]:
                add(find_row(family, name))
        concurrent.futures.wait(pending)
        for future in pending:
            future.result()
    if _JSON.value:
        table = [dataclasses.asdict(row) | {"holds": bool(row.holds)} for row in rows]
        pathlib.Path(_JSON.value).write_text(json.dumps(table, indent=2) + "\n")
    failed = sum(not row.holds for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} identities hold")
    sys.exit(1 if failed else 0)


def format_row(row: Row) -> str:
    limit = f"p ≥ {P_VALUE:g}" if row.limit is None else f"≤ {row.limit:g}"
    return f"{row.family:12} {row.identity:78} {row.error:10.2g}  {limit:10} {'ok' if row.holds else 'FAILS'}"


SHARED = "all"  # in place of a family


@functools.cache
def checks_of(family: str) -> dict[str, Check]:
    """A family's checks by identity, or those that all share."""
    checks = shared_checks() if family == SHARED else Checked(family).checks()
    return {check[0]: check for check in checks}


def find_row(family: str, identity: str) -> Row:
    _, find, limit = checks_of(family)[identity]
    return Row(family, identity, float(find()), limit)


def check_all(families: list[str], only: str = "") -> Iterator[Row]:
    """The rows of each family, or SHARED, whose identity contains `only`, in this process."""
    for family in families:
        yield from (find_row(family, identity) for identity in checks_of(family) if only in identity)


# --- What all families share -----------------------------------------------------------------------------------------


def shared_checks() -> Iterator[Check]:
    yield "every schedule: the rate is the derivative of the total", _schedule_error, 1e-3
    yield "log S(n, σ̄) is that of its series", _log_S_error, 1e-5
    yield "inserting into a canvas = into a list, also when it is full", _insertion_error, 0
    yield "deleted tokens' gaps: the dynamic program = all masks", _alignment_error, 1e-5
    yield "equal bfloat16 scores: gaps and tokens are drawn uniformly", _uniform_p_value, None
    yield "draws by the same noise that scores apart by 1e-6 change", _rounded_draws, 1e-3


def _schedule_error():
    t = np.linspace(0.02, 0.98, 25)
    errors = []
    for name, make in schedules.SCHEDULES.items():
        schedule = make(sigma_min=2.0 if name == "constant" else 0.5, sigma_max=2.0)
        up, down = (np.asarray(schedule.total(jnp.float32(t + h)), np.float64) for h in (0.01, -0.01))
        errors.append(np.abs((up - down) / 0.02 / np.asarray(schedule.rate(jnp.float32(t))) - 1).max())
    return max(errors)


def _log_S_error():
    n_max, totals = 64, (1e-3, 0.5, 10.0, 60.0, 300.0)
    logs = np.asarray(special.log_S(n_max, jnp.float32(totals), max(totals)), np.float64)
    terms = np.arange(4000)
    log_series = [
        [np.logaddexp.reduce(scipy.special.gammaln(n + 1) - scipy.special.gammaln(n + terms + 1) + terms * math.log(x))
         for n in range(n_max + 1)] for x in totals
    ]  # fmt: skip
    return (np.abs(logs - log_series) / np.maximum(np.abs(log_series), 1)).max()


def _insertion_error():
    """How many of many random canvases differ from insertions into lists: tokens that were there stay in order, new
    ones come where they were meant, and as many as there is room for."""
    rng, num = np.random.default_rng(0), 2000
    texts = [plain(rng.integers(NUM_SPECIAL, V, rng.integers(0, L + 1)).tolist()) for _ in range(num)]
    fire = rng.random((num, S)) < rng.choice([0.3, 1.0], (num, 1))
    new = np.broadcast_to(V + np.arange(S), fire.shape)  # says which gap it was meant for
    canvas = _canvas(texts, L)
    result, _, truncated = jax.device_get(
        jax.jit(canvas_lib.insert_tokens)(_keys(0, num), canvas, jnp.asarray(fire), jnp.asarray(new))
    )
    wrong = 0
    for row, text in enumerate(texts):
        wanted = [i for i in range(len(text.tokens) + 1) if fire[row, i + 1]]
        after = worlds.to_text(result, row).tokens
        made = [w - V - 1 for w in after if w >= V]
        expected = list(text.tokens)
        for i in reversed(made):
            expected.insert(i, V + i + 1)
        room = L - len(text.tokens)
        wrong += (
            list(after) != expected
            or not set(made) <= set(wanted)
            or len(made) != min(room, len(wanted))
            or bool(truncated[row]) != (len(wanted) > room)
        )
    return wrong


def _alignment_error():
    world = small_world()
    canvas, targets = worlds.corrupted(world.pairs, np.zeros(len(world.pairs)), L, VOCABULARY)
    posterior = np.asarray(alignment.gap_posterior(targets.x0, canvas), np.float64)
    error = 0.0
    for p, (text, dropped) in enumerate(world.pairs):
        masks = world.masks_like(p)
        counts = np.zeros((S, L))
        for mask in masks:
            for k, (gap, _) in zip(mask, missing(text, mask), strict=True):
                counts[gap, k] += 1 / len(masks)
        error = max(error, np.abs(posterior[p] - counts).max(), abs(posterior[p].sum() - len(dropped)))
    return error


def _uniform_p_value():
    """Of the mean gap and the mean token of draws from scores that are all 16 in bfloat16: where noise is added in
    bfloat16, many tie, and the first of those that tie is drawn."""
    drawn = _drawn(jnp.full((1, 65, 64), 16, jnp.bfloat16), NUM_FLAT)
    z = (np.mean(drawn, axis=-1) - 31.5) / math.sqrt((64**2 - 1) / 12 / NUM_FLAT)
    return scipy.stats.chi2.sf((z**2).sum(), len(z))


def _rounded_draws():
    """Where noise is rounded, the least difference in scores decides between those that tie."""
    rising = 1e-6 / 65 / 64 * jnp.arange(65.0 * 64).reshape(1, 65, 64)
    return (_drawn(rising, 4000) != _drawn(rising[:, ::-1, ::-1], 4000)).any(0).mean()


def _drawn(logits, num: int) -> np.ndarray:
    """[2, num] gaps and tokens from 64 open gaps and 64 tokens."""
    canvas = _canvas([plain([NUM_SPECIAL] * 63)], 63)

    @jax.jit
    def draw(keys, logits):
        def one(key):
            scores = Scores(logits=logits, length_logits=None, stop_logits=None)
            insert, tokens = sampling.draw_one_gap(key[None], scores, canvas, jnp.ones(1, int), Filters())
            return insert[0].argmax() - 1, tokens[0, 0]  # gap 0, after CLS, is closed

        return jax.vmap(one)(keys)

    return np.stack(jax.device_get(draw(_keys(0, num), logits)))


# --- A family --------------------------------------------------------------------------------------------------------


@functools.cache
def small_world() -> World:
    """Every short text of two letters, prompts and infills included."""
    texts = worlds.small_texts(2, L)
    return World(texts, np.random.default_rng(7).dirichlet(np.full(len(texts), 2.0)))


@functools.cache
def plain_world() -> World:
    """Texts without prompts, few of them likely, so that what is missing from one gap says much about another. Every
    text of up to L letters is a state: samplers and imperfect networks may come through all of them."""
    a, b, c = range(NUM_SPECIAL, V)
    law = {(): 0.1, (b,): 0.15, (a, b): 0.1, (a, a): 0.05, (a, b, a): 0.25, (b, b, b): 0.1, (c, a, c, b): 0.15}
    words = [word for n in range(L + 1) for word in itertools.product((a, b, c), repeat=n)]
    rest = [word for word in words if len(word) < L and word not in law]
    law |= dict.fromkeys(rest, 0.1 / len(rest))
    return World([plain(word) for word in law], np.array(list(law.values())), also=[plain(word) for word in words])


class Checked:
    """A family's process, and the rows that apply to what it offers."""

    def __init__(self, family: str):
        self.family = family
        self.make = functools.partial(
            make_process,
            family,
            vocabulary=VOCABULARY,
            max_length=L,
            schedule=SCHEDULE,
            eps=EPS,
            time_sampling="uniform",
            masking="log_linear",
            time_conditioning=False,
        )
        self.process: Any = self.make(loss_config=ELBO)
        self.bounded = isinstance(self.process, likelihood.Bounded)
        self.programs = {}  # by sampler
        self.kept_probs = jax.jit(lambda t: self.process.kept_probs(jnp.arange(K), t))
        self.posterior = jax.jit(self.posterior_scores, static_argnums=0)
        self.integrand = jax.jit(
            lambda scores, canvas, targets: likelihood.integrand(self.process, canvas, targets)(scores)
        )
        self.log_insertion_rates = jax.jit(
            lambda scores, canvas, t: self.process.log_rates(scores, canvas, t)[..., None] + scores.logits
        )

    def checks(self) -> Iterator[Check]:
        yield "losses and their gradients are finite, from nothing dropped to everything", self.not_finite, 0
        if not self.bounded:
            yield from self.fitted_checks()
            return
        yield "noise: P(m of n left) solves the Kolmogorov equation of its rates", self.kolmogorov_error, 1e-3
        yield "noise: the rate of a deletion does not depend on the clean text (Markov)", self.markov_error, 1e-3
        yield "noise: P(nothing left at t = 1), and P(one missing) given that", self.empty_error, 1e-3
        yield "corrupt draws every mask as often as it should", self.corrupt_p_value, None
        to_empty = functools.partial(self.corrupt_p_value, to_empty=True)
        yield "corrupt_to_empty draws every mask as often, given that t = 1 is empty", to_empty, None
        for changed in ({}, {"weighting": "self_normalized"}, {"alignment": "marginal"}):
            name = ", ".join(changed.values()) or "elbo, sampled"
            slope = functools.partial(self.slope_at_truth, changed)
            yield f"the expected loss has gradient 0 at the true posterior ({name})", slope, 1e-3
        yield "marginal targets have the expected gradient of sampled ones", self.marginal_error, 1e-3
        yield "rates to each text, and the bound's integrand, by insertions one by one", self.integrand_error, 1e-3
        yield "bound of the true rates − entropy of the data, nats", self.bound_error, 2e-3
        yield "draws of that bound, their mean's distance in standard errors, less skewness", self.bound_z, 4
        yield "bound of a wrong network − exact −log p, where it is below, nats", self.bound_below_exact, 2e-3
        yield "reverse marginals of the true rates = forward marginals", self.reverse_error, 2e-3
        for name in self.process.samplers(SamplingOptions(num_steps=NUM_STEPS)):
            excess = functools.partial(self.sampler_excess, name)
            yield f"sampler {name}: total variation to the data, beyond sampling error", excess, 0
        for name in self.read_mean_only():
            changed = functools.partial(self.changed_draws, name)
            yield f"sampler {name}: share that a length head with no more than its mean right changes", changed, 0.01

    # --- What the process says of its chain

    @functools.cached_property
    def chain(self):
        """t [T], P(m of n left) [T, n, m] and the log of the rate at which each missing token comes back [T, n, m]."""
        t = np.concatenate([[0.0], np.geomspace(EPS / 10, 1, NUM_GRID)])
        n = np.arange(K)
        kept = jax.jit(jax.vmap(self.kept_probs))(np.float32(t))
        rows = list(itertools.product(range(len(t)), n, n))
        canvas = _canvas([plain([NUM_SPECIAL] * m) for _, _, m in rows], L)
        at, of_n = (np.array([row[i] for row in rows]) for i in (0, 1))
        log_back = jax.jit(self.process.log_missing_rate)(canvas, of_n, np.float32(np.maximum(t[at], t[1])))
        kept, log_back = np.asarray(kept, np.float64), np.asarray(log_back, np.float64).reshape(len(t), K, K)
        return t, kept, log_back

    def flux(self):
        """Probability a unit of time that moves from m + 1 to m, [T, n, m]."""
        _, kept, log_back = self.chain
        n, m = np.arange(K)[:, None], np.arange(K)
        return np.where(m < n, kept * (n - m) * np.exp(log_back), 0.0)

    def kolmogorov_error(self):
        t, kept, _ = self.chain
        moved = _cumulative(self.flux()[1:], t[1:])
        at_most = kept.cumsum(-1)
        n, m = np.arange(K)[:, None], np.arange(K)
        return np.abs(np.where(m < n, at_most[1:] - at_most[1] - moved, 0.0)).max()

    def deletion_rates(self):
        """[T, n, m]: from m tokens to m − 1, of a text that had n; NaN where m > n or too rare to say."""
        _, kept, _ = self.chain
        flux = np.roll(self.flux(), 1, axis=-1)
        n, m = np.arange(K)[:, None], np.arange(K)
        seen = (m >= 1) & (m <= n) & (kept > 1e-4)
        return np.where(seen, flux / np.where(seen, kept, 1), np.nan)

    def markov_error(self):
        rates = self.deletion_rates()[1:]
        known = np.isfinite(rates)
        low = np.where(known, rates, np.inf).min(1)
        high = np.where(known, rates, -np.inf).max(1)
        return np.where(known.any(1), high / np.where(known.any(1), low, 1) - 1, 0.0).max()

    @functools.cached_property
    def then_empty(self):
        """P(nothing left at t = 1 | m left at t) [T, m], from the backward equation."""
        t, _, _ = self.chain
        rates = self.deletion_rates()
        rates = np.where(np.isfinite(rates), rates, -np.inf).max(1)
        generator = np.zeros((len(t), K, K))
        for m in range(1, K):
            rate = _filled(rates[:, m])
            generator[:, m, m], generator[:, m, m - 1] = -rate, rate
        result = np.zeros((len(t), K))
        result[-1, 0] = 1
        steps = (generator[1:] + generator[:-1]) / 2 * np.diff(t)[:, None, None]
        for i in reversed(range(len(steps))):
            result[i] = scipy.sparse.linalg.expm_multiply(steps[i], result[i + 1], traceA=np.trace(steps[i]))
        return result

    def empty_error(self):
        """Of `start_nonempty`, of kept_probs and of the backward equation; and of `one_missing`."""
        t, kept, _ = self.chain
        said = 1 - np.asarray(jax.jit(self.process.start_nonempty)(np.arange(K)))
        n, at = np.arange(1, K), NUM_GRID // 2
        one = np.asarray(jax.jit(self.process.one_missing)(n, np.full(len(n), t[at], np.float32)))
        given_empty = kept[at, n, n - 1] * self.then_empty[at, n - 1] / self.then_empty[0, n]
        return max(np.abs(x).max() for x in (said - kept[-1, :, 0], said - self.then_empty[0], one - given_empty))

    def mask_probs(self, world: World, t: float, *, to_empty: bool) -> np.ndarray:
        """P(mask | text) [P] of each pair, if `to_empty` given that nothing is left at t = 1."""
        n, m = world.pair_n, world.pair_m
        kept = np.asarray(self.kept_probs(np.float32(t)), np.float64)
        probs = kept[n, m] / scipy.special.comb(n, m)
        if to_empty:
            at = [np.interp(t, self.chain[0], self.then_empty[:, left]) for left in range(K)]
            probs = probs * np.array(at)[m] / self.then_empty[0][n]
        return probs

    # --- Noise

    def corrupt_p_value(self, to_empty=False):
        """Fisher's method over times and texts of chi-square tests."""
        world, num = small_world(), 200
        corrupt = jax.jit(self.process.corrupt_to_empty if to_empty else self.process.corrupt)
        x0 = worlds.to_example([text for text in world.texts for _ in range(num)], L)
        pair_of = np.zeros((len(world.texts), 2**L), int)  # by text and mask, read as a binary number
        for p, (_, dropped) in enumerate(world.pairs):
            pair_of[world.pair_text[p], sum(2**k for k in dropped)] = p
        p_values = []
        for t in (0.1, 0.4, 0.8):
            rows = len(world.texts) * num
            _, targets = corrupt(_keys(int(100 * t), rows), x0, np.full(rows, t, np.float32))
            mask = np.asarray(targets.dropped) @ 2 ** np.arange(L)
            seen = np.bincount(pair_of[np.arange(rows) // num, mask], minlength=len(world.pairs))
            probs = self.mask_probs(world, t, to_empty=to_empty)
            for text in range(len(world.texts)):
                of_text = world.pair_text == text
                if of_text.sum() > 1:
                    p_values.append(_chi_square(seen[of_text], num * probs[of_text]))
        return scipy.stats.combine_pvalues(np.maximum(p_values, 1e-300))[1]

    # --- The truth as a network

    def posterior_scores(self, world: World, state, t) -> Scores:
        """Scores of the optimum at the world's states [B] and times [B]: the posterior of how many tokens are missing,
        and the insertions by the rate at which they happen. Nothing is missing from other canvases (state −1)."""
        tables, n = _Tables.of(world), jnp.arange(K)
        at = jax.tree.map(lambda x: x[jnp.maximum(state, 0)], tables)
        kept = jax.vmap(lambda t: self.process.kept_probs(n, t))(t)  # [B, n, m]
        kept = jnp.take_along_axis(kept, at.canvas.num_free[:, None, None], axis=-1)[..., 0] * (state >= 0)[:, None]
        kept = kept / jnp.maximum((kept[..., None] * at.num_left).sum((1, 2))[:, None], 1e-30)
        back = jax.vmap(lambda k: self.process.log_missing_rate(at.canvas, jnp.full(state.shape, k), t), out_axes=-1)(n)
        by_rate = jnp.einsum("bn,bnsv->bsv", kept * jnp.exp(back - back.max(-1, keepdims=True)), at.missing)
        letter = (jnp.arange(V) >= NUM_SPECIAL).astype(jnp.float32)
        if self.process.spec.length_head == "cls":
            left, axes = jnp.einsum("bn,bnk->bk", kept, at.num_left), (-2, -1)
        else:
            left, axes = jnp.einsum("bn,bnsk->bsk", kept, at.left_in_gap), -1
        some = by_rate.sum(axes, keepdims=True)
        by_rate = jnp.where(some > 0, by_rate / jnp.where(some > 0, some, 1), letter)
        left = jnp.where(left.sum(-1, keepdims=True) > 0, left, jnp.arange(K) == 0)
        logits = jnp.where(letter > 0, _safe_log(by_rate), -jnp.inf)
        return Scores(logits=logits, length_logits=_safe_log(left), stop_logits=None)

    def network(self, world: World):
        """(canvas, clock) → `posterior_scores`."""
        digits = V ** np.arange(L)
        state_of = np.full(V**L, -1)  # by the tokens, read as a number; PAD is 0
        for text, state in world.state_index.items():
            state_of[np.array(text.tokens, int) @ digits[: len(text.tokens)]] = state

        def scores(canvas: Canvas, clock):
            tokens, _ = canvas_lib.content(canvas)
            return self.posterior_scores(world, jnp.asarray(state_of)[tokens @ digits], clock)

        return scores

    def at_all_states(self, times, wrong: bool):
        """The plain world's states at each of `times`: canvases, clock and scores [times × states], which are the
        truth's or those of a network that is wrong in every state."""
        world = plain_world()
        N = len(world.states)
        clock = np.repeat(np.float32(times), N)
        scores = jax.device_get(self.posterior(world, np.tile(np.arange(N), len(times)), clock))
        if wrong:
            table = self.random_table(N, 4)
            change = {name: np.tile(0.5 * x, (len(times), *[1] * (x.ndim - 1))) for name, x in table.items()}
            scores = dataclasses.replace(
                scores,
                logits=scores.logits + change["logits"],
                length_logits=np.maximum(scores.length_logits, -3.0) + change["length"],
            )
        return _tiled(_Tables.of(world).canvas, len(times)), clock, scores

    # --- The loss

    def not_finite(self):
        """How many of the losses, and of the entries of the gradient, of random scores are not finite."""
        world = small_world()
        ends = [i for i, (text, dropped) in enumerate(world.pairs) if len(dropped) in (0, len(text.free))]
        pairs = [world.pairs[i] for i in ends] * 2
        t = np.repeat([EPS, 1.0], len(ends))
        if self.bounded:
            canvas, targets = worlds.corrupted(pairs, t, L, VOCABULARY)
        else:
            x0 = worlds.to_example([text for text, _ in pairs], L)
            canvas, targets = self.process.corrupt(_keys(0, len(pairs)), x0, jnp.float32(t))
        table = self.random_table(len(pairs), 0)

        def loss(table):
            return sum(
                jnp.where(jnp.isfinite(value), 0.0, jnp.inf).sum() + value.sum()
                for value in self.process.loss(self.scores_of(table), canvas, targets).values()
            )

        value, gradient = jax.jit(jax.value_and_grad(loss))(table)
        return float(not np.isfinite(value)) + sum(int((~np.isfinite(g)).sum()) for g in jax.tree.leaves(gradient))

    def random_table(self, num: int, seed: int) -> dict:
        """Scores of a network that is a table."""
        rng = np.random.default_rng(seed)
        length = {"cls": (num, K), "gap": (num, S, K), None: (num, 0)}[self.process.spec.length_head]
        return {"logits": _normal(rng, (num, S, V)), "length": _normal(rng, length), "stop": _normal(rng, (num,))}

    def scores_of(self, table: dict) -> Scores:
        """Of a table's entries, a row each."""
        spec = self.process.spec
        return Scores(
            logits=jnp.where(np.array(spec.predictable), jnp.asarray(table["logits"]), -jnp.inf),
            length_logits=jnp.asarray(table["length"]) if spec.length_head else None,
            stop_logits=jnp.asarray(table["stop"]) if spec.stop_head else None,
        )

    @functools.cached_property
    def expected_gradient(self):
        """(changed loss options) → (table [times × states] → gradient of the expected loss)."""
        world, times = small_world(), (0.15, 0.6)
        N = len(world.states)
        pairs = world.pairs * len(times)
        canvas, targets = worlds.corrupted(pairs, np.repeat(times, len(world.pairs)), L, VOCABULARY)
        probs = [world.law[world.pair_text] * self.mask_probs(world, t, to_empty=False) for t in times]
        entry = np.concatenate([world.pair_state + i * N for i in range(len(times))])

        @functools.cache
        def of(**changed):
            process = self.make(loss_config=dataclasses.replace(ELBO, **changed))

            def expectation(table):
                loss = process.loss(self.scores_of(jax.tree.map(lambda x: x[entry], table)), canvas, targets)["loss"]
                return jnp.asarray(np.concatenate(probs), jnp.float32) @ loss

            return jax.jit(jax.grad(expectation))

        return of, times

    def truth_table(self):
        world, (_, times) = small_world(), self.expected_gradient
        N = len(world.states)
        scores = self.posterior(world, np.tile(np.arange(N), len(times)), np.repeat(np.asarray(times, np.float32), N))
        letter = np.arange(V) >= NUM_SPECIAL
        length = np.asarray(scores.length_logits)
        return {"logits": np.where(letter, scores.logits, 0.0), "length": length, "stop": np.zeros(len(length))}

    def slope_at_truth(self, changed):
        """Largest entry of the gradient, over that of a random table's."""
        of, _ = self.expected_gradient
        truth = self.truth_table()
        at_truth, elsewhere = of(**changed)(truth), of(**changed)(self.random_table(len(truth["logits"]), 1))
        return max(
            float(jnp.abs(at_truth[leaf]).max() / jnp.abs(elsewhere[leaf]).max()) for leaf in ("logits", "length")
        )

    def marginal_error(self):
        of, times = self.expected_gradient
        table = self.random_table(len(times) * len(small_world().states), 2)
        sampled, marginal = of()(table), of(alignment="marginal")(table)
        of_leaf = ((sampled[leaf], marginal[leaf]) for leaf in ("logits", "length"))
        return max(float(jnp.abs(a - b).max() / jnp.abs(a).max()) for a, b in of_leaf)

    # --- A table fitted to the loss

    def fitted_checks(self) -> Iterator[Check]:
        samplers = self.process.TRAITS.samplers
        if isinstance(self.process, likelihood.Likelihood):
            yield "a table fitted to the loss: its −log p − entropy of the data, nats", self.fitted_excess, 0.03
        for name in samplers:
            excess = functools.partial(self.fitted_variation, name)
            yield f"that table, sampler {name}: total variation to the data, beyond sampling error", excess, 0

    @functools.cached_property
    def fitted(self):
        """The table [times, contents, …] that Adam makes of the loss, and (canvas, t) → its scores.

        Contents, or of a causal network what it has seen of them, are read as a number. A network that is told the time
        has an entry for each of some times, and is linear in log t in between: rates of what is rare are powers of t.
        """
        knots = NUM_KNOTS if self.process.spec.uses_time else 1
        num = V**L
        start = jax.tree.map(lambda x: jnp.zeros((knots, num, *x.shape[1:])), self.random_table(1, 0))

        def score(table, canvas: Canvas, t) -> Scores:
            seen = jnp.cumsum(canvas_lib.content(canvas)[0] * V ** np.arange(L), axis=-1)
            at_column = jnp.pad(seen, ((0, 0), (S - L, 0))) if self.process.spec.causal else seen[:, -1:]
            place = (1 - jnp.log(jnp.maximum(t, EPS)) / math.log(EPS)) * (knots - 1)
            low = jnp.minimum(jnp.floor(place).astype(jnp.int32), max(knots - 2, 0))

            def at(x, *entry):
                share = (place - low).reshape(-1, *[1] * (x.ndim - 2))
                below, above = (x[(knot.reshape(-1, *[1] * (entry[0].ndim - 1)), *entry)] for knot in (low, low + 1))
                return (1 - share) * below + share * above  # past the last knot it is that one

            logits = at(table["logits"], at_column, jnp.arange(S))
            return self.scores_of(
                {"logits": logits, **{name: at(table[name], seen[:, -1]) for name in ("length", "stop")}}
            )

        law = jnp.log(jnp.asarray(_fitted_law()))
        texts = worlds.to_example(_fitted_texts(), L)
        optimizer = optax.adam(optax.cosine_decay_schedule(FIT_RATE, FIT_STEPS))

        def step(carry, key):
            table, moments = carry
            k_text, k_time, k_noise = jax.random.split(key, 3)
            which = jax.random.categorical(k_text, law, shape=(FIT_BATCH,))
            u = schedules.stratified(jax.random.split(k_time, FIT_BATCH), jnp.arange(FIT_BATCH), FIT_BATCH)
            t, weight = self.process.times(u)
            x0 = jax.tree.map(lambda x: x[which], texts)
            canvas, targets = self.process.corrupt(jax.random.split(k_noise, FIT_BATCH), x0, t)
            loss = lambda table: (weight * self.process.loss(score(table, canvas, t), canvas, targets)["loss"]).mean()  # noqa: E731
            updates, moments = optimizer.update(jax.grad(loss)(table), moments)
            return (optax.apply_updates(table, updates), moments), None

        @jax.jit
        def fit():
            keys = jax.random.split(jax.random.key(8), FIT_STEPS)
            return jax.lax.scan(step, (start, optimizer.init(start)), keys)[0][0]

        table = fit()
        return lambda canvas, t: score(table, canvas, t)

    def fitted_excess(self):
        """Averaged over the data, many draws of each text."""
        copies, times = 1000, 8
        texts = [text for text in _fitted_texts() for _ in range(copies)]
        x0 = worlds.to_example(texts, L)
        place = schedules.evenly_spread(jnp.zeros(len(texts), jnp.uint32), jnp.arange(len(texts)))
        draws = jax.jit(self.process.nll_draws, static_argnums=(0, 4))(
            likelihood.at_once(self.fitted), _keys(9, len(texts)), place, x0, times
        )
        law = _fitted_law()
        each = np.asarray(draws, np.float64).mean(0).reshape(len(law), copies).mean(-1)
        return law @ each + (law * np.log(law)).sum()

    def fitted_variation(self, name):
        """As `sampler_excess`."""
        options = SamplingOptions(num_steps=FITTED_STEPS, stop_threshold=0.0)
        sampler, canvas = self.process.samplers(options)[name], _canvas([plain(())] * NUM_DRAWS, L)

        @jax.jit
        def run():
            return sampler.decode(
                sampling.generate(self.fitted, sampler, _keys(6, NUM_DRAWS), canvas, Filters()).canvas
            )

        tokens, length = jax.device_get(run())
        seen = collections.Counter(tuple(row[:n].tolist()) for row, n in zip(tokens, length, strict=True))
        law = dict(zip((text.tokens for text in _fitted_texts()), _fitted_law(), strict=True))
        variation = 0.5 * sum(abs(seen[text] / NUM_DRAWS - law.get(text, 0.0)) for text in law | seen)
        return _beyond_sampling(variation, np.array([*law.values()]), FITTED_ALLOWANCE)

    # --- The bound

    def integrand_error(self):
        """Against sums over the texts that insertions make, for random scores at every pair, prompts included."""
        world, times = small_world(), (0.15, 0.6)
        num = len(world.pairs)
        canvas, targets = worlds.corrupted(world.pairs * 2, np.repeat(times, num), L, VOCABULARY)
        table = self.random_table(2 * num, 3)

        @jax.jit
        def run(table, canvas, targets):
            scores, n = self.scores_of(table), targets.x0.free.sum(-1)
            return (
                likelihood.integrand(self.process, canvas, targets)(scores),
                self.log_insertion_rates(scores, canvas, targets.t),
                jnp.exp(self.process.log_missing_rate(canvas, n, targets.t)),
            )

        value, log_rate, back = jax.device_get(run(table, canvas, targets))
        error = 0.0
        for row, (text, _) in enumerate(world.pairs * 2):
            state = world.states[world.pair_state[row % num]]
            model, true = {}, {}
            for i, w in insertions(state, NUM_LETTERS):
                y = insert(state, i, w)
                model[y] = model.get(y, 0.0) + math.exp(log_rate[row, 1 + i, w])
            masks = world.masks_like(row % num)
            for mask in masks:
                for gap, w in missing(text, mask):
                    y = insert(state, gap - 1, w)
                    true[y] = true.get(y, 0.0) + back[row] / len(masks)
            page = sum(model.values()) + sum(r * math.log(r / model[y]) - r for y, r in true.items())
            error = max(error, abs(value[row] - page) / max(1, abs(page)))
        return error

    def bounds(self, *, wrong: bool):
        """The bound [texts] of each text of the plain world, by the midpoint rule in u and over all masks."""
        world = plain_world()
        u = (np.arange(NUM_NODES, dtype=np.float32) + 0.5) / NUM_NODES
        t, weight = (np.asarray(x) for x in jax.jit(likelihood.bound_times, static_argnums=0)(self.process, u))
        clock = np.repeat(np.float32(t), len(world.pairs))
        pairs = worlds.corrupted(world.pairs, np.zeros(len(world.pairs)), L, VOCABULARY)
        canvas, targets = _tiled(pairs, NUM_NODES)
        targets = targets.replace(t=clock)
        _, _, scores = self.at_all_states(np.maximum(t, EPS), wrong)
        entry = (np.arange(NUM_NODES)[:, None] * len(world.states) + world.pair_state).reshape(-1)
        scores = jax.tree.map(lambda x: x[entry], scores)
        value = np.asarray(self.integrand(scores, canvas, targets), np.float64).reshape(NUM_NODES, -1)
        result = np.zeros(len(world.texts))
        for i in range(NUM_NODES):
            probs = self.mask_probs(world, t[i], to_empty=True)
            np.add.at(result, world.pair_text, weight[i] / NUM_NODES * probs * np.where(probs > 0, value[i], 0.0))
        return result

    def start_law(self):
        """The law of texts given that noise ends empty, which is what samplers that start there return."""
        world = plain_world()
        n = [len(text.free) for text in world.texts]
        law = world.law * self.then_empty[0][n]
        return law / law.sum()

    @functools.cached_property
    def true_bounds(self):
        return self.bounds(wrong=False)

    def bound_error(self):
        """The data are those of the true rates: texts given that noise ends empty."""
        law = self.start_law()
        return law @ self.true_bounds + (law * np.log(law)).sum()

    def bound_z(self):
        """As `evaluate` draws it: times, and noise from corrupt_to_empty."""
        world, copies, times = plain_world(), 64, 8
        texts = [text for text in world.texts for _ in range(copies)]
        x0 = worlds.to_example(texts, L)
        place = schedules.evenly_spread(jnp.zeros(len(texts), jnp.uint32), jnp.arange(len(texts)))
        draws = jax.jit(likelihood.bound_samples, static_argnums=(0, 1, 5))(
            self.process, likelihood.at_once(self.network(world)), _keys(5, len(texts)), place, x0, times
        )
        each = np.asarray(draws, np.float64).mean(0).reshape(len(world.texts), copies)
        law, exact = self.start_law(), self.true_bounds
        rest = each - each.mean(-1, keepdims=True)
        variance = law**2 @ (rest**2).sum(-1) / (copies * (copies - 1))
        skewness = law**3 @ (rest**3).sum(-1) / copies**3 / variance**1.5
        z = law @ (each.mean(-1) - exact) / math.sqrt(variance)
        return z + skewness / 3 * z**2 + skewness**2 / 27 * z**3 + skewness / 6  # Hall's, see likelihood.py

    def bound_below_exact(self):
        """For a network that is wrong in every state."""
        exact = -np.log(self.law_of(wrong=True)[-1][plain_world().text_state])
        return min(0.0, (self.bounds(wrong=True) - exact).min())

    # --- The chain backwards

    def law_of(self, *, wrong: bool, times=()):
        """P(x_t) [T + 1, states] of the model's reverse chain at `times`, then at 0, from its Kolmogorov equation."""
        world = plain_world()
        N = len(world.states)
        grid = np.unique(np.concatenate([np.geomspace(EPS, 1, NUM_GRID), times]))[::-1]
        middle = np.sqrt(grid[1:] * grid[:-1])
        at = np.append(middle, EPS)
        canvas, clock, scores = self.at_all_states(at, wrong)
        rates = np.exp(np.asarray(self.log_insertion_rates(scores, canvas, clock), np.float64)).reshape(-1, N, S, V)
        generator = np.zeros((len(at), N, N))
        for x, state in enumerate(world.states):
            for i, w in insertions(state, NUM_LETTERS):
                if len(state.tokens) < L:
                    y = world.state_index[insert(state, i, w)]
                    generator[:, x, y] += rates[:, x, 1 + i, w]
                    generator[:, x, x] -= rates[:, x, 1 + i, w]
        law = np.zeros(N)
        law[world.state_index[plain(())]] = 1
        found = {1.0: law}
        for s, step in zip([*grid[1:], 0.0], generator * -np.diff(grid, append=0)[:, None, None], strict=True):
            law = scipy.sparse.linalg.expm_multiply(step.T, law, traceA=np.trace(step))
            found[s] = law
        return np.stack([found[t] for t in (*times, 0.0)])

    def reverse_error(self):
        world, times = plain_world(), (0.8, 0.5, 0.2)
        law = self.start_law()
        forward = np.zeros((len(times) + 1, len(world.states)))
        for i, t in enumerate(times):
            probs = law[world.pair_text] * self.mask_probs(world, t, to_empty=True)
            np.add.at(forward[i], world.pair_state, probs)
        forward[-1, world.text_state] = law
        return np.abs(self.law_of(wrong=False, times=times) - forward).max()

    def read_mean_only(self) -> list[str]:
        """The samplers that a config with a length head fitted by its mean may have."""
        allowed = []
        for name in self.process.samplers(SamplingOptions(num_steps=1)):
            made = config.default_config()
            made.process.family, made.loss.length, made.sampling.sampler = self.family, "poisson_mean", name
            with contextlib.suppress(ValueError):
                config.validate_values(made)
                allowed.append(name)
        return allowed

    def mean_network(self, mean_only):
        """The true network; where `mean_only`, but that either nothing is missing or all that fits, with the true rate
        of insertions."""
        true, left = self.network(plain_world()), jnp.arange(K)

        def scores(canvas: Canvas, clock):
            made = true(canvas, clock)
            back = jax.vmap(lambda l: self.process.log_missing_rate(canvas, canvas.num_free + l, clock), out_axes=-1)(
                left
            )
            rate = left * jnp.exp(back - back.max(-1, keepdims=True))  # [B, K]
            most = jnp.maximum(L - canvas.num_free, 0)[:, None]
            if self.process.spec.length_head == "gap":
                rate, most = rate[:, None], most[:, None]
            probs = jax.nn.softmax(jnp.asarray(made.length_logits), axis=-1)
            mean, at_most = (probs * rate).sum(-1, keepdims=True), (rate * (left == most)).sum(-1, keepdims=True)
            all_of_it = jnp.where(at_most > 0, mean / jnp.where(at_most > 0, at_most, 1), 0.0)
            two = jnp.where(left == most, all_of_it, jnp.where(left == 0, 1 - all_of_it, 0.0))
            return dataclasses.replace(
                made, length_logits=jnp.where(mean_only, _safe_log(two), jnp.asarray(made.length_logits))
            )

        return scores

    def sampler_excess(self, name):
        """What the grid may cost is allowed for."""
        world, allowance = plain_world(), 0.0 if name == "event" else GRID_ALLOWANCE
        law = np.zeros(len(world.states))
        law[world.text_state] = self.start_law()
        drawn = self.draws(name, mean_only=False)
        variation = 0.5 * np.abs(np.bincount(drawn, minlength=len(law)) / NUM_DRAWS - law).sum()
        return _beyond_sampling(variation, law, allowance)

    def changed_draws(self, name):
        """By the same keys; not 0 where rounding decides."""
        return (self.draws(name, mean_only=False) != self.draws(name, mean_only=True)).mean()

    def draws(self, name, *, mean_only):
        """States of the plain world [NUM_DRAWS]."""
        tokens, length = jax.device_get(self.compiled(name)(jnp.asarray(mean_only)))
        states = [plain_world().state_index[plain(row[:n].tolist())] for row, n in zip(tokens, length, strict=True)]
        return np.array(states)

    def compiled(self, name):
        """mean_only → texts."""
        if name not in self.programs:
            sampler = self.process.samplers(SamplingOptions(num_steps=NUM_STEPS))[name]
            canvas, key = _canvas([plain(())] * NUM_DRAWS, L), _keys(6, NUM_DRAWS)

            @jax.jit
            def run(mean_only):
                state = sampling.generate(self.mean_network(mean_only), sampler, key, canvas, Filters())
                return sampler.decode(state.canvas)

            self.programs[name] = run
        return self.programs[name]


@struct.dataclass
class _Tables:
    """Sums over the pairs of each state (N of them) by the length n of their text: of p(text), over the number of masks
    that leave as many, times what is missing."""

    canvas: Canvas
    num_left: Float[Array, "N K K"]  # how many tokens
    left_in_gap: Float[Array, "N K S K"]  # how many from each gap
    missing: Float[Array, "N K S V"]  # which, from each gap

    @staticmethod
    @functools.cache
    def of(world: World) -> "_Tables":
        N = len(world.states)
        num_left, left_in_gap, of_token = np.zeros((N, K, K)), np.zeros((N, K, S, K)), np.zeros((N, K, S, V))
        weight = world.law[world.pair_text] / scipy.special.comb(world.pair_n, world.pair_m)
        for p, pair in enumerate(world.pairs):
            at = world.pair_state[p], world.pair_n[p]
            gaps = np.zeros(S, int)
            for gap, w in missing(*pair):
                of_token[*at, gap, w] += weight[p]
                gaps[gap] += 1
            num_left[*at, gaps.sum()] += weight[p]
            left_in_gap[*at, np.arange(S), gaps] += weight[p]
        with jax.ensure_compile_time_eval():  # the first call may come from a traced function
            sums = (jnp.asarray(x, jnp.float32) for x in (num_left, left_in_gap, of_token))
            return _Tables(_canvas(world.states, L), *sums)


def _fitted_texts() -> list[Text]:
    a, b = range(NUM_SPECIAL, NUM_SPECIAL + 2)
    return [plain(word) for word in ((), (a,), (b, a), (a, b, a), (b, b, b), (a, a, b, b))]


def _fitted_law() -> np.ndarray:
    """Letters depend on each other and on the length; two texts differ from others by one insertion."""
    return np.array([0.1, 0.15, 0.2, 0.25, 0.1, 0.2])


def _beyond_sampling(variation, law, allowance):
    """How far a total variation is above what N draws and the allowance explain, at p > P_VALUE: its mean is at most
    ½·Σ sqrt(2p(1−p)/πN), and McDiarmid's bound on what it may be more is sqrt(ln(1/P_VALUE)/2N)."""
    mean = 0.5 * np.sqrt(2 * law * (1 - law) / (math.pi * NUM_DRAWS)).sum()
    return max(0.0, variation - mean - math.sqrt(-math.log(P_VALUE) / (2 * NUM_DRAWS)) - allowance)


def _chi_square(seen, expected):
    """p-value; cells with fewer than five expected are one."""
    rare = expected < 5
    seen, expected = (np.append(x[~rare], x[rare].sum()) for x in (seen, expected))
    if expected[-1] < 1e-6:
        if seen[-1]:
            return 0.0
        seen, expected = seen[:-1], expected[:-1]
    if len(seen) < 2:
        return 1.0
    return scipy.stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), len(seen) - 1)


def _cumulative(values, t):
    """∫ from t[0], by the trapezoid rule [T, …]."""
    step = np.diff(t)[:, None, None] * (values[1:] + values[:-1]) / 2
    return np.concatenate([np.zeros_like(values[:1]), step.cumsum(0)])


def _filled(rates):
    """Where a rate is not known (−inf), that of the nearest time before or after."""
    known = np.flatnonzero(np.isfinite(rates))
    return np.interp(np.arange(len(rates)), known, rates[known])


def _safe_log(x):
    return jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), IMPOSSIBLE)


def _tiled(rows, times: int):
    return jax.tree.map(lambda x: np.tile(x, (times, *[1] * (x.ndim - 1))), rows)


def _normal(rng, shape):
    return rng.normal(size=shape).astype(np.float32)


def _canvas(texts: list[Text], max_length: int = L) -> Canvas:
    return worlds.corrupted([(text, ()) for text in texts], np.zeros(len(texts)), max_length, VOCABULARY)[0]


def _keys(seed, num):
    return jax.random.split(jax.random.key(seed), num)


if __name__ == "__main__":
    cli.run(main)
