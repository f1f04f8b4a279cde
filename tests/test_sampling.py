"""The sampling loop, filters and draws, under cheap made-up networks: no family's law is tested here."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import struct

import oracles
from dilm_jax import canvas as canvas_lib
from dilm_jax import evals
from dilm_jax.canvas import Example
from dilm_jax.sampling import (
    Filter,
    Filters,
    Grid,
    Move,
    SamplingOptions,
    draw_every_gap,
    draw_gaps,
    draw_one_gap,
    generate,
)
from dilm_jax.scores import Scores

L, NUM_LETTERS = 10, 9
S, V = L + 2, oracles.NUM_SPECIAL + NUM_LETTERS
LETTER = oracles.NUM_SPECIAL  # the id of 'a'
GREEDY = Filter(temperature=0)
OPTIMISE = {"xla_backend_optimization_level": 1}  # for programs that run for long

# --- Filters ---------------------------------------------------------------------------------------------------------


def hugging_face(logits, temperature, top_k, top_p):
    """TemperatureLogitsWarper, TopKLogitsWarper and TopPLogitsWarper of transformers, in numpy, for one row."""
    scores = logits / temperature
    if top_k:
        scores = np.where(scores < np.sort(scores)[-min(top_k, len(scores))], -np.inf, scores)
    if top_p < 1:
        order = np.argsort(scores)
        probs = np.exp(scores[order] - scores.max())
        remove = np.cumsum(probs / probs.sum()) <= 1 - top_p
        remove[-1:] = False
        scores[order[remove]] = -np.inf
    return scores


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(
    "top_k, top_p", [(0, 1.0), (1, 1.0), (5, 1.0), (99, 1.0), (0, 0.01), (0, 0.5), (0, 0.9), (5, 0.7)]
)
def test_filter_equals_hugging_face(temperature, top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(2, 3, 12), scale=2)
    logits[..., :3] = -np.inf
    expected = np.apply_along_axis(hugging_face, -1, logits, temperature, top_k, top_p)
    filtered = Filter(temperature=temperature, top_k=top_k, top_p=top_p)(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(filtered, expected, rtol=1e-6)


@pytest.mark.parametrize("top_p, kept", [(0.05, 1), (0.45, 1), (0.55, 2), (0.75, 2), (0.85, 3), (1.0, 4)])
def test_top_p_keeps_the_token_that_crosses(top_p, kept):
    filtered = Filter(top_p=top_p)(jnp.log(jnp.array([0.3, 0.05, 0.5, 0.15])))
    assert np.isfinite(filtered).sum() == kept
    assert np.isfinite(filtered[2])


@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
def test_top_p_of_a_vocabulary_is_that_of_sorting_it(spread):
    logits = np.random.default_rng(0).normal(size=(4, 50_257)).astype(np.float32) * spread
    logits[:, ::7] = -np.inf
    kept = np.isfinite(Filter(top_p=0.9)(jnp.asarray(logits))).sum(-1)
    largest_first = -np.sort(-logits.astype(np.float64), axis=-1)
    mass = np.exp(largest_first - largest_first[:, :1]).cumsum(-1)
    wanted = (mass < 0.9 * mass[:, -1:]).sum(-1) + 1
    np.testing.assert_allclose(kept, wanted, atol=2)  # float32 sums


def test_filters_keep_all_that_tie():
    """Entries equal to the smallest kept one stay, as in Hugging Face's top-k; its top-p breaks ties by sort order."""
    tied = jnp.array([0.0, 1.0, -0.0, 0.0])
    np.testing.assert_array_equal(Filter(top_k=2)(tied), tied)
    np.testing.assert_array_equal(Filter(top_p=0.6)(tied), tied)


def test_temperature_zero_is_argmax():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 50)), jnp.float32)
    filtered = GREEDY(logits)
    np.testing.assert_array_equal(np.isfinite(filtered).sum(-1), 1)
    np.testing.assert_array_equal(filtered.argmax(-1), logits.argmax(-1))
    assert GREEDY(jnp.zeros(5))[0] == 0  # the first of equals


def test_filter_works_in_float32():
    assert Filter(top_p=0.9)(jnp.zeros((1, 8), jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize("bad", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_filter_refuses(bad):
    with pytest.raises(ValueError, match=str(*bad.values())):
        Filter(**bad)


@pytest.mark.parametrize("ignored", [{"top_k": 3}, {"top_p": 0.2}])
def test_filter_refuses_what_the_argmax_would_ignore(ignored):
    with pytest.raises(ValueError, match=f"{next(iter(ignored.values()))} .*no effect at temperature 0"):
        Filter(temperature=0, **ignored)


@pytest.mark.parametrize("bad", [{"num_steps": 0}, {"num_steps": 4, "rate_scale": 0.0}, {"num_steps": 1, "calls": 3},
                                 {"num_steps": 1, "events_per_call": 0}])  # fmt: skip
def test_options_refuse(bad):
    with pytest.raises(ValueError, match=str(list(bad.values())[-1])):
        SamplingOptions(**bad)


# --- Draws -----------------------------------------------------------------------------------------------------------


@struct.dataclass
class KnownScores(Scores):
    """Scores whose logsumexp need not be computed for every draw of a loop."""

    known_lse: jax.Array

    def lse(self):
        return self.known_lse


def draw_many(scores, canvas, num_draws):
    """Gaps and tokens of `num_draws` insertions into one row."""

    @functools.partial(jax.jit, compiler_options=OPTIMISE)
    def draws(scores, keys):
        def one(key):
            insert, tokens = draw_one_gap(key[None], scores, canvas, jnp.array([1]), Filters())
            return insert[0].argmax(), tokens[0, 0]

        return jax.lax.map(one, keys)

    return [np.asarray(x) for x in draws(scores, oracles.row_keys(0, num_draws))]


def test_uniform_gaps_and_tokens_of_a_large_canvas():
    """1024 gaps × 50257 tokens: a flat float32 Gumbel-argmax over them ties and takes the first cell."""
    num_gaps, vocab_size = 1024, 50257
    scores = KnownScores(
        logits=jnp.zeros((1, num_gaps, vocab_size)),
        length_logits=None,
        stop_logits=None,
        known_lse=jnp.full((1, num_gaps), math.log(vocab_size)),
    )
    canvas = oracles.canvas_of([""], NUM_LETTERS, num_gaps - 2).replace(open_gap=jnp.ones((1, num_gaps), bool))
    gap, token = draw_many(scores, canvas, 500)
    for value, size in ((gap, num_gaps), (token, vocab_size)):
        counts = np.histogram(value, bins=16, range=(0, size))[0]
        assert scipy.stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("draw", ["one", "every"])
def test_equal_bfloat16_logits_are_drawn_uniformly(draw):
    """Noise drawn in bfloat16 would give a mean index of 0.013."""
    size, num_draws = 10_000, 128
    num_columns = 3 if draw == "one" else num_draws
    canvas = oracles.canvas_of([""], NUM_LETTERS, num_columns - 2)
    logits = jnp.zeros((1, num_columns, size), jnp.bfloat16)
    scores = Scores(logits=logits, length_logits=None, stop_logits=None)
    if draw == "one":
        _, index = draw_many(scores, canvas, num_draws)
    else:
        every = jax.jit(draw_every_gap, static_argnums=4, compiler_options=OPTIMISE)
        all_gaps = jnp.ones_like(canvas.open_gap)
        canvas = canvas.replace(open_gap=all_gaps)
        index = every(oracles.row_keys(0, 1), scores, canvas, all_gaps, Filters())[1].ravel()
    assert index.size == num_draws
    assert index.mean() / size == pytest.approx(0.5, abs=4 / math.sqrt(12 * num_draws))


def test_one_gap_is_drawn_from_the_joint_softmax():
    """The gap by the sum over its tokens, the token within it; closed gaps and columns without a gap never."""
    N = 20_000
    logits = np.random.default_rng(0).normal(size=(S, V)).astype(np.float32)
    canvas = oracles.canvas_of(["abc"], NUM_LETTERS, L)
    canvas = canvas.replace(open_gap=canvas.open_gap.at[:, 2].set(False))
    scores = Scores(logits=jnp.asarray(logits)[None], length_logits=None, stop_logits=None)
    draw = jax.vmap(lambda key: draw_one_gap(key[None], scores, canvas, jnp.array([1]), Filters()))
    insert, tokens = jax.jit(draw)(oracles.row_keys(0, N))
    insert, tokens = np.asarray(insert)[:, 0], np.asarray(tokens)[:, 0, 0]
    assert (insert.sum(-1) == 1).all()
    open_gaps = [1, 3, 4]
    cell = insert.argmax(-1) * V + tokens
    probs = np.zeros((S, V))
    probs[open_gaps] = np.exp(logits[open_gaps])
    tv, bound = oracles.tv_and_bound(cell, probs.ravel() / probs.sum(), allowance=0)
    assert tv < bound


def test_gaps_are_repeated_draws_without_repetition():
    """The first two of draws from the joint softmax that skip gaps drawn before; tokens from each gap's softmax."""
    N = 20_000
    logits = np.random.default_rng(0).normal(size=(S, V)).astype(np.float32)
    canvas = oracles.canvas_of(["abc"], NUM_LETTERS, L)
    canvas = canvas.replace(open_gap=canvas.open_gap.at[:, 2].set(False))
    scores = Scores(logits=jnp.asarray(logits)[None], length_logits=None, stop_logits=None)
    draw = jax.vmap(lambda key, count: draw_gaps(key[None], scores, canvas, count[None], Filters()), in_axes=(0, None))
    insert, tokens = (np.asarray(x)[:, 0] for x in jax.jit(draw)(oracles.row_keys(0, N), jnp.int32(2)))
    assert (insert.sum(-1) == 2).all()
    open_gaps = [1, 3, 4]
    p = np.exp(logits[open_gaps]).sum(-1)
    p /= p.sum()
    pairs = {(i, j): p[i] * p[j] * (1 / (1 - p[i]) + 1 / (1 - p[j])) for i, j in ((0, 1), (0, 2), (1, 2))}
    drawn = [list(pairs).index(tuple(open_gaps.index(i) for i in np.flatnonzero(row))) for row in insert]
    tv, bound = oracles.tv_and_bound(np.array(drawn), np.array(list(pairs.values())), allowance=0)
    assert tv < bound
    of_gap = tokens[insert[:, 3], 3]
    probs = np.exp(logits[3]) / np.exp(logits[3]).sum()
    tv, bound = oracles.tv_and_bound(of_gap, probs, allowance=0)
    assert tv < bound
    for count, made in ((0, 0), (1, 1), (3, 3), (9, 3)):
        insert, _ = jax.jit(draw)(oracles.row_keys(0, 1), jnp.int32(count))
        assert insert.sum() == made and not insert[..., 2].any()


def test_gap_and_token_have_their_own_filters():
    """A gap is greedy by its sum over tokens, not by its best token."""
    logits = np.full((1, S, V), -5.0, np.float32)
    logits[0, 1, LETTER : LETTER + 4] = [1.0, 1.1, 1.2, 1.3]
    logits[0, 2, LETTER] = 2.0
    scores = Scores(logits=jnp.asarray(logits), length_logits=None, stop_logits=None)
    canvas = oracles.canvas_of(["a"], NUM_LETTERS, L)
    draw = jax.jit(jax.vmap(
        lambda key, filters: draw_one_gap(key[None], scores, canvas, jnp.array([1]), filters), in_axes=(0, None)
    ), static_argnums=1)  # fmt: skip
    insert, tokens = draw(oracles.row_keys(0, 200), Filters(gap=GREEDY))
    assert insert[:, 0, 1].all()
    assert len(set(np.asarray(tokens)[:, 0, 0])) > 3
    insert, tokens = draw(oracles.row_keys(0, 200), Filters(token=GREEDY))
    assert set(np.asarray(insert)[:, 0].argmax(-1)) >= {1, 2}
    np.testing.assert_array_equal(
        tokens[:, 0, 0], np.where(insert[:, 0, 1], LETTER + 3, np.where(insert[:, 0, 2], LETTER, tokens[:, 0, 0]))
    )


def test_nothing_is_inserted_without_an_open_gap():
    canvas = oracles.canvas_of(["ab"], NUM_LETTERS, L)
    canvas = canvas.replace(open_gap=jnp.zeros_like(canvas.open_gap))
    scores = Scores(logits=jnp.zeros((1, S, V)), length_logits=None, stop_logits=None)
    filters = Filters(gap=Filter(top_k=2, top_p=0.5), token=GREEDY)
    key = oracles.row_keys(0, 1)
    insert, tokens = jax.jit(lambda: draw_one_gap(key, scores, canvas, jnp.array([1]), filters))()
    assert not insert.any()
    assert (tokens < V).all()


# --- The loop --------------------------------------------------------------------------------------------------------


def prompts():
    """Random prompts of letters that no network emits (upper half of the alphabet), some free tokens among them, some
    gaps closed. Row 0 has no open gap, row 1 is full, row 2 is empty."""
    rng = np.random.default_rng(0)
    length = rng.integers(1, L // 2 + 1, B)
    length[1:3] = L, 0
    frozen = rng.random((B, L)) < 0.7
    open_gap = rng.random((B, L + 1)) < 0.4
    open_gap[:, :-1] |= ~frozen
    open_gap[:, 1:] |= ~frozen
    frozen[0], open_gap[0] = True, False
    example = Example(
        tokens=jnp.asarray(LETTER + rng.integers(NUM_LETTERS // 2, NUM_LETTERS, (B, L)), jnp.int32),
        length=jnp.asarray(length, jnp.int32),
        frozen=jnp.asarray(frozen),
        open_gap=jnp.asarray(open_gap | (length == 0)[:, None]),
        num_bytes=jnp.zeros(B, jnp.int32),
    )
    return canvas_lib.to_canvas(example, oracles.vocabulary(NUM_LETTERS))


def wanted(canvas):
    """How many tokens a row's prompt asks for: 3 to 8."""
    prompted = canvas.occupied & (canvas.tokens >= LETTER + NUM_LETTERS // 2)
    return jnp.max(jnp.where(prompted, canvas.tokens, 0), axis=-1) % 6 + 3


def made_up(family, calls):
    """A network whose scores depend on all of a row's tokens and on time. It says how many are missing: the number
    wanted as far as cells are free, for DILM-M all in the first open gap (and two in each closed one, where nothing
    may come of it); if an even number is wanted, that or none. Appends to `calls` whenever it runs."""

    def network(canvas, clock):
        jax.debug.callback(lambda: calls.append(1))
        S = canvas.num_columns
        phase = (canvas.tokens * (1 + jnp.arange(S)) * canvas.occupied).sum(-1) + 10 * clock
        logits = jnp.sin(phase[:, None, None] + 3 * jnp.arange(S)[:, None] + 5 * jnp.arange(V))
        emitted = (jnp.arange(V) >= LETTER) & (jnp.arange(V) < LETTER + NUM_LETTERS // 2)
        left = jnp.clip(wanted(canvas) - emitted[canvas.tokens].sum(-1), 0, L + 2 - canvas.length)
        unsure = wanted(canvas) % 2 == 0
        if family == "independent":
            first = jnp.arange(S) == canvas.open_gap.argmax(-1)[:, None]
            left, unsure = jnp.where(first, left[:, None], jnp.where(canvas.open_gap, 0, 2)), unsure[:, None]
        length = jnp.arange(L + 1)
        likely = (length == left[..., None]) | ((length == 0) & unsure[..., None])
        return Scores(
            logits=jnp.where(emitted, logits, -jnp.inf),
            length_logits=jnp.where(likely, 0.0, -jnp.inf),
            stop_logits=None,
        )

    return network


B, NUM_STEPS = 24, 3


@functools.cache
def compiled(family, sampler, record=False):
    calls = []
    process = oracles.make_process(family, NUM_LETTERS, L)
    grid = process.samplers(SamplingOptions(num_steps=NUM_STEPS))[sampler]
    network = made_up(family, calls)
    rates = functools.partial(evals.log_gap_rates, process) if record else None
    return jax.jit(lambda key, canvas: generate(network, grid, key, canvas, Filters(), log_gap_rates=rates)), calls


def sample(family, sampler, key, canvas):
    """The last State and the number of network calls. Rows of the same number share a program."""
    run, calls = compiled(family, sampler)
    calls.clear()
    state = jax.block_until_ready(run(key, canvas))
    jax.effects_barrier()
    return state, len(calls)


def assert_same_rows(state, other):
    for name in ("canvas", "clock", "nfe", "saturated", "truncated", "done"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(other, name))


def take(tree, rows):
    return jax.tree.map(lambda x: x[jnp.asarray(rows)], tree)


SAMPLERS = [(family, "event") for family in oracles.FAMILIES]
SAMPLERS += [
    pytest.param(family, sampler, marks=pytest.mark.slow)
    for family in oracles.FAMILIES
    for sampler in ("leap", "euler")
]
BY_DEFAULT = ["event", pytest.param("leap", marks=pytest.mark.slow)]


@pytest.mark.parametrize("family, sampler", SAMPLERS)
def test_prompts_stay_and_closed_gaps_never_fire(family, sampler):
    before = prompts()
    state, _ = sample(family, sampler, oracles.row_keys(0, B), before)
    after = state.canvas
    grew = 0
    for b in range(B):
        num = int(before.length[b])
        kept = np.flatnonzero(np.asarray(after.tokens[b]) >= LETTER + NUM_LETTERS // 2)
        np.testing.assert_array_equal(after.tokens[b][kept], before.tokens[b][2:num])
        np.testing.assert_array_equal(after.frozen[b][kept], before.frozen[b][2:num])
        ends = np.concatenate([[1], kept, [int(after.length[b])]])  # BOS, the old tokens, the end
        inserted = np.diff(ends) - 1
        assert (inserted[~np.asarray(before.open_gap[b, 1:num])] == 0).all()
        assert set(np.asarray(after.tokens[b, int(after.length[b]) :])) <= {0}
        grew += inserted.sum() > 0
    assert grew > B / 2


@pytest.mark.parametrize("sampler", BY_DEFAULT)
@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_rows_depend_on_their_own_key_and_canvas(family, sampler):
    """Neither on neighbours, nor on their number, nor on how long they take; nothing of a finished row changes."""
    key, canvas = oracles.row_keys(0, B), prompts()
    together, calls = sample(family, sampler, key, canvas)
    assert len(set(np.asarray(together.nfe))) >= 3
    assert calls == together.nfe.max()
    assert not together.truncated.any()
    order = np.random.default_rng(0).permutation(B)
    shuffled, _ = sample(family, sampler, key[order], take(canvas, order))
    assert_same_rows(shuffled, take(together, order))
    for row in range(B):
        alone, calls = sample(family, sampler, key[row : row + 1], take(canvas, [row]))
        assert_same_rows(alone, take(together, [row]))
        assert calls == alone.nfe[0]  # calls are counted while the row is unfinished, and no others


@pytest.mark.parametrize("family, sampler", SAMPLERS)
def test_nothing_to_do_costs_no_calls(family, sampler):
    canvas = take(prompts(), [0, 1] * (B // 2))  # no open gap; full
    state, calls = sample(family, sampler, oracles.row_keys(0, B), canvas)
    assert calls == 0
    np.testing.assert_array_equal(state.nfe, 0)
    np.testing.assert_array_equal(state.done, True)
    jax.tree.map(np.testing.assert_array_equal, state.canvas, canvas)


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_few_steps_for_many_tokens(family):
    """3 steps for up to 8 tokens: "euler" counts what it could not make, "leap" repeats its last step for the rest."""
    canvas = prompts()
    busy = np.asarray(canvas.open_gap.any(-1) & (canvas.length < S) & (wanted(canvas) % 2 == 1))
    due = np.asarray(jnp.minimum(wanted(canvas), S - canvas.length))
    assert (due[busy] > NUM_STEPS + 1).any()
    for sampler in ("leap", "euler"):
        state, _ = sample(family, sampler, oracles.row_keys(0, B), canvas)
        inserted = np.asarray(state.canvas.length - canvas.length)
        assert not state.truncated.any()
        if sampler == "leap":
            np.testing.assert_array_equal(inserted[busy], due[busy])
            repeated = np.asarray(state.nfe) > NUM_STEPS
            assert repeated[busy & (due > NUM_STEPS)].all()
        else:
            full = np.asarray(state.canvas.length == S)
            np.testing.assert_array_equal(np.asarray(state.nfe)[busy & ~full], NUM_STEPS)
            assert (inserted <= NUM_STEPS).all()
        assert (np.asarray(state.saturated)[busy & (due > NUM_STEPS + 1)] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_jit_equals_no_jit(family):
    key, canvas = oracles.row_keys(0, B)[:4], take(prompts(), range(4))
    run, calls = compiled(family, "leap")
    jitted = run(key, canvas)
    calls.clear()
    with jax.disable_jit():
        assert_same_rows(run(key, canvas), jitted)
    assert len(calls) == jitted.nfe.max() > NUM_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_a_larger_canvas_gives_the_same_texts(family):
    """But for rows that fill the smaller one; and the lowest bits of the noise depend on the shape."""
    small, extra = prompts(), 6
    large = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, extra))) if x.ndim == 2 else x, small)
    large = large.replace(position=jnp.broadcast_to(jnp.arange(S + extra), (B, S + extra)))
    texts = sample(family, "leap", oracles.row_keys(0, B), small)[0].canvas.tokens
    padded = sample(family, "leap", oracles.row_keys(0, B), large)[0].canvas.tokens
    assert (padded[:, S:] == 0).all()
    assert (padded[:, :S] == texts).all(-1).mean() > 0.95


# --- Recording -------------------------------------------------------------------------------------------------------


def log_gap_rates(process, scores, canvas, t):
    """The row's rate by the softmax over open gaps (DILM-S), or each gap's own (DILM-M)."""
    log_rate = jnp.log(process.insertion_rate(scores, canvas, t))
    if log_rate.ndim == 2:
        return log_rate
    return log_rate[:, None] + jax.nn.log_softmax(jnp.where(canvas.open_gap, scores.lse(), -jnp.inf), axis=-1)


@pytest.mark.parametrize(
    "family, sampler",
    [
        ("joint", "leap"),
        ("independent", "event"),
        ("independent", "leap"),
        pytest.param("joint", "event", marks=pytest.mark.slow),  # by default its samples alone, see test_commands.py
    ],
)
def test_recording_changes_no_sample_and_keeps_what_each_call_said(family, sampler):
    """Against the loop in Python, in which the columns carry marks."""
    key, before = oracles.row_keys(0, B), prompts()
    plain, _ = sample(family, sampler, key, before)
    recorded = compiled(family, sampler, record=True)[0](key, before)
    assert plain.trace is None
    assert_same_rows(recorded, plain)
    np.testing.assert_array_equal(recorded.born, plain.born)

    network, process = made_up(family, []), oracles.make_process(family, NUM_LETTERS, L)
    runs = process.samplers(SamplingOptions(num_steps=NUM_STEPS))[sampler]

    @jax.jit
    def step(state):
        scores = network(state.canvas, state.clock)
        marked = state.replace(born=jnp.broadcast_to(1000 + jnp.arange(S), (B, S)))
        rates = log_gap_rates(process, scores, state.canvas, state.clock)
        return runs.advance(scores, marked, Filters()), jax.nn.log_softmax(scores.dense(), axis=-1), rates

    state = runs.start(key, before)
    rows = [[(0, 0.0, 0.0, 0.0)] * S for _ in range(B)]  # (born, time, log_prob, log_rate) of each column
    calls = 0
    while not state.done.all():
        after, log_p, rates = jax.device_get(step(state))
        calls += 1
        for b in np.flatnonzero(~np.asarray(state.done)):
            of_old, gap = rows[b], None
            rows[b] = []
            for token, mark in zip(after.canvas.tokens[b, : after.canvas.length[b]], after.born[b], strict=False):
                gap = mark - 1000 if mark >= 1000 else gap
                new = (calls, state.clock[b], log_p[b, gap, token], rates[b, gap])
                rows[b].append(of_old[gap] if mark >= 1000 else new)
            rows[b] += [(0, 0.0, 0.0, 0.0)] * (S - len(rows[b]))
        state = after
    born, *trace = np.moveaxis(np.array(rows), -1, 0)
    np.testing.assert_array_equal(recorded.born, born)
    for name, expected in zip(("time", "log_prob", "log_rate"), trace, strict=True):
        np.testing.assert_allclose(getattr(recorded.trace, name), expected, rtol=1e-5, atol=1e-5, err_msg=name)
    assert len(np.unique(trace[0])) >= 3 and (born > 0).sum() == (plain.canvas.length - before.length).sum() > B


# --- Grids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 3, 7, 49, 80, 100, 200, 1000])
def test_a_grid_runs_from_exactly_one_to_exactly_zero(num_steps):
    """Compiled as in production: a fused multiply-add made the last s negative, and no token was inserted for NaN."""
    grid = Grid(num_steps=num_steps, eps=1e-4, max_length=L, draw=draw_nothing, repeat_last=False)
    time = jax.jit(grid._time, compiler_options={"xla_backend_optimization_level": 3})
    t = np.asarray(time(jnp.arange(num_steps + 1, dtype=jnp.int32)))
    assert t[-1] == 0
    np.testing.assert_allclose(t, 1 - np.arange(num_steps + 1) / num_steps, atol=1e-7)
    assert (np.diff(t) < 0).all()


NO_SCORES = Scores(logits=jnp.zeros((1, S, V)), length_logits=None, stop_logits=None)


def draw_nothing(key, scores, canvas, t, s, filters):
    del key, scores, s, filters
    none = jnp.zeros_like(canvas.open_gap)
    return Move(insert=none, tokens=canvas.tokens, saturated=t > 0.5)


def test_steps_below_eps_read_the_network_at_eps_and_keep_their_own_times():
    eps, seen = 0.3, []

    def draw(key, scores, canvas, t, s, filters):
        jax.debug.callback(lambda t, s: seen.append((t, s)), t[0], s[0])
        return draw_nothing(key, scores, canvas, t, s, filters)

    grid = Grid(num_steps=5, eps=eps, max_length=L, draw=draw, repeat_last=False)
    state, clocks = grid.start(oracles.row_keys(0, 1), oracles.canvas_of([""], NUM_LETTERS, L)), []
    advance = jax.jit(lambda state: grid.advance(NO_SCORES, state, Filters()))
    while not state.done.all():
        clocks.append(float(state.clock[0]))
        state = advance(state)
    jax.effects_barrier()
    np.testing.assert_allclose(clocks, [1, 0.8, 0.6, 0.4, eps], rtol=1e-6)
    np.testing.assert_allclose(seen, [(1, 0.8), (0.8, 0.6), (0.6, 0.4), (0.4, 0.2), (0.2, 0)], atol=1e-6)
    assert state.nfe[0] == 5
    assert state.saturated[0] == 3


@pytest.mark.parametrize("family, sampler", [("joint", "euler"), ("independent", "leap")])
def test_a_canvas_too_small_for_what_is_due(family, sampler):
    """A row that is full is flagged if the model still expects tokens, and only then; with room to spare it would
    have inserted them."""
    process = oracles.make_process(family, NUM_LETTERS, L + 4)
    grid = process.samplers(SamplingOptions(num_steps=100))[sampler]
    missing = jnp.array([0, 0, 2, 2])  # beyond the canvas

    def network(canvas, clock):
        left = L + 2 + missing - canvas.length
        if family == "independent":
            left = jnp.where(jnp.arange(canvas.num_columns) == canvas.open_gap.argmax(-1)[:, None], left[:, None], 0)
        logits = jnp.broadcast_to(jnp.where(jnp.arange(V) >= LETTER, 0.0, -jnp.inf), (*canvas.tokens.shape, V))
        lengths = jnp.where(jnp.arange(L + 5) == left[..., None], 0.0, -jnp.inf)
        return Scores(logits=logits, length_logits=lengths, stop_logits=None)

    run = jax.jit(lambda key, canvas: generate(network, grid, key, canvas, Filters()))
    state = run(oracles.row_keys(0, 4), oracles.canvas_of(["abc"] * 4, NUM_LETTERS, L))
    np.testing.assert_array_equal(state.canvas.length, L + 2)
    np.testing.assert_array_equal(state.truncated, missing > 0)


def test_more_gaps_fire_than_cells_are_free():
    """Five gaps, two free cells: the row is flagged, its tokens stay in order, which two fire is uniform."""
    B, text = 600, "abcd"
    L = len(text) + 2

    def network(canvas, clock):
        one = jnp.where(jnp.arange(2 * L) == 1, 0.0, -jnp.inf)
        logits = jnp.where(jnp.arange(V) == LETTER + 8, 0.0, -jnp.inf)
        shape = canvas.tokens.shape
        return Scores(
            logits=jnp.broadcast_to(logits, (*shape, V)),
            length_logits=jnp.broadcast_to(one, (*shape, 2 * L)),
            stop_logits=None,
        )

    process = oracles.make_process("independent", NUM_LETTERS, 2 * L - 1)
    grid = process.samplers(SamplingOptions(num_steps=1))["leap"]
    run = jax.jit(lambda key, canvas: generate(network, grid, key, canvas, Filters()))
    state = run(oracles.row_keys(0, B), oracles.canvas_of([text] * B, NUM_LETTERS, L))
    np.testing.assert_array_equal(state.truncated, True)
    np.testing.assert_array_equal(state.nfe, 1)
    tokens = np.asarray(state.canvas.tokens)[:, 2:]
    old = tokens != LETTER + 8
    np.testing.assert_array_equal(old.sum(-1), len(text))
    np.testing.assert_array_equal(tokens[old].reshape(B, -1), np.tile(oracles.encode(text), (B, 1)))
    # an inserted token is followed by as many old ones as its gap has behind it
    np.testing.assert_array_equal(np.asarray(state.born)[:, 2:], ~old)  # all that came, and nothing else, is marked
    gap = len(text) - np.cumsum(old[:, ::-1], axis=-1)[:, ::-1][~old]
    assert scipy.stats.chisquare(np.bincount(gap, minlength=len(text) + 1)).pvalue > 1e-4
