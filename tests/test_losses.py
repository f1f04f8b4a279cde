import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import worlds
from dilm_jax import canvas as canvas_lib
from dilm_jax import losses
from dilm_jax.canvas import to_canvas
from dilm_jax.scores import Scores
from worlds import FAMILIES, LETTERS, VOCABULARY, V, delete, equivalent, insertions, prompted, to_example

each_family = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def _batch():
    """Every (text, mask) of the small world at random times, with random scores of no table: row by row."""
    pairs = worlds.small_world().pairs
    t = np.random.default_rng(0).uniform(worlds.EPS, 1.0, len(pairs))
    return worlds.corrupted(pairs, t)


def _table(family, seed=3):
    return worlds.random_table(family, len(worlds.small_world().pairs), seed, scale=2.0)


def _losses(process, batch, table):
    canvas, targets = batch
    return process.loss(worlds.table_scores(table, np.arange(len(targets.t))), canvas, targets)


@functools.cache
def _jitted(family, kernel, max_weight):
    process = worlds.process(family, kernel=kernel, max_weight=max_weight)
    return jax.jit(functools.partial(_losses, process, _batch()))


def _rows(family, table, kernel="exact", max_weight=math.inf):
    """{part: [rows]} of numpy arrays."""
    parts = _jitted(family, kernel, max_weight)(table)
    return {name: np.asarray(part) for name, part in parts.items()}


# --- Runs ------------------------------------------------------------------------------------------------------------


def _long_texts(num, max_length):
    """Letters that repeat, frozen tokens and closed gaps among them."""
    rng, texts = np.random.default_rng(1), []
    for _ in range(num):
        n = rng.integers(max_length + 1)
        tokens, frozen = rng.choice(LETTERS, n, p=[0.75, 0.25]), rng.random(n) < rng.choice([0.0, 0.3])
        open_gap = rng.random(n + 1) < 0.7
        open_gap[:-1] |= ~frozen
        open_gap[1:] |= ~frozen
        texts.append(prompted(list(zip(tokens.tolist(), frozen.tolist(), strict=True)), open_gap.tolist()))
    return texts


def test_run_sums_are_those_of_equal_results():
    """For every open gap and letter: the kernel summed over all insertions that give the same text."""
    num, max_length = 200, 7
    texts, columns = _long_texts(num, max_length), max_length + 2
    logits = np.random.default_rng(2).normal(size=(num, columns, V)).astype(np.float32)
    offset = np.random.default_rng(3).normal(size=(num, columns)).astype(np.float32)
    queries = [(gap, w) for gap in range(1, columns) for w in LETTERS]
    gaps, tokens = (jnp.asarray(np.broadcast_to(column, (num, len(queries)))) for column in zip(*queries, strict=True))

    @jax.jit
    def run(example):
        canvas = to_canvas(example, VOCABULARY)
        scores = Scores(logits=jnp.asarray(logits), length_logits=None, stop_logits=None)
        found, column = losses.find_run(canvas, gaps, tokens)
        sums = jnp.take_along_axis(
            losses.run_sums(losses.Cells(scores, jnp.asarray(offset)).at, canvas), column, axis=-1
        )
        return found, sums, losses.log_normalizer(scores, canvas)

    found, sums, normalizer = (np.asarray(x) for x in run(to_example(texts, max_length)))
    for b, text in enumerate(texts):
        kernel = logits[b].astype(np.float64) + offset[b, :, None]
        for i, w in insertions(text):
            same, query = equivalent(text, i, w), queries.index((1 + i, w))
            assert found[b, query] == (len(same) > 1)
            if len(same) > 1:
                expected = np.log(sum(np.exp(kernel[1 + j, w]) for j, _ in same))
                np.testing.assert_allclose(sums[b, query], expected, rtol=1e-5, atol=1e-5)
        open_columns = [1 + i for i, is_open in enumerate(text.open_gap) if is_open]
        expected = np.log(np.exp(logits[b, open_columns].astype(np.float64)).sum()) if open_columns else 0.0
        np.testing.assert_allclose(normalizer[b], expected, rtol=1e-5)


@each_family
def test_exact_is_never_above_paper(family):
    """Row by row, and below it wherever a dropped token lands beside its like."""
    exact, paper = (_rows(family, _table(family), kernel)["loss"] for kernel in ("exact", "paper"))
    assert (exact <= paper + 1e-5 * np.abs(paper)).all()
    beside = [
        any(len(equivalent(functools.reduce(delete, reversed(dropped), text), gap - 1, w)) > 1 for gap, w in gone)
        for text, dropped in worlds.small_world().pairs
        for gone in [worlds.missing(text, dropped)]
    ]
    assert ((exact < paper - 1e-5) == beside)[np.asarray(_batch()[1].t) < 0.7].all()  # later the weight is tiny


# --- What may not matter ---------------------------------------------------------------------------------------------


@each_family
def test_closed_gaps_are_outside_every_softmax(family):
    """Other scores at closed gaps, at PAD and at CLS change nothing; nor do other length logits there."""
    canvas, _ = _batch()
    closed, table, other = ~np.asarray(canvas.open_gap), _table(family), _table(family, seed=4)
    changed = {"logits": np.where(closed[..., None], other["logits"], table["logits"]), "length": table["length"]}
    if family == "independent":
        changed["length"] = np.where(closed[..., None], other["length"], table["length"])
    before, after = _rows(family, table), _rows(family, changed)
    for part in before:
        np.testing.assert_array_equal(before[part], after[part])


@each_family
def test_parts_add_up_and_are_float32(family):
    parts = _rows(family, _table(family))
    assert {name: part.dtype for name, part in parts.items()} == dict.fromkeys(
        ("loss", "loss_token", "loss_length"), jnp.float32
    )
    np.testing.assert_allclose(parts["loss"], parts["loss_token"] + parts["loss_length"], rtol=1e-6)


@pytest.mark.slow  # compiles every operation by itself
@each_family
def test_jit_changes_nothing(family):
    eager = _losses(worlds.process(family), _batch(), _table(family))
    for name, part in _rows(family, _table(family)).items():
        np.testing.assert_allclose(part, eager[name], rtol=1e-5, atol=1e-6)


@each_family
def test_nothing_dropped_costs_length_only(family):
    parts = _rows(family, _table(family))
    whole = [not dropped for _, dropped in worlds.small_world().pairs]
    assert (parts["loss_token"][whole] == 0).all()
    assert (parts["loss_length"][whole] >= 0).all()


# --- Weights ---------------------------------------------------------------------------------------------------------


@each_family
def test_max_weight_bounds_the_coefficient(family):
    """Early rows shrink to the bound, the others stay."""
    free, bound = (_rows(family, _table(family), max_weight=w) for w in (math.inf, 8.0))
    rate, total = np.array([worlds.rate_and_total(float(t)) for t in _batch()[1].t]).T
    coefficient = rate / (total if family == "joint" else np.expm1(total))
    assert (coefficient > 8).any() and (coefficient < 8).any()
    for part in free:
        expected = free[part] * np.minimum(8 / coefficient, 1)
        np.testing.assert_allclose(bound[part], expected, rtol=1e-5, atol=1e-30)


# --- Length terms ----------------------------------------------------------------------------------------------------


def test_lengths_that_do_not_fit_have_no_probability():
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(4, 4)).astype(np.float32))
    p = np.exp(np.asarray(losses.log_length_probs(logits, jnp.arange(4))))
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-6)
    assert ((p > 0) == np.tri(4, dtype=bool)).all()


def test_room_counts_content_only():
    canvas, _ = _batch()
    kept = [len(text.tokens) - len(dropped) for text, dropped in worlds.small_world().pairs]
    assert (np.asarray(canvas_lib.room(canvas, worlds.L)) == worlds.L - np.array(kept)).all()


def test_log_mean_of_nothing():
    """log 0 with zero gradient where only l = 0 is possible; else the log of the mean."""

    @jax.jit
    def means(logits):
        log_p = losses.log_length_probs(logits, jnp.array([0, 3]))
        log_mean = losses.log_mean(log_p, jnp.log(jnp.arange(4.0)))
        return jnp.exp(log_mean).sum(), log_mean

    gradient, log_mean = jax.grad(means, has_aux=True)(jnp.zeros((2, 4)))
    np.testing.assert_allclose(log_mean, [-np.inf, math.log(1.5)], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, 0, 0, 0], [-1.5 / 4, -0.5 / 4, 0.5 / 4, 1.5 / 4]], atol=1e-7)


def test_poisson_nll_where_both_underflow():
    """weight·(rate − count·log rate) from logs: 1/S(n) may be e^-100 where the weight undoes it."""
    args = [jnp.float32(x) for x in (-100.0, math.log(2.0) - 100.0, 100.0)]
    np.testing.assert_allclose(losses.poisson_nll(*args), 1 + 2 * 100, rtol=1e-5)
    zero = losses.poisson_nll(jnp.float32(-jnp.inf), jnp.float32(-jnp.inf), jnp.float32(3.0))
    assert zero == 0
