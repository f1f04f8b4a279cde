"""Sources: every format and unit, splits by name and by hash, and one line with file and line for what is wrong."""

import collections
import gzip
import itertools
import json
import sys
import types

import numpy as np
import pytest
import zstandard

import corpora
from dilm_jax.data import sources

COMPRESS = {"": lambda raw: raw, ".gz": gzip.compress, ".zst": zstandard.compress}
TEXTS = [
    "plain",
    "two  spaces, a tab\t and a trailing one ",
    " \x00 NUL, \x0c form feed, \x0b, \x85 and \u2028 inside",
    "e\u0301 \u65e5\u672c\u8a9e 👩\u200d🚀 \ufeff",
    "[MASK] <|endoftext|> </s>",
    '{"text": "a, b"}',
    "a lone \r inside",
]


def rows(spec, split="train", **options):
    """Texts of one split; for train those that were hashed out come last."""
    splits = sources.open_source(str(spec), **options)
    names = [split] if split != "train" else ["train", *(name for name in splits if splits[name].buckets)]
    return [row for name in dict.fromkeys(names) for row in splits[name]]


def texts(spec, **options):
    return sorted(row.text for row in rows(spec, **options))


def write(path, raw: bytes | str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    return path


def csv_of(values, header="id,text"):
    quoted = [value.replace('"', '""') for value in values]
    return "\n".join([header, *(f'{i},"{value}"' for i, value in enumerate(quoted))]) + "\n"


# --- Formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", COMPRESS)
@pytest.mark.parametrize(
    "name, raw",
    [
        ("a.txt", "\n".join(TEXTS)),
        ("a.txt", "\r\n".join([*TEXTS, ""])),
        ("a.log", "\ufeff" + "\n\n".join(TEXTS) + "\n"),
        ("a.jsonl", "\n".join(json.dumps({"id": 1, "text": text}) for text in TEXTS)),
        (
            "a.jsonl",
            "\ufeff" + "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS) + "\r\n\r\n",
        ),
        ("a.csv", csv_of(TEXTS)),
        ("a.csv", "\ufeff" + csv_of(TEXTS, header="id,text").replace("\n", "\r\n")),
    ],
)
def test_every_format_gives_the_texts_unchanged(tmp_path, name, raw, compressed):
    path = write(tmp_path / (name + compressed), COMPRESS[compressed](raw.encode()))
    assert texts(path) == sorted(TEXTS)


def test_lines_end_with_lf_or_crlf_and_nothing_else_is_taken(tmp_path):
    path = write(tmp_path / "a.txt", b"one\r\r\n two \n\n\r\nthree\x0b\x1c\x1d\x1e\nfour\r")
    assert texts(path) == sorted(["one\r", " two ", "three\x0b\x1c\x1d\x1e", "four\r"])


def test_units(tmp_path):
    first = write(tmp_path / "d" / "one.txt", "a\r\nb\r\n\r\n\r\nc\n \nd\n\n")
    write(tmp_path / "d" / "two.txt", "")
    assert texts(first, unit="line") == sorted(["a", "b", "c", " ", "d"])
    assert texts(first, unit="block") == sorted(["a\r\nb", "c\n \nd"])
    assert texts(tmp_path / "d", unit="file") == ["a\r\nb\r\n\r\n\r\nc\n \nd\n"]
    assert {row.where for row in rows(first, unit="block")} == {f"{first}:1", f"{first}:5"}
    assert {row.where for row in rows(first)} == {f"{first}:{line}" for line in (1, 2, 5, 6, 7)}


def test_csv_cells_may_hold_lines_and_be_long(tmp_path):
    long = "x" * 200_000
    path = write(tmp_path / "a.csv", f'text,n\n"a\r\nb, ""c""\n",1\n\n{long},2\n')
    found = {row.where: row.text for row in rows(path)}
    assert found == {f"{path}:2": 'a\r\nb, "c"\n', f"{path}:6": long}


def test_field(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": 1, "body": "yes"}\n')
    assert texts(path, field="body") == ["yes"]


def test_frames_and_members_follow_each_other(tmp_path):
    for suffix in (".gz", ".zst"):
        raw = COMPRESS[suffix](b"one\ntw") + COMPRESS[suffix](b"") + COMPRESS[suffix](b"o\n" + b"x" * 300_000)
        assert texts(write(tmp_path / f"a.txt{suffix}", raw)) == ["one", "two", "x" * 300_000]


def test_a_split_streams_and_starts_again(tmp_path):
    path = write(tmp_path / "d" / "train.txt", "".join(f"row {i}\n" for i in range(1000)))
    split = sources.open_source(str(path.parent))["train"]
    begun = iter(split)
    first = [next(begun) for _ in range(3)]
    assert list(split)[:3] == first
    path.unlink()  # what is not read yet is not in memory
    with pytest.raises(OSError):
        list(split)


# --- What is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, raw, says",
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', r"a\.jsonl:2: not JSON \(Expecting value at column"),
        ("a.jsonl", '{"text": "a"}\n\n["a"]\n', r"a\.jsonl:3: expected an object like .*, got a list"),
        ("a.jsonl", '{"body": "a", "id": 1}\n', r"a\.jsonl:1: no field 'text'; the fields are 'body', 'id'"),
        ("a.jsonl", '{"text": null}\n', r"a\.jsonl:1: field 'text' must be a string, got null"),
        ("a.jsonl", '{"text": 17}\n', r"a\.jsonl:1: field 'text' must be a string, got 17"),
        ("a.jsonl", '{"text": "\\ud83d"}\n', r"a\.jsonl:1: field 'text' has half a surrogate pair, '\\ud83d'"),
        ("a.jsonl", '{"text": ' + "[" * 100_000, r"a\.jsonl:1: cannot be read as JSON"),
        ("a.csv", "id,body\n1,a\n", r"a\.csv:1: no field 'text'; the fields are 'id', 'body'"),
        ("a.csv", 'id,text\n1,a\n\n2,"b\nb",c\n', r"a\.csv:4: 3 cells, but the header has 2: id, text"),
        ("a.csv", 'id,text\n1,a\n2,"b\nb', r"a\.csv:3: not CSV \(unexpected end of data, line 4\)"),
        ("a.csv", 'id,text\n1,"a"b\n', r"a\.csv:2: not CSV"),
        ("a.txt", "é\nb\nc".encode() + b"\xff\n", r"a\.txt:3: byte 0xff at offset 6 is not UTF-8"),
        ("a.txt", "text".encode("utf-16"), r"a\.txt:1: byte 0xff at offset 0 is not UTF-8"),
        ("a.jsonl", b'{"text": "\xe9"}', r"a\.jsonl:1: byte 0xe9 at offset 10 is not UTF-8"),
        ("a.txt", "\n\r\n\n", r"a\.txt has no text"),
        ("a.csv", "id,text\n", r"a\.csv has no text"),
        ("a.txt", "", r"a\.txt has no text"),
        (
            "a.txt.gz",
            gzip.compress(b"one\n" * 9, mtime=0)[:-3],
            r"a\.txt\.gz:\d+: the compressed file is damaged or cut off",
        ),
        ("a.txt.zst", zstandard.compress(b"one\n" * 9)[:-3], r"a\.txt\.zst:\d+: the compressed file is damaged or cut"),
        ("a.txt.gz", b"no gzip", r"a\.txt\.gz:1: the compressed file is damaged or cut off"),
        ("a.txt.zst", b"no zstandard", r"a\.txt\.zst:1: the compressed file is damaged or cut off"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path, name, raw, says):
    path = write(tmp_path / name, raw)
    with pytest.raises(ValueError, match=says):
        rows(path)


@pytest.mark.parametrize(
    "spec, options, says",
    [
        ("{}/nothing", {}, "nothing: no file there"),
        ("{}/*.jsonl", {}, r"\*\.jsonl: no file there; expected a file, a directory with files, or a glob"),
        ("{}/empty", {}, "empty: no file there"),
        ("{}/**/a.txt", {}, r"\*\* is not supported; name the directory"),
        ("", {}, "the source is empty"),
        ("{}/held", {}, "all 2 files are test or valid by their names, none is train"),
        ("{}/a.txt", {"unit": "page"}, "unit 'page' is unknown: choose one of line, file, block"),
        ("{}/a.jsonl", {"unit": "block"}, "unit 'block' has no effect on .*a.jsonl: no file is plain text"),
        ("{}/a.txt", {"field": "body"}, "field 'body' has no effect on .*a.txt: plain text has no fields"),
        ("tfds:lm1b", {"unit": "file"}, "unit 'file' has no effect on tfds:lm1b"),
    ],
)
def test_sources_that_cannot_be_opened(tmp_path, spec, options, says):
    for name in ("a.txt", "a.jsonl", "held/dev.txt", "held/test.txt", "empty/.hidden"):
        write(tmp_path / name, '{"text": "a"}')
    (tmp_path / "a.jsonl").rename(tmp_path / ("a.jsonl" if "a.jsonl" in spec else "a.other"))
    with pytest.raises(ValueError, match=says):
        sources.open_source(spec.format(tmp_path), **options)


# --- Splits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, split",
    [
        ("train.txt", "train"),
        ("wiki.valid.raw", "valid"),
        ("my_VAL-2.jsonl.gz", "valid"),
        ("x.validation", "valid"),
        ("dev-00000-of-00002", "valid"),
        ("news.heldout-1", "test"),
        ("test/part-1.txt", "test"),
        ("test/train/part-1.txt", "train"),
        ("train_data/valid.txt", "valid"),
        ("latest.txt", "train"),
        ("contest-devil.txt", "train"),
    ],
)
def test_the_name_says_the_split(name, split):
    assert sources.split_of(name) == split


def test_a_name_that_says_two_splits():
    with pytest.raises(ValueError, match="d/train_test.txt: the name says test and train"):
        sources.split_of("d/train_test.txt")


def test_splits_by_name_in_sorted_order(tmp_path):
    for name in ("b/train-2.txt", "b/train-1.txt", "a.txt", "deep/er/val.jsonl", "test.txt.gz"):
        raw = json.dumps({"text": name}) if "json" in name else name
        write(tmp_path / name, COMPRESS[name[-3:] if name.endswith(".gz") else ""](raw.encode()))
    found = {
        split: [row.text for row in rows] for split, rows in sources.open_source(str(tmp_path), field="text").items()
    }
    assert found == {
        "train": ["a.txt", "b/train-1.txt", "b/train-2.txt"],
        "valid": ["deep/er/val.jsonl"],
        "test": ["test.txt.gz"],
    }


def test_a_file_named_alone_is_train_and_a_glob_takes_its_matches(tmp_path):
    for name in ("test-1.txt", "train-1.txt", "train-0.txt", "other.csv"):
        write(tmp_path / name, name)
    assert texts(tmp_path / "test-1.txt") == ["test-1.txt"]
    splits = sources.open_source(f"{tmp_path}/t*-?.txt")
    assert [row.text for row in splits["test"]] == ["test-1.txt"]
    assert sorted(row.text for name in ("train", "valid") for row in splits[name]) == ["train-0.txt", "train-1.txt"]


def test_hashed_splits_are_disjoint_complete_and_stable(tmp_path):
    lines = [f"row {i % 5000}" for i in range(6000)]  # a thousand twice
    splits = sources.open_source(str(write(tmp_path / "a.txt", "\n".join(lines))))
    found = {name: [row.text for row in rows] for name, rows in splits.items()}
    assert collections.Counter(itertools.chain(*found.values())) == collections.Counter(lines)
    assert not set(found["train"]) & set(found["valid"]) and not set(found["valid"]) & set(found["test"])
    assert not set(found["train"]) & set(found["test"])
    for name in ("valid", "test"):
        p = len(set(found[name])) / 5000
        assert abs(p - 0.01) < 4 * np.sqrt(0.01 * 0.99 / 5000)
    assert [sources.bucket(text) for text in ("", "row 1", "\u65e5")] == [56, 67, 34], (
        "pinned: it is every user's split"
    )


def test_only_what_is_missing_is_hashed_out(tmp_path):
    lines = [f"row {i}" for i in range(2000)]
    write(tmp_path / "train.txt", "\n".join(lines))
    write(tmp_path / "test.txt", "\n".join(lines[:300]))
    splits = sources.open_source(str(tmp_path))
    assert [row.text for row in splits["test"]] == lines[:300]
    assert [row.text for row in splits["valid"]] == [line for line in lines if sources.bucket(line) == 0]
    assert [row.text for row in splits["train"]] == [line for line in lines if sources.bucket(line) != 0]


# --- Fingerprints ----------------------------------------------------------------------------------------------------


def test_a_fingerprint_changes_with_the_text_and_how_it_is_read(tmp_path):
    def fingerprints(**options):
        return {name: split.fingerprint() for name, split in sources.open_source(str(path), **options).items()}

    path = write(tmp_path / "a.txt", "one\ntwo\n")
    before, blocks = fingerprints(), fingerprints(unit="block")
    assert before == fingerprints() and len({*before.values(), *blocks.values()}) == 6
    moved = write(tmp_path / "elsewhere" / "a.txt", "one\ntwo\n")
    assert sources.open_source(str(moved))["train"].fingerprint() == before["train"]
    write(path, "one\ntwO\n")
    assert not set(fingerprints().values()) & set(before.values())


def test_a_huge_file_is_told_by_size_time_and_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "HUGE", 2**21)
    path = write(tmp_path / "a.txt", b"x" * (3 * 2**20))
    before = sources.checksum(str(path))
    assert before == sources.checksum(str(path))
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"y")
    assert sources.checksum(str(path)) != before


# --- TFDS and Hugging Face -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
    """A prepared data set of 30 + 5 rows."""
    directory = tmp_path_factory.mktemp("tfds")
    corpora.write_tfds(directory, 30)
    assert "tensorflow" not in sys.modules
    return directory


def test_tfds(tfds_dir, monkeypatch, caplog):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_dir))
    monkeypatch.setattr(sources, "READ_AT_ONCE", 7)
    splits = sources.open_source("tfds:tiny_news")
    train = [row for name in ("train", "test") for row in splits[name]]
    assert sorted(row.text for row in train) == sorted(f"train {i} é\n\x00" for i in range(30))
    assert [row.text for row in splits["valid"]] != sorted(row.text for row in splits["valid"]), "TFDS's own order"
    assert {row.text for row in splits["valid"]} == {f"valid {i} é\n\x00" for i in range(5)}
    assert {row.where for row in train} == {f"tfds:tiny_news[train] {i}" for i in range(30)}
    assert list(splits["valid"]) == list(splits["valid"])
    assert "the split 'extra' is not read" in caplog.text and "tensorflow" not in sys.modules


def test_tfds_fields(tfds_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_dir))
    with pytest.raises(ValueError, match=r"tfds:tiny_news\[train\] 0: no field 'body'; the fields are 'id', 'text'"):
        rows("tfds:tiny_news", field="body")
    with pytest.raises(ValueError, match=r"tfds:tiny_news\[train\] 0: field 'id' must be a string, got "):
        rows("tfds:tiny_news", field="id")


def test_tfds_that_is_not_there_gives_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"tfds:imdb_reviews is not prepared in .*: python -c \"import tensorflow_data"
    ):
        sources.open_source("tfds:imdb_reviews")
    with pytest.raises(ValueError, match="--source=lm1b:PATH reads the archive of statmt.org/lm-benchmark as it is"):
        sources.open_source("tfds:lm1b")
    with pytest.raises(ValueError, match="tfds:no_such_news is neither known to TFDS nor prepared in "):
        sources.open_source("tfds:no_such_news")


def test_hugging_face_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"hf:stas/tiny needs the package datasets: pip install 'dilm_jax\[hf\]'"):
        sources.open_source("hf:stas/tiny")


class FakeDataset(list):
    info = types.SimpleNamespace(version="1.0.0")

    def __getitems__(self, indices):
        return [self[i] for i in indices]


def test_hugging_face(monkeypatch):
    """Against a stand-in for the package, which is optional."""

    def load_dataset(path, config):
        if path != "org/news":
            raise FileNotFoundError(f"Dataset '{path}' doesn't exist on the Hub\nand more")
        made = {"train": 300, "validation": 3, "unsupervised": 1}
        return {
            split: FakeDataset({"text": f"{config} {split} {i}", "id": i} for i in range(n))
            for split, n in made.items()
        }

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    splits = sources.open_source("hf:org/news:2024")
    assert [row.text for row in splits["valid"]] == [f"2024 validation {i}" for i in range(3)]
    assert next(iter(splits["train"])) == ("2024 train 0", "hf:org/news:2024[train] 0")
    assert len(list(splits["train"])) + len(list(splits["test"])) == 300
    assert texts("hf:org/news", split="valid")[0] == "None validation 0"
    with pytest.raises(ValueError, match="hf:org/olds cannot be loaded: Dataset 'org/olds' doesn't exist on the Hub; "):
        sources.open_source("hf:org/olds")
