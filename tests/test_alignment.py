"""Where deleted tokens may have been, against the enumeration of all masks and exact integer counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import worlds
from dilm_jax import alignment
from dilm_jax import canvas as canvas_lib
from dilm_jax.canvas import Example

gap_posterior = jax.jit(alignment.gap_posterior)


def test_gap_posterior_is_that_of_all_masks():
    """Prompts, infills and texts without a free token included."""
    world = worlds.small_world()
    canvas, targets = worlds.corrupted(world.pairs, np.full(len(world.pairs), 0.5))
    posterior = np.asarray(gap_posterior(targets.x0, canvas))
    for pair, (text, _) in enumerate(world.pairs):
        same = [
            dropped
            for (other, dropped), state in zip(world.pairs, world.pair_state, strict=True)
            if other == text and state == world.pair_state[pair]
        ]
        expected = np.zeros((worlds.S, worlds.L))
        for dropped in same:
            for k in dropped:
                expected[1 + sum(j not in dropped for j in range(k)), k] += 1 / len(same)
        np.testing.assert_allclose(posterior[pair], expected, atol=1e-6)


def random_case(rng, B, L, num_letters, keep):
    """Texts with frozen tokens among them, and a mask of each."""
    tokens = rng.integers(5, 5 + num_letters, (B, L)).astype(np.int32)
    x0 = Example(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(rng.integers(0, L + 1, B), jnp.int32),
        frozen=jnp.asarray(rng.random((B, L)) < 0.1),
        open_gap=jnp.ones((B, L + 1), bool),
        num_bytes=jnp.zeros(B, jnp.int32),
    )
    x0 = x0.replace(length=x0.length.at[0].set(L))
    dropped = x0.free & jnp.asarray(rng.random((B, L)) >= keep)
    canvas, _ = canvas_lib.drop_tokens(x0, dropped, worlds.VOCABULARY)
    return x0, canvas, np.asarray(dropped)


def exact_posterior(tokens, frozen, kept):
    """By integer counts of prefixes and suffixes."""
    left = [(tokens[k], frozen[k]) for k in kept]
    n, m = len(tokens), len(left)

    def step(ways, k, columns):
        """Ways to read columns 0..j-1 from the tokens so far, with token k after them."""
        read = [0] + [ways[j] if columns[j] == (tokens[k], frozen[k]) else 0 for j in range(m)]
        return [(0 if frozen[k] else ways[j]) + read[j] for j in range(m + 1)]

    before, after = [[1] + [0] * m], [[1] + [0] * m]
    for k in range(n):
        before.append(step(before[-1], k, left))
    for k in reversed(range(n)):
        after.append(step(after[-1], k, left[::-1]))
    after = [ways[::-1] for ways in after[::-1]]
    posterior = np.zeros((m + 1, n))
    for k in range(n):
        for i in range(m + 1):
            if not frozen[k]:
                posterior[i, k] = before[k][i] * after[k + 1][i] * 10**12 // before[n][m] / 1e12
    return posterior


@pytest.mark.parametrize(
    "B, L, num_letters, keep, rows",
    [(200, 12, 2, 0.5, 200), pytest.param(8, 1024, 2, 0.3, 2, marks=pytest.mark.slow)],
)
def test_gap_posterior_equals_integer_counts(B, L, num_letters, keep, rows):
    x0, canvas, dropped = random_case(np.random.default_rng(0), B, L, num_letters, keep)
    posterior = np.asarray(gap_posterior(x0, canvas))
    assert np.isfinite(posterior).all()
    np.testing.assert_allclose(posterior.sum((-2, -1)), dropped.sum(-1), rtol=1e-5, atol=1e-6)
    for b in range(rows):
        n = int(x0.length[b])
        kept = np.flatnonzero(~dropped[b, :n])
        tokens, frozen = np.asarray(x0.tokens[b, :n]).tolist(), np.asarray(x0.frozen[b, :n]).tolist()
        expected = exact_posterior(tokens, frozen, kept)
        np.testing.assert_allclose(posterior[b, 1 : 2 + len(kept), :n], expected, atol=2e-6)


def test_a_canvas_of_another_text_has_no_posterior():
    x0 = worlds.to_example([worlds.plain([5, 5])])
    canvas = canvas_lib.to_canvas(worlds.to_example([worlds.plain([6])]), worlds.VOCABULARY)
    assert np.isnan(gap_posterior(x0, canvas)).any()
