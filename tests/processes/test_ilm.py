"""ILM: uniform drops, the law that its losses have as their optimum, its bound, and when it stops."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import worlds
from dilm_jax import canvas as canvas_lib
from dilm_jax import likelihood, request, sampling
from dilm_jax.losses import LossConfig
from dilm_jax.processes.ilm import ILM
from dilm_jax.sampling import Filter, Filters, SamplingOptions
from dilm_jax.scores import Scores
from dilm_jax.worlds import insert, insertions, missing, plain

A, B_ = worlds.LETTERS
V, L = worlds.V, 3
S = L + 2
ALL = [word for n in range(L + 1) for word in itertools.product(worlds.LETTERS, repeat=n)]
LAW = np.random.default_rng(1).dirichlet(np.full(len(ALL), 1.0))
LENGTHS = np.array([len(word) for word in ALL])


def make(weighting="elbo", kernel="exact"):
    config = LossConfig(
        kernel=kernel,
        alignment="sampled",
        length="cross_entropy",
        weighting=weighting,
        max_weight=math.inf,
        targets="gather",
    )
    return ILM(vocabulary=worlds.VOCABULARY, max_length=L, loss_config=config)


def keys(seed, num):
    return jax.random.split(jax.random.key(seed), num)


def test_a_weighting_that_it_does_not_have_is_refused():
    with pytest.raises(ValueError, match="'elbo' or 'normalized', got 'self_normalized'"):
        make("self_normalized")


def test_every_number_of_drops_is_as_likely_and_which_ones_are_uniform():
    num, text = 24_000, worlds.prompted([(A, True), (B_, False), (A, False)], [False, True, True, True])
    u = (jnp.arange(num) + 0.5) / num
    _, targets = jax.jit(make().corrupt)(keys(0, num), worlds.to_example([text] * num, L), u)
    dropped = np.asarray(targets.dropped)
    assert not dropped[:, 0].any()
    counts = np.array([(dropped[:, 1:] == mask).all(-1).mean() for mask in itertools.product([False, True], repeat=2)])
    expected = np.array([1 / 3, 1 / 6, 1 / 6, 1 / 3])
    assert (abs(counts - expected) < 4 * np.sqrt(expected / num)).all()


# --- Every text, every mask ------------------------------------------------------------------------------------------


@functools.cache
def world():
    return worlds.worlds.World([plain(word) for word in ALL], LAW)


def visits(per_text) -> np.ndarray:
    """How often each pair (text, mask) is seen where text x counts `per_text[x]`, masks of each number alike."""
    pairs = world()
    masks = np.array([math.comb(n, m) for n, m in zip(pairs.pair_n, pairs.pair_m, strict=True)])
    return per_text[pairs.pair_text] / masks


@functools.cache
def optimum(weighting):
    """(scores of the joint softmax [states, S, V], stop logits [states]) at which the loss is least: by its definition
    the mean of its targets, over texts as they count."""
    pairs = world()
    weight = visits(LAW if weighting == "elbo" else LAW / (LENGTHS + 1))
    counts, stops, seen = np.zeros((len(pairs.states), S, V)), np.zeros(len(pairs.states)), np.zeros(len(pairs.states))
    for (text, dropped), x, w in zip(pairs.pairs, pairs.pair_state, weight, strict=True):
        seen[x] += w
        stops[x] += w * (not dropped)
        for gap, token in missing(text, dropped):
            counts[x, gap, token] += w / len(dropped)
    with np.errstate(divide="ignore"):
        stop = np.log(stops) - np.log(seen - stops)
        return np.maximum(np.log(counts), -30).astype(np.float32), np.clip(stop, -30, 30).astype(np.float32)


def network(table):
    logits, stop = (jnp.asarray(x) for x in table)
    state_of = np.zeros(V**L, int)
    for state, index in world().state_index.items():
        state_of[np.array(state.tokens, int) @ V ** np.arange(len(state.tokens))] = index
    letter = np.isin(np.arange(V), worlds.LETTERS)

    def scores(canvas, t=None):
        del t
        at = jnp.asarray(state_of)[canvas_lib.content(canvas)[0] @ jnp.asarray(V ** np.arange(L))]
        return Scores(logits=jnp.where(letter, logits[at], -jnp.inf), length_logits=None, stop_logits=stop[at])

    return scores


def law_of(table) -> np.ndarray:
    """P(text) of insertions one by one, by enumeration of all paths."""
    logits, stop = (np.asarray(x, np.float64) for x in table)
    reached = {plain(()): 1.0}
    law = dict.fromkeys(ALL, 0.0)
    for n in range(L + 1):
        following: dict = {}
        for state, p in reached.items():
            x = world().state_index[state]
            p_stop = 1.0 if n == L else 1 / (1 + math.exp(-stop[x]))
            law[state.tokens] += p * p_stop
            cells = {(i, w): math.exp(logits[x, 1 + i, w]) for i, w in insertions(state, 2)} if n < L else {}
            for (i, w), cell in cells.items():
                after = insert(state, i, w)
                following[after] = following.get(after, 0.0) + p * (1 - p_stop) * cell / sum(cells.values())
        reached = following
    return np.array([law[word] for word in ALL])


@pytest.mark.parametrize("weighting, kernel", [("elbo", "exact"), ("elbo", "paper"), ("normalized", "exact")])
def test_the_expected_loss_has_no_slope_at_its_optimum(weighting, kernel):
    """Over all texts and masks, each number of drops alike. (The published kernel has the same optimum.)"""
    pairs, process = world(), make(weighting, kernel)
    canvas, targets = worlds.worlds.corrupted(pairs.pairs, np.zeros(len(pairs.pairs)), L, worlds.VOCABULARY)
    weight = visits(LAW / (LENGTHS + 1))

    def expected(table):
        scores = Scores(
            logits=jnp.where(np.isin(np.arange(V), worlds.LETTERS), table[0][pairs.pair_state], -jnp.inf),
            length_logits=None,
            stop_logits=table[1][pairs.pair_state],
        )
        return jnp.asarray(weight, jnp.float32) @ process.loss(scores, canvas, targets)["loss"]

    slope = jax.jit(jax.grad(expected))
    at_optimum, elsewhere = slope(optimum(weighting)), slope(jax.tree.map(np.zeros_like, optimum(weighting)))
    for leaf in (0, 1):
        assert abs(at_optimum[leaf]).max() < 1e-4 * abs(elsewhere[leaf]).max()


def test_texts_come_as_in_the_data_or_by_the_published_loss_short_ones_too_often():
    np.testing.assert_allclose(law_of(optimum("elbo")), LAW, atol=1e-5)
    biased = LAW / (LENGTHS + 1)
    np.testing.assert_allclose(law_of(optimum("normalized")), biased / biased.sum(), atol=1e-5)


def exact_bound(table) -> np.ndarray:
    """The mean of `nll_draws` over all masks."""
    pairs, process = world(), make()
    canvas, targets = worlds.worlds.corrupted(pairs.pairs, np.zeros(len(pairs.pairs)), L, worlds.VOCABULARY)

    def capture(noised, t, value_of):
        del noised, t
        return value_of(network(table)(canvas))

    class Fixed(ILM):
        def corrupt(self, key, x0, t):
            return canvas, targets

    fixed = Fixed(vocabulary=process.vocabulary, max_length=L, loss_config=process.loss_config)
    num = len(pairs.pairs)
    values = fixed.nll_draws(capture, keys(0, num), jnp.zeros(num), targets.x0, 1)[0]
    result = np.zeros(len(ALL))
    np.add.at(result, pairs.pair_text, np.asarray(values, np.float64) * visits(1 / (LENGTHS + 1)))
    return result


def test_the_bound_is_the_entropy_at_the_optimum_and_above_log_p_elsewhere():
    assert LAW @ exact_bound(optimum("elbo")) == pytest.approx(-(LAW * np.log(LAW)).sum(), abs=1e-4)
    rng = np.random.default_rng(3)
    wrong = tuple((x + 0.7 * rng.normal(size=x.shape)).astype(np.float32) for x in jax.tree.map(
        lambda x: np.maximum(x, -4), optimum("elbo")))  # fmt: skip
    gap = exact_bound(wrong) + np.log(law_of(wrong))
    assert gap.min() > -1e-4 and gap.max() > 0.01


def test_draws_of_the_bound_have_its_mean():
    table, copies = optimum("normalized"), 400
    x0 = worlds.to_example([plain(word) for word in ALL for _ in range(copies)], L)
    num = len(x0.length)
    drawn = jax.jit(make().nll_draws, static_argnums=(0, 4))(
        likelihood.at_once(network(table)), keys(4, num), (jnp.arange(num) % copies + 0.5) / copies, x0, 2
    )
    each = np.asarray(drawn, np.float64).mean(0).reshape(len(ALL), copies)
    error = abs(each.mean(-1) - exact_bound(table))
    assert (error < 4 * each.std(-1) / copies**0.5 + 1e-4).all()


def test_a_prompt_is_neither_paid_for_nor_counted():
    """Loss and bound of what follows it are those of a text that has no more, where neither is full."""
    rng, process = np.random.default_rng(5), make()
    words = [(text.tokens, dropped) for text, dropped in world().pairs if len(text.tokens) < L - 1]
    table = rng.normal(size=(len(words), S, V)).astype(np.float32), rng.normal(size=len(words)).astype(np.float32)
    values = []
    for prompt in ((), (A,)):
        first = len(prompt)
        pairs = [
            (
                worlds.prompted(
                    [*((w, True) for w in prompt), *((w, False) for w in tokens)],
                    [False] * first + [True] * (len(tokens) + 1),
                ),
                tuple(first + k for k in dropped),
            )
            for tokens, dropped in words
        ]
        canvas, targets = worlds.worlds.corrupted(pairs, np.zeros(len(pairs)), L, worlds.VOCABULARY)
        logits = np.where(np.isin(np.arange(V), worlds.LETTERS), np.roll(table[0], first, axis=1), -np.inf)
        scores = Scores(logits=jnp.asarray(logits), length_logits=None, stop_logits=jnp.asarray(table[1]))

        class Fixed(ILM):
            def corrupt(self, key, x0, t, made=(canvas, targets)):
                return made

        fixed = Fixed(vocabulary=process.vocabulary, max_length=L, loss_config=process.loss_config)
        ask = lambda canvas, t, value_of, scores=scores: value_of(scores)  # noqa: E731
        num = len(pairs)
        values.append(
            (
                process.loss(scores, canvas, targets)["loss"],
                fixed.nll_draws(ask, keys(0, num), jnp.zeros(num), targets.x0, 1),
            )
        )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), *values)


# --- Sampling --------------------------------------------------------------------------------------------------------


DRAWN = Filters()


def sample(table, threshold, num, filters=DRAWN, asked=None):
    sampler = make().samplers(SamplingOptions(num_steps=1, stop_threshold=threshold))["one_by_one"]
    canvas = canvas_lib.to_canvas(worlds.to_example([plain(())] * num, L), worlds.VOCABULARY)
    run = jax.jit(lambda key, asked: sampling.generate(network(table), sampler, key, canvas, filters, asked))
    state = run(keys(5, num), asked)
    tokens, length = sampler.decode(state.canvas)
    return [tuple(row[:n].tolist()) for row, n in zip(np.asarray(tokens), np.asarray(length), strict=True)], state


def test_where_stopping_is_drawn_texts_are_those_of_the_law():
    num = 4000
    texts, state = sample(optimum("elbo"), 0.0, num)
    shares = np.array([texts.count(word) for word in ALL]) / num
    assert (abs(shares - LAW) < 4 * np.sqrt(LAW * (1 - LAW) / num)).all()
    length = np.asarray(state.canvas.length) - 2
    np.testing.assert_array_equal(state.nfe, length + (length < L))  # to stop costs a call, but for a full text


def test_a_threshold_stops_where_the_probability_is_above_it():
    """A stop probability of 0.6 everywhere."""
    logits = np.zeros((len(world().states), S, V), np.float32)
    table = logits, np.full(len(world().states), np.log(0.6 / 0.4), np.float32)
    for threshold, length in ((0.5, 0), (0.7, L)):
        texts, _ = sample(table, threshold, 20)
        assert {len(text) for text in texts} == {length}


@pytest.mark.parametrize("total", [(2, 2), (0, 1)])
def test_numbers_that_are_asked_for_are_kept(total):
    num = 50
    asked = request.build(S, V, [[(1, 0, request.UNBOUNDED)]] * num, [total] * num, [[B_]] * num, 1)
    texts, _ = sample(optimum("elbo"), 0.0, num, asked=jax.tree.map(jnp.asarray, asked))
    assert {len(text) for text in texts} == set(range(total[0], total[1] + 1))
    assert not any(B_ in text for text in texts)


def test_greedy_gaps_and_tokens_take_the_likeliest():
    logits = np.random.default_rng(6).normal(size=(len(world().states), S, V)).astype(np.float32)
    table = logits, np.full(len(world().states), -30, np.float32)
    greedy = Filters(gap=Filter(temperature=0.0), token=Filter(temperature=0.0))
    texts, _ = sample(table, 0.9, 3, greedy)
    state = plain(())
    for _ in range(L):
        scores = logits[world().state_index[state]][1 : 2 + len(state.tokens), list(worlds.LETTERS)]
        gap = np.logaddexp.reduce(scores, axis=-1).argmax()
        state = insert(state, int(gap), worlds.LETTERS[scores[gap].argmax()])
    assert set(texts) == {state.tokens}
