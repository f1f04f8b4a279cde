"""What every family of the registry owes, whatever its noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilm_jax import selfcheck, worlds
from dilm_jax.processes.registry import PROCESSES

A, B_ = worlds.NUM_SPECIAL, worlds.NUM_SPECIAL + 1
TEXTS = [
    worlds.plain([A, B_, A, A]),
    worlds.prompted([(A, True), (B_, False), (A, False)], [False, True, True, True]),
    worlds.prompted([(B_, True), (A, False), (B_, True)], [False, True, True, False]),
]
each_family = pytest.mark.parametrize("family", PROCESSES)


def corrupted(family, max_length, rows=slice(None)):
    """64 rows of noise on the texts in turn; those of `rows` alone."""
    texts, num = TEXTS * 22, 64
    process = selfcheck.Checked(family).make(loss_config=selfcheck.ELBO, max_length=max_length)
    x0 = jax.tree.map(lambda x: x[rows], worlds.to_example(texts[:num], max_length))
    key, t = jax.random.split(jax.random.key(0), num)[rows], jnp.linspace(0.05, 1, num)[rows]
    canvas, _ = process.corrupt(key, x0, t)
    return canvas, texts[:num]


@each_family
def test_noise_does_not_depend_on_the_size_of_the_canvas(family):
    small, large = (corrupted(family, max_length)[0] for max_length in (4, 9))
    for name in ("tokens", "frozen"):
        np.testing.assert_array_equal(getattr(small, name), getattr(large, name)[:, : small.num_columns])


@each_family
def test_noise_of_a_row_depends_on_that_row_alone(family):
    whole, part = corrupted(family, 4)[0], corrupted(family, 4, slice(9, 13))[0]
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[9:13], y), whole, part)


@each_family
def test_frozen_tokens_are_never_lost(family):
    canvas, texts = corrupted(family, 4)
    for row, text in enumerate(texts):
        kept = np.asarray(canvas.tokens[row])[np.asarray(canvas.frozen[row])]
        wanted = [word for word, frozen in zip(text.tokens, text.frozen, strict=True) if frozen]
        assert [word for word in kept.tolist() if word >= worlds.NUM_SPECIAL] == wanted
