import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from dilm_jax.special import log_S

TOTAL_MAX = 1e4
NUMBERS = [0, 1, 2, 3, 7, 28, 100, 300, 533, 1022, 2048, 4095, 4096]
TOTALS = [1e-6, 1e-4, 1e-2, 0.3, 1.0, 5.0, 11.726, 30.0, 107.5, 720.0, 1500.0, 4000.0, 8752.117, 1e4]


@pytest.fixture(scope="module")
def all_log_S():
    return np.asarray(jax.jit(lambda total: log_S(4096, total, TOTAL_MAX))(jnp.array(TOTALS, jnp.float32)))


def _exact(n, total):
    with mpmath.workdps(40):
        return float(mpmath.log(mpmath.hyp1f1(1, n + 1, mpmath.mpf(float(np.float32(total))))))


def test_log_S_against_mpmath(all_log_S):
    """To 2e-6 relative, where log S is as small as 2e-10 and where it is as large as 1e4."""
    exact = np.array([[_exact(n, total) for n in NUMBERS] for total in TOTALS])
    np.testing.assert_allclose(all_log_S[:, NUMBERS], exact, rtol=2e-6)


def test_log_S_of_the_page(all_log_S):
    """The values of docs/MATH.md 3, which shorter series miss."""
    assert round(float(all_log_S[TOTALS.index(107.5), 28]), 2) == 44.42
    assert round(float(all_log_S[TOTALS.index(720.0), 300]), 2) == 161.13


def test_S_of_zero_is_the_exponential(all_log_S):
    np.testing.assert_allclose(all_log_S[:, 0], TOTALS, rtol=2e-6)


@pytest.mark.parametrize("n_max, total_max", [(0, 2.0), (5, 0.1), (5, 2.0), (40, 2.0)])
def test_log_S_does_not_depend_on_its_bounds(n_max, total_max):
    """The static sizes set the cost only; no noise gives S = 1."""
    total = jnp.array([0.0, 0.01, 0.1], jnp.float32)
    log_s = np.asarray(jax.jit(lambda total: log_S(n_max, total, total_max))(total))
    assert log_s.shape == (3, n_max + 1) and (log_s[0] == 0).all()
    exact = [[_exact(n, x) for n in range(n_max + 1)] for x in total]
    np.testing.assert_allclose(log_s, exact, rtol=2e-6)
