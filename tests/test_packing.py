"""Packed canvases: each lies somewhere once, the network's scores, gradients and samples are those of a canvas a row,
and what lies in the same row stays unseen.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import test_backbone as tb
import tiny
from dilm_jax import evals, likelihood, packing, sampling
from dilm_jax.canvas import drop_tokens
from dilm_jax.packing import Packing, first_fit
from dilm_jax.processes.registry import PROCESSES
from dilm_jax.sampling import Filters

B, S = 8, tb.S
fit = jax.jit(first_fit, static_argnums=(2, 3, 4))


def check(made: Packing, length, waiting, num_rows, num_shards, width=S):
    """Canvases lie whole, in one row of their shard, in no one's way; the two arrays are inverses. Returns who is
    placed."""
    b = len(length) // num_shards
    source, place = np.asarray(made.source), np.asarray(made.place)
    assert source.shape == (num_shards, num_rows, width) and place.shape == (num_shards, b, S)
    for shard in range(num_shards):
        taken = np.full(num_rows * width, b * S)
        for i in range(b):
            where = place[shard, i]
            n = length[shard * b + i] if where[0] < num_rows * width else 0
            assert waiting[shard * b + i] or n == 0
            assert (where[n:] == num_rows * width).all()
            assert (where[:n] == where[0] + np.arange(n)).all() and len(set(where[:n] // width)) <= 1
            assert (taken[where[:n]] == b * S).all()
            taken[where[:n]] = i * S + np.arange(n)
        np.testing.assert_array_equal(taken.reshape(num_rows, width), source[shard])
    np.testing.assert_array_equal(made.placed, (place[..., 0] < num_rows * width).reshape(-1))
    return np.asarray(made.placed)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_canvases_lie_apart_and_none_that_fits_is_left(num_rows, num_shards):
    rng = np.random.default_rng(num_rows)
    for _ in range(50):
        length, waiting = rng.integers(2, S + 1, B), rng.random(B) < 0.8
        made = fit(jnp.asarray(length), jnp.asarray(waiting), S, num_rows, num_shards)
        placed = check(made, length, waiting, num_rows, num_shards)
        for shard in range(num_shards):
            mine = np.arange(B).reshape(num_shards, -1)[shard]
            room = S - (np.asarray(made.source)[shard] < len(mine) * S).sum(-1)
            left = length[mine][waiting[mine] & ~placed[mine]]
            assert not len(left) or left.min() > room.max()
            longest = mine[waiting[mine]][np.argmax(length[mine][waiting[mine]])] if waiting[mine].any() else None
            assert longest is None or placed[longest] or length[longest] == length[mine][placed[mine]].max()


@pytest.mark.parametrize("num_rows", [1, 3])
def test_every_canvas_has_its_turn_once(num_rows):
    rng = np.random.default_rng(0)
    run = jax.jit(lambda n: packing.in_passes(lambda x, p: x + p.placed, jnp.zeros(B, int), n, S, num_rows, 2))
    for _ in range(20):
        length = jnp.asarray(rng.integers(2, S + 1, B))
        times, passes = run(length)
        assert (times == 1).all()
        needed = int(packing.rows_needed(length, S, 2).max())
        assert passes >= -(-needed // num_rows) and (passes == 1) == (needed <= num_rows)


def test_first_fit_decreasing_by_hand():
    """8 | 5 + 3 | 4 + 2 + 2, of rows of 8."""
    length = jnp.array([2, 5, 2, 8, 4, 3])
    made = fit(length, jnp.ones(6, bool), S, 6, 1)
    assert [int(x) for x in made.place[0, :, 0]] == [20, 8, 22, 0, 16, 13]
    assert packing.rows_needed(length, S, 1).tolist() == [3]


def test_slots_by_hand():
    """Of 8, 4 and 2 columns, in rows of 12 of which 8 are used. The first and third are the same."""
    length, what = jnp.array([3, 8, 3, 2, 5, 4]), jnp.array([7, 0, 7, 1, 7, 2])
    waiting = jnp.array([True, True, True, True, False, True])
    slots = packing.in_slots(length, waiting, (what,), 12, 1)
    nowhere = packing.NOWHERE
    assert slots.begins.tolist() == [[12, 0, nowhere, 24, nowhere, 16]]
    assert slots.reads.tolist() == [[12, 0, 12, 24, nowhere, 16]]
    assert slots.rows_needed == 3
    made = slots.packing(length, S, 4, 12)
    assert made.placed.tolist() == [True, True, True, True, False, True]
    assert made.place[0, 2].tolist() == [12, 13, 14, *[48] * (S - 3)]
    assert made.source[0, 1].tolist() == [0, 1, 2, 48, 40, 41, 42, 43, *[48] * 4]
    shards = packing.in_slots(length, waiting, (what,), 12, 2)
    assert shards.begins.tolist() == [[12, 0, nowhere], [4, nowhere, 0]]
    assert shards.reads.tolist() == [[12, 0, 12], [4, nowhere, 0]] and shards.rows_needed == 2


@pytest.mark.parametrize("width", [8, 16, 21])
def test_slots_hold_canvases_apart(width):
    rng, slots_of = np.random.default_rng(0), jax.jit(packing.in_slots, static_argnums=(3, 4))
    for _ in range(30):
        length, waiting = rng.integers(2, S + 1, B), rng.random(B) < 0.8
        slots = slots_of(jnp.asarray(length), jnp.asarray(waiting), np.arange(B), width, 2)
        num_rows = int(slots.rows_needed)
        made = slots.packing(jnp.asarray(length), S, num_rows, width)
        np.testing.assert_array_equal(check(made, length, waiting, num_rows, 2, width), waiting)


def test_no_slots():
    length, what = jnp.full(6, 3), jnp.arange(6)
    none = packing.in_slots(length, jnp.zeros(6, bool), (what,), 12, 2)
    assert (none.begins == packing.NOWHERE).all() and (none.reads == packing.NOWHERE).all()
    assert none.rows_needed == 0


def test_moving_back_and_forth():
    """Values by row and by canvas. What the backward pass does is the transpose: ⟨f(x), y⟩ = ⟨x, fᵀ(y)⟩."""
    rng = np.random.default_rng(0)
    length, waiting = rng.integers(2, S + 1, B), np.arange(B) != 3
    made = fit(jnp.asarray(length), jnp.asarray(waiting), S, 5, 1)
    placed, place = np.asarray(made.placed), np.asarray(made.place[0])
    assert not placed[3] and placed.sum() > 3
    by_row, by_canvas, a_canvas = (rng.normal(size=(n, *rest, 3)) for n, *rest in ((5, S), (B, S), (B,)))
    flat = np.concatenate([by_row.reshape(-1, 3), np.zeros((1, 3))])
    np.testing.assert_array_equal(made.canvases_of(jnp.asarray(by_row)), flat[place].astype(np.float32))
    np.testing.assert_array_equal(made.first_of(jnp.asarray(by_row)), flat[place[:, 0]].astype(np.float32))
    column = rng.integers(0, S, (B, 4))
    want = flat[np.take_along_axis(place, column, 1)].astype(np.float32)
    np.testing.assert_array_equal(made.at_columns(jnp.asarray(by_row), jnp.asarray(column)), want)
    there = np.arange(S) < (length * placed)[:, None]
    back = made.canvases_of(made.rows_of(jnp.asarray(by_canvas), 0))
    np.testing.assert_array_equal(back, (by_canvas * there[..., None]).astype(np.float32))
    spread = made.canvases_of(made.spread(jnp.asarray(a_canvas)))
    np.testing.assert_array_equal(spread, (a_canvas[:, None] * there[..., None]).astype(np.float32))

    for forward, values in ((made.canvases_of, by_row), (made.first_of, by_row), (made.spread, a_canvas)):
        x = jnp.asarray(values)
        out, transpose = jax.vjp(forward, x)
        y = jnp.asarray(rng.normal(size=out.shape))
        np.testing.assert_allclose((out * y).sum(), (x * transpose(y)[0]).sum(), rtol=1e-5)


# --- The network -----------------------------------------------------------------------------------------------------

GAP, TOKEN = jnp.array([[1, 2, 0, 5]] * B), jnp.array([[5, 6, 8, 7]] * B)


@functools.cache
def noised():
    """Eight canvases of 2 to 8 columns."""
    rng = np.random.default_rng(1)
    x0 = tb.examples(length=(6,) * B)
    dropped = rng.permuted(np.arange(6) < np.array([6, 5, 4, 3, 2, 1, 0, 4])[:, None], axis=1)
    return drop_tokens(x0, jnp.asarray(dropped), tb.VOCABULARY)[0]


@functools.cache
def network(num_rows, num_chunks, changed):
    """params → (what is asked of the scores where there is something, gradient of a mixture of it); and params. None:
    a canvas a row, and all scores held."""
    graphdef, abstract = tb.make(**dict(changed))
    keys, time = jax.random.split(jax.random.key(3), B), jnp.linspace(0.1, 0.9, B)
    weight = np.random.default_rng(2).normal(size=(B, S, 4))

    @functools.partial(jax.jit, compiler_options=tb.FAST_COMPILE)
    @functools.partial(jax.grad, has_aux=True)
    def run(params, made):
        fitted = num_rows and first_fit(made.length, jnp.ones(B, bool), S, num_rows, 2)
        scores = nnx.merge(graphdef, params)(made, time, keys, fitted or None, num_chunks)
        there = np.arange(S) < made.length[:, None]
        asked = {
            "lse": jnp.where(there, scores.lse(), 0),
            "at": jnp.where(made.length[:, None] > GAP, scores.at(GAP, TOKEN), 0),
            "outer": jnp.where(there[..., None], scores.outer(TOKEN), 0),
            "length": scores.length_logits,
            "stop": scores.stop_logits,
        }
        if asked["length"] is not None and asked["length"].ndim == 3:
            asked["length"] = jnp.where(there[..., None], asked["length"], 0)
        asked = {name: value for name, value in asked.items() if value is not None}
        mixed = sum((value * weight.reshape(B, -1)[:, : value[0].size].reshape(value.shape)).sum()
                    for value in asked.values() if value[0].size <= S * 4)  # fmt: skip
        dense = jnp.where(there[..., None] & np.array(tb.VOCABULARY.ordinary), scores.dense(), 0)
        return mixed, asked | {"dense": dense}

    return run, tb.randomised(abstract)


HEADS = [
    (("length_head", "cls"),),
    (("length_head", "gap"), ("num_lengths", 4)),
    (("length_head", None), ("uses_time", False), ("causal", True)),
]


@pytest.mark.parametrize("changed", HEADS)
@pytest.mark.parametrize(("num_rows", "num_chunks"), [(None, 3), (4, 100)])
def test_scores_and_gradients_are_those_of_a_canvas_a_row(num_rows, num_chunks, changed):
    """With dropout, fused and in any number of chunks."""
    run, params = network(num_rows, num_chunks, changed)
    plain, _ = network(None, None, changed)
    (got_gradient, got), (want_gradient, want) = run(params, noised()), plain(params, noised())
    tb.assert_close(got, want)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want_gradient))
    for a, b in zip(jax.tree.leaves(got_gradient), jax.tree.leaves(want_gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("changed", HEADS)
def test_what_lies_in_the_same_row_is_not_seen(changed):
    """Bit by bit, when what is in the first two canvases changes."""
    run, params = network(4, 100, changed)
    made = noised()
    row = np.asarray(fit(made.length, jnp.ones(B, bool), S, 4, 2).place[0, :, 0]) // S
    assert set(row[:2]) == set(row[2:])  # each shares its row with one of the others
    other = np.asarray(made.tokens).copy()
    other[:2, 1:] = np.where(np.asarray(made.occupied)[:2, 1:], 5 + (other[:2, 1:] - 4) % 4, other[:2, 1:])
    before, after = run(params, made)[1], run(params, tb.edit(made, tokens=other))[1]
    for name in before:
        np.testing.assert_array_equal(before[name][2:], after[name][2:])
    assert (before["lse"][:2] != after["lse"][:2]).any(1).all()


def test_a_packing_needs_scores_that_are_not_held():
    graphdef, abstract = tb.make()
    fitted = fit(noised().length, jnp.ones(B, bool), S, 4, 2)
    with pytest.raises(ValueError, match="a packing needs num_chunks"):
        nnx.merge(graphdef, tb.randomised(abstract))(noised(), jnp.ones(B), None, fitted)


@pytest.mark.parametrize("family", PROCESSES)
def test_the_bound_in_passes_is_that_of_a_canvas_a_row(family):
    """Sixteen texts, two rows at a time."""
    made, parts, mesh, _ = tiny.world(family, ("batch_size", 16))
    params = tiny.random_params(evals.abstract_params(parts, mesh))
    x0, key = tiny.batch(parts, made), jax.random.split(jax.random.key(0), 16)
    network = functools.partial(evals.network(parts, mesh), params)
    draws = [
        jax.jit(lambda x0, net=net: parts.process.nll_draws(net, key, jnp.arange(16) / 16, x0, 2))(x0)
        for net in (
            likelihood.at_once(network),
            functools.partial(evals.packed_values, functools.partial(network, fused=True), 1),
        )
    ]
    np.testing.assert_allclose(draws[1], draws[0], rtol=1e-5)


# --- Sampling --------------------------------------------------------------------------------------------------------


def generated(family, overrides, sampler, packed, x0):
    """The last state of sixteen rows with a network of random weights, and how many packed rows each call computed (0:
    a canvas a row)."""
    _, parts, mesh, _ = tiny.world(family, *overrides)
    params, calls = tiny.random_params(evals.abstract_params(parts, mesh)), []
    network = evals.for_sampling(parts, mesh, params)

    def call(canvas, clock, packing=None):
        jax.debug.callback(lambda: calls.append(0 if packing is None else packing.source.shape[1]))
        return network.call(canvas, clock, packing)

    runs = parts.process.samplers(parts.sampling)[sampler]
    net = sampling.Packed(call=call, num_shards=1) if packed else call
    rates = functools.partial(evals.log_gap_rates, parts.process)
    run = jax.jit(lambda key, canvas: sampling.generate(net, runs, key, canvas, Filters(), log_gap_rates=rates))
    canvas = drop_tokens(x0, x0.free, parts.process.vocabulary)[0]
    state = jax.device_get(run(jax.random.split(jax.random.key(0), len(x0.length)), canvas))
    jax.effects_barrier()
    return state, calls


SAMPLED = [
    pytest.param("joint", "event", (), marks=pytest.mark.slow),
    ("independent", "leap", (("sampling.sampler", "leap"), ("sampling.num_steps", 8))),
    pytest.param("joint", "leap", (("sampling.sampler", "leap"), ("sampling.num_steps", 8)), marks=pytest.mark.slow),
    pytest.param("ilm", "one_by_one", (("sampling.stop_threshold", 0.0),), marks=pytest.mark.slow),
    pytest.param("flexmdm", "leap", (("sampling.num_steps", 8),), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "sampler", "overrides"), SAMPLED)
def test_samples_of_a_packed_network_are_those_of_a_canvas_a_row(family, sampler, overrides, monkeypatch):
    """And their traces. Most rows are empty at first, the others have a prompt that takes most of the canvas."""
    monkeypatch.setattr(sampling, "LEAST_COLUMNS", 30)
    made, parts, *_ = tiny.world(family, ("batch_size", 16), *overrides)
    x0 = tiny.batch(parts, made)
    empty = np.arange(16)[:, None] < 13
    x0 = dataclasses.replace(x0, frozen=x0.frozen & ~empty, open_gap=x0.open_gap | empty)
    overrides = (("batch_size", 16), *overrides)
    packed, calls = generated(family, overrides, sampler, True, x0)
    plain, of_plain = generated(family, overrides, sampler, False, x0)
    assert len(calls) == len(of_plain) and set(of_plain) == {0}
    assert calls[0] > 0 and len(set(calls)) > 1, calls
    for name in ("canvas", "nfe", "saturated", "truncated", "born", "done"):
        jax.tree.map(np.testing.assert_array_equal, getattr(packed, name), getattr(plain, name))
    for got, want in zip(jax.tree.leaves(packed.trace), jax.tree.leaves(plain.trace), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
