"""Tokenises text: `python -m dilm_jax.prepare --source=… --tokenizer=… --out=DIR [--max_length=… --overlong=drop
--unit=block --field=… --workers=… --shard_rows=…]`.

Any source of data/sources.py becomes a directory of data/store.py. A run that was killed goes on when the command is
given again; the files are the same then, and with any number of workers. Wrong input leaves nothing behind.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any, TextIO

import numpy as np
from absl import flags

from dilm_jax import cli, config, coverage
from dilm_jax.data import sources, store, tokenizers
from dilm_jax.data.sources import Row, Split
from dilm_jax.data.store import Counts, Settings
from dilm_jax.data.tokenizers import Tokenizer
from dilm_jax.likelihood import Bounded
from dilm_jax.processes.registry import PROCESSES, make_process
from dilm_jax.schedules import LogLinear, concrete_total

_SOURCE = flags.DEFINE_string(
    "source", None, "A file, directory or glob of .txt, .jsonl or .csv (also .gz, .zst), or tfds:…, hf:…, lm1b:PATH."
)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "bytes, chars, or one of Hugging Face by name or directory.")
_OUT = flags.DEFINE_string("out", None, "The directory to write; new, empty, or left unfinished by this command.")
_MAX_LENGTH = flags.DEFINE_integer("max_length", None, "Tokens a row may have; any number unless given.")
_OVERLONG = flags.DEFINE_enum("overlong", None, store.OVERLONG, "What becomes of longer rows; truncate unless given.")
_UNIT = flags.DEFINE_enum("unit", "line", sources.UNITS, "What is a row of plain text.")
_FIELD = flags.DEFINE_string("field", "text", "Where the text is in jsonl, csv and data sets.")
_WORKERS = flags.DEFINE_integer("workers", None, "Processes that tokenise; one a CPU unless given.", lower_bound=1)
_SHARD_ROWS = flags.DEFINE_integer("shard_rows", 65_536, "Rows read for each file that is written.", lower_bound=1)

CHUNK_ROWS, CHUNK_CHARACTERS = 512, 2**20  # what a worker gets at once: rows, or fewer if they have as much text
CHUNKS_HERE = 4  # before there are workers
BARS = 24  # of a histogram

Tokenized = tuple[list[bytes], Counts]  # the records of a chunk
Tokenize = Callable[[Iterator[list[Row]]], Iterator[Tokenized]]


def main() -> None:
    if _OVERLONG.value and _MAX_LENGTH.value is None:
        raise ValueError(f"--overlong={_OVERLONG.value} has no effect without --max_length")
    source, name, out = map(cli.required, ("source", "tokenizer", "out"))
    settings = Settings(max_length=_MAX_LENGTH.value, overlong=_OVERLONG.value or "truncate")
    splits = sources.open_source(source, unit=_UNIT.value, field=_FIELD.value)
    tokenizer = tokenizers.load_tokenizer(name, (row.text for row in splits["train"]))
    workers = _WORKERS.value or os.cpu_count() or 1
    directory, shard_rows = pathlib.Path(out), _SHARD_ROWS.value
    manifest = prepare(source, splits, tokenizer, settings, directory, workers=workers, shard_rows=shard_rows)
    print(report(manifest))
    print(schedule_report(tokenizer, Counts.from_json(manifest["splits"]["train"]["counts"])))


# --- Writing ---------------------------------------------------------------------------------------------------------


def prepare(
    source: str,
    splits: Mapping[str, Split],
    tokenizer: Tokenizer,
    settings: Settings,
    directory: pathlib.Path,
    *,
    workers: int = 1,
    shard_rows: int = 65_536,
) -> dict[str, Any]:
    """Writes `directory` (see data/store.py), or goes on with it, and returns its manifest.

    Raises:
      ValueError: as tokenize_rows, for a training split of which no row is left (nothing stays behind); or for a
        directory that holds something else.
      ChildProcessError: if a worker dies; what is finished stays.
    """
    recipe = {
        "source": {split: rows.fingerprint() for split, rows in splits.items()},
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "max_length": settings.max_length,
        "overlong": settings.overlong,
        "shard_rows": shard_rows,
    }
    if (directory / store.PREPARED).is_file():
        manifest = store.read_manifest(directory)
        _check_recipe(directory, manifest["recipe"], recipe)
        shutil.rmtree(directory / store.UNFINISHED, ignore_errors=True)
        return manifest
    created = not directory.exists()
    _begin(directory, tokenizer, recipe)
    try:
        shards = {}
        with _tokenizing(directory, tokenizer, settings, workers) as tokenize:
            for split, rows in splits.items():
                shards[split] = _write_split(directory, split, rows, tokenize, shard_rows)
        train = sum(shards["train"], Counts())
        if not train.kept:
            raise ValueError(f"{source}: no row of train is left: {train.describe()}")
    except ValueError:
        shutil.rmtree(directory / store.UNFINISHED)
        shutil.rmtree(directory / store.TOKENIZER)
        if created:
            directory.rmdir()
        raise
    manifest = {
        "format": store.FORMAT,
        "source": source,
        "fingerprint": store.fingerprint(recipe),
        "recipe": recipe,
        "id_dtype": store.id_dtype_of(tokenizer.vocabulary.size),
    }
    return _finish(directory, manifest, shards)


def _begin(directory: pathlib.Path, tokenizer: Tokenizer, recipe: Mapping[str, Any]) -> None:
    """Makes the directory ready for shards. Raises ValueError."""
    unfinished = directory / store.UNFINISHED
    if (unfinished / "recipe.json").is_file():
        return _check_recipe(directory, store.read_json(unfinished / "recipe.json"), recipe)
    if directory.is_dir() and {path.name for path in directory.iterdir()} - {store.UNFINISHED, store.TOKENIZER}:
        raise ValueError(f"--out={directory} holds other files: name a directory that is new or empty")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--out={directory} is a file: name a directory that is new or empty")
    unfinished.mkdir(parents=True, exist_ok=True)
    tokenizer.save(directory / store.TOKENIZER)
    store.write_json(unfinished / "recipe.json", recipe)


def _check_recipe(directory: pathlib.Path, begun: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    """Raises ValueError, naming what differs."""
    changed = [key for key in recipe if store.identity(begun.get(key)) != store.identity(recipe[key])]
    if changed:
        said = [f"{key} ({_said(begun.get(key))}, now {_said(recipe[key])})" for key in changed]
        raise ValueError(f"{directory} was prepared with another {', '.join(said)}: delete it, or choose another --out")


def _said(value: Any) -> str:
    """A value of a recipe, short."""
    if isinstance(value, dict):
        return f"{value['name']} {value['fingerprint'][:8]}" if "name" in value else store.fingerprint(value)[:8]
    return str(value)


def _write_split(
    directory: pathlib.Path, split: str, rows: Iterable[Row], tokenize: Tokenize, shard_rows: int
) -> list[Counts]:
    """Writes the shards that are not there yet. Returns the counts of each."""
    rows, shards = iter(rows), []
    with contextlib.closing(_Progress(split)) as progress:
        while True:
            path = directory / store.UNFINISHED / _work_name(split, len(shards))
            done = path.with_suffix(".json")  # written after its shard
            if done.is_file():
                shards.append(Counts.from_json(store.read_json(done)))
                collections.deque(itertools.islice(rows, shards[-1].read), maxlen=0)
                progress.add(shards[-1].read)
                continue
            chunks = _chunks(itertools.islice(rows, shard_rows))
            if (first := next(chunks, None)) is None:
                return shards
            shards.append(_write_shard(path, tokenize(itertools.chain([first], chunks)), progress))
            store.write_json(done, shards[-1].to_json())


def _write_shard(path: pathlib.Path, tokenized: Iterable[Tokenized], progress: "_Progress") -> Counts:
    counts = Counts()

    def records():
        nonlocal counts
        for of_chunk, counts_of_chunk in tokenized:
            counts += counts_of_chunk
            progress.add(counts_of_chunk.read)
            yield from of_chunk

    store.write_records(path, records())
    return counts


def _finish(directory: pathlib.Path, manifest: dict[str, Any], shards: Mapping[str, list[Counts]]) -> dict[str, Any]:
    """Moves the shards to their places; prepared.json comes last. It may be killed, and done again, anywhere."""
    for split, counts in shards.items():
        for index in range(len(counts)):
            path = directory / store.UNFINISHED / _work_name(split, index)
            if path.is_file():
                os.replace(path, directory / store.shard_name(split, index, len(counts)))
    manifest["splits"] = {
        split: {"shards": [shard.kept for shard in counts], "counts": sum(counts, Counts()).to_json()}
        for split, counts in shards.items()
    }
    store.write_json(directory / store.PREPARED, manifest)
    shutil.rmtree(directory / store.UNFINISHED)
    return manifest


def _work_name(split: str, index: int) -> str:
    return f"{split}-{index:05d}.array_record"


# --- Tokenising in parallel ------------------------------------------------------------------------------------------


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    chunk, characters = [], 0
    for row in rows:
        chunk.append(row)
        characters += len(row.text)
        if len(chunk) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


@contextlib.contextmanager
def _tokenizing(directory: pathlib.Path, tokenizer: Tokenizer, settings: Settings, workers: int) -> Iterator[Tokenize]:
    """What tokenises chunks, in order. The first ones are done here, so that a small source starts no processes."""
    pool, done_here = None, 0

    def tokenize(chunks: Iterator[list[Row]]) -> Iterator[Tokenized]:
        nonlocal pool, done_here
        while workers == 1 or done_here < CHUNKS_HERE:
            if (chunk := next(chunks, None)) is None:
                return
            done_here += 1
            yield _tokenize(chunk, tokenizer, settings)
        pool = pool or concurrent.futures.ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _start_worker, (directory / store.TOKENIZER, settings)
        )
        pending = collections.deque()
        for chunk in chunks:
            pending.append(pool.submit(_work, chunk))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    try:
        yield tokenize
    except BrokenProcessPool:
        raise ChildProcessError(
            "a process that tokenises has ended (killed, or out of memory?); finished files are kept, the same command "
            "goes on, with fewer --workers perhaps"
        ) from None
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _tokenize(chunk: list[Row], tokenizer: Tokenizer, settings: Settings) -> Tokenized:
    counts, id_dtype = Counts(), store.id_dtype_of(tokenizer.vocabulary.size)
    rows = store.tokenize_rows(chunk, tokenizer, settings, counts)
    return [store.encode_record(ids, num_bytes, id_dtype) for ids, num_bytes in rows], counts


_worker: tuple[Tokenizer, Settings] | None = None  # of this process


def _start_worker(tokenizer: pathlib.Path, settings: Settings) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = tokenizers.from_directory(tokenizer), settings


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, which would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _work(chunk: list[Row]) -> Tokenized:
    assert _worker is not None
    return _tokenize(chunk, *_worker)


class _Progress:
    """Rows read: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, split: str, stream: TextIO | None = None, every_s: float = 10.0):
        import tqdm

        self._split, self._stream, self._every_s = split, stream or sys.stderr, every_s
        self._began = self._last_line = time.monotonic()
        self._bar = tqdm.tqdm(
            desc=split, unit="row", unit_scale=True, file=self._stream, disable=not self._stream.isatty()
        )
        self._rows = 0

    def add(self, rows: int) -> None:
        self._bar.update(rows)
        self._rows += rows
        if self._bar.disable and time.monotonic() - self._last_line >= self._every_s:
            self._last_line = time.monotonic()
            rate = self._rows / (self._last_line - self._began)
            print(f"{self._split}: {self._rows:,} rows read, {rate:,.0f} rows/s", file=self._stream, flush=True)

    def close(self) -> None:
        self._bar.close()


# --- Reports ---------------------------------------------------------------------------------------------------------


def report(manifest: Mapping[str, Any]) -> str:
    """What became of the rows of each split."""
    return "\n".join(
        line
        for split, said in manifest["splits"].items()
        for line in _split_report(split, Counts.from_json(said["counts"]), len(said["shards"]))
    )


def _split_report(split: str, counts: Counts, num_shards: int) -> list[str]:
    files = f"{num_shards:,} file{'' if num_shards == 1 else 's'}"
    lines = [f"{split}: {counts.describe()}; {files}"]
    if not counts.read:
        lines.append("  the source is too small to hash rows out of it: give this split a file of its own")
    if counts.kept:
        lines.append(f"  tokens a row {describe_lengths(counts)}")
    if counts.num_tokens:
        lines.append(f"  bytes a token {counts.num_bytes / counts.num_tokens:.3f} (rows that were not truncated)")
    return lines


def describe_lengths(counts: Counts) -> str:
    """`1–126, mean 28.3, median 27, 90% 50, 99% 73  ▂▅█▇▃▁▁▁`: the bars are equal parts of that range."""
    values, number = _histogram(counts)
    below = np.cumsum(number) / number.sum()
    median, most, nearly_all = (values[np.searchsorted(below, share)] for share in (0.5, 0.9, 0.99))
    bars, _ = np.histogram(values, bins=min(BARS, values[-1] - values[0] + 1), weights=number)
    drawn = "".join("▁▂▃▄▅▆▇█"[int(7 * bar / bars.max())] if bar else " " for bar in bars)
    mean = values @ number / number.sum()
    return f"{values[0]}–{values[-1]}, mean {mean:.1f}, median {median}, 90% {most}, 99% {nearly_all}  {drawn}"


def schedule_report(tokenizer: Tokenizer, counts: Counts) -> str:
    """For each family a schedule that covers the lengths of these rows."""
    lines = [f"schedules that leave something of {50 * coverage.TOO_MANY:.1f}% of the training texts at t = 1:"]
    for family in PROCESSES:
        found = propose_schedule(family, tokenizer, counts)
        if found is not None:
            values = f"sigma_min={found.sigma_min:.3g}, sigma_max={found.sigma_max:.3g}"
            much = concrete_total(found, 1.0) > config.MAX_TOTAL
            lines.append(f"  {family}: {values}" + ", more than a config may have: lower --max_length" * much)
    return "\n".join(lines)


def propose_schedule(family: str, tokenizer: Tokenizer, counts: Counts) -> LogLinear | None:
    """A log-linear one, of the ratio that the paper's are near; None for a family without such a schedule."""
    if "process.schedule" not in PROCESSES[family].TRAITS.reads:
        return None
    values, number = _histogram(counts)
    defaults = config.default_config()
    process = make_process(
        family,
        vocabulary=tokenizer.vocabulary,
        max_length=int(values[-1]),
        schedule=LogLinear(sigma_min=1.0, sigma_max=100.0),
        eps=defaults.process.eps,
        loss_config=config.loss_config(defaults),
        time_sampling=defaults.loss.time_sampling,
    )
    if not isinstance(process, Bounded):
        return None
    share = min(1.0, 1e6 / number.sum())  # a million rows say it as well
    sigma_min, sigma_max = coverage.propose(process, np.repeat(values, np.ceil(share * number).astype(int)).tolist())
    return LogLinear(sigma_min=sigma_min, sigma_max=sigma_max)


def _histogram(counts: Counts) -> tuple[np.ndarray, np.ndarray]:
    """Lengths that occur, ascending, and how often."""
    return np.array(sorted(counts.lengths), np.int32), np.array([counts.lengths[n] for n in sorted(counts.lengths)])


if __name__ == "__main__":
    cli.run(main)
