"""What token ids alone tell about texts: diversity, repetition, lengths, and whether they are tokenised as usual.

No judge is asked. A low NLL is easy to reach with dull or short texts: these numbers stand beside it.
"""

import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from jaxtyping import Int

Ids: TypeAlias = Sequence[int] | Int[np.ndarray, " _"]  # of one text
Lengths: TypeAlias = Sequence[int] | Int[np.ndarray, " _"]

MAUVE_MODEL = "gpt2-large"  # whose features MAUVE compares; its customary one


class Codec(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def summarize(texts: Sequence[Ids], reference_lengths: Lengths, tokenizer: Codec) -> dict[str, float]:
    """All measures of this file but MAUVE.

    Returns:
      entropy: nats, the mean over texts (0 for an empty one).
      length_mean: tokens.
      length_ks: distance of the lengths to `reference_lengths`, those of the data.
      distinct_1, distinct_2, distinct_3, repeated_4gram, noncanonical: shares; nan where there is nothing to count.

    Raises:
      ValueError: for no texts, or no lengths to compare with.
    """
    if not len(texts):
        raise ValueError("there are 0 texts to measure, expected at least 1")
    lengths = [len(ids) for ids in texts]
    return {
        "entropy": float(np.mean([unigram_entropy(ids) for ids in texts])),
        "length_mean": float(np.mean(lengths)),
        "length_ks": length_ks(lengths, reference_lengths),
        "distinct_1": distinct(texts, 1),
        "distinct_2": distinct(texts, 2),
        "distinct_3": distinct(texts, 3),
        "repeated_4gram": repeated_ngram_rate(texts, 4),
        "noncanonical": noncanonical_share(texts, tokenizer),
    }


def unigram_entropy(ids: Ids) -> float:
    """−Σ p log p in nats, p the shares of the tokens of one text. 0 for an empty text."""
    if not len(ids):
        return 0.0
    _, counts = np.unique(np.asarray(ids), return_counts=True)
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum()) + 0.0  # not −0.0


def length_ks(a: Lengths, b: Lengths) -> float:
    """The Kolmogorov–Smirnov distance sup |F_a − F_b| of two samples of lengths, in [0, 1]. Raises ValueError for an
    empty one."""
    if not len(a) or not len(b):
        raise ValueError(f"cannot compare {len(a)} with {len(b)} lengths: expected at least 1 of each")
    where = np.union1d(a, b)  # both distribution functions are constant between these
    share_a, share_b = (np.searchsorted(np.sort(sample), where, side="right") / len(sample) for sample in (a, b))
    return float(np.abs(share_a - share_b).max())


def distinct(texts: Sequence[Ids], n: int) -> float:
    """Distinct n-grams over all n-grams, of all texts together: nan if there is none. It falls with the number of
    texts: compare equal numbers only."""
    grams = [gram for ids in texts for gram in _ngrams(ids, n)]
    return len(set(grams)) / len(grams) if grams else float("nan")


def repeated_ngram_rate(texts: Sequence[Ids], n: int = 4) -> float:
    """The share of a text's n-grams that occurred earlier in it, the mean over the texts that have any: nan if none."""
    grams = [list(_ngrams(ids, n)) for ids in texts]
    rates = [1 - len(set(found)) / len(found) for found in grams if found]
    return float(np.mean(rates)) if rates else float("nan")


def noncanonical_share(texts: Sequence[Ids], tokenizer: Codec) -> float:
    """The share of texts whose ids are not those that the tokenizer gives their text: nan for no texts."""
    plain = [[int(token) for token in ids] for ids in texts]
    others = [tokenizer.encode(tokenizer.decode(ids)) != ids for ids in plain]
    return float(np.mean(others)) if others else float("nan")


def mauve(texts: Sequence[str], references: Sequence[str]) -> float | None:
    """MAUVE of the texts against the data's (Pillutla et al., 2021), in [0, 1], 1 is best, by features of gpt2-large
    of the first 1024 tokens. An empty text counts as the end of a text alone. None unless the package `mauve-text`
    (and PyTorch) is installed."""
    if not all(map(importlib.util.find_spec, ("mauve", "torch"))):
        return None
    import mauve as package  # pyright: ignore[reportMissingImports]

    p, q = ([text or "<|endoftext|>" for text in sample] for sample in (references, texts))
    return float(package.compute_mauve(p_text=p, q_text=q, featurize_model_name=MAUVE_MODEL, verbose=False).mauve)


def _ngrams(ids: Ids, n: int) -> Iterator[tuple[int, ...]]:
    if n < 1:
        raise ValueError(f"there are no {n}-grams: n must be at least 1")
    tokens = [int(token) for token in ids]
    return zip(*(itertools.islice(tokens, start, None) for start in range(n)), strict=False)
