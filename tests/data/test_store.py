"""Tokenised rows: counts, limits, random access in memory and on disk, and directories that cannot be used."""

import concurrent.futures
import json
import multiprocessing
import pickle
import resource
import shutil

import numpy as np
import pytest

from dilm_jax import prepare
from dilm_jax.canvas import Vocabulary
from dilm_jax.data import sources, store, tokenizers
from dilm_jax.data.loader import Source
from dilm_jax.data.sources import Row
from dilm_jax.data.store import Counts, InMemory, Settings, Store, TokenRows

BYTES = tokenizers.load_tokenizer("bytes")
TEXTS = ["abc", "", "é", "abcdef", "abcd", " "]
ROWS = [Row(text, f"a.txt:{i}") for i, text in enumerate(TEXTS, 1)]
NUMBERED = 1003


class Odd:
    """A tokenizer that does not do what it must."""

    name, lossless, fingerprint = "odd", True, "00"
    vocabulary = Vocabulary(size=300, pad=295, cls=296, bos=297, eos=298, mask=299)

    def __init__(self, ids):
        self.ids = ids

    def encode(self, text):
        if text == "é":
            if isinstance(self.ids, Exception):
                raise self.ids
            return self.ids
        return [1]

    def decode(self, ids):
        raise NotImplementedError

    piece = save = decode


def tokenize(**settings):
    counts = Counts()
    rows = [
        (bytes(ids.tolist()).decode(), n) for ids, n in store.tokenize_rows(ROWS, BYTES, Settings(**settings), counts)
    ]
    return rows, counts


# --- Tokenising ------------------------------------------------------------------------------------------------------


def test_rows_that_fit_are_kept_whole():
    rows, counts = tokenize()
    assert rows == [("abc", 3), ("é", 2), ("abcdef", 6), ("abcd", 4), (" ", 1)]
    assert counts == Counts(
        read=6, kept=5, num_bytes=16, num_tokens=16, dropped={"empty": 1}, lengths={3: 1, 2: 1, 6: 1, 4: 1, 1: 1}
    )
    assert tokenize(max_length=6)[0] == rows


def test_overlong_rows():
    rows, counts = tokenize(max_length=3)
    assert rows == [("abc", 3), ("é", 2), ("abc", -1), ("abc", -1), (" ", 1)]
    assert (counts.kept, counts.truncated, counts.num_bytes, counts.num_tokens) == (5, 2, 6, 6)
    assert counts.lengths == {3: 3, 2: 1, 1: 1}

    rows, counts = tokenize(max_length=3, overlong="drop")
    assert rows == [("abc", 3), ("é", 2), (" ", 1)]
    assert (counts.read, counts.kept, counts.truncated, counts.dropped) == (6, 3, 0, {"empty": 1, "overlong": 2})

    with pytest.raises(ValueError, match=r"a\.txt:4: 6 tokens, more than max_length 3"):
        tokenize(max_length=3, overlong="error")


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="max_length 0 must be at least 1"):
        Settings(max_length=0)
    with pytest.raises(ValueError, match="overlong 'cut' is unknown: choose one of truncate, drop, error"):
        Settings(overlong="cut")


@pytest.mark.parametrize(
    "ids, says",
    [
        ([5, 299], "gives the id 299, which is special or outside its 300 ids"),
        ([300], "gives the id 300"),
        ([-1], "gives the id -1"),
        (TypeError("what"), r"fails on this row \(TypeError: what\)"),
    ],
)
def test_a_row_that_cannot_be_tokenised_is_named(ids, says):
    with pytest.raises(ValueError, match=r"a\.txt:3: tokenizer 'odd' " + says):
        list(store.tokenize_rows(ROWS, Odd(ids), Settings(), Counts()))


def test_counts_add_up_and_survive_json():
    parts = [Counts(), Counts()]
    for rows, counts in zip((ROWS[:4], ROWS[4:]), parts, strict=True):
        list(store.tokenize_rows(rows, BYTES, Settings(max_length=3), counts))
    _, whole = tokenize(max_length=3)
    assert sum(parts, Counts()) == whole
    assert Counts.from_json(json.loads(json.dumps(whole.to_json()))) == whole


# --- Random access ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """1,003 numbered rows of many lengths, in 11 shards; and the same rows in memory."""
    directory = tmp_path_factory.mktemp("numbered")
    lines = [f"{i} " + "x" * (i * 7 % 90) for i in range(NUMBERED)]
    for split, of_split in {"train": lines, "valid": ["one"], "test": ["two", "three"]}.items():
        (directory / f"{split}.txt").write_text("\n".join(of_split))
    splits = sources.open_source(f"{directory}/*.txt")
    out = directory / "out"
    prepare.prepare("numbered", splits, BYTES, Settings(max_length=80), out, shard_rows=100)
    return out, store.tokenize_in_memory(splits, BYTES, Settings(max_length=80))[0]["train"], lines


def check(rows, lines, order):
    for i in order:
        ids, num_bytes = rows[i]
        assert ids.dtype == np.int32 and bytes(ids.tolist()).decode() == lines[i][:80]
        assert num_bytes == (len(lines[i]) if len(lines[i]) <= 80 else -1)
    return True


@pytest.mark.parametrize("where", ["on disk", "in memory"])
def test_numbered_rows_come_back(numbered, where):
    out, in_memory, lines = numbered
    opened = Store.open(out)
    rows = opened.splits["train"] if where == "on disk" else in_memory
    assert isinstance(rows, TokenRows) and isinstance(rows, Source) and len(rows) == NUMBERED
    assert sum(len(line) > 80 for line in lines) > 50
    order = np.random.default_rng(0).permutation(NUMBERED).tolist()
    check(rows, lines, order)
    some = [5, 0, 777, 5]  # a row may be asked for twice
    for got, i in zip(rows.take(some), some, strict=True):
        assert got[0].tolist() == rows[i][0].tolist() and got[1] == rows[i][1]
    assert [bytes(ids.tolist()).decode().split()[0] for ids, _ in rows] == [str(i) for i in range(NUMBERED)]
    check(pickle.loads(pickle.dumps(rows)), lines, order[:50])
    for outside in (-1, NUMBERED):
        with pytest.raises(IndexError, match="outside the 1003 rows"):
            rows[outside]


def test_rows_are_safe_in_threads_and_other_processes(numbered):
    out, _, lines = numbered
    rows = Store.open(out).splits["train"]
    orders = [np.random.default_rng(seed).permutation(NUMBERED).tolist() for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda order: check(rows, lines, order), orders))
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        ids, num_bytes = processes.submit(store.Sharded.__getitem__, rows, 777).result()
    assert (ids.tolist(), num_bytes) == (rows[777][0].tolist(), rows[777][1])


def test_a_store_tells_what_it_holds(numbered):
    out, _, lines = numbered
    opened = Store.open(out, BYTES)
    names = sorted(path.name for path in out.iterdir())
    assert names[:3] == ["prepared.json", "test-00000-of-00001.array_record", "tokenizer"]
    assert names[3:-1] == [f"train-{i:05d}-of-00011.array_record" for i in range(11)]
    assert {split: len(rows) for split, rows in opened.splits.items()} == {"train": NUMBERED, "valid": 1, "test": 2}
    assert opened.counts("train").lengths == {
        n: sum(min(len(line), 80) == n for line in lines) for n in {min(len(line), 80) for line in lines}
    }
    assert opened.tokenizer.fingerprint == BYTES.fingerprint and opened.manifest["source"] == "numbered"


@pytest.mark.parametrize(
    "size, dtype, largest", [(2**16, "<u2", 2**16 - 1), (2**16 + 1, "<u4", 2**16), (260, "<u2", 9)]
)
def test_records_hold_all_ids(size, dtype, largest):
    assert store.id_dtype_of(size) == dtype
    ids, num_bytes = store.decode_record(store.encode_record(np.array([0, largest], np.int32), -1, dtype), dtype)
    assert ids.tolist() == [0, largest] and ids.dtype == np.int32 and num_bytes == -1


def test_a_shard_is_written_whole_or_not_at_all(tmp_path):
    def records():
        yield b"one"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        store.write_records(tmp_path / "a.array_record", records())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a full disk
    try:
        with pytest.raises(OSError, match="a.array_record cannot be written: "):
            store.write_records(tmp_path / "a.array_record", (np.random.default_rng(i).bytes(99) for i in range(9999)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_no_rows():
    empty = InMemory.from_rows([])
    assert len(empty) == len(store.Sharded([], [], "<u2")) == 0 and list(empty) == []


# --- What cannot be opened -------------------------------------------------------------------------------------------


def test_directories_that_are_not_prepared(numbered, tmp_path):
    with pytest.raises(
        ValueError, match=rf"directory {tmp_path}/no is missing: run python -m dilm_jax.prepare .*--out="
    ):
        Store.open(tmp_path / "no")
    with pytest.raises(
        ValueError, match="is not prepared: run python -m dilm_jax.prepare --source=… --tokenizer=… --out="
    ):
        Store.open(tmp_path)
    (tmp_path / "half" / store.UNFINISHED).mkdir(parents=True)
    with pytest.raises(ValueError, match="half is half prepared: run the command that prepares it again"):
        Store.open(tmp_path / "half")

    copy = shutil.copytree(numbered[0], tmp_path / "copy")
    manifest = json.loads((copy / store.PREPARED).read_text())
    for text, says in {
        json.dumps(manifest | {"format": 99}): "prepared.json has format 99, this version reads 1: run python -m",
        "[]": "prepared.json has format None, this version reads 1",
        "{": "prepared.json cannot be read",
    }.items():
        (copy / store.PREPARED).write_text(text)
        with pytest.raises(ValueError, match=says):
            Store.open(copy)


def test_damaged_shards(numbered, tmp_path):
    copy = shutil.copytree(numbered[0], tmp_path / "copy")
    shards = [copy / store.shard_name("train", i, 11) for i in range(11)]
    shutil.copy(shards[10], shards[1])
    shards[2].write_bytes(b"no record")
    rows = Store.open(copy).splits["train"]
    with pytest.raises(ValueError, match="train-00001-of-00011.array_record holds 3 rows, expected 100: prepare"):
        rows[150]
    with pytest.raises(ValueError, match="train-00002-of-00011.array_record holds 0 rows, expected 100: prepare"):
        rows[250]
    raw = bytearray(shards[4].read_bytes())
    raw[150:250] = bytes(100)
    shards[4].write_bytes(raw)
    with pytest.raises(
        ValueError, match=r"train-00004-of-00011.array_record is damaged \(.*\): prepare the data again"
    ):
        list(rows[i] for i in range(400, 500))
    shards[3].unlink()
    with pytest.raises(ValueError, match="train-00003-of-00011.array_record is missing: prepare the data again"):
        Store.open(copy)


def test_another_tokenizer(numbered, tmp_path):
    chars = tokenizers.load_tokenizer("chars", ["abc"])
    with pytest.raises(
        ValueError, match=r"was prepared with tokenizer 'bytes' \(\w{8}\), but asked for is 'chars' \(\w{8}\)"
    ):
        Store.open(numbered[0], chars)
    copy = shutil.copytree(numbered[0], tmp_path / "copy")
    chars.save(copy / store.TOKENIZER)
    with pytest.raises(ValueError, match="was prepared with tokenizer 'bytes' .*, but its files are of 'chars'"):
        Store.open(copy)
