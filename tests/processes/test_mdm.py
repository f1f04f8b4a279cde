"""MDM: its noise, its bound by brute force over all masks, its samplers, and the gaps that it can fill."""

import dataclasses
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
from dilm_jax.canvas import Example
from dilm_jax.data.task import make_example
from dilm_jax.processes.mdm import MDM
from dilm_jax.sampling import Filters, SamplingOptions
from dilm_jax.schedules import MASKING
from dilm_jax.scores import Scores

A, B_ = worlds.LETTERS
VOCABULARY, V = worlds.VOCABULARY, worlds.V
PAD, EOS, MASK = VOCABULARY.pad, VOCABULARY.eos, VOCABULARY.mask
L = 3
S = L + 2
TEXTS = [(), (A,), (B_, A), (A, A), (A, B_, A), (B_, B_, B_)]
LAW = np.array([0.1, 0.2, 0.15, 0.2, 0.25, 0.1])


def make(masking="log_linear", time_conditioning=False, max_length=L):
    return MDM(
        vocabulary=VOCABULARY, max_length=max_length, eps=1e-3, masking=masking, time_conditioning=time_conditioning
    )


def fixed(text):
    """A text on the canvas of fixed size, without CLS and BOS."""
    return (*text, EOS, *[PAD] * L)[:L]


def keys(seed, num):
    return jax.random.split(jax.random.key(seed), num)


# --- Noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masking", MASKING)
def test_the_rate_of_revealing_is_that_of_the_share_of_masks(masking):
    law, t = MASKING[masking], np.linspace(0.05, 0.95, 19, dtype=np.float32)
    slope = jax.vmap(jax.grad(law.masked))(t)
    np.testing.assert_allclose(law.reveal_rate(t), slope / law.masked(t), rtol=1e-5)
    np.testing.assert_allclose(law.inverse(law.masked(t)), t, rtol=1e-5)
    np.testing.assert_allclose([law.masked(jnp.float32(t)) for t in (0, 1)], [0, 1], atol=1e-7)


@pytest.mark.parametrize("masking", MASKING)
def test_each_free_token_is_masked_by_itself_as_often_as_it_should(masking):
    text = worlds.prompted([(A, True), (B_, False)], [False, True, True])
    num, t = 20_000, 0.4
    canvas, targets = jax.jit(make(masking).corrupt)(
        keys(0, num), worlds.to_example([text] * num, L), jnp.full(num, t, jnp.float32)
    )
    tokens, masked = np.asarray(canvas.tokens[:, 2:]), np.asarray(targets.masked[:, 2:])
    np.testing.assert_array_equal(np.where(masked, MASK, [A, B_, EOS]), tokens)
    assert not masked[:, 0].any() and canvas.segment.all() and not canvas.open_gap.any()
    share = float(MASKING[masking].masked(t))
    both = np.array([masked[:, 1].mean(), masked[:, 2].mean(), masked[:, 1:].all(-1).mean()])
    expected = np.array([share, share, share**2])
    assert (abs(both - expected) < 4 * np.sqrt(expected * (1 - expected) / num)).all()


def test_little_noise_leaves_the_text_and_all_of_it_nothing():
    x0 = worlds.to_example([worlds.plain(text) for text in TEXTS], L)
    num = len(TEXTS)
    for t, expected in ((1e-9, [fixed(text) for text in TEXTS]), (1.0, [[MASK] * L] * num)):
        canvas, _ = make().corrupt(keys(1, num), x0, jnp.full(num, t))
        np.testing.assert_array_equal(canvas.tokens[:, 2:], expected)


# --- The bound -------------------------------------------------------------------------------------------------------


@functools.cache
def posterior():
    """log p(token | what is not masked) [states, L, V] by the contents of L columns, read as a number."""
    texts = [fixed(text) for text in TEXTS]
    table = np.full((V**L, L, V), 1.0)
    for state in itertools.product([A, B_, EOS, PAD, MASK], repeat=L):
        agree = np.array([all(s in (w, MASK) for s, w in zip(state, text, strict=True)) for text in texts])
        if agree.any():
            counts = np.zeros((L, V))
            for column in range(L):
                np.add.at(counts[column], [text[column] for text in texts], LAW * agree)
            table[np.array(state) @ V ** np.arange(L)] = counts
    with np.errstate(divide="ignore"):
        return np.log(table / table.sum(-1, keepdims=True)).astype(np.float32)


def network(wrong: float = 0.0):
    """The truth, or that and something else."""
    other = np.random.default_rng(0).normal(size=(V**L, L, V)).astype(np.float32)
    table = jnp.asarray(
        np.where(np.isfinite(posterior()), posterior() + wrong * other, -1e9 if not wrong else other - 6)
    )
    predictable = np.isin(np.arange(V), [A, B_, EOS, PAD])

    def scores(canvas, t):
        del t
        logits = table[canvas_lib.content(canvas)[0] @ jnp.asarray(V ** np.arange(L))]
        logits = jnp.where(predictable, jnp.pad(logits, ((0, 0), (2, 0), (0, 0))), -jnp.inf)
        return Scores(logits=logits, length_logits=None, stop_logits=None)

    return scores


def bound_by_masks(text, scores, num_frozen=0) -> float:
    """Given its first tokens: Σ over sets of masks of (m − 1)!(N − m)!/N!·Σ −log p, ∫ of the rate of
    revealing times P(these masks at t)."""
    total, content = 0.0, np.array(fixed(text))
    for masks in itertools.product([False], *[[False, True]] * (L - num_frozen)):
        masks, m = masks[1:], sum(masks)
        if m:
            weight = 1 / m / math.comb(L - num_frozen, m)
            masks = (*[False] * num_frozen, *masks)
            canvas = canvas_lib.to_canvas(worlds.to_example([worlds.plain(text)], L), VOCABULARY)
            tokens = np.concatenate([[VOCABULARY.cls, VOCABULARY.bos], np.where(masks, MASK, content)])
            logits = np.asarray(
                scores(dataclasses.replace(canvas, tokens=jnp.asarray(tokens[None], jnp.int32)), None).logits[0, 2:],
                np.float64,
            )
            log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
            total -= weight * log_p[np.arange(L), content][list(masks)].sum()
    return total


def draws(process, scores, text, num, num_frozen=0):
    pattern = [(word, k < num_frozen) for k, word in enumerate(text)]
    open_gap = [k >= num_frozen for k in range(len(text) + 1)]
    x0 = worlds.to_example([worlds.prompted(pattern, open_gap)] * num, L)
    place = (jnp.arange(num) + 0.5) / num
    return np.asarray(
        jax.jit(process.nll_draws, static_argnums=(0, 4))(likelihood.at_once(scores), keys(3, num), place, x0, 3)
    ).astype(np.float64)


@pytest.mark.parametrize("wrong", [0.0, 0.5])
@pytest.mark.parametrize("masking, time_conditioning", [("log_linear", False), ("cosine", True)])
def test_draws_of_the_bound_have_the_mean_over_all_masks(wrong, masking, time_conditioning):
    process, scores = make(masking, time_conditioning), network(wrong)
    for text, num_frozen in [(text, 0) for text in TEXTS] + [((B_, A), 1), ((A, B_, A), 1), ((A, B_, A), 2)]:
        drawn = draws(process, scores, text, 2000, num_frozen).mean(0)
        error = abs(drawn.mean() - bound_by_masks(text, scores, num_frozen))
        assert error < 4 * drawn.std() / len(drawn) ** 0.5 + 1e-4, text


def test_the_bound_is_the_entropy_at_the_truth_and_above_it_elsewhere():
    entropy = -(LAW * np.log(LAW)).sum()
    at_truth, elsewhere = (LAW @ [bound_by_masks(text, network(wrong)) for text in TEXTS] for wrong in (0.0, 0.5))
    assert at_truth == pytest.approx(entropy, abs=1e-5)
    assert elsewhere > entropy + 0.01


@pytest.mark.parametrize("masking", MASKING)
def test_the_loss_at_uniform_times_has_the_mean_of_the_bound(masking):
    process, scores, num = make(masking), network(0.5), 100_000
    x0 = worlds.to_example([worlds.plain((B_, A))] * num, L)

    @jax.jit
    def losses(key):
        t, weight = process.times((jnp.arange(num) + 0.5) / num)
        canvas, targets = process.corrupt(key, x0, t)
        return weight * process.loss(scores(canvas, t), canvas, targets)["loss"]

    values = np.asarray(losses(keys(4, num)), np.float64)
    below_eps = 1e-3 * 10  # of the integral, at most
    assert abs(values.mean() - bound_by_masks((B_, A), scores)) < 4 * values.std() / num**0.5 + below_eps


def test_the_likelihood_of_an_answer_is_given_its_prompt():
    """A frozen token is never masked, and one text alone costs nothing at the truth."""
    text = worlds.prompted([(A, True), (B_, True), (A, False)], [False, False, True, True])
    x0 = worlds.to_example([text] * 50, L)
    drawn = jax.jit(make().nll_draws, static_argnums=(0, 4))(
        likelihood.at_once(network()), keys(5, 50), jnp.arange(50) / 50, x0, 4
    )
    np.testing.assert_allclose(drawn, 0, atol=1e-5)


# --- Samplers --------------------------------------------------------------------------------------------------------


@functools.cache
def sample(name, num_steps, num=4000, time_conditioning=False):
    process = make(time_conditioning=time_conditioning)
    sampler = process.samplers(SamplingOptions(num_steps=num_steps))[name]
    canvas = canvas_lib.to_canvas(worlds.to_example([worlds.plain(())] * num, L), VOCABULARY)

    @jax.jit
    def run(key):
        state = sampling.generate(network(), sampler, key, canvas, Filters())
        return *sampler.decode(state.canvas), state.nfe, state.clock

    tokens, length, nfe, clock = jax.device_get(run(keys(6, num)))
    return [tuple(row[:n].tolist()) for row, n in zip(tokens, length, strict=True)], nfe, clock


@pytest.mark.parametrize(
    "name, num_steps, allowance", [("ancestral", 32, 0.03), ("confidence", 8, 0), ("first_hitting", 1, 0)]
)
def test_samplers_return_the_data(name, num_steps, allowance):
    texts, nfe, _ = sample(name, num_steps)
    shares = np.array([texts.count(text) for text in TEXTS]) / len(texts)
    noise = 4 * np.sqrt(LAW * (1 - LAW) / len(texts))
    assert (abs(shares - LAW) < noise + allowance).all()
    assert nfe.max() <= (num_steps if name == "ancestral" else L)  # a call a mask


def test_confidence_reveals_equal_parts_in_the_steps_that_it_has():
    for num_steps, calls in ((1, 1), (2, 2), (3, 3), (50, 3)):
        assert set(sample("confidence", num_steps, 50)[1]) == {calls}


def test_a_text_ends_before_its_first_EOS_or_PAD():
    sampler = make().samplers(SamplingOptions(num_steps=1))["first_hitting"]
    rows = [(A, EOS, B_), (PAD, A, B_), (A, B_, A), (EOS, EOS, A)]
    canvas = canvas_lib.to_canvas(worlds.to_example([worlds.plain((A,))] * 4, L), VOCABULARY)
    canvas = dataclasses.replace(canvas, tokens=canvas.tokens.at[:, 2:].set(np.array(rows)))
    tokens, length = sampler.decode(canvas)
    np.testing.assert_array_equal(length, [1, 0, 3, 0])
    np.testing.assert_array_equal(tokens, [(A, PAD, PAD), (PAD,) * 3, (A, B_, A), (PAD,) * 3])


# --- Gaps ------------------------------------------------------------------------------------------------------------

LONG = 8


def uniform(canvas, t):
    """The same score for all, EOS and PAD included."""
    del t
    logits = jnp.where(np.isin(np.arange(V), [A, B_, EOS, PAD]), 0.0, -jnp.inf)
    return Scores(logits=jnp.broadcast_to(logits, (*canvas.tokens.shape, V)), length_logits=None, stop_logits=None)


@functools.cache
def filled(text, gaps, total, num=100):
    """Texts of which `text` is a part, with so many tokens in each gap (column, at least, at most)."""
    process = make(max_length=LONG)
    sampler = process.samplers(SamplingOptions(num_steps=4))["first_hitting"]
    x0 = jax.tree.map(lambda *x: np.stack(x), *[Example(**make_example(VOCABULARY, LONG, (), text))] * num)
    asked = request.build(LONG + 2, V, [list(gaps)] * num, [total] * num, [[]] * num, len(gaps))

    @jax.jit
    def run(key, asked):
        state = sampling.generate(uniform, sampler, key, canvas_lib.to_canvas(x0, VOCABULARY), Filters(), asked)
        return *sampler.decode(state.canvas), state.request.group, state.canvas.tokens

    tokens, length, group, canvas = jax.device_get(run(keys(7, num), jax.tree.map(jnp.asarray, asked)))
    return [tuple(row[:n].tolist()) for row, n in zip(tokens, length, strict=True)], group, canvas


def test_gaps_of_a_known_number_of_tokens_are_filled():
    """Two between A and B, one before both: neither EOS nor PAD comes there, and the text then ends."""
    texts, group, canvas = filled((A, B_), ((1, 1, 1), (2, 2, 2)), (0, request.UNBOUNDED))
    assert {len(text) for text in texts} == {5}
    assert {(text[1], text[4]) for text in texts} == {(A, B_)}
    assert len({text[0] for text in texts}) == 2 and len({text[2:4] for text in texts}) == 4
    np.testing.assert_array_equal(group[:, 1:7], [[0, 0, 1, 1, 1, request.NO_GROUP]] * len(texts))
    np.testing.assert_array_equal(canvas[:, 7:], [[EOS, PAD, PAD]] * len(texts))


@pytest.mark.parametrize("bounds, total, lengths", [
    ((0, request.UNBOUNDED), (0, request.UNBOUNDED), range(2, LONG + 1)),
    ((0, request.UNBOUNDED), (3, 3), {5}),
    ((0, request.UNBOUNDED), (0, 2), {2, 3, 4}),
    ((2, 3), (0, request.UNBOUNDED), {4, 5}),
])  # fmt: skip
def test_the_gap_at_the_end_takes_what_fits_or_what_is_asked_for(bounds, total, lengths):
    texts, *_ = filled((A, B_), ((3, *bounds),), total, 400)
    assert {text[:2] for text in texts} == {(A, B_)}
    assert {len(text) for text in texts} == set(lengths)
