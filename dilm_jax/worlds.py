"""Enumerable worlds: a few short texts with a law over them, every mask of each, and every single insertion.

What `selfcheck` and the tests call true comes from here: deletions and insertions one by one on Python tuples. Only the
array types are those of the code under test. No process may be known here.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from dilm_jax.canvas import NUM_SPECIAL_COLUMNS, Canvas, Example, InsertionTargets, Vocabulary, drop_tokens

NUM_SPECIAL = 5  # ids below the letters


def vocabulary(num_letters: int) -> Vocabulary:
    """PAD, CLS, BOS, EOS, MASK, then the letters."""
    return Vocabulary(size=NUM_SPECIAL + num_letters, pad=0, cls=1, bos=2, eos=3, mask=4)


@dataclasses.dataclass(frozen=True)
class Text:
    """A text, or what noise left of it. `open_gap[i]` is the gap before token i, the last one the gap at the end."""

    tokens: tuple[int, ...]
    frozen: tuple[bool, ...]
    open_gap: tuple[bool, ...]

    @property
    def free(self) -> list[int]:
        """Positions of the tokens that noise may delete."""
        return [k for k, frozen in enumerate(self.frozen) if not frozen]


def plain(tokens) -> Text:
    """All free, all open."""
    return Text(tuple(tokens), (False,) * len(tokens), (True,) * (len(tokens) + 1))


def prompted(pattern: list[tuple[int, bool]], open_gap) -> Text:
    """From (token, frozen) pairs."""
    return Text(tuple(w for w, _ in pattern), tuple(f for _, f in pattern), tuple(open_gap))


def delete(text: Text, k: int) -> Text:
    """Without token k; the gaps on its sides become one, open if either was."""
    gap = (text.open_gap[k] or text.open_gap[k + 1],)
    return Text(
        text.tokens[:k] + text.tokens[k + 1 :],
        text.frozen[:k] + text.frozen[k + 1 :],
        text.open_gap[:k] + gap + text.open_gap[k + 2 :],
    )


def insert(text: Text, i: int, token: int) -> Text:
    """With a free token in open gap i."""
    assert text.open_gap[i]
    return Text(
        text.tokens[:i] + (token,) + text.tokens[i:],
        text.frozen[:i] + (False,) + text.frozen[i:],
        text.open_gap[:i] + (True, True) + text.open_gap[i + 1 :],
    )


def insertions(text: Text, num_letters: int) -> list[tuple[int, int]]:
    """All (open gap, letter)."""
    letters = range(NUM_SPECIAL, NUM_SPECIAL + num_letters)
    return [(i, w) for i, is_open in enumerate(text.open_gap) if is_open for w in letters]


@functools.cache
def equivalent(text: Text, i: int, token: int) -> list[tuple[int, int]]:
    """The insertions whose result is that of (i, token)."""
    result = insert(text, i, token)
    return [(j, token) for j, is_open in enumerate(text.open_gap) if is_open and insert(text, j, token) == result]


def missing(text: Text, dropped: tuple[int, ...]) -> list[tuple[int, int]]:
    """(canvas column of the gap, token) of each dropped token; the gap at the start is after column 1, BOS."""
    return [(1 + sum(j not in dropped for j in range(k)), text.tokens[k]) for k in dropped]


def small_texts(num_letters: int, max_length: int) -> list[Text]:
    """All texts of up to `max_length` letters; answers, one letter shorter, after a frozen letter; infills, two letters
    shorter, between two frozen letters; a text that is all frozen, without an open gap."""
    letters = range(NUM_SPECIAL, NUM_SPECIAL + num_letters)
    a, words = letters[0], [word for n in range(max_length + 1) for word in itertools.product(letters, repeat=n)]
    free = [[(w, False) for w in word] for word in words]
    prompts = [
        prompted([(a, True), *word], [False] + [True] * (len(word) + 1)) for word in free if len(word) < max_length
    ]
    infills = [
        prompted([(a, True), *word, (a, True)], [False] + [True] * (len(word) + 1) + [False])
        for word in free
        if len(word) < max_length - 1
    ]
    closed = prompted([(w, True) for w in letters], [False] * (num_letters + 1))
    return [*map(plain, words), *prompts, *infills, closed]


class World:
    """Texts with a law over them; `states` are all they can be noised to, and those given; `pairs` all (text, dropped
    positions).

    Attributes:
      pair_text, pair_state: [P] index of each pair's text and of what is left of it.
      pair_n, pair_m: [P] free tokens of each pair's text, and how many of them are left.
      text_state: [T] index of each text among the states.
    """

    def __init__(self, texts: list[Text], law: np.ndarray, also: Sequence[Text] = ()):
        self.texts, self.law = texts, law
        self.pairs, pair_text, results = [], [], []
        for index, text in enumerate(texts):
            for mask in itertools.product([False, True], repeat=len(text.free)):
                dropped = tuple(itertools.compress(text.free, mask))
                self.pairs.append((text, dropped))
                pair_text.append(index)
                results.append(functools.reduce(delete, reversed(dropped), text))
        self.states = list(dict.fromkeys([*results, *also]))
        self.state_index = {state: i for i, state in enumerate(self.states)}
        self.pair_text = np.array(pair_text)
        self.pair_state = np.array([self.state_index[state] for state in results])
        self.pair_n = np.array([len(text.free) for text, _ in self.pairs])
        self.pair_m = self.pair_n - np.array([len(dropped) for _, dropped in self.pairs])
        self.text_state = np.array([self.state_index[text] for text in texts])

    def masks_like(self, p: int) -> list[tuple[int, ...]]:
        """The dropped positions that leave of pair p's text what pair p leaves of it."""
        alike = (self.pair_text == self.pair_text[p]) & (self.pair_state == self.pair_state[p])
        return [self.pairs[q][1] for q in np.flatnonzero(alike)]


# --- Arrays ----------------------------------------------------------------------------------------------------------


def to_example(texts: list[Text], max_length: int, fill: int = 0) -> Example:
    """`fill` stands after the end of each text."""
    B = len(texts)
    tokens, frozen = np.full((B, max_length), fill, np.int32), np.zeros((B, max_length), bool)
    open_gap = np.zeros((B, max_length + 1), bool)
    for b, text in enumerate(texts):
        n = len(text.tokens)
        tokens[b, :n], frozen[b, :n], open_gap[b, : n + 1] = text.tokens, text.frozen, text.open_gap
    length = np.array([len(text.tokens) for text in texts], np.int32)
    fields = {"tokens": tokens, "length": length, "frozen": frozen, "open_gap": open_gap}
    return Example(**jax.device_put(fields | {"num_bytes": np.zeros(B, np.int32)}))


def to_text(canvas: Canvas, row: int) -> Text:
    """What a row of a canvas (of numpy arrays, if there are many) holds."""
    end = int(canvas.length[row])
    return Text(
        tuple(np.asarray(canvas.tokens[row, NUM_SPECIAL_COLUMNS:end]).tolist()),
        tuple(np.asarray(canvas.frozen[row, NUM_SPECIAL_COLUMNS:end]).tolist()),
        tuple(np.asarray(canvas.open_gap[row, NUM_SPECIAL_COLUMNS - 1 : end]).tolist()),
    )


_drop = jax.jit(drop_tokens, static_argnums=2)


def corrupted(
    pairs: list[tuple[Text, tuple[int, ...]]], t: np.ndarray, max_length: int, vocabulary: Vocabulary
) -> tuple[Canvas, InsertionTargets]:
    """The canvas and targets of each (text, dropped positions)."""
    x0 = to_example([text for text, _ in pairs], max_length)
    dropped = np.zeros((len(pairs), max_length), bool)
    for b, (_, positions) in enumerate(pairs):
        dropped[b, list(positions)] = True
    mask, time = jax.device_put((dropped, t.astype(np.float32)))
    canvas, gap = _drop(x0, mask, vocabulary)
    targets = InsertionTargets(tokens=x0.tokens, gap=gap, dropped=mask, x0=x0, t=time)
    return canvas, targets
