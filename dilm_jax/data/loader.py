"""Batches by step number, and a thread that makes them ahead of time.

A source is random access: `len(source)`, and `source[index]` is a dict of the fields of one `canvas.Example` without
the batch axis. It may have `source.take(indices)`, a batch of them made in one go. The batch of step i is a pure
function of (source, seed, i): there is no state to save, and resuming is asking for the next step. The order of
training data is grain's; grain is imported where it is used.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float

Batch = TypeVar("Batch")
ALL_ROWS = slice(None)


@runtime_checkable
class Source(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches:
    """Step i holds the examples of `source` at places [i·batch_size, (i + 1)·batch_size) of `order`. Its length is the
    number of steps (endless in training). `rows` selects rows of the global batch: only those are computed.

    Raises:
      ValueError: for a batch size below 1.
    """

    source: Source
    order: Sequence[int]
    batch_size: int

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"batch_size {self.batch_size} must be at least 1")

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def batch(self, step: int, rows: slice = ALL_ROWS) -> dict[str, Any]:
        """The fields of an `Example`, [rows, …]. A last batch that is not full repeats its last example; `weight`
        tells. Raises IndexError for a step outside [0, len)."""
        return take(self.source, [self.order[min(i, len(self.order) - 1)] for i in self._places(step, rows)])

    def weight(self, step: int, rows: slice = ALL_ROWS) -> Float[np.ndarray, " B"]:
        """1 for an example, 0 for a row that only fills up the last batch."""
        return np.array([i < len(self.order) for i in self._places(step, rows)], np.float32)

    def _places(self, step: int, rows: slice) -> range:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} is outside the {len(self)} batches")
        return range(step * self.batch_size, (step + 1) * self.batch_size)[rows]


@dataclasses.dataclass(frozen=True)
class Memo:
    """A source that makes each example once and keeps it: for small data that cost more to make than to hold."""

    source: Source
    made: dict[int, Any] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        if index not in self.made:
            self.made[index] = self.source[index]
        return self.made[index]


def train_batches(source: Source, batch_size: int, seed: int) -> Batches:
    """Endless batches: every epoch holds each example once, in an order of its own. An epoch's last examples share a
    batch with the next one's first, so none is dropped.

    Raises:
      ValueError: for an empty source, or a seed outside [0, 2^32).
    """
    import grain

    if not len(source):
        raise ValueError("the source of training data has 0 examples, expected at least 1")
    if not 0 <= seed < 2**32:
        raise ValueError(f"the seed of the data order is {seed}, expected one in [0, 2^32)")
    order: Any = grain.MapDataset.range(len(source)).seed(seed).shuffle().repeat()
    return Batches(source=source, order=order, batch_size=batch_size)


def eval_batches(source: Source, batch_size: int, num_examples: int | None = None) -> Batches:
    """The first `num_examples` (default: all) examples in order, each exactly once: see `Batches.weight`.

    Raises:
      ValueError: if the source does not hold that many.
    """
    num_examples = len(source) if num_examples is None else num_examples
    if not 1 <= num_examples <= len(source):
        raise ValueError(f"cannot evaluate {num_examples} examples: choose 1 to {len(source)}, all that there are")
    return Batches(source=source, order=range(num_examples), batch_size=batch_size)


def take(source: Source, indices: Sequence[int]) -> dict[str, Any]:
    """A batch of these examples."""
    if hasattr(source, "take"):
        return source.take(indices)  # pyright: ignore[reportAttributeAccessIssue]
    return stack([source[index] for index in indices])


def stack(examples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Examples to a batch: every field gets a leading axis."""
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def local_rows(batch_size: int, process_index: int, process_count: int) -> slice:
    """The rows of the global batch that a process makes: the blocks of all processes, in order, are the batch.

    Raises:
      ValueError: if the batch size does not divide.
    """
    if batch_size % process_count:
        raise ValueError(f"batch_size {batch_size} must be divisible by {process_count} processes")
    rows = batch_size // process_count
    return slice(process_index * rows, (process_index + 1) * rows)


def prefetch(make: Callable[[int], Batch], steps: Iterable[int], depth: int = 2) -> Iterator[tuple[int, Batch]]:
    """Yields (step, make(step)) in order, with up to `depth` batches made ahead by one background thread.

    An error in `make` is raised again where its batch would have come. Closing the iterator stops the thread.
    """
    steps = iter(steps)
    thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    try:
        pending = collections.deque((step, thread.submit(make, step)) for step in itertools.islice(steps, depth))
        while pending:
            step, batch = pending.popleft()
            result = batch.result()
            pending.extend((step, thread.submit(make, step)) for step in itertools.islice(steps, 1))
            yield step, result
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
