"""Tokenised rows: in memory, or in a directory that `python -m dilm_jax.prepare` wrote.

A directory holds, for each split, `<split>-00000-of-0000N.array_record` …, the tokenizer's files under `tokenizer/`,
and `prepared.json`, which is written last: without it nothing else counts. A record is a little-endian int32, the
row's bytes of UTF-8 or −1 where it was truncated, then its ids as uint16, or uint32 for more than 65,536 ids.
array_record is imported where it is used; it reads and writes local paths only.
"""

import bisect
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dilm_jax.data import tokenizers
from dilm_jax.data.sources import Row
from dilm_jax.data.tokenizers import Tokenizer

FORMAT = 1
PREPARED = "prepared.json"
UNFINISHED = "unfinished"  # the directory that shards are in until all are there
TOKENIZER = "tokenizer"
OVERLONG = ("truncate", "drop", "error")
# Random access costs what the number of groups in a shard does: groups of 16 take a tenth of the time, and half the
# space, of a group a record.
WRITER_OPTIONS = "group_size:16"
READER_OPTIONS = "readahead_buffer_size:0"  # random access

TokenRow = tuple[np.ndarray, int]  # ids, int32; bytes, or −1 where truncated


@runtime_checkable
class TokenRows(Protocol):
    """Random access to the rows of a split. Picklable, and safe in threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TokenRow:
        """Raises IndexError outside [0, len)."""
        ...

    def take(self, indices: Sequence[int]) -> list[TokenRow]:
        """Several at once, which is faster."""
        ...


# --- Tokenising ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What becomes of a row with more than `max_length` tokens (None: no row has too many): its first ones are kept,
    it is dropped, or it is an error. Raises ValueError for a value that cannot be."""

    max_length: int | None = None
    overlong: str = "truncate"

    def __post_init__(self):
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length {self.max_length} must be at least 1")
        if self.overlong not in OVERLONG:
            raise ValueError(f"overlong {self.overlong!r} is unknown: choose one of {', '.join(OVERLONG)}")


@dataclasses.dataclass(kw_only=True)
class Counts:
    """What became of the rows read. Bytes and tokens are those of rows that were kept whole."""

    read: int = 0
    kept: int = 0
    truncated: int = 0  # of the kept
    num_bytes: int = 0
    num_tokens: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)  # rows by reason: "empty", "overlong"
    lengths: dict[int, int] = dataclasses.field(default_factory=dict)  # kept rows by number of tokens

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def keep(self, length: int, num_bytes: int) -> None:
        self.kept += 1
        self.lengths[length] = self.lengths.get(length, 0) + 1
        if num_bytes < 0:
            self.truncated += 1
        else:
            self.num_bytes, self.num_tokens = self.num_bytes + num_bytes, self.num_tokens + length

    def __add__(self, other: "Counts") -> "Counts":
        def total(one: Any, two: Any) -> Any:
            return one + two if isinstance(one, int) else dict(collections.Counter(one) + collections.Counter(two))

        return Counts(**{name: total(mine, vars(other)[name]) for name, mine in vars(self).items()})

    def describe(self) -> str:
        """In a line."""
        kept = f"{self.kept:,} kept ({self.truncated:,} truncated)"
        return f"{self.read:,} rows read, {kept}, {self.describe_dropped()}"

    def describe_dropped(self) -> str:
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(self.dropped.items()))
        return f"{sum(self.dropped.values()):,} dropped" + (f" ({reasons})" if reasons else "")

    def to_json(self) -> dict[str, Any]:
        lengths = {str(length): self.lengths[length] for length in sorted(self.lengths)}
        return vars(self) | {"dropped": dict(sorted(self.dropped.items())), "lengths": lengths}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "Counts":
        return cls(**{**tree, "lengths": {int(length): count for length, count in tree["lengths"].items()}})


def tokenize_rows(rows: Iterable[Row], tokenizer: Tokenizer, settings: Settings, counts: Counts) -> Iterator[TokenRow]:
    """The rows that are kept, in order; `counts` is kept up to date.

    Raises:
      ValueError: naming the row, if it cannot be tokenised, gives an id that is no data, or is too long.
    """
    ordinary = tokenizer.vocabulary.ordinary
    for row in rows:
        counts.read += 1
        ids = _encode(row, tokenizer, ordinary)
        num_bytes = len(row.text.encode())
        overlong = settings.max_length is not None and len(ids) > settings.max_length
        if overlong and settings.overlong == "error":
            raise ValueError(
                f"{row.where}: {len(ids)} tokens, more than max_length {settings.max_length}; raise it, or truncate or "
                "drop such rows"
            )
        if not len(ids):
            counts.drop("empty")
        elif overlong and settings.overlong == "drop":
            counts.drop("overlong")
        else:
            ids, num_bytes = (ids[: settings.max_length], -1) if overlong else (ids, num_bytes)
            counts.keep(len(ids), num_bytes)
            yield ids, num_bytes


def _encode(row: Row, tokenizer: Tokenizer, ordinary: np.ndarray) -> np.ndarray:
    try:
        ids = np.array(tokenizer.encode(row.text), np.int32)
    except Exception as error:  # whatever a tokenizer raises: the row is what its user needs to know
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{row.where}: tokenizer {tokenizer.name!r} fails on this row ({what})") from error
    in_range = (ids >= 0) & (ids < len(ordinary))
    if not in_range.all() or not ordinary[ids].all():
        bad = ids[~in_range] if not in_range.all() else ids[~ordinary[ids]]
        raise ValueError(
            f"{row.where}: tokenizer {tokenizer.name!r} gives the id {bad[0]}, which is special or outside its "
            f"{len(ordinary)} ids: no text may"
        )
    return ids


# --- In memory -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class InMemory:
    """Rows in three arrays: all ids, where each row's begin (and the last ends), and bytes."""

    ids: np.ndarray
    offsets: np.ndarray
    num_bytes: np.ndarray

    @classmethod
    def from_rows(cls, rows: Iterable[TokenRow]) -> "InMemory":
        made = list(rows)
        ids = [ids for ids, _ in made]
        return cls(
            np.concatenate([np.zeros(0, np.int32), *ids]),
            np.cumsum([0, *map(len, ids)]),
            np.array([num_bytes for _, num_bytes in made], np.int64),
        )

    def __len__(self) -> int:
        return len(self.num_bytes)

    def __getitem__(self, index: int) -> TokenRow:
        return self.take([index])[0]

    def take(self, indices: Sequence[int]) -> list[TokenRow]:
        for index in indices:
            check_index(index, len(self))
        return [(self.ids[self.offsets[i] : self.offsets[i + 1]], int(self.num_bytes[i])) for i in indices]


def tokenize_in_memory(
    splits: Mapping[str, Iterable[Row]], tokenizer: Tokenizer, settings: Settings
) -> tuple[dict[str, InMemory], dict[str, Counts]]:
    """A source that is small enough, without a directory. Raises ValueError as `tokenize_rows`."""
    rows, counts = {}, {split: Counts() for split in splits}
    for split, texts in splits.items():
        rows[split] = InMemory.from_rows(tokenize_rows(texts, tokenizer, settings, counts[split]))
    return rows, counts


def check_index(index: int, size: int) -> None:
    """Raises IndexError, which also ends an iteration."""
    if not 0 <= index < size:
        raise IndexError(f"row {index} is outside the {size} rows")


# --- On disk ---------------------------------------------------------------------------------------------------------


class Sharded:
    """The rows of some files, each with a known number of rows. A file is opened when a row of it is first asked for;
    a copy in another process opens its own."""

    def __init__(self, paths: Sequence[str], sizes: Sequence[int], id_dtype: str):
        self._paths, self._sizes, self._id_dtype = list(paths), list(sizes), id_dtype
        self._ends = list(itertools.accumulate(sizes))
        self._readers: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __reduce__(self):
        return Sharded, (self._paths, self._sizes, self._id_dtype)

    def __len__(self) -> int:
        return sum(self._sizes)

    def __getitem__(self, index: int) -> TokenRow:
        return self.take([index])[0]

    def take(self, indices: Sequence[int]) -> list[TokenRow]:
        places: dict[int, list[int]] = collections.defaultdict(list)  # of the indices, by shard
        for place, index in enumerate(indices):
            check_index(index, len(self))
            places[bisect.bisect_right(self._ends, index)].append(place)
        records: dict[int, bytes] = {}
        for shard, of_shard in places.items():
            start = self._ends[shard] - self._sizes[shard]
            try:
                read = self._reader(shard).read([indices[place] - start for place in of_shard])
            except RuntimeError as error:  # as array_record says that bytes are wrong
                raise ValueError(f"{self._paths[shard]} is damaged ({error}): prepare the data again") from None
            records |= zip(of_shard, read, strict=True)
        return [decode_record(records[place], self._id_dtype) for place in range(len(indices))]

    def _reader(self, shard: int) -> Any:
        with self._lock:
            if shard not in self._readers:
                self._readers[shard] = _open_shard(self._paths[shard], self._sizes[shard])
            return self._readers[shard]


def _open_shard(path: str, size: int) -> Any:
    """Raises ValueError for a file that is not what was written: array_record takes no file for one without rows."""
    reader = _array_record().ArrayRecordReader(path, options=READER_OPTIONS, file_reader_buffer_size=2**15)
    if reader.num_records() != size:
        raise ValueError(f"{path} holds {reader.num_records()} rows, expected {size}: prepare the data again")
    return reader


def _array_record() -> Any:
    from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

    return array_record_module


def encode_record(ids: np.ndarray, num_bytes: int, id_dtype: str) -> bytes:
    return struct.pack("<i", num_bytes) + ids.astype(id_dtype).tobytes()


def decode_record(record: bytes, id_dtype: str) -> TokenRow:
    (num_bytes,) = struct.unpack_from("<i", record)
    return np.frombuffer(record, id_dtype, offset=4).astype(np.int32), num_bytes


def id_dtype_of(vocabulary_size: int) -> str:
    """The numpy type that ids are stored as."""
    return "<u2" if vocabulary_size <= 2**16 else "<u4"


def write_records(path: pathlib.Path, records: Iterable[bytes]) -> None:
    """Writes a shard, which is there only when it is complete. Raises OSError if it cannot be written."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    writer = _array_record().ArrayRecordWriter(str(temporary), WRITER_OPTIONS)
    try:
        for record in records:
            _written(path, writer.write, record)
        _written(path, writer.close)
    except BaseException:
        with contextlib.suppress(RuntimeError):
            writer.close()
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)


def _written(path: pathlib.Path, action: Callable, *args: Any) -> None:
    try:
        action(*args)
    except RuntimeError as error:  # as array_record says that a disk is full
        raise OSError(f"{path} cannot be written: {error}") from None


def write_json(path: pathlib.Path, tree: Mapping[str, Any]) -> None:
    """The whole file or none."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(tree, indent=1) + "\n")
    os.replace(temporary, path)


def read_json(path: pathlib.Path) -> Any:
    """Raises ValueError, naming the file, for what is not JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}): delete its directory and prepare the data again") from None


def shard_name(split: str, index: int, number: int) -> str:
    return f"{split}-{index:05d}-of-{number:05d}.array_record"


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """Hex, of all that decides about the rows and their files."""
    said = json.dumps({key: identity(value) for key, value in recipe.items()}, sort_keys=True)
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def identity(value: Any) -> Any:
    """What counts of a recipe's entry: not by which name or path the same tokenizer was asked for."""
    return value["fingerprint"] if isinstance(value, dict) and "fingerprint" in value else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store:
    """A directory that is prepared.

    Attributes:
      splits: rows of "train", "valid" and "test".
      tokenizer: that made them.
      manifest: prepared.json: `format`; `source`, as it was given; `recipe` (fingerprints of source and tokenizer, the
        settings), `fingerprint` of the recipe; `id_dtype`; and of each split its `shards` (rows) and `counts`.
    """

    directory: pathlib.Path
    splits: Mapping[str, TokenRows]
    tokenizer: Tokenizer
    manifest: dict[str, Any]

    @classmethod
    def open(cls, directory: str | os.PathLike, tokenizer: Tokenizer | None = None) -> "Store":
        """Raises ValueError for a directory that is not prepared, only half, or by another version; or with another
        tokenizer than the one given."""
        directory = pathlib.Path(directory)
        manifest = read_manifest(directory)
        own = tokenizers.from_directory(directory / TOKENIZER)
        for other, what in ((own, "its files are of"), (tokenizer, "asked for is")):
            made_with = manifest["recipe"]["tokenizer"]
            if other is not None and other.fingerprint != made_with["fingerprint"]:
                raise ValueError(
                    f"{directory} was prepared with tokenizer {made_with['name']!r} ({made_with['fingerprint'][:8]}), "
                    f"but {what} {other.name!r} ({other.fingerprint[:8]}); {_command('another directory')}"
                )
        splits = {split: _open_split(directory, split, said, manifest) for split, said in manifest["splits"].items()}
        return cls(directory=directory, splits=splits, tokenizer=own, manifest=manifest)

    def counts(self, split: str) -> Counts:
        return Counts.from_json(self.manifest["splits"][split]["counts"])


def read_manifest(directory: pathlib.Path) -> dict[str, Any]:
    """prepared.json. Raises ValueError if there is none of this version."""
    path = directory / PREPARED
    if (directory / UNFINISHED).is_dir() and not path.is_file():
        raise ValueError(f"{directory} is half prepared: run the command that prepares it again, it goes on")
    if not path.is_file():
        state = "is not prepared" if directory.is_dir() else "is missing"
        raise ValueError(f"the directory {directory} {state}: {_command(directory)}")
    manifest = read_json(path)
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} has format {found}, this version reads {FORMAT}: {_command('another directory')}")
    return manifest


def _command(out: str | os.PathLike) -> str:
    return f"run python -m dilm_jax.prepare --source=… --tokenizer=… --out={out}"


def _open_split(directory: pathlib.Path, split: str, said: Mapping[str, Any], manifest: Mapping[str, Any]) -> Sharded:
    sizes = said["shards"]
    paths = [directory / shard_name(split, i, len(sizes)) for i in range(len(sizes))]
    if missing := [path for path in paths if not path.is_file()]:
        raise ValueError(f"{missing[0]} is missing: prepare the data again")
    return Sharded(tuple(map(str, paths)), tuple(sizes), manifest["id_dtype"])
