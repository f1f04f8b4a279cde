import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import worlds
from dilm_jax import canvas as canvas_lib
from dilm_jax.canvas import Canvas, Vocabulary
from worlds import LETTERS, VOCABULARY, Text, delete, equivalent, insert, plain, to_example, to_text

B, L = 10_000, 7  # one shape for all, compiled once
S = L + 2

_drop = jax.jit(lambda x0, dropped: canvas_lib.drop_tokens(x0, dropped, VOCABULARY))
_runs = jax.jit(lambda canvas: (canvas_lib.linked(canvas), canvas_lib.run_starts(canvas)))
_insert, _choose = jax.jit(canvas_lib.insert_tokens), jax.jit(canvas_lib.choose)
_keys = jax.jit(lambda seed: jax.random.split(jax.random.key(seed), B))


def _random_text(rng, length=None) -> Text:
    """Free and frozen tokens; gaps between frozen ones open or closed."""
    n = rng.integers(L + 1) if length is None else length
    frozen = rng.random(n) < rng.choice([0.0, 0.5, 1.0])
    open_gap = rng.random(n + 1) < 0.5
    open_gap[:-1] |= ~frozen
    open_gap[1:] |= ~frozen
    return Text(tuple(rng.choice(LETTERS, n).tolist()), tuple(frozen.tolist()), tuple(open_gap.tolist()))


def _random_texts(rng) -> list[Text]:
    """Many are empty or full."""
    return [_random_text(rng, length) for length in [0, L, None, None] * (B // 4)]


def _to_canvas(texts) -> Canvas:
    return _drop(to_example(texts, L), jnp.asarray(np.zeros((B, L), bool)))[0]


# --- Vocabulary and examples -----------------------------------------------------------------------------------------


def test_vocabulary_names_what_is_wrong():
    with pytest.raises(ValueError, match=r"distinct, got \(0, 1, 1, 3, 4\)"):
        Vocabulary(size=9, pad=0, cls=1, bos=1, eos=3, mask=4)
    with pytest.raises(ValueError, match=r"\[9, -1\] are outside the vocabulary of 9 ids"):
        Vocabulary(size=9, pad=0, cls=1, bos=2, eos=9, mask=-1)
    assert VOCABULARY.ordinary.tolist() == [False] * 5 + [True] * 2


def test_valid_examples_pass():
    rng = np.random.default_rng(0)
    texts = [_random_text(rng) for _ in range(50)]
    for fill in (VOCABULARY.pad, 99):  # what stands behind the end does not matter
        canvas_lib.validate_examples(to_example(texts, L, fill), VOCABULARY)


def _changed(example, field, index, value):
    array = np.array(getattr(example, field))
    array[index] = value
    return example.replace(**{field: jnp.asarray(array)})


@pytest.mark.parametrize(
    "field, index, value, message",
    [
        ("length", 1, 8, r"row 1: length 8 is outside \[0, 7\]"),
        ("length", 1, -1, r"row 1: length -1 is outside \[0, 7\]"),
        ("tokens", (1, 2), 7, "row 1: token 2 is 7, outside the vocabulary of 7 ids"),
        ("tokens", (1, 0), -1, "row 1: token 0 is -1, outside the vocabulary of 7 ids"),
        ("tokens", (1, 2), 4, "row 1: token 2 is the special id 4"),
        ("open_gap", (1, 3), False, "row 1: token 2 is free, but a gap beside it is closed"),
        ("open_gap", (1, 0), False, "row 1: token 0 is free, but a gap beside it is closed"),
    ],
)
def test_invalid_examples_are_named(field, index, value, message):
    examples = to_example([plain([5, 6]), plain([5, 5, 6])], L)
    with pytest.raises(ValueError, match=message):
        canvas_lib.validate_examples(_changed(examples, field, index, value), VOCABULARY)


def test_freeze_spans_makes_infills_of_a_fraction():
    """Frozen tokens, closed gaps and the text stay as they were; what comes of it is a valid example."""
    fraction = 0.3
    x0 = to_example(_random_texts(np.random.default_rng(8)), L)
    made = jax.jit(canvas_lib.freeze_spans, static_argnums=2)(_keys(9), x0, fraction)
    canvas_lib.validate_examples(made, VOCABULARY)
    for name in ("tokens", "length", "num_bytes"):
        np.testing.assert_array_equal(getattr(made, name), getattr(x0, name))
    assert not (x0.frozen & ~made.frozen).any() and not (made.open_gap & ~x0.open_gap).any()

    many = np.asarray(x0.free.sum(-1) == L)  # all free: an infill freezes none with probability 1/2·(2/3)^6
    changed = (np.asarray(made.frozen) != np.asarray(x0.frozen)).any(-1)
    share = changed[many].mean()
    expected = fraction * (1 - 0.5 * (2 / 3) ** (L - 1))
    assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / many.sum())
    frozen = np.asarray(made.frozen)[many & changed]
    assert np.mean(frozen[:, 1:] != frozen[:, :-1]) == pytest.approx(1 / 3, abs=0.06)  # of those that changed
    beside = ~np.asarray(made.free)[many & changed]
    inner = beside[:, 1:] & beside[:, :-1]
    share_open = np.asarray(made.open_gap)[many & changed, 1:L][inner].mean()
    assert abs(share_open - 1 / 4) < 4 * np.sqrt(3 / 16 / inner.sum())


# --- Dropping --------------------------------------------------------------------------------------------------------


def test_drop_tokens_deletes_one_by_one():
    """Against single deletions on lists, frozen tokens and closed gaps included."""
    rng = np.random.default_rng(1)
    texts = _random_texts(rng)
    dropped = np.zeros((B, L), bool)
    for b, text in enumerate(texts):
        dropped[b, text.free] = rng.random(len(text.free)) < rng.choice([0.0, 0.5, 1.0])
    example = to_example(texts, L, fill=LETTERS[0])
    canvas, gap = _drop(example, jnp.asarray(dropped))
    assert (np.asarray(canvas.num_free) == np.asarray(example.free).sum(-1) - dropped.sum(-1)).all()

    canvas, gap = jax.device_get(canvas), np.asarray(gap)
    for b, text in enumerate(texts):
        gone = np.flatnonzero(dropped[b]).tolist()
        assert to_text(canvas, b) == functools.reduce(delete, reversed(gone), text)
        expected = np.zeros(L, int)
        expected[gone] = [column for column, _ in worlds.missing(text, tuple(gone))]
        assert (gap[b] == expected).all()
    _check_layout(canvas)


def _check_layout(canvas):
    """CLS, BOS, content, PAD; nothing is open or in a segment behind the content; CLS's gap is closed."""
    column = np.arange(S)
    occupied = column < canvas.length[:, None]
    assert (canvas.tokens[:, :2] == [VOCABULARY.cls, VOCABULARY.bos]).all()
    assert (canvas.tokens == VOCABULARY.pad)[~occupied].all()
    assert canvas.frozen[:, :2].all() and not canvas.open_gap[:, 0].any()
    assert not canvas.frozen[~occupied].any() and not canvas.open_gap[~occupied].any()
    assert (canvas.segment == occupied).all() and (canvas.position == column).all()


def test_nothing_dropped_gives_the_whole_text():
    texts = [plain([]), plain([5, 6, 6]), *worlds.small_world().texts]
    example = to_example(texts)
    canvas = jax.jit(lambda x0: canvas_lib.to_canvas(x0, VOCABULARY))(example)
    tokens, length = canvas_lib.content(canvas)
    assert (np.asarray(tokens) == np.asarray(example.tokens)).all()
    assert (np.asarray(length) == np.asarray(example.length)).all()
    canvas = jax.device_get(canvas)
    assert [to_text(canvas, b) for b in range(len(texts))] == texts


# --- Inserting -------------------------------------------------------------------------------------------------------


def test_insert_tokens_against_lists():
    """10,000 random rows, full rows and rows in which all gaps fire included."""
    rng = np.random.default_rng(2)
    texts = _random_texts(rng)
    fire = rng.random((B, S)) < rng.choice([0.2, 0.6, 1.0], (B, 1))
    # unlike the letters in the canvas, and each names its gap, so that what was inserted can be read off
    new = jnp.asarray(np.broadcast_to(100 + np.arange(S, dtype=np.int32), (B, S)))
    result, _, truncated = _insert(_keys(0), _to_canvas(texts), jnp.asarray(fire), new)

    result, truncated, num_truncated = jax.device_get(result), np.asarray(truncated), 0
    for b, text in enumerate(texts):
        wanted = [i for i, is_open in enumerate(text.open_gap) if is_open and fire[b, i + 1]]
        after = to_text(result, b)
        done = [w - 101 for w in after.tokens if w >= 100]
        assert set(done) <= set(wanted) and len(done) == min(len(wanted), L - len(text.tokens))
        assert after == functools.reduce(lambda x, i: insert(x, i, 101 + i), reversed(done), text)
        assert truncated[b] == (len(done) < len(wanted))
        num_truncated += len(done) < len(wanted)
    _check_layout(result)
    assert num_truncated > B // 10


def test_a_truncated_row_keeps_a_uniform_subset():
    """Six gaps fire, two columns are free: each of the fifteen pairs is as likely as the others."""
    canvas = _to_canvas([plain([5, 6, 5, 6, 5])] * B)
    tokens = jnp.asarray(np.broadcast_to(100 + np.arange(S, dtype=np.int32), (B, S)))
    result, _, truncated = _insert(_keys(3), canvas, jnp.asarray(np.ones((B, S), bool)), tokens)
    assert np.asarray(truncated).all()
    inserted = np.asarray(result.tokens)
    pairs, counts = np.unique(inserted[inserted >= 100].reshape(B, 2), axis=0, return_counts=True)
    assert len(pairs) == 15 and stats.chisquare(counts).pvalue > 1e-4


def test_dropping_then_inserting_gives_the_text_back():
    """Token by token, in random order, each in the gap that it has beside what is still missing."""
    rng = np.random.default_rng(4)
    texts = _random_texts(rng)
    x0 = to_example(texts, L)
    dropped = np.asarray(x0.free) & (rng.random((B, L)) < 0.7)
    canvas, gap = _drop(x0, jnp.asarray(dropped))
    while dropped.any():
        which, some = np.where(dropped, rng.random((B, L)), -1).argmax(-1)[:, None], dropped.any(-1, keepdims=True)
        fire = some & (np.arange(S) == np.take_along_axis(np.asarray(gap), which, -1))
        token = np.broadcast_to(np.take_along_axis(np.asarray(x0.tokens), which, -1), (B, S))
        canvas, _, truncated = _insert(_keys(5), canvas, jnp.asarray(fire), jnp.asarray(token))
        assert not np.asarray(truncated).any()
        dropped = dropped & (np.arange(L) != which)
        expected, gap = _drop(x0, jnp.asarray(dropped))
        for result, wanted in zip(jax.tree.leaves(canvas), jax.tree.leaves(expected), strict=True):
            assert (np.asarray(result) == np.asarray(wanted)).all()
    canvas = jax.device_get(canvas)
    assert [to_text(canvas, b) for b in range(B)] == texts


# --- Choosing --------------------------------------------------------------------------------------------------------


def test_columns_close_up_where_tokens_go():
    """As `drop_tokens` moves tokens; a canvas is an example again."""
    texts = _random_texts(np.random.default_rng(1))
    canvas = _to_canvas(texts)
    x0 = canvas_lib.to_example(canvas, canvas.frozen)
    for name in ("tokens", "length", "frozen", "open_gap"):
        np.testing.assert_array_equal(getattr(x0, name), getattr(to_example(texts, L), name), err_msg=name)
    dropped = _choose(_keys(1), x0.free, jnp.full(B, 2))
    after, _ = _drop(x0, dropped)
    columns = jnp.pad(dropped, ((0, 0), (2, 0)))
    for values, expected, at_pad in ((canvas.tokens, after.tokens, 0), (canvas.frozen, after.frozen, False)):
        np.testing.assert_array_equal(canvas_lib.close_up(canvas, columns, values, at_pad), expected)


@pytest.mark.parametrize("N", [1, 8])
def test_choose_takes_the_exact_number(N):
    rng = np.random.default_rng(5)
    eligible = rng.random((B, N)) < rng.choice([0.0, 0.5, 1.0], (B, 1))
    count = rng.integers(0, N + 2, B)
    chosen = np.asarray(_choose(_keys(1), jnp.asarray(eligible), jnp.asarray(count, jnp.int32)))
    assert not (chosen & ~eligible).any()
    assert (chosen.sum(-1) == np.minimum(count, eligible.sum(-1))).all()


def test_choose_is_uniform_over_subsets():
    """Two of five eligible entries."""
    eligible = np.broadcast_to(np.array([1, 0, 1, 1, 0, 1, 1, 0], bool), (B, 8))
    chosen = np.asarray(_choose(_keys(2), jnp.asarray(eligible), jnp.asarray(np.full(B, 2, np.int32))))
    subsets, counts = np.unique(chosen, axis=0, return_counts=True)
    assert len(subsets) == 10 and stats.chisquare(counts).pvalue > 1e-4


def test_choose_depends_on_its_own_key_alone():
    rng, keys = np.random.default_rng(6), _keys(6)
    eligible, count = rng.random((B, 8)) < 0.7, rng.integers(0, 9, B)
    once = np.asarray(_choose(keys, jnp.asarray(eligible), jnp.asarray(count, jnp.int32)))
    order = rng.permutation(B)
    again = _choose(keys[order], jnp.asarray(eligible[order]), jnp.asarray(count[order], jnp.int32))
    assert (np.asarray(again) == once[order]).all()


# --- Runs ------------------------------------------------------------------------------------------------------------


def test_runs_are_the_columns_between_equivalent_gaps():
    """The gaps on the two sides of a column are equivalent for its token exactly when the column is linked; a run
    starts at a linked column whose gap before is not equivalent to the one before that."""
    texts = _random_texts(np.random.default_rng(8))
    linked, starts = map(np.asarray, _runs(_to_canvas(texts)))
    for b, text in enumerate(texts[:1000]):
        expected_links, expected_starts = np.zeros(S, bool), np.zeros(S, bool)
        for k, token in enumerate(text.tokens):
            if text.open_gap[k]:
                gaps = [i for i, _ in equivalent(text, k, token)]
                expected_links[2 + k] = k + 1 in gaps
                expected_starts[2 + k] = k + 1 in gaps and k - 1 not in gaps
        assert (linked[b] == expected_links).all() and (starts[b] == expected_starts).all()
