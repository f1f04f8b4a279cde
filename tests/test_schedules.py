import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from scipy import integrate

import worlds
from dilm_jax.schedules import (
    SCHEDULES,
    TIME_SAMPLING,
    Constant,
    Geometric,
    LogLinear,
    evenly_spread,
    spread_cells,
    stratified,
)

ALL = [
    LogLinear(sigma_min=3, sigma_max=30),
    LogLinear(sigma_min=50, sigma_max=3000),
    LogLinear(sigma_min=0.1, sigma_max=20),
    Constant(sigma_min=12, sigma_max=12),
    Geometric(sigma_min=0.01, sigma_max=20),
]
EPS = worlds.EPS
each_schedule = pytest.mark.parametrize("schedule", ALL, ids=str)
coarse_times = np.linspace(0, 1, 101, dtype=np.float32)


@each_schedule
def test_rate_is_the_derivative_of_total(schedule):
    derivative = jax.jit(jax.vmap(jax.grad(schedule.total)))(coarse_times)
    np.testing.assert_allclose(schedule.rate(jnp.asarray(coarse_times)), derivative, rtol=1e-6)


@each_schedule
def test_totals_and_times_invert_each_other(schedule):
    t = jnp.asarray(coarse_times)
    assert schedule.total(jnp.float32(0)) == 0 and schedule.inverse_total(jnp.float32(0)) == 0
    np.testing.assert_allclose(schedule.inverse_total(schedule.total(t)), t, rtol=1e-5, atol=1e-7)
    total = schedule.total(t)
    np.testing.assert_allclose(schedule.total(schedule.inverse_total(total)), total, rtol=1e-5)


def test_log_linear_is_the_papers():
    """σ_t = σmin·r^t between its ends, σ̄_1 = (σmax − σmin)/ln r."""
    schedule = LogLinear(sigma_min=3, sigma_max=30)
    np.testing.assert_allclose(schedule.rate(jnp.array([0.0, 0.5, 1.0])), [3, 3 * math.sqrt(10), 30], rtol=1e-6)
    np.testing.assert_allclose(schedule.total(jnp.float32(1)), 27 / math.log(10), rtol=1e-6)


@pytest.mark.parametrize(
    "name, sigma_min, sigma_max, message",
    [
        ("log_linear", 3, 3, "LogLinear needs 0 < sigma_min < sigma_max, got 3 and 3"),
        ("log_linear", 0, 3, "LogLinear needs 0 < sigma_min < sigma_max, got 0 and 3"),
        ("geometric", 5, 1, "Geometric needs 0 < sigma_min < sigma_max, got 5 and 1"),
        ("constant", 1, 2, "a constant schedule needs 0 < sigma_min = sigma_max, got 1 and 2"),
        ("constant", -1, -1, "a constant schedule needs 0 < sigma_min = sigma_max, got -1 and -1"),
    ],
)
def test_impossible_schedules_are_refused(name, sigma_min, sigma_max, message):
    with pytest.raises(ValueError, match=message):
        SCHEDULES[name](sigma_min=sigma_min, sigma_max=sigma_max)


# --- Drawing times ---------------------------------------------------------------------------------------------------

INTEGRANDS = [np.ones_like, lambda t: t, lambda t: np.exp(-20 * t), lambda t: np.cos(9 * t) / np.sqrt(t)]


def _times(name, family, schedule):
    """As the family itself builds them."""
    return dataclasses.replace(worlds.process(family, schedule=schedule), time_sampling=name).times


@pytest.mark.parametrize("family", worlds.FAMILIES)
@pytest.mark.parametrize("name", sorted(TIME_SAMPLING))
@each_schedule
def test_weighted_times_are_unbiased(name, family, schedule):
    """E[weight·f(t)] = the mean of f over [ε, 1], by the midpoint rule over u, for times near both ends too."""
    N = 2**16
    sampler = _times(name, family, schedule)
    t, weight = jax.jit(sampler)((np.arange(N, dtype=np.float32) + 0.5) / N)
    t, weight = np.asarray(t, np.float64), np.asarray(weight, np.float64)
    assert EPS <= t.min() < 1.01 * EPS and 1 - 1e-3 < t.max() <= 1
    for f in INTEGRANDS:
        exact = integrate.quad(f, EPS, 1)[0] / (1 - EPS)
        np.testing.assert_allclose(np.mean(weight * f(t)), exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", worlds.FAMILIES)
def test_importance_weights_undo_the_coefficient(family):
    """Where the coefficient is large, weight × coefficient is bounded; the weight itself is bounded everywhere."""
    process = worlds.process(family)
    N = 2**12
    t, weight = _times("importance", family, worlds.SCHEDULE)((jnp.arange(N) + 0.5) / N)
    rate, total = process.schedule.rate(t), process.schedule.total(t)
    coefficient = rate / (total if family == "joint" else jnp.expm1(total))
    assert np.asarray(weight * coefficient * jnp.sqrt(total / (1 + total))).max() < 10 < np.asarray(coefficient).max()
    assert np.asarray(weight).max() < 10.1


@pytest.mark.parametrize("name", sorted(TIME_SAMPLING))
def test_times_reach_both_ends(name):
    t, weight = _times(name, "joint", ALL[0])(jnp.array([0.0, np.nextafter(np.float32(1), np.float32(0))]))
    np.testing.assert_allclose(t, [EPS, 1], rtol=1e-4)
    assert np.isfinite(np.asarray(weight)).all()


# --- Stratification --------------------------------------------------------------------------------------------------


def test_one_time_in_each_cell_however_the_batch_is_split():
    B = 64
    keys, index = jax.random.split(jax.random.key(0), B), jnp.arange(B)
    u = stratified(keys, index, B)
    assert (np.floor(np.asarray(u) * B) == np.arange(B)).all()
    assert 0 < np.std(np.asarray(u) * B % 1) < 1  # and jittered within it
    for part in (slice(0, 16), slice(16, 64), slice(63, 64)):
        assert (np.asarray(stratified(keys[part], index[part], B)) == np.asarray(u[part])).all()


@pytest.mark.parametrize("B", [1, 2, 3, 4, 6, 64, 96, 500, 512])
def test_every_shard_gets_small_and_large_times(B):
    cells = np.asarray(spread_cells(B))
    assert sorted(cells) == list(range(B))
    for shards in (n for n in (2, 4, 8) if B % n == 0 and B // n >= 8):
        means = cells.reshape(shards, -1).mean(-1) / B
        assert np.abs(means - 0.5).max() < 0.125


def test_stratified_stays_below_one():
    keys, index = jax.random.split(jax.random.key(0), 512), jnp.full(512, 2**24 - 1)
    assert np.asarray(stratified(keys, index, 2**24)).max() < 1


def test_evenly_spread_places():
    """Any consecutive ones cover [0, 1) as a grid would, other seeds elsewhere, each by its seed and index alone."""
    seed, index = jnp.full(1000, 7, jnp.uint32), 123_456 + jnp.arange(1000)
    place = np.asarray(evenly_spread(seed, index))
    assert place.min() >= 0 and place.max() < 1
    assert np.abs(np.sort(place) - (np.arange(1000) + 0.5) / 1000).max() < 3 / 1000
    np.testing.assert_array_equal(evenly_spread(seed[500:501], index[500:501]), place[500:501])
    others = np.asarray(evenly_spread(jnp.arange(1000, dtype=jnp.uint32), jnp.zeros(1000, jnp.int32)))
    assert scipy.stats.kstest(others, "uniform").pvalue > 1e-4
