"""The event-driven samplers under an oracle network: the data's law, without a grid to let go to zero."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import oracles
from dilm_jax.sampling import Filters, SamplingOptions, generate
from oracles import World

L = 5
ROOM = {"num_letters": 5, "max_length": L, "num_states": 32}
MIXTURE = World({"": 0.05, "b": 0.15, "ab": 0.2, "aa": 0.1, "aba": 0.25, "abb": 0.15, "bbb": 0.1}, **ROOM)
CORRELATED = World({"aba": 0.3, "bab": 0.3, "a": 0.2, "bbbbb": 0.2}, **ROOM)  # gaps that know of each other
DISTINCT = World({"abcde": 1.0}, **ROOM)
NUM_ROWS = {MIXTURE: 6_000, CORRELATED: 6_000, DISTINCT: 200}
WORLDS = {"mixture": MIXTURE, "correlated": CORRELATED, "distinct": DISTINCT}
# One call a token is an approximation for DILM-S: the length left and the token are drawn apart (TV 0.25 on
# "correlated"). For DILM-M it is exact while the number missing does not rise at an insertion (0.01).
CASES = [(family, 2, world) for family in oracles.FAMILIES for world in WORLDS]
ONE_CALL = [("joint", 1, "distinct"), *(("independent", 1, world) for world in WORLDS)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in ONE_CALL]


@functools.cache
def samples(family, calls, events_per_call=1):
    """{world: (state of each row, NFE, tokens)}, and the saturated moves of all."""
    options = SamplingOptions(num_steps=1, calls=calls, events_per_call=events_per_call)
    sampler = oracles.make_process(family, ROOM["num_letters"], L).samplers(options)["event"]
    nums = list(NUM_ROWS.values())

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})
    def run(tables, key, canvas):
        state = generate(oracles.oracle_of_rows(family, tables), sampler, key, canvas, Filters())
        return tables.find(state.canvas), state.nfe, state.canvas.length - 2, state.saturated, state.truncated

    canvas = oracles.canvas_of([""] * sum(nums), ROOM["num_letters"], L)
    x, nfe, length, saturated, truncated = run(oracles.tables(NUM_ROWS, nums), oracles.row_keys(3, sum(nums)), canvas)
    assert events_per_call > 1 or not truncated.any()  # gaps drawn apart may ask for more than fits
    of_world = np.repeat(np.arange(len(nums)), nums)
    arrays = [np.asarray(array) for array in (x, nfe, length)]
    return {w: [a[of_world == i] for a in arrays] for i, w in enumerate(NUM_ROWS)}, int(saturated.sum())


def law_of_the_empty_start(family, world):
    """p(x0 | nothing left at t = 1) over states: what the exact reverse chain makes of the empty canvas."""
    total = oracles.total(1.0)
    probs = np.zeros(world.outside + 1)
    for text, p in world.law.items():
        n = len(text)
        empty = scipy.stats.poisson.sf(n - 1, total) if family == "joint" else (-np.expm1(-total)) ** n
        probs[world.find(text)] = p * empty
    return probs / probs.sum()


@pytest.mark.parametrize("family, calls, world", CASES)
def test_samples_have_the_law_of_the_data(family, calls, world):
    by_world, saturated = samples(family, calls)
    world = WORLDS[world]
    draws, _, _ = by_world[world]
    below_eps = L * oracles.rate(0.0) * oracles.EPS  # thinning may leave out a token that is still missing at eps
    allowance = below_eps + (0.01 if calls == 1 else 0.0)
    tv, bound = oracles.tv_and_bound(draws, law_of_the_empty_start(family, world), allowance=allowance)
    assert tv < bound
    if calls == 2:
        assert saturated == 0


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_network_calls_follow_the_length(family):
    """Two a token and one that finds nothing missing (order statistics); thinning has its rejections on top."""
    for world, (_, nfe, length) in samples(family, 2)[0].items():
        if family == "joint":
            assert (nfe <= 2 * length + 1).all() and (nfe >= 2 * length).all()
        elif world is DISTINCT:
            assert nfe.mean() < 3 * L


def test_earlier_times_of_independent_noise():
    """1 − ρ_s = (1 − ρ_t)·exp(log_factor) in float64, at both ends of what float32 holds."""
    process = oracles.make_process("independent", 2, L)
    for t in (1e-6, 1e-4, 0.01, 0.3, 1.0):
        for log_factor in (-1e-6, -1e-3, -0.5, -3.0, -20.0):
            s = float(process.earlier(jnp.float32([t]), jnp.float32([log_factor]))[0])
            total = -np.log1p(np.expm1(-oracles.total(np.float64(t))) * np.exp(log_factor))
            assert oracles.total(np.float64(s)) == pytest.approx(total, rel=1e-4)


# Total variation that two insertions from one call cost in these worlds, where letters say nearly all of each other:
# gaps are drawn apart, and DILM-S's length from its tokens.
TWO_EVENTS = {
    ("joint", "mixture"): 0.25, ("joint", "correlated"): 0.52, ("joint", "distinct"): 0.0,
    ("independent", "mixture"): 0.25, ("independent", "correlated"): 0.39, ("independent", "distinct"): 0.0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family, world", TWO_EVENTS)
def test_several_events_of_a_call(family, world):
    draws, nfe, length = samples(family, 2, events_per_call=2)[0][WORLDS[world]]
    tv, bound = oracles.tv_and_bound(draws, law_of_the_empty_start(family, WORLDS[world]), allowance=0)
    assert tv == pytest.approx(TWO_EVENTS[family, world], abs=bound)
    assert (nfe <= length + 1).all()
    if world == "distinct":  # in the others texts are so short that most calls insert one token
        assert nfe.mean() < length.mean()
