"""What a run learns, behind one interface: where its examples come from, how its texts are read, written and scored.

The trainer, samplers and evaluators know a task by this alone; `config.build` chooses it by config.data.source.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from dilm_jax.canvas import Example, Vocabulary
from dilm_jax.data.loader import Source

Tokens = Sequence[int] | np.ndarray
SPLITS = ("train", "valid", "test")


@runtime_checkable
class Task(Protocol):
    """Rows that `parse_prompt` and `parse_infill` return are what `Run.generate` takes. Raises ValueError, naming what
    cannot be read, wherever a user's text is parsed."""

    @property
    def name(self) -> str: ...

    @property
    def protocol(self) -> str:
        """How `score` and `summarize` come by their figures, in a line."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def max_length(self) -> int: ...

    @property
    def lossless(self) -> bool:
        """Whether ids give the raw text back: bits per byte are of it, or else of the decoded text."""
        ...

    def source(self, split: str) -> Source:
        """The examples of a split: each the fields of one `Example`, without a batch axis."""
        ...

    def notes(self) -> list[str]:
        """What its user should know of the data, a line each."""
        ...

    def score(
        self, reference: Example, tokens: Int[np.ndarray, "B L"], length: Int[np.ndarray, " B"]
    ) -> dict[str, Float[np.ndarray, " B"]]:
        """Figures of each generated row beside its reference; their means are reported."""
        ...

    def summarize(self, references: list[list[int]], generated: list[list[int]]) -> dict[str, float]:
        """Figures of all rows together."""
        ...

    def parse_prompt(self, text: str) -> dict[str, Any]: ...

    def parse_infill(self, text: str) -> dict[str, Any]: ...

    def parse_tokens(self, text: str) -> list[int]: ...

    def default_rows(self, num: int) -> tuple[list[dict[str, Any]], list[str] | None]:
        """What is generated where nothing is asked for, and the right answers if there are any."""
        ...

    def format_prompt(self, prompt: Tokens) -> str: ...

    def format_text(self, ids: Tokens, num_prompt: int) -> str:
        """A whole text of which the first `num_prompt` tokens are the prompt."""
        ...

    def format_answer(self, answer: Tokens) -> str:
        """All that follows a prompt."""
        ...

    def format_span(self, span: Tokens) -> str:
        """What came into one gap of an answer."""
        ...

    def format_row(self, row: dict[str, Any], answer: str | None) -> str:
        """A row of `Run.generate` for the screen, beside the right answer if there is one."""
        ...

    def piece(self, token: int) -> str:
        """One token, to be read alone."""
        ...

    def save(self, directory: pathlib.Path) -> None:
        """Writes what the run needs to be loaded again, beside its config."""
        ...


def make_example(
    vocabulary: Vocabulary, max_length: int, prompt: Tokens, answer: Tokens = (), num_bytes: int = -1
) -> dict[str, np.ndarray]:
    """The fields of one `Example` (no batch axis): prompt tokens are frozen and their gaps closed; the gap after the
    prompt and those of the answer are open. Without an answer it is what a sampler completes.

    Raises:
      ValueError: if prompt and answer are longer than `max_length`.
    """
    length = len(prompt) + len(answer)
    if length > max_length:
        what = "prompt and answer have" if len(answer) and len(prompt) else "prompt has" if len(prompt) else "text has"
        raise ValueError(f"{what} {length} tokens, the model takes at most {max_length}")
    tokens = np.full(max_length, vocabulary.pad, np.int32)
    tokens[: len(prompt)] = prompt
    tokens[len(prompt) : length] = answer
    frozen = np.zeros(max_length, bool)
    frozen[: len(prompt)] = True
    open_gap = np.zeros(max_length + 1, bool)
    open_gap[len(prompt) : length + 1] = True
    return {
        "tokens": tokens,
        "length": np.array(length, np.int32),
        "frozen": frozen,
        "open_gap": open_gap,
        "num_bytes": np.array(num_bytes, np.int32),
    }


def make_examples(
    vocabulary: Vocabulary, max_length: int, texts: Sequence[np.ndarray], num_bytes: Sequence[int]
) -> dict[str, np.ndarray]:
    """The fields of a batch of `make_example` without prompts. Raises ValueError for a text that is longer than
    `max_length`."""
    length = np.array([len(ids) for ids in texts], np.int32)
    if length.max() > max_length:
        raise ValueError(f"text has {length.max()} tokens, the model takes at most {max_length}")
    tokens = np.full((len(texts), max_length), vocabulary.pad, np.int32)
    tokens[np.arange(max_length) < length[:, None]] = np.concatenate(texts)
    return {
        "tokens": tokens,
        "length": length,
        "frozen": np.zeros(tokens.shape, bool),
        "open_gap": np.arange(max_length + 1) <= length[:, None],
        "num_bytes": np.array(num_bytes, np.int32),
    }


def make_infill(
    vocabulary: Vocabulary, max_length: int, prompt: Tokens, answer: Tokens, gaps: Sequence[int]
) -> dict[str, np.ndarray]:
    """The fields of an `Example` whose tokens are all frozen, for a network that was trained on infills: open are the
    gaps after so many tokens of the answer. Raises ValueError as `make_example`."""
    fields = make_example(vocabulary, max_length, prompt, answer)
    fields["frozen"][: len(prompt) + len(answer)] = True
    fields["open_gap"][:] = False
    fields["open_gap"][len(prompt) + np.array(gaps)] = True
    return fields


MARK = re.compile(r"(?<!\\)\[GAP(?::([0-9]+)-([0-9]+))?\]")


def parse_mark(match: re.Match) -> tuple[int, int | None]:
    """Bounds of a mark: `[GAP]` takes any number of tokens, `[GAP:lo-hi]` lo to hi. Raises ValueError."""
    low, high = (int(bound) if bound else None for bound in match.groups())
    if high is not None and low is not None and low > high:
        raise ValueError(f"{match[0]}: at least {low} tokens, but at most {high}")
    return low or 0, high
