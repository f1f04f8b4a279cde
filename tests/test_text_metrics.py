"""Measures of texts, against values by hand."""

import sys
import types

import numpy as np
import pytest

from dilm_jax import text_metrics

LN2 = np.log(2)


class Letters:
    """A token a letter, a = 0; but "ab" is one token, 26."""

    def encode(self, text):
        ids = [ord(letter) - ord("a") for letter in text.replace("ab", "{")]
        return ids

    def decode(self, ids):
        return "".join(chr(ord("a") + token) for token in ids).replace("{", "ab")


def test_entropy_is_that_of_one_text_s_tokens_in_nats():
    assert text_metrics.unigram_entropy([]) == 0
    assert text_metrics.unigram_entropy([7]) == 0
    assert str(text_metrics.unigram_entropy([7, 7, 7])) == "0.0"
    assert text_metrics.unigram_entropy([3, 50_000]) == pytest.approx(LN2)
    assert text_metrics.unigram_entropy([1, 2, 1, 3]) == pytest.approx(1.5 * LN2)
    assert text_metrics.unigram_entropy(np.arange(8, dtype=np.int32)) == pytest.approx(3 * LN2)


def test_ks_distance_of_lengths():
    assert text_metrics.length_ks([3, 1, 2], [1, 2, 3]) == 0
    assert text_metrics.length_ks([1, 2], [3]) == 1
    assert text_metrics.length_ks([1, 1, 1, 4], [1, 4]) == 0.25
    assert text_metrics.length_ks([1, 4], [1, 1, 1, 4]) == 0.25
    assert text_metrics.length_ks([0, 0, 5, 9], [2, 5, 5, 9, 9]) == pytest.approx(0.5)
    scipy = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    a, b = rng.poisson(30, 200), rng.poisson(33, 71)
    assert text_metrics.length_ks(a, b) == pytest.approx(scipy.ks_2samp(a, b).statistic)


def test_distinct_counts_over_all_texts_and_no_ngram_spans_two():
    texts = [[1, 2, 1, 2], [1, 2], [], [3]]
    assert text_metrics.distinct(texts, 1) == pytest.approx(3 / 7)
    assert text_metrics.distinct(texts, 2) == pytest.approx(2 / 4)  # 12 21 12 12
    assert text_metrics.distinct(texts, 3) == 1  # 121 212
    assert np.isnan(text_metrics.distinct(texts, 5))


def test_repetition_is_within_a_text_and_averaged_over_the_texts_that_have_ngrams():
    assert text_metrics.repeated_ngram_rate([[5] * 7]) == pytest.approx(3 / 4)  # of 4, 3 occurred before
    assert text_metrics.repeated_ngram_rate([[5] * 7, [1, 2, 3, 4, 5], [1, 2, 3]]) == pytest.approx(3 / 8)
    assert text_metrics.repeated_ngram_rate([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0
    assert np.isnan(text_metrics.repeated_ngram_rate([[1, 2, 3], []]))
    assert text_metrics.repeated_ngram_rate([[1, 2, 1, 2, 1]], n=2) == pytest.approx(1 / 2)


def test_noncanonical_share():
    texts = [[0, 1], [26], [2, 0], [], np.array([3, 0, 1])]
    assert text_metrics.noncanonical_share(texts, Letters()) == pytest.approx(2 / 5)
    assert np.isnan(text_metrics.noncanonical_share([], Letters()))


def test_summary_has_these_keys():
    texts = [[0, 1, 0, 1, 0, 1], [], [4]]
    summary = text_metrics.summarize(texts, [6, 6, 1, 1], Letters())
    assert {key: pytest.approx(value) for key, value in summary.items()} == {
        "entropy": LN2 / 3,
        "length_mean": 7 / 3,
        "length_ks": 1 / 3,
        "distinct_1": 3 / 7,
        "distinct_2": 2 / 5,
        "distinct_3": 2 / 4,
        "repeated_4gram": 1 / 3,
        "noncanonical": 1 / 3,
    }
    assert all(type(value) is float for value in summary.values())


def test_what_cannot_be_measured_is_named():
    with pytest.raises(ValueError, match="0 texts to measure, expected at least 1"):
        text_metrics.summarize([], [1], Letters())
    with pytest.raises(ValueError, match="cannot compare 2 with 0 lengths"):
        text_metrics.length_ks([1, 2], [])
    with pytest.raises(ValueError, match="no 0-grams: n must be at least 1"):
        text_metrics.distinct([[1]], 0)


def test_mauve_is_none_without_its_package(monkeypatch):
    monkeypatch.setattr(text_metrics.importlib.util, "find_spec", lambda name: None if name == "mauve" else object())
    assert text_metrics.mauve(["a"], ["b"]) is None


def test_mauve_compares_the_texts_with_the_references(monkeypatch):
    asked = {}

    def compute_mauve(**options):
        asked.update(options)
        return types.SimpleNamespace(mauve=np.float64(0.25))

    monkeypatch.setattr(text_metrics.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "mauve", types.SimpleNamespace(compute_mauve=compute_mauve))
    assert text_metrics.mauve(["a", ""], ["b", "c"]) == 0.25
    assert asked["q_text"] == ["a", "<|endoftext|>"]
    assert asked["p_text"] == ["b", "c"]
    assert asked["featurize_model_name"] == "gpt2-large"
