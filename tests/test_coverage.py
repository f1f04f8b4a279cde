"""The schedule report, against scipy and against the schedules it proposes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import worlds
from dilm_jax import coverage, schedules

SCHEDULE = schedules.LogLinear(sigma_min=1.0, sigma_max=8.0)
LENGTHS = [0, 1, 3, 3, 3, 7]


def process(family, schedule=SCHEDULE):
    return worlds.process(family, schedule=schedule, max_length=8)


@pytest.mark.parametrize("family", worlds.FAMILIES)
def test_laws_of_what_is_left(family):
    report = coverage.coverage(process(family), LENGTHS, num_times=5)
    np.testing.assert_array_equal(report.lengths, [0, 1, 3, 7])
    np.testing.assert_allclose(report.share, np.array([1, 1, 3, 1]) / 6)
    for t, kept in zip(report.times, report.kept, strict=True):
        total = float(SCHEDULE.total(jnp.float32(t)))
        for n, probs in zip(report.lengths, kept, strict=True):
            if family == "joint":
                expected = scipy.stats.poisson.pmf(n - np.arange(9), total)
                expected[0] = scipy.stats.poisson.sf(n - 1, total)
            else:
                expected = scipy.stats.binom.pmf(np.arange(9), n, np.exp(-total))
            np.testing.assert_allclose(probs, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(report.p_empty, report.kept[-1, :, 0], atol=1e-6)
    assert report.p_start_nonempty == pytest.approx(report.share @ report.start_nonempty)


@pytest.mark.parametrize("schedule", [SCHEDULE, schedules.Constant(sigma_min=2.0, sigma_max=2.0)])
@pytest.mark.parametrize("family", worlds.FAMILIES)
def test_a_proposal_covers_the_lengths(family, schedule):
    made = process(family, schedule)
    low, high = coverage.propose(made, LENGTHS, target=0.02)
    assert high / low == pytest.approx(schedule.sigma_max / schedule.sigma_min)
    made = dataclasses.replace(made, schedule=dataclasses.replace(schedule, sigma_min=low, sigma_max=high))
    assert coverage.coverage(made, LENGTHS).p_start_nonempty == pytest.approx(0.02, rel=1e-3)


@pytest.mark.parametrize("family", worlds.FAMILIES)
def test_one_line_where_the_schedule_does_not_cover(family):
    line = coverage.warning(process(family), LENGTHS)
    assert line is not None and "\n" not in line and "would leave 0.5%" in line
    enough = schedules.LogLinear(sigma_min=10.0, sigma_max=80.0)
    assert coverage.warning(process(family, enough), LENGTHS) is None


def test_wrong_lengths_are_named():
    with pytest.raises(ValueError, match="at least one length"):
        coverage.coverage(process("joint"), [])
    with pytest.raises(ValueError, match="lengths run from 2 to 9, outside .0, 8."):
        coverage.coverage(process("joint"), [2, 9])
    with pytest.raises(ValueError, match="every length is 0"):
        coverage.propose(process("joint"), [0, 0])
    with pytest.raises(ValueError, match="target must be in .0, 1., got 1"):
        coverage.propose(process("joint"), [1], target=1)


def test_plot(tmp_path):
    coverage.plot(coverage.coverage(process("joint"), LENGTHS), tmp_path / "coverage.png")
    assert (tmp_path / "coverage.png").stat().st_size > 1000
