"""The grid samplers of both families under an oracle network: reverse marginals, point masses, fire probabilities.

One march from t = 1 to 0 is compiled for each family and sampler; its rows belong to different worlds.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import oracles
from dilm_jax.sampling import Filters, SamplingOptions
from dilm_jax.scores import Scores
from oracles import World

L = 5
NUM_STEPS = 64
EXTRA = 8  # repeats of the last step that end every row
OPTIMISE = {"xla_backend_optimization_level": 1}  # these programs run for long
SAMPLERS = [(family, "leap") for family in oracles.FAMILIES]
SAMPLERS += [pytest.param(family, "euler", marks=pytest.mark.slow) for family in oracles.FAMILIES]
ROOM = {"num_letters": 5, "max_length": L, "num_states": 32}

MIXTURE = World({"": 0.05, "b": 0.15, "ab": 0.2, "aa": 0.1, "aba": 0.25, "abb": 0.15, "bbb": 0.1}, **ROOM)
DISTINCT = World({"abcde": 1.0}, **ROOM)
REPEATS = World({"aabaa": 1.0}, **ROOM)
NUM_ROWS = {MIXTURE: 2000, DISTINCT: 600, REPEATS: 200}

# TV that a grid of N steps costs: at most one token a step ("leap", and joint noising's "euler"), tokens drawn apart
# in the gaps of one step, and those that DILM-M's "euler" leaves out. Measured with N = 40 and 160.
DISCRETISATION = {"leap": 2 / NUM_STEPS, "euler": 4 / NUM_STEPS}
# The sampler starts from the empty canvas, but noise leaves something at t = 1: P(N_1 < n).
START = {n: float(scipy.stats.poisson.cdf(n - 1, oracles.total(1.0))) for n in (3, 5)}


@functools.cache
def march(family, sampler, rate_scale=1.0):
    """Rows of every world from t = 1 to 0: the world's state of each row, as {world: function of t}."""
    process = oracles.make_process(family, ROOM["num_letters"], L)
    grid = process.samplers(SamplingOptions(num_steps=NUM_STEPS, rate_scale=rate_scale))[sampler]

    def run(tables, key, canvas):
        network = oracles.oracle(family, tables)

        def step(state, _):
            state = grid.advance(network(state.canvas, state.clock), state, Filters())
            return state, tables.find(state.canvas)

        return jax.lax.scan(step, grid.start(key, canvas), length=NUM_STEPS + EXTRA)

    nums = list(NUM_ROWS.values())
    canvas = oracles.canvas_of([""] * sum(nums), ROOM["num_letters"], L)
    run = jax.jit(run, compiler_options=OPTIMISE)
    state, path = run(oracles.tables(NUM_ROWS, nums), oracles.row_keys(7, sum(nums)), canvas)
    assert state.done.all()
    path = np.asarray(path)

    def at(rows, t):
        return path[round(NUM_STEPS * (1 - t)) - 1 if t else -1, rows]

    ends = zip(NUM_ROWS, nums, np.cumsum(nums), strict=True)
    return {world: functools.partial(at, slice(end - num, end)) for world, num, end in ends}


# --- Laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_forward_law_of_the_oracle(family):
    """Its own limits: the data at t = 0, the empty canvas at t = 1, no mass lost between."""
    clean, middle, noised = (MIXTURE.forward(family, t) for t in (0.0, 0.25, 1.0))
    np.testing.assert_allclose([clean[MIXTURE.find(text)] for text in MIXTURE.law], list(MIXTURE.law.values()))
    assert noised[MIXTURE.find("")] > 0.999
    np.testing.assert_allclose([clean.sum(), middle.sum(), noised.sum()], 1, atol=1e-12)


@pytest.mark.parametrize("family, sampler", SAMPLERS)
@pytest.mark.parametrize("t", [0.75, 0.5, 0.25, 0.0])
def test_reverse_marginals_equal_forward_marginals(family, sampler, t):
    """Texts of lengths 0 to 3 with repeated letters; at t = 0 the law of the text is that of the data."""
    at = march(family, sampler)[MIXTURE]
    allowance = DISCRETISATION[sampler] * (1 - t) + START[3]
    tv, bound = oracles.tv_and_bound(at(t), MIXTURE.forward(family, t), allowance=allowance)
    assert tv < bound


@pytest.mark.parametrize("family, sampler", SAMPLERS)
@pytest.mark.parametrize("world", [DISTINCT, REPEATS], ids=["abcde", "aabaa"])
def test_point_mass_is_recovered(world, family, sampler):
    """Every row by "leap" where letters are distinct.

    Otherwise at first order in the step: "leap", and DILM-M, may put two letters into one step that exclude each other
    (aabaa), and "euler" leaves a token out with the probability of test_what_euler_leaves_out.
    """
    at = march(family, sampler)[world]
    complete = (at(0) == world.find(*world.law)).mean()
    outside = (at(0) == world.outside).mean()
    if world is DISTINCT or (family, sampler) == ("joint", "euler"):
        assert outside == 0
    if sampler == "leap" and world is DISTINCT:
        assert complete == 1
    else:
        assert complete > 1 - 4 * L / NUM_STEPS


@pytest.mark.slow
def test_what_euler_leaves_out():
    """DILM-M's "euler" fires with 1 − exp(−γΔ·l): a token is never inserted with probability Π exp(−γΔ)."""
    at = march("independent", "euler")[DISTINCT]
    t = 1 - np.arange(NUM_STEPS) / NUM_STEPS
    left_out = math.exp(-(oracles.rate(t) / np.expm1(oracles.total(t)) / NUM_STEPS).sum())
    missing = L - DISTINCT.num_kept[at(0)]
    error = 4 * math.sqrt(left_out / missing.size / L)
    # a gap that misses several gets one of them a step: more is left out, by a factor of order L/N
    assert left_out - error < missing.mean() / L < left_out * (1 + 2 * L / NUM_STEPS) + error


@pytest.mark.parametrize("sampler", ["leap", pytest.param("euler", marks=pytest.mark.slow)])
def test_all_five_present(sampler):
    """P(5 of 5 tokens present at t = 0.25), docs/MATH.md 1: e^{−σ̄} forward, a little less from the empty canvas."""
    forward = DISTINCT.forward("joint", 0.25)[DISTINCT.find("abcde")]
    assert forward == pytest.approx(math.exp(-oracles.total(0.25)))
    assert forward == pytest.approx(0.363, abs=5e-4)
    exact = present_by_master_equation(5, 0.25)
    assert exact == pytest.approx(0.358, abs=1e-3)
    assert forward - START[5] < exact < forward
    present = (march("joint", sampler)[DISTINCT](0.25) == DISTINCT.find("abcde")).mean()
    assert abs(present - exact) < binomial_error(exact, NUM_ROWS[DISTINCT]) + DISCRETISATION[sampler]


@pytest.mark.slow
def test_rate_scale_of_code_whose_rate_is_not_the_derivative():
    """With the extra factor ln r of docs/MATH.md 1 far too much is there at t = 0.25."""
    scale = math.log(oracles.SIGMA_MAX / oracles.SIGMA_MIN)
    exact = present_by_master_equation(5, 0.25, scale)
    assert exact == pytest.approx(0.917, abs=1e-3)
    present = (march("joint", "euler", scale)[DISTINCT](0.25) == DISTINCT.find("abcde")).mean()
    assert abs(present - exact) < binomial_error(exact, NUM_ROWS[DISTINCT]) + DISCRETISATION["euler"]


def binomial_error(p, num):
    return 4 * math.sqrt(p * (1 - p) / num)


def present_by_master_equation(n, t_end, rate_scale=1.0, num_steps=4000):
    """P(all n tokens are there at t_end) of the exact reverse chain (one text, from the empty canvas), float64."""
    dt = (1 - t_end) / num_steps
    t = 1 - dt * (np.arange(num_steps)[:, None] + 0.5)
    total = oracles.total(t)
    rates = rate_scale * oracles.rate(t) / total * (n - np.arange(n + 1))
    rates[:, :1] *= scipy.stats.poisson.pmf(n, total) / scipy.stats.poisson.sf(n - 1, total)  # 1/S(n)
    prob = np.eye(n + 1)[0]
    for leaves in -np.expm1(-rates * dt):
        prob = prob * (1 - leaves) + np.concatenate([[0], (prob * leaves)[:-1]])
    return prob[-1]


# --- One step --------------------------------------------------------------------------------------------------------


TIMES = [(1.0, 0.9), (0.5, 0.3), (0.3, 0.29), (0.01, 0.0)]


def events_of(left, num_kept, total, rng):
    """How many Poisson events of the noise had come by σ̄ = total, given how many tokens they deleted."""
    if num_kept:
        return left
    support = np.arange(left.max() + 200)  # all that is known of an empty canvas is that l events or more came
    events = np.empty(len(left), int)
    for l in range(left.max() + 1):
        tail = scipy.stats.poisson.pmf(support, total) * (support >= l)
        events[left == l] = rng.choice(support, size=(left == l).sum(), p=tail / tail.sum())
    return events


@pytest.mark.parametrize("t, s", TIMES)
@pytest.mark.parametrize("num_kept", [0, 2])
def test_joint_leap_inserts_as_many_as_the_exact_chain(num_kept, t, s):
    """Given l, simulate the Poisson events of the noise and count which of the first l of them lie beyond s."""
    rng, N = np.random.default_rng(0), 20_000
    p_left = random_probs(rng, L + 1 - num_kept)
    left = rng.choice(len(p_left), size=10 * N, p=p_left)
    events = events_of(left, num_kept, oracles.total(t), rng)
    exact = left - np.minimum(rng.binomial(events, oracles.total(s) / oracles.total(t)), left)

    canvas, scores = heads("joint", p_left, num_kept, num_rows=N)
    times = (jnp.full(N, time, jnp.float32) for time in (t, s))
    count = np.asarray(compiled("joint", "_count_within")(oracles.row_keys(0, N), scores, canvas, *times))
    law = np.bincount(exact, minlength=L + 1) / len(exact)
    tv, bound = oracles.tv_and_bound(count, law, allowance=0.005)  # of the law itself
    assert tv < bound


@pytest.mark.parametrize("num_kept", [0, 2])
def test_time_of_the_third_of_four_insertions(num_kept):
    """Four tokens are missing at t = 0.4: the second event from the first, of the four that deleted them."""
    rng, N, t = np.random.default_rng(0), 20_000, 0.4
    left = np.full(N, 4)
    events = events_of(left, num_kept, oracles.total(t), rng)
    rings = [np.sort(rng.uniform(0, oracles.total(t), num))[1] for num in events]

    canvas, _ = heads("joint", np.eye(L + 1)[4], num_kept, num_rows=N)
    of_rows = [jnp.asarray(left), jnp.full(N, t, jnp.float32), jnp.full(N, 3)]
    times = compiled("joint", "_next_time")(oracles.row_keys(0, N), canvas, *of_rows)
    assert scipy.stats.ks_2samp(rings, oracles.total(np.asarray(times, np.float64))).pvalue > 1e-4


@pytest.mark.parametrize("t, s", TIMES)
def test_independent_leap_fires_as_often_as_the_exact_chain(t, s):
    """Each missing token went at an exponential time, known to be before t."""
    rng = np.random.default_rng(0)
    p_left = random_probs(rng, L + 1)
    N = 200_000
    left = rng.choice(len(p_left), size=N, p=p_left)
    still_missing = rng.binomial(left, math.expm1(-oracles.total(s)) / math.expm1(-oracles.total(t)))
    fires, expected = (still_missing < left).mean(), (left - still_missing).mean()
    canvas, scores = heads("independent", p_left, 0)
    step = compiled("independent", "_fire_probability")(scores, canvas, jnp.float32([t]), jnp.float32([s]))
    probability, due = (float(value[0, 1]) for value in step)  # of the gap after BOS
    assert abs(probability - fires) < 4 * math.sqrt(max(fires * (1 - fires), 1e-4) / N)
    assert due == pytest.approx(expected, abs=4 * L / math.sqrt(N))


@pytest.mark.parametrize("t", [1.0, 0.5, 0.01])
def test_insertion_rates(t):
    """The rates of docs/MATH.md 4 in float64; on the empty canvas the mean of l/S(l), not l/S(l) of the mean."""
    p_left = random_probs(np.random.default_rng(1), L + 1)
    left, total = np.arange(L + 1), oracles.total(t)
    sigma = oracles.rate(t)
    S = scipy.stats.poisson.sf(left - 1, total) / scipy.stats.poisson.pmf(left, total)
    by_family = {
        ("joint", 0): sigma / total * (p_left * left / S).sum(),
        ("joint", 2): sigma / total * (renormalised(p_left[: L - 1]) * left[: L - 1]).sum(),
        ("independent", 0): sigma / math.expm1(total) * (p_left * left).sum(),
    }
    for (family, num_kept), expected in by_family.items():
        canvas, scores = heads(family, p_left, num_kept)
        rate = np.asarray(compiled(family, "insertion_rate")(scores, canvas, jnp.float32([t])))
        assert rate.max() == pytest.approx(expected, rel=1e-5)
        if family == "independent":
            np.testing.assert_array_equal(rate > 0, canvas.open_gap)


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_one_step_of_each_sampler(family):
    """How often a step (t, s] fires: "leap" exactly so, "euler" at the rate of t, or of eps where t is below eps.

    One token is missing from a row of two letters (in one gap).
    """
    eps, N, scale = 0.1, 2000, 2.0
    steps = [(0.5, 0.47), (0.05, 0.04)]
    process = oracles.make_process(family, 5, L, eps=eps)
    plain = process.samplers(SamplingOptions(num_steps=1))
    scaled = process.samplers(SamplingOptions(num_steps=1, rate_scale=scale))
    draws = {"leap": plain["leap"].draw, "euler": plain["euler"].draw, "scaled": scaled["euler"].draw}
    canvas, scores = heads(family, np.eye(L + 1)[1], 2, num_rows=N * len(steps))
    if family == "independent":
        canvas = canvas.replace(open_gap=canvas.open_gap.at[:, 2:].set(False))
    t, s = (jnp.repeat(jnp.float32(times), N) for times in zip(*steps, strict=True))

    @jax.jit
    def fires(key, scores, canvas):
        return {name: draw(key, scores, canvas, t, s, Filters()).insert.any(-1) for name, draw in draws.items()}

    fired = fires(oracles.row_keys(0, len(t)), scores, canvas)
    for (t, s), rows in zip(steps, (slice(N), slice(N, None)), strict=True):
        at = max(t, eps)
        if family == "joint":
            still_missing, coefficient = oracles.total(s) / oracles.total(t), oracles.rate(at) / oracles.total(at)
        else:
            still_missing = math.expm1(-oracles.total(s)) / math.expm1(-oracles.total(t))
            coefficient = oracles.rate(at) / math.expm1(oracles.total(at))
        due = coefficient * (t - s)
        expected = {"leap": 1 - still_missing, "euler": due, "scaled": scale * due}
        if family == "independent":
            expected |= {name: -math.expm1(-expected[name]) for name in ("euler", "scaled")}
        for name, p in expected.items():
            assert abs(fired[name][rows].mean() - p) < binomial_error(p, N), (name, t)


def random_probs(rng, num):
    return renormalised(rng.uniform(0.1, 1, num))


def renormalised(p):
    return p / p.sum()


def heads(family, p_left, num_kept, num_rows=1):
    """A canvas of `num_kept` letters and Scores with the length posterior p_left (in every gap for DILM-M)."""
    canvas = oracles.canvas_of(["a" * num_kept] * num_rows, ROOM["num_letters"], L)
    S, K = canvas.num_columns, L + 1
    logits = np.full(K, -np.inf)
    with np.errstate(divide="ignore"):
        logits[: len(p_left)] = np.log(p_left)
    shape = (num_rows, K) if family == "joint" else (num_rows, S, K)
    token_logits = jnp.zeros((num_rows, S, oracles.NUM_SPECIAL + ROOM["num_letters"]))
    length_logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), shape)
    return canvas, Scores(logits=token_logits, length_logits=length_logits, stop_logits=None)


@functools.cache
def compiled(family, method):
    return jax.jit(getattr(oracles.make_process(family, ROOM["num_letters"], L), method))
