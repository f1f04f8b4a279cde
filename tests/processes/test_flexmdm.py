"""FlexMDM: its noise, its losses' optimum, its bound by brute force over all masks, and its samplers."""

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
from dilm_jax.processes.flexmdm import FlexMDM, Targets
from dilm_jax.sampling import Filters, SamplingOptions
from dilm_jax.schedules import SquareTimes
from dilm_jax.scores import Scores
from dilm_jax.worlds import plain

A, B_ = worlds.LETTERS
VOCABULARY, V = worlds.VOCABULARY, worlds.V
MASK = VOCABULARY.mask
L, EPS = 4, 1e-3
S, K = L + 2, L + 1
TEXTS = [(), (A,), (B_, A), (A, A), (A, B_, A), (B_, B_, B_)]
LAW = np.array([0.1, 0.2, 0.15, 0.2, 0.25, 0.1])
LETTER = np.isin(np.arange(V), worlds.LETTERS)
MISSING, MASKED, SEEN = range(3)


def make(length="cross_entropy", eps=EPS):
    config = LossConfig(
        kernel="exact",
        alignment="sampled",
        length=length,
        weighting="elbo",
        max_weight=math.inf,
        targets="gather",
    )
    return FlexMDM(vocabulary=VOCABULARY, max_length=L, eps=eps, loss_config=config, time_sampling="uniform")


def keys(seed, num):
    return jax.random.split(jax.random.key(seed), num)


# --- Every text, every way to noise it -------------------------------------------------------------------------------


class AllWays:
    """Rows: a text, and which of its tokens are missing, masked, and seen; canvas and targets by lists.

    Attributes:
      prompt: frozen tokens before every text.
      text: [R] the text's index.
      counts: [R, 3] how many free ones are missing, masked, seen.
      state: [R] index of the contents among all that occur; `of` the index by the contents read as a number.
      left: [R, S] how many are missing from each gap.
      meant: [R, S] the token that stands for each column.
    """

    def __init__(self, prompt=()):
        rows, states, texts, self.how, self.prompt = [], [], [], [], prompt
        seen = [(word, True) for word in prompt], [False] * len(prompt)
        for x, text in enumerate(TEXTS):
            for how in itertools.product(range(3), repeat=len(text)):
                contents, meant, left = [*prompt], np.zeros(S, int), np.zeros(S, int)
                meant[2 : 2 + len(prompt)] = prompt
                for word, which in zip(text, how, strict=True):
                    if which == MISSING:
                        left[1 + len(contents)] += 1
                    else:
                        meant[2 + len(contents)] = word
                        contents.append(MASK if which == MASKED else word)
                rows.append((x, [how.count(which) for which in range(3)], left, meant))  # of the free ones
                states.append(tuple(contents))
                open_gap = seen[1] + [True] * (len(text) + 1)
                texts.append(worlds.prompted([*seen[0], *((word, False) for word in text)], open_gap))
                how = (SEEN,) * len(prompt) + how
                self.how.append(how + (SEEN,) * (L - len(how)))
        self.text, self.counts, self.left, self.meant = map(np.array, zip(*rows, strict=True))
        distinct = list(dict.fromkeys(states))
        self.state = np.array([distinct.index(state) for state in states])
        self.of = np.zeros(V**L, int)
        for index, state in enumerate(distinct):
            self.of[np.array(state, int) @ V ** np.arange(len(state))] = index
        self.num_states, self.x0 = len(distinct), worlds.to_example(texts, L)

    def probs(self, t):
        """P(the row's way | its text) [R] at a time."""
        each = jnp.stack([t, -t * jnp.log(t), 1 - t + t * jnp.log(t)])
        return jnp.prod(jnp.where(self.counts > 0, each**self.counts, 1.0), axis=-1)

    def at(self, process, t):
        """Canvas and targets of every row, by events that make it so."""
        before, after = t / 2, (1 + t) / 2
        times = np.array([(before, before), (after, before), (after, after)])[np.array(self.how)]
        return process._at(jnp.full(len(self.how), t), self.x0, jnp.asarray(times))


PLAIN, PROMPTED = AllWays(), AllWays((B_,))
both = pytest.mark.parametrize("ways", [PLAIN, PROMPTED], ids=["plain", "prompted"])


def table(ways, wrong: float = 0.0, seed=0):
    """log of (how many are missing, what the masks stand for) → [states, …] at a time: those of the truth, or with
    something else added."""
    rng = np.random.default_rng(seed)
    extra = rng.normal(size=(ways.num_states, S, K)), rng.normal(size=(ways.num_states, S, V))

    def at(t):
        weight = LAW[ways.text] * ways.probs(t)
        counts = jnp.zeros((ways.num_states, S, K)).at[ways.state[:, None], np.arange(S), ways.left]
        length = counts.add(jnp.broadcast_to(weight[:, None], (len(weight), S)))
        counts = jnp.zeros((ways.num_states, S, V)).at[ways.state[:, None], np.arange(S), ways.meant]
        token = counts.add(jnp.broadcast_to(weight[:, None], (len(weight), S)))
        total = length.sum(-1, keepdims=True)
        logs = [jnp.log(jnp.maximum(x / jnp.maximum(total, 1e-37), 1e-12)) for x in (length, token)]
        return [x + wrong * y if wrong else x for x, y in zip(logs, extra, strict=True)]

    return at


def scores_of(length, token):
    return Scores(logits=jnp.where(LETTER, token, -jnp.inf), length_logits=length, stop_logits=None)


def network(wrong: float = 0.0, ways=PLAIN):
    """(canvas, t) → scores; a time a row."""

    def scores(canvas, t):
        state = jnp.asarray(ways.of)[canvas_lib.content(canvas)[0] @ jnp.asarray(V ** np.arange(L))]
        return scores_of(*jax.vmap(lambda i, t: [x[i] for x in table(ways, wrong)(t)])(state, jnp.minimum(t, 1 - 1e-6)))

    return scores


# --- Noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0.15, 0.7])
def test_each_free_token_is_deleted_or_masked_by_itself_as_often_as_it_should(t):
    """A frozen token stays; what is left says where what is missing was."""
    text, num = worlds.prompted([(A, True), (B_, False), (A, False)], [False, True, True, True]), 20_000
    canvas, targets = jax.jit(make().corrupt)(
        keys(0, num), worlds.to_example([text] * num, L), jnp.full(num, t, jnp.float32)
    )
    dropped, masked = np.asarray(targets.missing.dropped), np.asarray(targets.masked)
    assert not dropped[:, 0].any() and not masked[:, 0].any() and not (dropped & masked).any()
    how = np.where(dropped, MISSING, np.where(masked, MASKED, SEEN))[:, 1:3]
    each = np.array([t, -t * np.log(t), 1 - t + t * np.log(t)])
    for first, second in itertools.product(range(3), repeat=2):
        rows = (how == (first, second)).all(-1)
        expected = each[first] * each[second]
        assert abs(rows.mean() - expected) < 4 * np.sqrt(expected / num)
        here = [A, *(w if h == SEEN else MASK for w, h in zip((B_, A), (first, second), strict=True) if h != MISSING)]
        np.testing.assert_array_equal(canvas.tokens[rows, 2:], [here + [VOCABULARY.pad] * (L - len(here))] * rows.sum())
        missing = np.zeros((rows.sum(), S), int)
        for which, column in ((first, 2), (second, 3 - (first == MISSING))):
            missing[:, column] += which == MISSING
        np.testing.assert_array_equal(targets.missing.num_in_gap[rows], missing)


def test_times_of_the_loss_are_squares_whose_weights_are_those_of_uniform_ones():
    t, weight = SquareTimes(eps=0.01)((jnp.arange(10_000) + 0.5) / 10_000)
    assert t.min() == pytest.approx(0.01, rel=1e-2) and t.max() == pytest.approx(1, rel=1e-3)
    for function, mean in ((lambda t: t, (1 - 0.01**2) / 2), (lambda t: 1 / t, -np.log(0.01))):
        assert (weight * function(t)).mean() == pytest.approx(mean / 0.99, rel=1e-3)


# --- The loss --------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("length", ["poisson_mean", "cross_entropy"])
def test_the_expected_loss_has_no_slope_at_the_truth(length, ways):
    process, t = make(length), 0.4
    canvas, targets = ways.at(process, t)
    weight = jnp.asarray(LAW[ways.text] * ways.probs(t), jnp.float32)

    def expected(table):
        scores = scores_of(*(x[ways.state] for x in table))
        return weight @ process.loss(scores, canvas, targets)["loss"]

    slope = jax.jit(jax.grad(expected))
    at_truth, elsewhere = slope(table(ways)(t)), slope(table(ways, 0.5)(t))
    for leaf in (0, 1):
        assert abs(at_truth[leaf]).max() < 1e-4 * abs(elsewhere[leaf]).max()


@both
def test_the_loss_is_that_of_its_definition(ways):
    """Over masks and gaps one by one."""
    t = 0.3
    canvas, targets = ways.at(make(), t)
    length, token = (np.asarray(x, np.float64)[ways.state] for x in table(ways, 0.5)(t))
    scores = scores_of(*map(jnp.float32, (length, token)))
    log_p = token - np.logaddexp.reduce(token[..., LETTER], axis=-1, keepdims=True)
    log_p_left = length - np.logaddexp.reduce(length, axis=-1, keepdims=True)
    g = np.exp(log_p_left) @ np.arange(K)
    for kind in ("poisson_mean", "cross_entropy"):
        loss = make(kind).loss(scores, canvas, targets)["loss"]
        for row, how in enumerate(ways.how):
            first = len(ways.prompt)
            n = first + len(TEXTS[ways.text[row]])
            kept = [k for k in range(n) if how[k] != MISSING]
            expected = -sum(log_p[row, 2 + i, ways.meant[row, 2 + i]] for i, k in enumerate(kept) if how[k] == MASKED)
            for gap in range(1 + first, 2 + len(kept)):
                G = ways.left[row, gap]
                log_G = -log_p_left[row, gap, G]
                expected += g[row, gap] - G * np.log(g[row, gap]) if kind == "poisson_mean" else log_G
            assert loss[row] == pytest.approx(expected / t, rel=1e-4, abs=1e-6), (kind, how)


# --- The bound -------------------------------------------------------------------------------------------------------


def bound(wrong: float, ways=PLAIN) -> np.ndarray:
    """[texts] ∫ of Σ over all ways: the rates at which what is missing and masked comes against those of the model."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    ts, dts = ((nodes + 1) / 2) ** 3, weights / 2 * 3 * ((nodes + 1) / 2) ** 2
    result = np.zeros(len(TEXTS))
    columns = np.arange(S)
    for t, dt in zip(ts, dts, strict=True):
        length, token = (np.asarray(x, np.float64)[ways.state] for x in table(ways, wrong)(t))
        log_p = token - np.logaddexp.reduce(token[..., LETTER], axis=-1, keepdims=True)
        p_left = np.exp(length - np.logaddexp.reduce(length, axis=-1, keepdims=True))
        rate = p_left @ np.arange(K) / t
        first = 1 + len(ways.prompt)
        num_seen = ways.counts[:, MASKED] + ways.counts[:, SEEN]
        is_gap = (columns >= first) & (columns <= first + num_seen[:, None])
        gaps = rate - ways.left / t * (1 + np.log(t * rate))  # of path densities: each token's true rate is 1/t
        value = np.where(is_gap, gaps, 0).sum(-1)
        contents = np.where(ways.meant > 0, ways.meant, A)
        nll = -np.take_along_axis(log_p, contents[..., None], axis=-1)[..., 0]
        value += np.where(masked_columns(ways), nll, 0).sum(-1) / t
        np.add.at(result, ways.text, dt * np.asarray(ways.probs(t), np.float64) * value)
    return result


def masked_columns(ways):
    """[R, S]"""
    result = np.zeros((len(ways.how), S), bool)
    for row, how in enumerate(ways.how):
        num = len(ways.prompt) + len(TEXTS[ways.text[row]])
        seen = [which for which in how[:num] if which != MISSING]
        result[row, 2 : 2 + len(seen)] = [which == MASKED for which in seen]
    return result


@both
def test_the_bound_is_the_entropy_at_the_truth_and_above_it_elsewhere(ways):
    entropy = -(LAW * np.log(LAW)).sum()
    assert LAW @ bound(0.0, ways) == pytest.approx(entropy, abs=2e-3)
    assert LAW @ bound(0.5, ways) > entropy + 0.1


@both
@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_draws_of_the_bound_have_its_mean_and_none_is_large(wrong, ways):
    process, copies = make(eps=1e-6), 1500
    whole = np.flatnonzero(ways.counts[:, SEEN] == [len(TEXTS[x]) for x in ways.text])
    x0 = jax.tree.map(lambda x: jnp.repeat(x[whole], copies, axis=0), ways.x0)
    place = jnp.tile((jnp.arange(copies) + 0.5) / copies, len(TEXTS))
    drawn = jax.jit(process.nll_draws, static_argnums=(0, 4))(
        likelihood.at_once(network(wrong, ways)), keys(4, len(place)), place, x0, 4
    )
    each = np.asarray(drawn, np.float64).mean(0).reshape(len(TEXTS), copies)
    assert (abs(each.mean(-1) - bound(wrong, ways)) < 4 * each.std(-1) / copies**0.5 + 2e-3).all()
    assert each.max() < 100


def test_below_eps_the_network_is_asked_at_eps():
    asked = []

    def spy(canvas, t, value_of):
        asked.append(t)
        return value_of(network()(canvas, t))

    num = 10
    x0 = worlds.to_example([plain((A, B_, A))] * num, L)
    with jax.disable_jit():
        values = make(eps=0.2).nll_draws(spy, keys(5, num), jnp.arange(num) / num, x0, 1)
    assert min(t.min() for t in asked) == np.float32(0.2) and np.isfinite(values).all()


# --- Samplers --------------------------------------------------------------------------------------------------------


def run(name, num_steps, num, scores, asked=None, seed=7):
    sampler = make().samplers(SamplingOptions(num_steps=num_steps))[name]
    canvas = canvas_lib.to_canvas(worlds.to_example([plain(())] * num, L), VOCABULARY)

    @jax.jit
    def sample(key, asked):
        state = sampling.generate(scores, sampler, key, canvas, Filters(), asked)
        return *sampler.decode(state.canvas), state.nfe

    tokens, length, nfe = jax.device_get(sample(keys(seed, num), asked))
    return [tuple(row[:n].tolist()) for row, n in zip(tokens, length, strict=True)], nfe


@pytest.mark.parametrize("name", ["leap", "euler"])
def test_samplers_return_the_data(name):
    texts, nfe = run(name, 32, 2000, network())
    shares = np.array([texts.count(text) for text in TEXTS]) / len(texts)
    noise = 4 * np.sqrt(LAW * (1 - LAW) / len(texts))
    assert (abs(shares - LAW) < noise + 0.03).all()
    assert nfe.max() <= 32 + 2 * L  # until the last mask is revealed


def uniform(length_logits):
    """A network that says the same of each gap, and of each letter."""

    def scores(canvas, t):
        del t
        shape = canvas.tokens.shape
        return scores_of(jnp.broadcast_to(length_logits, (*shape, K)), jnp.zeros((*shape, V)))

    return scores


@pytest.mark.parametrize("name", ["leap", "euler"])
@pytest.mark.parametrize("t, s", [(1.0, 0.5), (0.1, 0.05)])
def test_a_step_inserts_and_reveals_as_often_as_it_should(name, t, s):
    """With eps 0.2, below which the rate of euler's insertions is constant. A gap from which 0 or 2 are missing."""
    num, eps = 20_000, 0.2
    sampler = make(eps=eps).samplers(SamplingOptions(num_steps=2))[name]
    canvas = canvas_lib.to_canvas(worlds.to_example([plain((MASK,))] * num, L), VOCABULARY)
    scores = uniform(jnp.log(jnp.array([0.4, 1e-9, 0.6, 1e-9, 1e-9])))(canvas, t)
    draw = jax.jit(lambda key: sampler.draw(key, scores, canvas, jnp.full(num, t), jnp.full(num, s), Filters()))
    drawn = draw(keys(8, num))
    fires = 0.6 * (1 - (s / t) ** 2) if name == "leap" else 1 - np.exp(-1.2 * (t - s) / max(t, eps))
    for seen, expected in ((drawn.insert[:, 1:3].mean(), fires), (drawn.reveal[:, 2].mean(), 0.5)):
        assert abs(seen - expected) < 4 * np.sqrt(expected * (1 - expected) / num)
    assert (drawn.tokens == MASK).all() and not drawn.reveal[:, [0, 1, 3, 4]].any()
    assert not drawn.insert[:, [0, 3, 4]].any() and not drawn.saturated.any()
    assert LETTER[np.asarray(drawn.revealed)[np.asarray(drawn.reveal)]].all()


@pytest.mark.parametrize("name", ["leap", "euler"])
def test_a_gap_from_which_more_than_one_is_due_is_saturated(name):
    sampler = make().samplers(SamplingOptions(num_steps=2))[name]
    canvas = canvas_lib.to_canvas(worlds.to_example([plain(())] * 2, L), VOCABULARY)
    scores = uniform(jnp.log(jnp.array([1e-9, 1e-9, 1.0, 1e-9, 1e-9])))(canvas, 1.0)
    t, s = jnp.ones(2), jnp.array([0.6, 0.4])  # 0.8 and 1.2 of two are due
    np.testing.assert_array_equal(sampler.draw(keys(9, 2), scores, canvas, t, s, Filters()).saturated, [False, True])


@pytest.mark.parametrize("name", ["leap", "euler"])
@pytest.mark.parametrize("total", [(2, 2), (0, 1), (3, 3)])
def test_numbers_that_are_asked_for_are_kept_and_no_mask_is_left(name, total):
    num = 60
    asked = request.build(S, V, [[(1, 0, request.UNBOUNDED)]] * num, [total] * num, [[B_]] * num, 1)
    length = jnp.zeros(K)
    texts, _ = run(name, 6, num, uniform(length), jax.tree.map(jnp.asarray, asked))
    assert {len(text) for text in texts} <= set(range(total[0], total[1] + 1))
    assert {word for text in texts for word in text} == {A}


@both
def test_targets_are_as_counted_by_lists(ways):
    canvas, targets = ways.at(make(), 0.5)
    assert isinstance(targets, Targets)
    np.testing.assert_array_equal(targets.missing.num_in_gap, ways.left)
    np.testing.assert_array_equal(
        np.where(np.arange(S) < np.asarray(canvas.length)[:, None], canvas.tokens == MASK, False), masked_columns(ways)
    )
