"""The likelihood bound against its definition, the entropy of data, and its own Monte Carlo estimate."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracles
import worlds
from dilm_jax import canvas as canvas_lib
from dilm_jax import likelihood
from dilm_jax.processes.registry import PROCESSES
from dilm_jax.schedules import LogLinear
from dilm_jax.scores import Scores
from oracles import World
from worlds import K, insert, insertions, rate_and_total, series_S

BOUNDED = [name for name in PROCESSES if isinstance(worlds.process(name), likelihood.Bounded)]
TIMES = (worlds.EPS / 4, 0.2, 0.45, 0.8)  # the first below eps


# --- The integrand, from the definitions in float64 ------------------------------------------------------------------


def model_rates(family, t, state, logits, lengths):
    """{text: R̂} of every text that one insertion makes (docs/MATH.md 3, 4)."""
    rate, total = rate_and_total(max(t, worlds.EPS))
    choices = [(1 + i, w) for i, w in insertions(state)]
    rates = {}
    for i, w in insertions(state):
        if family == "joint":
            p = np.exp(worlds.log_p_left(lengths, state))
            count = [l / (1.0 if state.free else series_S(l, total)) for l in range(K)]
            gap_rate = rate / total * (p @ count) / sum(np.exp(logits[c]) for c in choices)
        else:
            mean = np.exp(worlds.log_p_left(lengths[1 + i], state)) @ np.arange(K)
            gap_rate = rate / math.expm1(total) * mean / sum(np.exp(logits[1 + i, v]) for v in worlds.LETTERS)
        y = insert(state, i, w)
        rates[y] = rates.get(y, 0.0) + gap_rate * np.exp(logits[1 + i, w])
    return rates


@functools.cache
def true_rates(family, t, text):
    """{(x, y): rate} between texts, of the chain reversed given x0 = `text`: σ_t·q_t(y)·Q(y → x)/q_t(x)."""
    world = worlds.World([text], seed=0)
    return {(world.states[x], world.states[y]): r for (x, y), r in world.reverse_rates(family, t).items()}


def page_integrand(family, t, text, state, logits, lengths):
    model = model_rates(family, t, state, logits, lengths)
    true = {y: r for (x, y), r in true_rates(family, t, text).items() if x == state}
    return sum(model.values()) + sum(r * math.log(r / model[y]) - r for y, r in true.items())


@pytest.mark.parametrize("family", BOUNDED)
def test_integrand_is_the_pages(family):
    """For random tables, at every text and mask: runs, prompts, infills, the empty canvas, t below eps."""
    world = worlds.small_world()
    num = len(world.pairs)
    canvas, targets = worlds.corrupted(world.pairs * len(TIMES), np.repeat(TIMES, num))
    table = worlds.random_table(family, num * len(TIMES), seed=3)
    process = worlds.process(family)

    @jax.jit
    def run(table):
        scores = worlds.table_scores(table, np.arange(num * len(TIMES)))
        return likelihood.integrand(process, canvas, targets)(scores)

    values = np.asarray(run(table)).reshape(len(TIMES), num)
    logits, lengths = (table[leaf].astype(np.float64).reshape(len(TIMES), num, *table[leaf].shape[1:])
                       for leaf in ("logits", "length"))  # fmt: skip
    for i, t in enumerate(TIMES):
        for p, (text, _) in enumerate(world.pairs):
            state = world.states[world.pair_state[p]]
            expected = page_integrand(family, t, text, state, logits[i, p], lengths[i, p])
            np.testing.assert_allclose(values[i, p], expected, rtol=2e-4, atol=2e-4)


# --- Noise given that nothing is left at t = 1 -----------------------------------------------------------------------


@pytest.mark.parametrize("family", BOUNDED)
def test_corrupt_to_empty_has_the_conditional_law(family):
    """Also where the end of time often leaves something: σ̄_1 = 2, three tokens."""
    schedule = worlds.LogLinear(sigma_min=1.0, sigma_max=3.5)
    total_1 = 2.5 / math.log(3.5)
    num, text = 4000, worlds.plain([5, 6, 5])
    process = worlds.process(family, schedule=schedule)
    x0 = worlds.to_example([text] * num)
    corrupt = jax.jit(process.corrupt_to_empty)
    for t in (0.15, 0.6, 1.0):
        total = float(schedule.total(jnp.float32(t)))
        _, targets = corrupt(oracles.row_keys(1, num), x0, jnp.full(num, t))
        dropped = np.asarray(targets.dropped)
        counts = np.bincount(dropped.sum(-1), minlength=4)
        probs = _deleted_given_empty(family, total, total_1)
        assert (np.abs(counts / num - probs) <= 4 * np.sqrt(probs * (1 - probs) / num) + 1e-9).all()
        per_token = dropped.mean(0)
        mean = probs @ np.arange(4) / 3
        assert (np.abs(per_token - mean) <= 4 * math.sqrt(mean * (1 - mean) / num) + 1e-9).all()


def _deleted_given_empty(family, total, total_1, n=3):
    """P(D = d | all n gone at t = 1), d = 0..n, from the chain's transition probabilities."""

    def moves(from_, to, span):
        """P(to tokens at the end | from_ tokens at the start of a span of σ̄)."""
        return worlds.mask_prob(family, from_, from_ - to, span) * math.comb(from_, to) if from_ >= to else 0.0

    joint = np.array(
        [moves(n, n - d, total) * (moves(n - d, 0, total_1 - total) if d < n else 1) for d in range(n + 1)]
    )
    return joint / joint.sum()


@pytest.mark.parametrize("family", BOUNDED)
def test_times_integrate_over_all_of_time(family):
    """What lies below eps included, by itself and with an integrand that grows there."""
    process, num = worlds.process(family), 20_000
    t, weight = (np.asarray(x, np.float64) for x in likelihood.bound_times(process, (jnp.arange(num) + 0.5) / num))
    assert t.min() > 0 and t.max() <= 1
    for values, integral in ((np.ones(num), 1.0), (t, 1 / 2), (1 / np.sqrt(t), 2.0)):
        assert (weight * values).mean() == pytest.approx(integral, rel=2e-3)
    below = t < worlds.EPS
    assert (weight * ~below).mean() == pytest.approx(1 - worlds.EPS, abs=2e-4)
    assert (weight * below).mean() == pytest.approx(worlds.EPS, rel=1e-3)
    assert (weight * below / np.sqrt(t)).mean() == pytest.approx(2 * math.sqrt(worlds.EPS), rel=2e-2)  # 1000 of them


@pytest.mark.parametrize("family", BOUNDED)
@pytest.mark.parametrize("text", [(), (5,), (5, 6, 5)])
def test_masks_below_eps_have_their_weight(family, text):
    """Half of the draws have one token missing; weighted, all masks are as often as `corrupt_to_empty` draws them."""
    num, eps, schedule = 4000, 0.2, LogLinear(sigma_min=0.5, sigma_max=5.0)
    process = dataclasses.replace(worlds.process(family, schedule=schedule), eps=eps)
    total, total_1 = (float(schedule.total(jnp.float32(t))) for t in (0.15, 1.0))
    x0 = worlds.to_example([worlds.plain(text)] * num)
    noised = jax.jit(likelihood.noised, static_argnums=0)
    _, targets, weight = noised(process, oracles.row_keys(1, num), x0, jnp.full(num, 0.15))
    missing, weight = np.asarray(targets.num_dropped), np.asarray(weight, np.float64)
    for d, prob in enumerate(_deleted_given_empty(family, total, total_1, len(text))):
        of_mask = weight * (missing == d)
        assert abs(of_mask.mean() - prob) <= 4 * of_mask.std() / math.sqrt(num) + 1e-6
    if text:
        assert (missing == 1).mean() > 0.45
    _, _, above = noised(process, oracles.row_keys(1, num), x0, jnp.full(num, eps))
    np.testing.assert_array_equal(above, 1.0)


def test_confidence_interval_of_skewed_draws():
    """Of 1,000 sums of 200 draws of exp(2·normal), whose skewness is 414; symmetric about the mean it would hold the
    truth four times in five."""
    draws = np.exp(2 * np.random.default_rng(0).normal(size=(1000, 1, 200)))
    n = np.ones(200, int)
    held = [
        r["nelbo_low"] <= math.exp(2) <= r["nelbo_high"]
        for r in (likelihood.summarize(x, n, np.zeros_like(n)) for x in draws)
    ]
    z = np.abs(draws.mean((1, 2)) - math.exp(2)) / (draws.std((1, 2), ddof=1) / math.sqrt(200))
    assert (z <= 1.96).mean() < np.mean(held) - 0.04
    assert np.mean(held) > 0.84


def test_confidence_interval_of_symmetric_draws():
    low, high = likelihood.skewed_interval(4.0, 0.0)
    assert (low, high) == (-3.92, 3.92)
    for third_moment in (1e-4, -1e-4):
        np.testing.assert_allclose(likelihood.skewed_interval(4.0, third_moment), (-3.92, 3.92), atol=1e-3)
    assert likelihood.skewed_interval(0.0, 0.0) == (0.0, 0.0)


# --- The bound -------------------------------------------------------------------------------------------------------

ROOM = {"num_letters": 2, "max_length": 3, "num_states": 15}
DATA = World({"": 0.1, "b": 0.15, "ab": 0.2, "aa": 0.1, "aba": 0.25, "bbb": 0.2}, **ROOM)
ENTROPY = -sum(p * math.log(p) for p in DATA.law.values())


@functools.cache
def estimates(family):
    """Draws of the bound under the oracle, by text: 64 times, 64 rows each."""
    process = oracles.make_process(family, ROOM["num_letters"], ROOM["max_length"])
    texts, rows = list(DATA.law), 64
    x0 = oracles.example_of([text for text in texts for _ in range(rows)], ROOM["max_length"])
    B = len(texts) * rows
    network = likelihood.at_once(oracles.oracle(family, oracles.tables([DATA], [B])))

    @jax.jit
    def run(key, u):
        return likelihood.bound_sample(process, network, jax.random.split(key, B), x0, jnp.full(B, u))

    draws = [run(jax.random.key(i), (i + 0.5) / 256) for i in range(256)]
    return np.stack(draws).reshape(256, len(texts), rows)


@pytest.mark.parametrize("family", BOUNDED)
def test_bound_of_the_true_rates_is_the_entropy(family):
    draws = estimates(family)  # by the midpoint rule in u
    law = np.array(list(DATA.law.values()))
    mean = law @ draws.mean((0, 2))
    error = math.sqrt((law**2) @ (draws.var(-1, ddof=1).sum(0) / draws.shape[-1]) / draws.shape[0] ** 2)
    assert mean == pytest.approx(ENTROPY, abs=4 * error + 5e-3)
    assert error < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("family", BOUNDED)
def test_memory_at_length_1024_does_not_grow_with_the_number_of_times(family):
    """By ahead-of-time analysis, 8 texts in bytes: what one time needs, however many there are."""
    L, B = 1024, 8
    bytes_ = canvas_lib.Vocabulary(size=261, pad=0, cls=1, bos=2, eos=3, mask=4)
    process = dataclasses.replace(worlds.process(family), vocabulary=bytes_, max_length=L)
    num_lengths = (B, L + 1) if process.spec.length_head == "cls" else (B, L + 2, L + 1)

    def network(canvas, clock):
        logits = jnp.zeros((B, L + 2, 261)) + canvas.tokens[..., None] * clock[:, None, None]
        return Scores(logits=logits, length_logits=jnp.zeros(num_lengths), stop_logits=None)

    def megabytes(num_times):
        x0 = jax.eval_shape(lambda: oracles.example_of(["a" * L] * B, L))
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))
        net = likelihood.at_once(network)
        run = jax.jit(lambda key, x0: likelihood.bound_samples(process, net, key, jnp.zeros(B), x0, num_times))
        return run.lower(keys, x0).compile().memory_analysis().temp_size_in_bytes / 2**20

    few, many = megabytes(2), megabytes(64)
    assert many < 1.05 * few
    assert many < 1500, f"{many:.0f} MiB"
