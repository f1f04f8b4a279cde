"""ARM: its likelihood is the chain rule, and a cache of keys and values changes no token."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
import worlds
from dilm_jax import canvas as canvas_lib
from dilm_jax import evals, likelihood, request, sampling
from dilm_jax.canvas import Example
from dilm_jax.config import Parts
from dilm_jax.data.task import make_example
from dilm_jax.processes.arm import ARM
from dilm_jax.sampling import Filter, Filters

A, B_ = worlds.LETTERS
EOS = worlds.VOCABULARY.eos
MAX = 4
MODEL = dict(num_layers=2, width=16, num_heads=2, mlp_width=32, cond_width=8, dropout=0.0, rope_theta=1e4,
             dtype="float32", remat="none", scan=True)  # fmt: skip


@functools.cache
def model(max_length: int = MAX):
    """Parts of a random network over two letters, its mesh and parameters."""
    _, parts, mesh, _ = tiny.world("arm")
    process = ARM(vocabulary=worlds.VOCABULARY, max_length=max_length)
    filters = Filters(token=Filter(temperature=1.0))
    parts = dataclasses.replace(parts, process=process, model=MODEL, filters=filters, sampler="left_to_right")
    params = jax.tree.map(lambda x: 3 * x, tiny.random_params(evals.abstract_params(parts, mesh)))
    return parts, mesh, params


def nll(parts: Parts, mesh, params, x0: Example) -> np.ndarray:
    network = likelihood.at_once(functools.partial(evals.network(parts, mesh), params))
    draws = parts.process.nll_draws(network, None, jnp.zeros(len(x0.length)), x0, 3)
    assert draws.shape[0] == 1
    return np.asarray(draws[0], np.float64)


def step_by_step(parts: Parts, mesh, params, prompt: tuple, answer: tuple) -> float:
    """−log p(answer | prompt) by one call of the network a token, in float64."""
    network, total = functools.partial(evals.network(parts, mesh), params), 0.0
    for end in range(len(answer) + 1):
        text = prompt + answer[:end]
        if len(text) == parts.process.max_length:
            break  # nothing can follow
        x0 = worlds.to_example([prefix(prompt, answer[:end])], parts.process.max_length)
        canvas = canvas_lib.to_canvas(x0, worlds.VOCABULARY)
        logits = np.asarray(network(canvas, jnp.ones(1)).dense()[0, 1 + len(text)], np.float64)
        follows = answer[end] if end < len(answer) else EOS
        total -= logits[follows] - np.logaddexp.reduce(logits)
    return total


def prefix(prompt: tuple, answer: tuple) -> worlds.Text:
    pattern = [(w, True) for w in prompt] + [(w, False) for w in answer]
    return worlds.prompted(pattern, [False] * len(prompt) + [True] * (len(answer) + 1))


def test_the_likelihood_is_the_chain_rule():
    cases = [
        ((), ()),
        ((), (A,)),
        ((), (A, B_, B_)),
        ((), (B_, A, A, B_)),
        ((A, B_), (B_,)),
        ((A, A), ()),
        ((B_, B_, A), (A,)),
    ]
    x0 = worlds.to_example([prefix(*case) for case in cases], MAX)
    expected = [step_by_step(*model(), *case) for case in cases]
    np.testing.assert_allclose(nll(*model(), x0), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prompt", [(), (B_, A)])
def test_the_probabilities_of_all_texts_sum_to_one(prompt):
    room = MAX - len(prompt)
    answers = [word for n in range(room + 1) for word in itertools.product(worlds.LETTERS, repeat=n)]
    x0 = worlds.to_example([prefix(prompt, answer) for answer in answers], MAX)
    assert np.exp(-nll(*model(), x0)).sum() == pytest.approx(1, abs=1e-5)


def test_nothing_is_asked_of_a_closed_text():
    closed = worlds.prompted([(A, True), (B_, True)], [False] * 3)
    np.testing.assert_array_equal(nll(*model(), worlds.to_example([closed], MAX)), 0)


# --- The cache -------------------------------------------------------------------------------------------------------


@functools.cache
def prompts(max_length: int):
    """200 of mixed length, none to all but one token long."""
    rng = np.random.default_rng(0)
    rows = [rng.choice(worlds.LETTERS, rng.integers(0, max_length)) for _ in range(200)]
    rows = [make_example(worlds.VOCABULARY, max_length, row) for row in rows]
    return jax.tree.map(lambda *x: np.stack(x), *(Example(**row) for row in rows))


@functools.cache
def generated(cached: bool, scan: bool = True):
    parts, mesh, params = model(24)
    parts = dataclasses.replace(parts, model=MODEL | {"scan": scan})
    sampler = parts.process.samplers(parts.sampling)["left_to_right"]
    network = evals.for_sampling(parts, mesh, params)
    assert isinstance(network, sampling.Cached)
    if not cached:
        network = functools.partial(evals.network(parts, mesh), params)
    rates = functools.partial(evals.log_gap_rates, parts.process)

    @jax.jit
    def run(key, canvas):
        state = sampling.generate(network, sampler, key, canvas, parts.filters, log_gap_rates=rates)
        return dataclasses.replace(state, key=jnp.zeros(200))

    keys = jax.random.split(jax.random.key(1), 200)
    return jax.device_get(run(keys, canvas_lib.to_canvas(prompts(24), worlds.VOCABULARY)))


@pytest.mark.parametrize("scan", [True, False])
def test_generation_with_a_cache_is_that_without_token_by_token(scan):
    with_cache, without = generated(True, scan), generated(False)
    assert len(set(without.canvas.length - 2)) > 15 and len(set(without.nfe)) > 10
    for name in ("tokens", "length", "frozen", "open_gap"):
        np.testing.assert_array_equal(getattr(with_cache.canvas, name), getattr(without.canvas, name))
    for name in ("nfe", "born", "done", "truncated"):
        np.testing.assert_array_equal(getattr(with_cache, name), getattr(without, name))
    np.testing.assert_allclose(with_cache.trace.log_prob, without.trace.log_prob, atol=1e-4)
    inserted = without.born > 0
    assert (without.trace.log_prob[inserted] < 0).all() and (without.trace.log_prob[~inserted] == 0).all()


def test_texts_end_before_they_are_full_or_when_they_are():
    state = generated(True)
    calls = np.asarray(state.canvas.length) - 2 - np.asarray(prompts(24).length)
    full = np.asarray(state.canvas.length) == 26
    np.testing.assert_array_equal(state.nfe, calls + ~full)  # EOS costs a call
    assert full.any() and not full.all()
    assert set(np.unique(state.canvas.tokens)) <= {0, 1, 2, *worlds.LETTERS}  # PAD, CLS, BOS and letters


# --- Requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [(3, 3), (0, 2), (2, 5)])
def test_numbers_that_are_asked_for_are_kept(total):
    parts, mesh, params = model(8)
    sampler = parts.process.samplers(parts.sampling)["left_to_right"]
    num = 64
    x0 = jax.tree.map(lambda *x: np.stack(x), *[Example(**make_example(worlds.VOCABULARY, 8, ()))] * num)
    asked = request.build(10, worlds.V, [[(1, 0, request.UNBOUNDED)]] * num, [total] * num, [[A]] * num, 1)
    network = evals.for_sampling(parts, mesh, params)
    canvas = canvas_lib.to_canvas(x0, worlds.VOCABULARY)
    state = jax.jit(lambda key, asked: sampling.generate(network, sampler, key, canvas, parts.filters, asked).canvas)(
        jax.random.split(jax.random.key(2), num), jax.tree.map(jnp.asarray, asked)
    )
    length = np.asarray(state.length) - 2
    assert (length.min(), length.max()) == total
    assert A not in np.asarray(state.tokens)
