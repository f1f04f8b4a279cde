"""Scores that are not held: memory and precision. (Their values and gradients: test_packing.py.)"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import temporary_bytes
from dilm_jax.scores import FusedScores, Scores, TokenHead, fused_lse, num_chunks


def token_loss(scores, gap, token):
    """As the joint family's: one softmax over columns and ids, and single scores, asked for twice."""
    log_p = scores.at(gap, token) - jax.nn.logsumexp(scores.lse(), axis=-1, keepdims=True)
    return log_p.sum() + jnp.sin(scores.at(gap + 1, token)).sum()


def temporaries(make_scores, rows, columns, vocab_size, width):
    """Bytes for value and gradient, by ahead-of-time analysis, outputs not counted."""
    shapes = [((rows, columns, width), jnp.float32), ((width, vocab_size), jnp.float32)]
    shapes += [((rows, columns - 2), jnp.int32)] * 2

    def loss(hidden, kernel, gap, token):
        return token_loss(make_scores(hidden, kernel), gap, token)

    lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    return temporary_bytes(lowered.compile())


@pytest.mark.parametrize("shape, share", [((8, 128, 30522, 768), 0.25), ((4, 1024, 50257, 768), 0.1)])
def test_a_loss_needs_a_part_of_the_memory_of_all_scores(shape, share):
    """With a kernel that is itself a quarter of that, and as much in its gradient: neither is copied."""
    rows, columns, vocab_size, _ = shape
    of = head(predictable=tuple((np.arange(vocab_size) > 4).tolist()))
    chunks = num_chunks(rows * columns, vocab_size, "cpu")

    def held(hidden, kernel):
        return Scores(of.scores(hidden, kernel), length_logits=None, stop_logits=None)

    all_scores = temporaries(held, *shape)
    assert temporaries(functools.partial(fused, of=of, chunks=chunks), *shape) < share * all_scores
    assert temporaries(functools.partial(fused, of=of, chunks=1), *shape) > share * all_scores


@pytest.mark.parametrize("vocab_size", [9, 10, 24])
@pytest.mark.parametrize("chunks", [1, 4, 30])
def test_chunks_are_one_softmax(vocab_size, chunks):
    """However the vocabulary is cut: a prime number of ids, parts of several shards, the last chunk short."""
    rng = np.random.default_rng(0)
    hidden, kernel, g = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((2, 5, 3), (3, vocab_size), (2, 5)))
    of = head(predictable=tuple((np.arange(vocab_size) % 5 > 0).tolist()))

    def in_chunks(hidden, kernel):
        return (g * fused_lse(hidden, kernel, of, chunks)).sum()

    def held(hidden, kernel):
        return (g * jax.nn.logsumexp(of.scores(hidden, kernel), axis=-1)).sum()

    got, want = (jax.value_and_grad(loss, (0, 1))(hidden, kernel) for loss in (in_chunks, held))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def head(**changed):
    return TokenHead(**{"predictable": (True,) * 8, "dtype": "float32", "precision": None} | changed)


def fused(hidden, kernel, of, chunks=1):
    log_sums = fused_lse(hidden, kernel, of, chunks)
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
