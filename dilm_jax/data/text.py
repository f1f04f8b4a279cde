"""Language modelling: each example is a text, all of whose tokens are free.

Where texts come from is in sources.py and, tokenised, in store.py. A prompt is a context with one open gap at its end,
an infill a context with open gaps: their tokens stay because nothing deletes them while they are sampled from
(docs/MATH.md 6d), or are frozen where the network was trained on such (data.infill_fraction).
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dilm_jax import text_metrics
from dilm_jax.canvas import Vocabulary
from dilm_jax.data.loader import Source
from dilm_jax.data.sources import Split, open_source
from dilm_jax.data.store import PREPARED, TOKENIZER, UNFINISHED, Counts, Settings, Store, TokenRows, tokenize_in_memory
from dilm_jax.data.task import MARK, SPLITS, Tokens, make_examples, parse_mark
from dilm_jax.data.tokenizers import Tokenizer, from_directory, load_tokenizer


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Rows of token ids as the fields of an `Example`. Bytes are those of the raw text; of a tokenizer that is not
    lossless those of the decoded one, of which alone the model has the likelihood."""

    rows: TokenRows
    tokenizer: Tokenizer
    max_length: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: values[0] for name, values in self.take([index]).items()}

    def take(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """These rows, all at once."""
        ids, num_bytes = zip(*self.rows.take(indices), strict=True)
        if not self.tokenizer.lossless:
            num_bytes = [self._decoded(row) if known >= 0 else known for row, known in zip(ids, num_bytes, strict=True)]
        return make_examples(self.tokenizer.vocabulary, self.max_length, ids, num_bytes)

    def _decoded(self, ids: np.ndarray) -> int:
        return len(self.tokenizer.decode(ids.tolist()).encode())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTask:
    """A `Task`. `open_rows` is called when a split is first asked for: sampling needs no data."""

    name: str
    tokenizer: Tokenizer
    max_length: int
    open_rows: Callable[[], tuple[Mapping[str, TokenRows], Mapping[str, Counts]]]

    protocol = "texts from nothing, one for each of the split's; entropy, n-grams and lengths in tokens"

    @property
    def vocabulary(self) -> Vocabulary:
        return self.tokenizer.vocabulary

    @property
    def lossless(self) -> bool:
        return self.tokenizer.lossless

    def source(self, split: str) -> Source:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
        return TextSource(self.open_rows()[0][split], self.tokenizer, self.max_length)

    def notes(self) -> list[str]:
        """What became of the rows of each split."""
        return [f"{split}: {counts.describe()}" for split, counts in self.open_rows()[1].items()]

    def score(self, reference, tokens, length):
        return {}

    def summarize(self, references: list[list[int]], generated: list[list[int]]) -> dict[str, float]:
        return text_metrics.summarize(generated, [len(ids) for ids in references], self.tokenizer)

    def parse_prompt(self, text: str) -> dict[str, Any]:
        """What follows the text is generated."""
        ids = self._encode(text)
        return {"prompt": [], "answer": ids, "gaps": [(len(ids), 0, None)], "said": text}

    def parse_infill(self, text: str) -> dict[str, Any]:
        """Segments are tokenised apart. A space before a mark belongs to the mark: what is inserted brings its own; one
        after it belongs to the next segment. `\\[GAP]` is literal."""
        marks = list(MARK.finditer(text))
        if not marks:
            raise ValueError(f"no [GAP] in {text!r}: nothing could be inserted")
        ids, gaps, start = [], [], 0
        for mark in marks:
            before = text[start : mark.start()]
            ids += self._encode(_literal(before.removesuffix(" ")))
            if gaps and gaps[-1][0] == len(ids):
                raise ValueError(f"{mark[0]} follows a gap: write one gap for both")
            gaps.append((len(ids), *parse_mark(mark)))
            start = mark.end()
        ids += self._encode(_literal(text[start:]))
        return {"prompt": [], "answer": ids, "gaps": gaps, "said": text}

    def parse_tokens(self, text: str) -> list[int]:
        """Of words that are one token each."""
        ids = []
        for word in text.split():
            found = self._encode(word)
            if len(found) != 1:
                pieces = " ".join(repr(self.piece(token)) for token in found)
                raise ValueError(f"{word!r} is {len(found)} tokens, {pieces}: expected words of one token each")
            ids += found
        if not ids:
            raise ValueError("no tokens are given: leave it out")
        return ids

    def default_rows(self, num: int) -> tuple[list[dict[str, Any]], None]:
        return [{"prompt": []}] * num, None

    def format_prompt(self, prompt: Tokens) -> str:
        return self.tokenizer.decode(list(prompt))

    def format_text(self, ids: Tokens, num_prompt: int) -> str:
        return self.tokenizer.decode(list(ids))

    def format_answer(self, answer: Tokens) -> str:
        return self.tokenizer.decode(list(answer))

    def format_span(self, span: Tokens) -> str:
        return self.tokenizer.decode(list(span))

    def format_row(self, row: dict[str, Any], answer: str | None) -> str:
        return row["text"]

    def piece(self, token: int) -> str:
        return self.tokenizer.piece(token)

    def save(self, directory: pathlib.Path) -> None:
        self.tokenizer.save(directory / TOKENIZER)

    def _encode(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise ValueError(f"{text!r} is not text that UTF-8 can hold: {error.reason}") from None


def _literal(segment: str) -> str:
    return segment.replace("\\[GAP", "[GAP")


# --- From a config ---------------------------------------------------------------------------------------------------


def open_text(
    *,
    path: str,
    origin: str,
    tokenizer: str,
    max_length: int,
    unit: str,
    field: str,
    overlong: str,
    workdir: pathlib.Path | None = None,
) -> TextTask:
    """The task of the texts at `path`: a directory that `prepare` made, or a source that it takes (see `open_source`),
    whose tokens are then held in memory. `workdir` has the tokenizer of a run that is loaded again.

    Raises:
      ValueError: naming what is missing and, where it is the data, the command that prepares them from `origin`; or a
        directory that was prepared with another tokenizer or for longer texts.
    """
    if not path:
        raise ValueError("config.data.path is empty: give a text file, or a directory that dilm_jax.prepare made")
    settings = Settings(max_length=max_length, overlong=overlong)
    prepared = (pathlib.Path(path) / PREPARED).is_file() or (pathlib.Path(path) / UNFINISHED).is_dir()

    @functools.cache
    def opened() -> Mapping[str, Split]:
        try:
            return open_source(path, unit=unit, field=field)
        except ValueError as error:
            if not origin:
                raise
            raise ValueError(
                f"{error}; these data come from {origin}: python -m dilm_jax.prepare --source={origin.split()[0]} "
                f"--tokenizer={tokenizer} --max_length={max_length} --overlong={overlong} --out={path}"
            ) from None

    of_run = None if workdir is None else from_directory(workdir / TOKENIZER)

    @functools.cache
    def store() -> Store:
        return _check_prepared(Store.open(path, of_run), tokenizer, max_length)

    if of_run is not None:
        made = of_run
    else:
        made = store().tokenizer if prepared else load_tokenizer(tokenizer, (row.text for row in opened()["train"]))

    @functools.cache
    def open_rows() -> tuple[Mapping[str, TokenRows], Mapping[str, Counts]]:
        if not prepared:
            return tokenize_in_memory(opened(), made, settings)
        return store().splits, {split: store().counts(split) for split in store().splits}

    return TextTask(name=f"text {path}", tokenizer=made, max_length=max_length, open_rows=open_rows)


def _check_prepared(store: Store, tokenizer: str, max_length: int) -> Store:
    made = store.tokenizer.name
    if made != tokenizer:
        raise ValueError(
            f"{store.directory} was prepared with tokenizer {made!r}, but config.data.tokenizer is {tokenizer!r}; set "
            f"it to {made!r}, or prepare another directory"
        )
    longest = max(max(store.counts(split).lengths, default=0) for split in store.splits)
    if longest > max_length:
        raise ValueError(
            f"{store.directory} has texts of {longest} tokens, but config.data.max_length is {max_length}; raise "
            f"it, or prepare with --max_length={max_length}"
        )
    return store
