"""Samples under a request, and revised ones, with the true posterior as the network: numbers are those asked for,
contexts stay, and the law is the conditional one, as far as it is claimed to be."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import comb, gammainc

import oracles
from dilm_jax import request, sampling, selfcheck, worlds
from dilm_jax.request import UNBOUNDED
from dilm_jax.sampling import Corrector, Filters, SamplingOptions
from dilm_jax.selfcheck import L, S, plain, plain_world

A, B, C = 5, 6, 7
NUM = 3000
FREE = (0, UNBOUNDED)
ONCE, REVISED = Corrector(), Corrector(steps=2, strength=0.7)
FAMILIES = ("joint", "independent")


@functools.cache
def checked(family):
    return selfcheck.Checked(family)


@functools.cache
def program(family, sampler, corrector):
    made = checked(family).process.samplers(SamplingOptions(num_steps=2))[sampler]
    network = checked(family).network(plain_world())

    @jax.jit
    def run(key, canvas, asked):
        state = sampling.generate(network, made, key, canvas, Filters(), asked, corrector)
        return state.canvas, state.nfe, state.truncated, state.request

    return run


def texts(family, sampler, context, gaps, total=FREE, seed=0, corrector=ONCE, forbidden=()):
    """NUM texts that grow from a context of free tokens; `gaps` are (place among the context's gaps, lo, hi)."""
    canvas = selfcheck._canvas([plain(context)] * NUM, L)
    bounds = [[(1 + i, *bounds) for i, *bounds in gaps]] * NUM
    asked = request.build(S, selfcheck.V, bounds, [total] * NUM, [list(forbidden)] * NUM, 3)
    key = oracles.row_keys(seed, NUM)
    canvas, nfe, truncated, left = jax.device_get(
        program(family, sampler, corrector)(key, canvas, jax.tree.map(jnp.asarray, asked))
    )
    assert not truncated.any() and (left.least == 0).all()
    return [worlds.to_text(canvas, row).tokens for row in range(NUM)], nfe, left.group


def conditional(weight):
    """{text: probability} of the texts of the world's law, weighted."""
    law = np.array([p * weight(text.tokens) for p, text in zip(plain_world().law, plain_world().texts, strict=True)])
    return {text.tokens: p for text, p in zip(plain_world().texts, law / law.sum(), strict=True) if p > 0}


def variation(drawn, law):
    """(total variation, bound that sampling error passes at p > 1e-4)."""
    index = {text: i for i, text in enumerate(dict.fromkeys([*law, *drawn]))}
    probs = np.array([law.get(text, 0.0) for text in index])
    return oracles.tv_and_bound(np.array([index[text] for text in drawn]), probs, allowance=0)


def num_masks(text, left):
    """Ways to delete tokens of a text that leave `left`."""
    if not left:
        return 1
    return sum(num_masks(text[k + 1 :], left[1:]) for k in range(len(text)) if text[k] == left[0])


CONTEXT = (A, B)
TOTAL_1 = float(selfcheck.SCHEDULE.total(jnp.float32(1.0)))
WEIGHT_OF_CONTEXT = {  # docs/MATH.md 6d
    "joint": lambda n, m: gammainc(n - m + 1, TOTAL_1) / comb(n, m),
    "independent": lambda n, m: (1 - math.exp(-TOTAL_1)) ** (n - m),
}


@pytest.mark.slow
@pytest.mark.parametrize("corrector", [ONCE, REVISED], ids=["drawn", "revised"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_context_with_open_gaps_grows_into_the_texts_that_have_it(family, corrector):
    """All gaps open, no numbers asked for: p(x0) times the number of ways to delete to the context, times a weight of
    the length that MATH 6d states. Revision keeps that law."""
    drawn, _, _ = texts(family, "event", CONTEXT, [(0, *FREE), (1, *FREE), (2, *FREE)], corrector=corrector)
    of_length = WEIGHT_OF_CONTEXT[family]
    law = conditional(lambda x: num_masks(x, CONTEXT) * of_length(len(x), 2) if len(x) >= 2 else 0.0)
    found, bound = variation(drawn, law)
    assert found < bound, (found, bound)


# Total variation from the law given the length, as request.py's docstring says: the token scores mix over lengths.
MIXING = {
    ("joint", 2): 0.29, ("joint", 3): 0.10, ("joint", 4): 0.83,
    ("independent", 2): 0.35, ("independent", 3): 0.18, ("independent", 4): 0.74,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family, num", MIXING)
def test_a_length_that_is_asked_for(family, num):
    drawn, nfe, _ = texts(family, "event", (), [(0, *FREE)], total=(num, num))
    assert {len(text) for text in drawn} == {num}
    assert (nfe >= num).all()
    found, bound = variation(drawn, conditional(lambda x: float(len(x) == num)))
    assert found == pytest.approx(MIXING[family, num], abs=bound)


REVISED_SAMPLERS = [("joint", "event"), ("independent", "event")]
REVISED_SAMPLERS += [pytest.param(family, "leap", marks=pytest.mark.slow) for family in FAMILIES]


@pytest.mark.parametrize("family, sampler", REVISED_SAMPLERS)
def test_revision_keeps_the_law_of_the_data(family, sampler):
    """Of `leap` as far as its grid allows. Half of the texts change at least."""
    steps = {"event": {}, "leap": {"num_steps": 48}}[sampler]
    before, calls = unconditional(family, sampler, ONCE, **steps)
    after, more_calls = unconditional(family, sampler, REVISED, **steps)
    law = dict(zip([text.tokens for text in plain_world().texts], checked(family).start_law(), strict=True))
    found, bound = variation(after, law)
    assert found < bound + (0.03 if sampler == "leap" else 0.0), (found, bound)
    assert (more_calls > calls).mean() > 0.9
    assert np.mean([x != y for x, y in zip(before, after, strict=True)]) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_revised_row_depends_on_its_own_key(family):
    """Not on how many rows there are, nor on how long they take."""
    few, many = (unconditional(family, "event", REVISED, num=num) for num in (20, NUM))
    assert few[0] == many[0][:20] and (few[1] == many[1][:20]).all()


def unconditional(family, sampler, corrector, num_steps=1, num=NUM):
    """(`num` texts, their calls) from the empty canvas."""
    made = checked(family).process.samplers(SamplingOptions(num_steps=num_steps))[sampler]
    network = checked(family).network(plain_world())

    @jax.jit
    def run(key, canvas):
        return sampling.generate(network, made, key, canvas, Filters(), corrector=corrector)

    state = jax.device_get(run(oracles.row_keys(2, NUM)[:num], selfcheck._canvas([plain(())] * num, L)))
    return [worlds.to_text(state.canvas, row).tokens for row in range(num)], state.nfe


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_revised_texts_keep_numbers_and_contexts(family):
    """Two tokens between those of the context, none before, any number after."""
    drawn, _, group = texts(
        family,
        "event",
        CONTEXT,
        [(1, 1, 1), (2, *FREE)],
        total=(2, 2),
        seed=1,
        corrector=Corrector(steps=3, strength=1),
    )
    for text, of_row in zip(drawn, group, strict=True):
        assert text[0] == A and text[2] == B and len(text) == 4
        assert (of_row == 0).sum() == 2 and (of_row == 1).sum() == 2  # a context's token has its gap's group


SAMPLERS = [
    ("joint", "event"),
    ("independent", "event"),
    pytest.param("independent", "leap", marks=pytest.mark.slow),
    pytest.param("independent", "euler", marks=pytest.mark.slow),
]


# Bounds on the gap between the context's tokens, the total, and what the two gaps may then get.
ASKED = [
    ((1, 2), FREE, {(1, 0), (2, 0), (1, 1)}),
    ((2, 2), FREE, {(2, 0)}),
    ((0, 1), (2, 2), {(0, 2), (1, 1)}),
    ((1, 2), (0, 1), {(1, 0)}),
    ((0, 0), (1, 2), {(0, 1), (0, 2)}),
]


@pytest.mark.parametrize("family, sampler", SAMPLERS)
@pytest.mark.parametrize("middle, total, possible", ASKED)
def test_numbers_and_contexts(family, sampler, middle, total, possible):
    """A context of two tokens; the gap before it closed, the one within it bounded, the one after it free."""
    drawn, _, group = texts(family, sampler, CONTEXT, [(1, *middle), (2, *FREE)], total=total, seed=1)
    numbers = [tuple((row == g).sum() - 1 for g in (0, 1)) for row in group]  # a context's token has its gap's group
    assert set(numbers) <= possible  # not all are likely in this world
    for text, (between, after) in zip(drawn, numbers, strict=True):
        assert text[0] == A and text[1 + between] == B and len(text) == 2 + between + after


@pytest.mark.parametrize("family", FAMILIES)
def test_forbidden_tokens_are_never_inserted(family):
    """What is there stays. The joint softmax is that of the tokens that are left."""
    drawn, _, _ = texts(family, "event", CONTEXT, [(0, *FREE), (1, *FREE), (2, *FREE)], forbidden=(A, C))
    assert {text.count(A) for text in drawn} == {1} and {text.count(C) for text in drawn} == {0}
    assert max(map(len, drawn)) > 2


def asked_for(gaps, total, num_columns=8):
    made = request.build(num_columns, 8, [gaps], [total], [[]], len(gaps))
    return jax.tree.map(jnp.asarray, made)


def test_what_is_owed_keeps_its_place():
    """Group 0 is owed two tokens; the gaps of group 1 may have what is left of the room."""
    made = asked_for([(1, 2, 2), (3, *FREE)], FREE)
    made = made.replace(group=made.group.at[0, 4:6].set(1))
    insert = made.group == 1
    for room, kept in ((2, 0), (3, 1), (4, 2), (9, 3)):
        assert request.cap(oracles.row_keys(0, 1), made, insert, jnp.array([room])).sum() == kept
    fires = {room: set(np.flatnonzero(made.may_fire(jnp.array([room]))[0])) for room in (2, 3)}
    assert fires == {2: {1}, 3: {1, 3, 4, 5}}


def test_numbers_that_the_network_calls_impossible_are_drawn_all_the_same():
    logits = jnp.where(jnp.arange(21) == 0, 0.0, -40.0) * jnp.ones((1, 8, 1))
    made = asked_for([(1, 0, 3), (2, 0, 4), (3, 0, 3), (4, 2, 3)], (13, 13))
    drawn = request._draw_numbers(oracles.row_keys(0, 1), logits, made, jnp.array([20]))
    np.testing.assert_array_equal(drawn.at_most, [[3, 4, 3, 3]])
    assert drawn.drawn.all() and (drawn.at_least == drawn.at_most).all()
