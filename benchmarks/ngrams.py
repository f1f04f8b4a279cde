"""Cross-entropies of n-gram models of token ids: what a text model should beat."""

import collections
import math
from collections.abc import Sequence

import numpy as np

DISCOUNTS = (0.5, 0.6, 0.7, 0.8, 0.9)
START, END = -1, -2
Texts = Sequence[Sequence[int]]


def unigram_bits(train: Texts, held_out: Texts, vocab_size: int, max_length: int) -> float:
    """Of all held-out texts: their tokens, one pseudo-count each, and their lengths, one pseudo-count each."""
    tokens, lengths = np.ones(vocab_size), np.ones(max_length + 1)
    for text in train:
        np.add.at(tokens, text, 1)
        lengths[len(text)] += 1
    log_token, log_length = np.log2(tokens / tokens.sum()), np.log2(lengths / lengths.sum())
    return -float(sum(log_length[len(text)] + log_token[np.asarray(text, int)].sum() for text in held_out))


def bigram_bits(train: Texts, held_out: Texts, vocab_size: int) -> tuple[float, float]:
    """Of all held-out texts, ends included, and the discount that each bigram's count gives to unigrams."""
    counts, contexts, followers, tokens = (collections.Counter() for _ in range(4))
    for text in train:
        for pair in zip([START, *text], [*text, END], strict=True):
            followers[pair[0]] += pair not in counts
            counts[pair] += 1
            contexts[pair[0]] += 1
            tokens[pair[1]] += 1
    total = sum(tokens.values()) + vocab_size + 1

    def bits(discount):
        of_all = 0.0
        for text in held_out:
            for a, b in zip([START, *text], [*text, END], strict=True):
                p = (tokens[b] + 1) / total
                if contexts[a]:
                    p = (max(counts[a, b] - discount, 0) + discount * followers[a] * p) / contexts[a]
                of_all -= math.log2(p)
        return of_all

    return min((bits(discount), discount) for discount in DISCOUNTS)
