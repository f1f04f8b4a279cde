import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import worlds
from dilm_jax.schedules import Constant, LogLinear
from worlds import FAMILIES, LETTERS, Text, delete, missing, plain, prompted, to_example, to_text

B, L = 20_000, 5  # one shape for all, compiled once a family
SIGMA = 60.0  # a constant schedule, so that t chooses σ̄ = 60·t
EMPTIES, NEVER = 60.0, 1e-12  # σ̄ that leaves nothing of these texts, and one that deletes nothing
a, b = LETTERS
MIXED = prompted([(a, True), (a, False), (b, False), (b, True), (a, False)], [False] + [True] * 5)
EDGES = [
    *(plain([a, b, b, a, b][:n]) for n in range(6)),
    prompted([(a, True), (b, True)], [False] * 3),
    prompted([(a, True), (b, True)], [True] * 3),
    prompted([(a, True), (b, True), (b, True), (a, True), (a, True)], [False] * 6),
    prompted([(a, True), (b, False), (b, True)], [False, True, True, False]),
]
each_family = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def _corrupt(family):
    return jax.jit(worlds.process(family, max_length=L, schedule=Constant(sigma_min=SIGMA, sigma_max=SIGMA)).corrupt)


@functools.cache
def _keys(seed):
    return jax.random.split(jax.random.key(seed), B)


def _draw(family, texts: list[Text], total, seed, fill=worlds.VOCABULARY.pad):
    """B draws of canvas and targets at σ̄ = total, the texts taking turns."""
    example = to_example((texts * B)[:B], L, fill)
    return _corrupt(family)(_keys(seed), example, jnp.asarray(np.full(B, total / SIGMA, np.float32)))


def _num_dropped(targets):
    return np.asarray(targets.dropped).sum(-1)


@each_family
def test_the_mask_law_solves_the_kolmogorov_equation(family):
    """The oracle itself: masks pushed to states are the chain's marginal."""
    world = worlds.small_world()
    for total in (0.01, 0.5, 3.0):
        q = np.zeros(len(world.states))
        np.add.at(q, world.pair_state, world.pair_probs(family, total))
        np.testing.assert_allclose(q, world.marginal(family, total), atol=1e-12)


@pytest.mark.parametrize("total", [0.02, 0.3, 1.5, 6.0])
@each_family
def test_masks_have_the_exact_law(family, total):
    """All eight masks of three free tokens among two frozen ones."""
    dropped = np.asarray(_draw(family, [MIXED], total, seed=1)[1].dropped)
    assert not dropped[:, [0, 3]].any()
    masks = list(itertools.product([False, True], repeat=3))
    expected = B * np.array([worlds.mask_prob(family, 3, sum(mask), total) for mask in masks])
    counts = np.array([(dropped[:, [1, 2, 4]] == mask).all(-1).sum() for mask in masks])
    assert counts.sum() == B
    rare = expected < 5  # pooled, as chi-square asks
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    seen = expected > 0
    assert stats.chisquare(counts[seen], expected[seen]).pvalue > 1e-4


@each_family
def test_canvas_and_targets_agree(family):
    """What is dropped is what is missing: each target names its gap and token, and the canvas is the rest."""
    canvas, targets = _draw(family, [MIXED], 0.7, seed=1)
    gap, dropped, tokens = (np.asarray(x) for x in (targets.gap, targets.dropped, targets.tokens))
    assert (np.asarray(targets.num_dropped) == dropped.sum(-1)).all()
    assert (np.asarray(targets.t) == np.float32(0.7 / SIGMA)).all()
    for row in range(50):
        gone = tuple(np.flatnonzero(dropped[row]).tolist())
        assert to_text(canvas, row) == functools.reduce(delete, reversed(gone), MIXED)
        assert [(gap[row, k], tokens[row, k]) for k in gone] == missing(MIXED, gone)


@each_family
def test_all_five_present(family):
    """P(all 5 present) at t = 0.25 on the star schedule (docs/MATH.md 1): no deletion yet in the joint chain, none of
    five independent ones."""
    total = float(LogLinear(sigma_min=3, sigma_max=30).total(0.25))
    present = _num_dropped(_draw(family, [plain([a, b, a, b, a])], total, 3)[1]) == 0
    exact = math.exp(-total if family == "joint" else -5 * total)
    assert round(exact, 3) == (0.363 if family == "joint" else 0.006)
    assert abs(present.mean() - exact) < 4 * math.sqrt(exact * (1 - exact) / B)


@pytest.mark.parametrize("total, all_go", [(NEVER, False), (EMPTIES, True)])
@each_family
def test_limits(family, total, all_go):
    """No noise gives the data, full noise the frozen tokens: texts of every length, all frozen, no open gap."""
    canvas, targets = _draw(family, EDGES, total, 0, fill=a)
    left = np.resize([len(text.free) if all_go else 0 for text in EDGES], B)
    assert (_num_dropped(targets) == left).all()
    for row, text in enumerate(EDGES):
        assert to_text(canvas, row) == functools.reduce(delete, reversed(text.free if all_go else []), text)
    lengths = np.resize([len(text.tokens) for text in EDGES], B)
    assert (np.asarray(canvas.length) == 2 + lengths - left).all()


@pytest.mark.parametrize("total", [0.5, 4.0])
@each_family
def test_empty_as_often_as_the_law_says(family, total):
    """P(N_t = 0) = P(Poisson(σ̄_t) ≥ n), or (1 − ρ_t)^n, for n = 0..5."""
    texts = [plain([a, b, b, a, b][:n]) for n in range(6)]
    dropped = _num_dropped(_draw(family, texts, total, 4)[1])
    for n in range(6):
        exact = stats.poisson.sf(n - 1, total) if family == "joint" else (1 - math.exp(-total)) ** n
        empty = dropped[n::6] == n
        assert abs(empty.mean() - exact) <= 4 * math.sqrt(exact * (1 - exact) / len(empty))


@each_family
def test_a_row_depends_on_its_own_key_alone(family):
    """Not on the rows beside it, nor on their number."""
    keys, example = _keys(2), to_example((EDGES * B)[:B], L)
    t = np.random.default_rng(0).uniform(0, 6 / SIGMA, B).astype(np.float32)

    def rows(which):
        part = type(example)(**{name: jnp.asarray(np.asarray(x)[which]) for name, x in vars(example).items()})
        return jax.tree.leaves(_corrupt(family)(keys[which], part, jnp.asarray(t[which])))

    order = np.random.default_rng(1).permutation(B)
    whole = rows(slice(None))
    for which in (order, slice(7, 8)):
        for part, reference in zip(rows(which), whole, strict=True):
            assert (np.asarray(part) == np.asarray(reference)[which]).all()
