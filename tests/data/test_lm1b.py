"""LM1B from a small archive with the real one's names: packed or not, it gives the same rows, detokenised."""

import io
import logging
import tarfile

import pytest

from dilm_jax.data import lm1b, sources
from dilm_jax.data.lm1b import TOP, detokenize

TRAIN, HELDOUT = "training-monolingual.tokenized.shuffled", "heldout-monolingual.tokenized.shuffled"
FILES = {
    f"{TRAIN}/news.en-00002-of-00100": "".join(f"Second , {i} .\n" for i in range(300)),
    f"{TRAIN}/news.en-00001-of-00100": 'He said , " it \'s done . "\n\n Caf\u00e9 ( new ) : $ 5 !\n',
    f"{TRAIN}/README": "no shard\n",
    f"{HELDOUT}/news.en.heldout-00000-of-00050": "First held out .\n",
    f"{HELDOUT}/news.en.heldout-00049-of-00050": "Last held out ?\n",
    "README.perplexity_and_such": "no shard\n",
}
EXPECTED = [
    ('He said, "it\'s done."', "news.en-00001-of-00100:1"),
    ("Caf\u00e9 (new): $5!", "news.en-00001-of-00100:3"),
    *((f"Second, {i}.", f"news.en-00002-of-00100:{i + 1}") for i in range(300)),
]


@pytest.fixture
def archive(tmp_path):
    return pack(tmp_path / f"{TOP}.tar.gz", FILES)


def pack(path, files, top=TOP):
    with tarfile.open(path, "w:gz") as tar:
        directory = tarfile.TarInfo(top)
        directory.type = tarfile.DIRTYPE
        tar.addfile(directory)
        for name, text in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def unpack(archive):
    with tarfile.open(archive) as tar:
        tar.extractall(archive.parent / "unpacked", filter="data")
    return archive.parent / "unpacked"


def read(spec):
    return {name: list(split) for name, split in sources.open_source(f"lm1b:{spec}").items()}


def test_archive_and_directory_give_the_rows(archive):
    packed, unpacked = read(archive), read(unpack(archive))
    assert unpacked == read(archive.parent / "unpacked" / TOP)
    for name, rows in unpacked.items():
        assert sorted(rows) == sorted(packed[name])
    assert sorted(unpacked["train"] + unpacked["valid"]) == sorted(EXPECTED)
    assert unpacked["train"] == [row for row in EXPECTED if sources.bucket(row[0]) != 0], "shards in sorted order"
    assert packed["train"][0].where.startswith("news.en-00002"), "shards in the archive's order"
    assert [row.text for row in unpacked["valid"]] == [text for text, _ in EXPECTED if sources.bucket(text) == 0] != []
    assert [tuple(row) for row in unpacked["test"]] == [
        ("First held out.", "news.en.heldout-00000-of-00050:1"),
        ("Last held out?", "news.en.heldout-00049-of-00050:1"),
    ]


def test_missing_shards_are_told(archive, caplog):
    with caplog.at_level(logging.WARNING):
        read(archive)
    assert "2 of 99 shards of train" in caplog.text and "2 of 50 shards of test" in caplog.text


def test_fingerprints(archive):
    def fingerprints(path):
        return {name: split.fingerprint() for name, split in lm1b.open_archive(str(path)).items()}

    packed, directory = fingerprints(archive), unpack(archive)
    before = fingerprints(directory)
    assert len({*packed.values(), *before.values()}) == 4
    (directory / TOP / HELDOUT / "news.en.heldout-00000-of-00050").write_text("Other .\n")
    after = fingerprints(directory)
    assert after["train"] == before["train"] and after["test"] != before["test"]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("plain", "plain"),
        ("They 've seen http : / / a.b / c , https : / / d", "They've seen http://a.b/c, https://d"),
        ("Mr . Smith went , etc . and left .", "Mr . Smith went, etc. and left."),
        ("Is it ? Yes ! No ; so : there", "Is it? Yes! No; so: there"),
        (
            "A \" quoted text \" and ' another ' ( in brackets ) [ or these ]",
            "A \"quoted text\" and 'another' (in brackets) [or these]",
        ),
        ("It costs $ 5 or \u00a3 3 !", "It costs $5 or \u00a33!"),
        ("two -- dashes - and 50 % stay", "two -- dashes - and 50 % stay"),
    ],
)
def test_detokenize(text, expected):
    assert detokenize(text) == expected


def test_what_is_not_the_archive(archive, tmp_path):
    (tmp_path / "text.tar.gz").write_text("no archive")
    pack(tmp_path / "other.tar.gz", {"a": "b"}, top="other-corpus")
    pack(tmp_path / "none.tar.gz", {f"{HELDOUT}/news.en.heldout-00000-of-00050": "one\n"})
    (tmp_path / "short.tar.gz").write_bytes(archive.read_bytes()[:-200])
    (tmp_path / "almost.tar.gz").write_bytes(archive.read_bytes()[:-2])
    (tmp_path / "empty").mkdir()
    expected = f"expected {TOP}.tar.gz of statmt.org/lm-benchmark, or the directory it unpacks to"
    for name, says in {
        "nothing": "no such file or directory",
        "text.tar.gz": "damaged, cut off, or no tar.gz",
        "other.tar.gz": "it begins with other-corpus",
        "none.tar.gz": f"no shards in {TRAIN}",
        "short.tar.gz": "damaged, cut off, or no tar.gz",
        "almost.tar.gz": "damaged, cut off, or no tar.gz",
        "empty": f"no directory {TRAIN} in it",
    }.items():
        with pytest.raises(ValueError) as error:
            read(tmp_path / name)
        assert says in str(error.value) and expected in str(error.value) and "\n" not in str(error.value), name
    with pytest.raises(ValueError, match="field 'body' has no effect on lm1b:"):
        sources.open_source(f"lm1b:{archive}", field="body")


def test_a_byte_that_is_not_utf8(archive):
    shard = unpack(archive) / TOP / TRAIN / "news.en-00001-of-00100"
    shard.write_bytes(b"one .\ntw\xf6\n")
    with pytest.raises(ValueError, match=r"news\.en-00001-of-00100:2: byte 0xf6 at offset 8 is not UTF-8"):
        read(archive.parent / "unpacked")
