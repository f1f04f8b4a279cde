"""Scores that are not held: memory and precision. (Their values and gradients: test_packing.py.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilm_jax.scores import FusedScores, TokenHead, fused_lse, num_chunks


@pytest.mark.parametrize(
    "rows, columns, vocab_size, width, share", [(8, 128, 30522, 128, 0.25), (4, 1024, 50257, 768, 0.1)]
)
def test_log_sums_need_a_part_of_the_memory_of_all_scores(rows, columns, vocab_size, width, share):
    """Forward and backward, by ahead-of-time analysis, outputs not counted."""
    predictable = np.arange(vocab_size) > 4
    shapes = (
        jax.ShapeDtypeStruct((rows, columns, width), jnp.float32),
        jax.ShapeDtypeStruct((width, vocab_size), jnp.float32),
    )

    def temporaries(lse):
        gradient = jax.jit(jax.grad(lambda hidden, kernel: lse(hidden, kernel).sum(), (0, 1)))
        return gradient.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    def held(hidden, kernel):
        return jax.nn.logsumexp(jnp.where(predictable, hidden @ kernel, -jnp.inf), axis=-1)

    def in_chunks(hidden, kernel):
        of = head(predictable=tuple(predictable.tolist()))
        return fused_lse(hidden, kernel, of, num_chunks(rows * columns, vocab_size))

    assert temporaries(in_chunks) < share * temporaries(held)


def head(**changed):
    return TokenHead(**{"predictable": (True,) * 8, "dtype": "float32", "precision": None} | changed)


def fused(hidden, kernel, of):
    log_sums = fused_lse(hidden, kernel, of, 1)
    return FusedScores(hidden, kernel, log_sums, packing=None, length_logits=None, stop_logits=None, head=of)


def test_gradients_of_single_scores_are_summed_in_float32():
    """Of one token in one gap, asked for 4,096 times: in bfloat16 a sum of ones ends at 256."""
    hidden, kernel = jnp.ones((1, 2, 4)), jnp.ones((4, 8))
    asked = jnp.ones((1, 4096), jnp.int32)
    of = head(dtype="bfloat16")
    of_hidden, of_kernel = jax.grad(lambda h, k: fused(h, k, of).at(asked, asked).sum(), (0, 1))(hidden, kernel)
    np.testing.assert_array_equal(of_hidden[0, 1], np.full(4, 4096))
    np.testing.assert_array_equal(of_kernel[:, 1], np.full(4, 4096))
    assert of_hidden.sum() == of_kernel.sum() == 4 * 4096


def test_the_precision_of_products_is_that_of_the_network():
    """In the backward pass and in what is asked for later, too."""
    hidden, kernel, asked = jnp.ones((1, 2, 4)), jnp.ones((4, 8)), jnp.ones((1, 3), jnp.int32)

    def loss(hidden, kernel, of):
        scores = fused(hidden, kernel, of)
        return scores.lse().sum() + scores.at(asked, asked).sum() + scores.outer(asked).sum() + scores.dense().sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)), static_argnums=2)(hidden, kernel, head(precision="highest")))
    assert text.count("dot_general") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 8
