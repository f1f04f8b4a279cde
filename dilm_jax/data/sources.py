"""Where text comes from: files, TFDS, Hugging Face datasets and the LM1B archive, behind one interface.

`open_source` gives the splits; a split yields rows, one at a time, again and again in the same order. What is wrong
with a row is reported with its file and line.
"""

import csv
import dataclasses
import gzip
import hashlib
import io
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from etils import epath

SPLIT_OF_NAME = {
    "train": "train",
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    **dict.fromkeys(("test", "heldout"), "test"),
}
NUM_BUCKETS = 100
HASHED_OUT = {"valid": 0, "test": 1}  # the bucket that becomes a split which the source lacks
UNITS = ("line", "file", "block")
HUGE = 256 * 2**20  # bytes; of a larger file not all is read for its fingerprint
READ_AT_ONCE = 1024  # rows, of TFDS


class Row(NamedTuple):
    text: str
    where: str  # for messages: "news.txt:12", "tfds:lm1b[train] 17"


class Part(Protocol):
    """A file, or what else holds rows."""

    def __iter__(self) -> Iterator[Row]: ...

    def fingerprint(self) -> str:
        """Changes with the rows."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The rows of its parts, one part after the other; with `buckets`, those whose text falls into one of them.

    Iterating raises ValueError where a row cannot be read, and where there is none at all (in the parts: a split that
    is hashed out of a small source may be empty).
    """

    name: str  # of the source, for messages
    parts: tuple[Part, ...]
    buckets: frozenset[int] | None = None

    def __iter__(self) -> Iterator[Row]:
        empty = True
        for part in self.parts:
            for row in part:
                empty = False
                if self.buckets is None or bucket(row.text) in self.buckets:
                    yield row
        if empty:
            raise ValueError(f"{self.name} has no text: expected at least one row that is not empty")

    def fingerprint(self) -> str:
        """Hex; changes with the rows. A pass over the files."""
        said = [*(part.fingerprint() for part in self.parts), repr(self.buckets and sorted(self.buckets))]
        return _digest("\n".join(said).encode())


def open_source(spec: str, *, unit: str = "line", field: str = "text") -> dict[str, Split]:
    """The splits "train", "valid" and "test" of a source.

    Args:
      spec: `tfds:NAME[/CONFIG]`, a TFDS data set that is prepared as array_record in TFDS_DATA_DIR;
        `hf:NAME[:CONFIG]`, a data set of Hugging Face; `lm1b:PATH`, see lm1b.py; or else a file, a directory (its
        files at any depth, but for names that start with a dot) or a glob, of .jsonl, .csv or else plain text, each
        also as .gz or .zst; remote ones as gs://… .
      unit: what is a row of plain text: a "line", a "file", or a "block" of lines between empty ones. A row keeps
        everything but the line end after it, LF or CRLF; empty ones are none. Text is UTF-8, with or without BOM.
      field: of jsonl, csv, tfds and hf: where the text is.

    A file is in the split that its name says (train; valid, validation, val or dev; test or heldout, set off by
    . _ - or /; the name of a directory counts where the file's own says nothing), else in train. A file that is named
    alone is train. Files are read in sorted order. A split that the source lacks is hashed out of train, which then
    lacks it: by the text's hash modulo 100, 0 is valid and 1 is test. So rows with equal text fall into one split.

    Raises:
      ValueError: naming the source, for one that is not there or holds no training data, and for a `unit` or `field`
        that is unknown or would have no effect.
    """
    if unit not in UNITS:
        raise ValueError(f"unit {unit!r} is unknown: choose one of {', '.join(UNITS)}")
    scheme, _, rest = spec.partition(":")
    if scheme not in OPENERS:
        return hash_out(_open_files(spec, unit, field))
    if unit != "line":
        raise ValueError(f"unit {unit!r} has no effect on {spec}: its rows are given; leave it out")
    return hash_out(OPENERS[scheme](rest, field))


def hash_out(splits: Mapping[str, Split]) -> dict[str, Split]:
    """Train, valid and test: those that are missing are taken out of train (see `open_source`)."""
    train = splits["train"]
    missing = {name: number for name, number in HASHED_OUT.items() if name not in splits}
    rest = frozenset(range(NUM_BUCKETS)) - frozenset(missing.values())
    buckets = {"train": rest if missing else None} | {name: frozenset({k}) for name, k in missing.items()}
    return {
        name: dataclasses.replace(train, buckets=buckets[name]) if name in buckets else splits[name]
        for name in ("train", "valid", "test")
    }


def bucket(text: str) -> int:
    """The text's hash modulo 100: equal on all machines and in all versions."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % NUM_BUCKETS


# --- Files -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """The rows of one file; its suffix says how they are read."""

    path: str
    unit: str
    field: str

    @property
    def kind(self) -> str:
        """.jsonl, .csv or .txt."""
        suffix = os.path.splitext(re.sub(r"\.(gz|zst)$", "", self.path))[1]
        return suffix if suffix in (".jsonl", ".csv") else ".txt"

    def __iter__(self):
        lines = decoded(raw_lines(self.path), self.path)
        if self.kind == ".txt":
            return TEXT_ROWS[self.unit](lines, self.path)
        return FIELD_ROWS[self.kind](lines, self.path, self.field)

    def fingerprint(self):
        how = self.unit if self.kind == ".txt" else self.field
        return f"{os.path.basename(self.path)} {how} {checksum(self.path)}"


def checksum(path: str) -> str:
    """Hex, of a file's bytes. Of a file above 256 MiB: of its size, time of change, first and last MiB."""
    file_path = epath.Path(path)
    stat, digest = file_path.stat(), hashlib.blake2b(digest_size=16)
    with file_path.open("rb") as file:
        if stat.length <= HUGE:
            while piece := file.read(2**20):
                digest.update(piece)
        else:
            digest.update(f"{stat.length} {stat.mtime} ".encode() + file.read(2**20))
            file.seek(stat.length - 2**20)
            digest.update(file.read())
    return digest.hexdigest()


def raw_lines(path: str) -> Iterator[bytes]:
    """The lines of a file, decompressed by its suffix, each with its line end. Raises ValueError for a compressed file
    that is damaged or cut off."""
    import zstandard

    number = 0
    with epath.Path(path).open("rb") as file:
        try:
            for line in _decompressed(path, file):
                number += 1
                yield line
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise ValueError(f"{path}:{number + 1}: the compressed file is damaged or cut off ({error})") from None


def decoded(lines: Iterable[bytes], path: str) -> Iterator[tuple[int, str]]:
    """Numbered lines, from 1, with their line ends; a BOM is dropped. Raises ValueError for what is not UTF-8."""
    offset = 0
    for number, raw in enumerate(lines, 1):
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}:{number}: byte 0x{raw[error.start]:02x} at offset {offset + error.start} is not UTF-8: "
                "convert the file to UTF-8"
            ) from None
        offset += len(raw)
        yield number, text.removeprefix("\ufeff") if number == 1 else text


def without_line_end(line: str) -> str:
    """A line without its LF or CRLF, and with everything else that str.splitlines or str.strip would take."""
    return line.removesuffix("\n").removesuffix("\r") if line.endswith("\n") else line


def _decompressed(path: str, file) -> Iterable[bytes]:
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)
    return io.BufferedReader(_Zstandard(file)) if path.endswith(".zst") else file


class _Zstandard(io.RawIOBase):
    """Decompresses frame after frame. (zstandard's own stream reader takes a file that is cut off for a whole one.)"""

    def __init__(self, file):
        self._file = file
        self._frame = None  # begun and without its end
        self._compressed = b""  # read, behind the end of a frame
        self._ready = memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self._ready and (compressed := self._compressed or self._file.read(2**16)):
            self._decompress(compressed)
        if not self._ready and self._frame is not None:
            raise EOFError("the last frame has no end")
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def _decompress(self, compressed: bytes) -> None:
        import zstandard

        frame = self._frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
        self._ready = memoryview(frame.decompress(compressed))
        self._frame, self._compressed = (None, frame.unused_data) if frame.eof else (frame, b"")


def _line_rows(lines: Iterable[tuple[int, str]], path: str) -> Iterator[Row]:
    for number, line in lines:
        if text := without_line_end(line):
            yield Row(text, f"{path}:{number}")


def _file_rows(lines: Iterable[tuple[int, str]], path: str) -> Iterator[Row]:
    if text := without_line_end("".join(line for _, line in lines)):
        yield Row(text, path)


def _block_rows(lines: Iterable[tuple[int, str]], path: str) -> Iterator[Row]:
    block, first = [], 0
    for number, line in lines:
        if without_line_end(line):
            first = first if block else number
            block.append(line)
        elif block:
            yield Row(without_line_end("".join(block)), f"{path}:{first}")
            block = []
    if block:
        yield Row(without_line_end("".join(block)), f"{path}:{first}")


def _jsonl_rows(lines: Iterable[tuple[int, str]], path: str, field: str) -> Iterator[Row]:
    for number, line in lines:
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
        except (ValueError, RecursionError) as error:  # a number with too many digits, too many brackets
            raise ValueError(f"{where}: cannot be read as JSON ({error})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected an object like {{{field!r}: …}}, got {_kind(record)}")
        yield Row(_text(record, field, where), where)


def _csv_rows(lines: Iterable[tuple[int, str]], path: str, field: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # of all readers in this process: a text may be longer than the default of 128 KiB
    reader = csv.reader((line for _, line in lines), strict=True)
    names, before = None, 0
    try:
        for cells in reader:
            where, before = f"{path}:{before + 1}", reader.line_num  # a cell may hold line ends
            if not cells:
                continue
            if names is None:
                names = cells
                _text(dict.fromkeys(names, ""), field, where)
            elif len(cells) != len(names):
                raise ValueError(f"{where}: {len(cells)} cells, but the header has {len(names)}: {', '.join(names)}")
            else:
                yield Row(dict(zip(names, cells, strict=True))[field], where)
    except csv.Error as error:
        raise ValueError(f"{path}:{before + 1}: not CSV ({error}, line {reader.line_num})") from None


TEXT_ROWS: dict[str, Callable[..., Iterator[Row]]] = {"line": _line_rows, "file": _file_rows, "block": _block_rows}
FIELD_ROWS: dict[str, Callable[..., Iterator[Row]]] = {".jsonl": _jsonl_rows, ".csv": _csv_rows}


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    """The text of a record. Raises ValueError."""
    if field not in record:
        there = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"{where}: no field {field!r}; the fields are {there}; choose one with field")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} must be a string, got {_kind(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON's escapes can spell one
        raise ValueError(f"{where}: field {field!r} has half a surrogate pair, {text[error.start]!a}") from None
    return text


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", bool: "a boolean", type(None): "null"}.get(type(value), repr(value))


def _open_files(spec: str, unit: str, field: str) -> dict[str, Split]:
    """The splits that have files."""
    files, named_alone = _find(spec)
    paths: dict[str, list[str]] = {}
    for path, name in files:
        split = "train" if named_alone else split_of(name)
        paths.setdefault(split, []).append(os.fspath(path))
    if "train" not in paths:
        raise ValueError(
            f"{spec}: all {len(files)} files are {' or '.join(sorted(paths))} by their names, none is train"
        )
    splits = {}
    for split, of_split in paths.items():
        parts = tuple(File(path=path, unit=unit, field=field) for path in of_split)
        name = of_split[0] if len(of_split) == 1 else f"{spec} ({len(of_split)} files of {split})"
        splits[split] = Split(name=name, parts=parts)
    kinds = {part.kind for split in splits.values() for part in split.parts}
    if unit != "line" and ".txt" not in kinds:
        raise ValueError(f"unit {unit!r} has no effect on {spec}: no file is plain text; leave it out")
    if field != "text" and kinds == {".txt"}:
        raise ValueError(f"field {field!r} has no effect on {spec}: plain text has no fields; leave it out")
    return splits


def split_of(name: str) -> str:
    """The split that a file's relative path says. Raises ValueError for a name that says two."""
    for part in reversed(name.lower().split("/")):
        said = {SPLIT_OF_NAME[word] for word in re.split(r"[._-]", part) if word in SPLIT_OF_NAME}
        if len(said) > 1:
            raise ValueError(f"{name}: the name says {' and '.join(sorted(said))}; rename it to say one split")
        if said:
            return said.pop()
    return "train"


def _find(spec: str) -> tuple[list[tuple[epath.Path, str]], bool]:
    """Paths with the part of each that may say its split, sorted; and whether the spec names one file."""
    if not spec:
        raise ValueError("the source is empty: name a file, a directory, a glob, or tfds:, hf: or lm1b:")
    path = epath.Path(spec).expanduser()
    if path.is_dir():
        found = list(_walk(path, ""))
    elif path.exists():
        return [(path, path.name)], True
    else:
        found = _glob(spec)
    if not found:
        raise ValueError(f"{spec}: no file there; expected a file, a directory with files, or a glob that matches some")
    return sorted(found, key=lambda file: file[1]), False


def _walk(directory: epath.Path, prefix: str) -> Iterator[tuple[epath.Path, str]]:
    for path in directory.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _walk(path, f"{prefix}{path.name}/")
        else:
            yield path, prefix + path.name


def _glob(spec: str) -> list[tuple[epath.Path, str]]:
    wild = re.search(r"[*?\[]", spec)
    if not wild:
        return []
    root = spec[: spec.rfind("/", 0, wild.start()) + 1]
    if "**" in spec:
        raise ValueError(f"{spec}: ** is not supported; name the directory, whose files are read at any depth")
    start = epath.Path(root or ".").expanduser()
    matches = start.glob(spec[len(root) :])
    return [(path, path.relative_to(start).as_posix()) for path in matches if not path.is_dir()]


# --- Data sets -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
    """The rows of one split of a data set with random access: `rows.__getitems__` gives many at once."""

    name: str  # "tfds:lm1b[train]"
    version: str
    rows: Any
    field: str

    def __iter__(self):
        for start in range(0, len(self.rows), READ_AT_ONCE):
            indices = list(range(start, min(start + READ_AT_ONCE, len(self.rows))))
            for index, record in zip(indices, self.rows.__getitems__(indices), strict=True):
                where = f"{self.name} {index}"
                yield Row(_text(_decode_field(record, self.field, where), self.field, where), where)

    def fingerprint(self):
        return f"{self.name} {self.version} {len(self.rows)} {self.field}"


def _decode_field(record: Mapping[str, Any], field: str, where: str) -> Mapping[str, Any]:
    """TFDS gives text as bytes."""
    if not isinstance(record.get(field), bytes):
        return record
    ((_, text),) = decoded([record[field]], where)
    return {**record, field: text}


def _open_tfds(name: str, field: str) -> dict[str, Split]:
    import absl.logging
    import tensorflow_datasets as tfds

    absl.logging.set_verbosity(absl.logging.WARNING)  # not where it looked
    data_dir = os.environ.get("TFDS_DATA_DIR") or os.path.join("~", "tensorflow_datasets")
    make = f"tfds.builder('{name}', data_dir='{data_dir}', file_format='array_record').download_and_prepare()"
    fix = f'python -c "import tensorflow_datasets as tfds; {make}" downloads and prepares it; or set TFDS_DATA_DIR'
    if name == "lm1b":
        fix = (
            "--source=lm1b:PATH reads the archive of statmt.org/lm-benchmark as it is; with TensorFlow installed, "
            + fix
        )
    try:
        builder: Any = tfds.builder(name, data_dir=data_dir)
    except Exception as error:  # of many kinds, followed by a list of all data sets
        first = str(error).strip().split("\n")[0]
        raise ValueError(f"tfds:{name} is neither known to TFDS nor prepared in {data_dir}: {first}") from None
    if not builder.info.splits:
        raise ValueError(f"tfds:{name} is not prepared in {data_dir}: {fix}")
    try:
        rows = {split: builder.as_data_source(split) for split in builder.info.splits}
    except NotImplementedError:
        kind = builder.info.file_format.value
        raise ValueError(f"tfds:{name} is prepared as {kind} in {data_dir}, expected array_record: {fix}") from None
    return _splits_of_records(f"tfds:{name}", str(builder.info.version), rows, field)


def _open_hugging_face(name: str, field: str) -> dict[str, Split]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(f"hf:{name} needs the package datasets: pip install 'dilm_jax[hf]'") from None
    path, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(path, config or None)
    except Exception as error:  # of many kinds, with the cause in the message's first line
        first = str(error).strip().split("\n")[0]
        raise ValueError(
            f"hf:{name} cannot be loaded: {first}; expected hf:NAME or hf:NAME:CONFIG on huggingface.co"
        ) from None
    version = str(next(iter(rows.values())).info.version)
    return _splits_of_records(f"hf:{name}", version, rows, field)


def _splits_of_records(name: str, version: str, rows: Mapping[str, Sequence], field: str) -> dict[str, Split]:
    splits = {}
    for said, of_split in rows.items():
        if said not in SPLIT_OF_NAME:
            logging.getLogger(__name__).warning("%s: the split %r is not read", name, said)
            continue
        part = Records(name=f"{name}[{said}]", version=version, rows=of_split, field=field)
        splits[SPLIT_OF_NAME[said]] = Split(name=part.name, parts=(part,))
    if "train" not in splits:
        raise ValueError(f"{name} has no split train; it has {', '.join(rows)}")
    return splits


def _open_lm1b(path: str, field: str) -> dict[str, Split]:
    from dilm_jax.data import lm1b

    if field != "text":
        raise ValueError(f"field {field!r} has no effect on lm1b:{path}: it has no fields; leave it out")
    return lm1b.open_archive(path)


OPENERS: dict[str, Callable[[str, str], dict[str, Split]]] = {
    "tfds": _open_tfds,
    "hf": _open_hugging_face,
    "lm1b": _open_lm1b,
}


def _digest(said: bytes) -> str:
    return hashlib.blake2b(said, digest_size=16).hexdigest()
