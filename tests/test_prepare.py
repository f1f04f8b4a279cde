"""`python -m dilm_jax.prepare`: what goes in comes out, however often it is killed, and wrong input leaves nothing."""

import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import children
from dilm_jax import prepare
from dilm_jax.data import sources, store, tokenizers
from dilm_jax.data.store import Counts, Settings, Store

PREPARE = "dilm_jax.prepare"
BYTES = tokenizers.load_tokenizer("bytes")
TEXTS = [
    "emoji 👩\u200d🚀🏽, CJK \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4, combining e\u0301 a\u0308\u0323",
    "NUL \x00, form feed \x0c, next line \x85, separator \u2028, BOM \ufeff inside",
    "double  spaces,\ttabs and a trailing one ",
    "[MASK] [CLS] [PAD] as text, <|endoftext|> and </s> too",
]


def files(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def prepare_lines(directory, out, lines=None, *, workers=1, shard_rows=100, tokenizer=BYTES, **settings):
    """Prepares a file of lines, 1,003 numbered ones unless given, without the command."""
    path = directory / "a.txt"
    if not path.exists():
        path.write_text("\n".join(lines or (f"row {i} " + "x" * (i % 90) for i in range(1003))))
    splits = sources.open_source(str(path))
    return prepare.prepare(
        str(path), splits, tokenizer, Settings(**settings), directory / out, workers=workers, shard_rows=shard_rows
    )


def decoded(out, split="train"):
    opened = Store.open(out)
    return [opened.tokenizer.decode(ids.tolist()) for ids, _ in opened.splits[split]]


def run(*argv, **options):
    return children.command(PREPARE, *map(str, argv), **options)


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_texts_survive(tmp_path, tokenizer):
    rows = [{"body": text} for text in [*TEXTS, "a CRLF\r\nand a blank line\n\n", ""]]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "valid.txt").write_bytes("\r\n".join(TEXTS).encode())
    (tmp_path / "test.txt").write_text("one\n")
    result = run(f"--source={tmp_path}", f"--tokenizer={tokenizer}", f"--out={tmp_path}/out", "--field=body").result()
    assert result.code == 0, result.err
    assert decoded(tmp_path / "out") == [row["body"] for row in rows[:-1]]
    assert decoded(tmp_path / "out", "valid") == TEXTS
    opened = Store.open(tmp_path / "out")
    assert [n for _, n in opened.splits["valid"]] == [len(text.encode()) for text in TEXTS]
    ordinary = opened.tokenizer.vocabulary.ordinary
    assert all(ordinary[ids].all() for ids, _ in opened.splits["train"])
    assert "train: 6 rows read, 5 kept (0 truncated), 1 dropped (1 empty); 1 file" in result.out
    assert re.search(r"joint: sigma_min=[\d.]+, sigma_max=\d+\n +independent: sigma_min=", result.out)


def test_the_lm1b_archive(tmp_path):
    """The real names, packed, to ids and back."""
    from data import test_lm1b

    archive = test_lm1b.pack(tmp_path / "lm1b.tar.gz", test_lm1b.FILES)
    flags = ["--tokenizer=bytes", f"--out={tmp_path}/out", "--max_length=16", "--overlong=drop"]
    result = run(f"--source=lm1b:{archive}", *flags).result()
    assert result.code == 0, result.err
    expected = [text for text, _ in test_lm1b.EXPECTED if len(text.encode()) <= 16]
    assert sorted(decoded(tmp_path / "out") + decoded(tmp_path / "out", "valid")) == sorted(expected)
    assert decoded(tmp_path / "out", "test") == ["First held out.", "Last held out?"]
    assert re.search(r"dropped \(\d+ overlong\)", result.out)


@pytest.mark.parametrize(
    "flags, says",
    [
        ([], "--source is missing"),
        (["--source=a.txt"], "--tokenizer is missing"),
        (["--source=a.txt", "--tokenizer=bytes"], "--out is missing"),
        (["--source=no.txt", "--tokenizer=bytes", "--out=out"], "no.txt: no file there"),
        (["--source=a.txt", "--tokenizer=bytes", "--out=out", "--overlong=drop"], "no effect without --max_length"),
        (["--source=a.txt", "--tokenizer=bytes", "--out=out", "--max_length=0"], "max_length 0 must be at least 1"),
        (["--source=a.txt", "--tokenizer=bytes", "--out=full"], "--out=full holds other files"),
        (["--source=a.txt", "--tokenizer=bytes", "--out=a.txt"], "--out=a.txt is a file"),
        (
            ["--source=a.txt", "--tokenizer=bytes", "--out=out", "--max_length=1", "--overlong=drop"],
            "a.txt: no row of train is left: 2 rows read, 0 kept (0 truncated), 2 dropped (2 overlong)",
        ),
        (
            ["--source=a.txt", "--tokenizer=bytes", "--out=out", "--max_length=3", "--overlong=error"],
            "a.txt:2: 4 tokens, more than max_length 3",
        ),
        (["--source=bad.jsonl", "--tokenizer=bytes", "--out=out"], "bad.jsonl:301: no field 'text'"),
        (["--source=bad.jsonl", "--tokenizer=chars", "--out=out"], "bad.jsonl:301: no field 'text'"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(tmp_path, flags, says):
    (tmp_path / "a.txt").write_text("aa\nbbbb\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n' * 300 + '{"body": "a"}\n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    before = files(tmp_path)
    result = run(*flags, "--shard_rows=100", cwd=tmp_path).result()
    assert result.code == 2 and says in result.err and result.err.startswith("error: ")
    assert result.err.count("\n") == 1 and not result.out
    assert files(tmp_path) == before and not (tmp_path / "out").exists()


# --- Killed, resumed, in parallel ------------------------------------------------------------------------------------


def die(name: str, number: int) -> None:
    """kill -9 at the `number`-th call of a function of store.py, just before it does anything."""
    function, calls = getattr(store, name), []

    def counted(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(store, name, counted)


# A recipe, twelve pairs of shard and counts (ten of train), then the shards are moved, and prepared.json.
@pytest.mark.parametrize(
    "name, number, kept",
    [
        ("write_json", 1, 0),
        ("write_records", 3, 2),
        ("write_json", 5, 3),
        ("shard_name", 4, 10),
        ("write_json", 14, 10),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(tmp_path, name, number, kept):
    prepare_lines(tmp_path, "whole", max_length=60)
    out = tmp_path / "out"
    flags = ["--tokenizer=bytes", "--max_length=60", "--shard_rows=100", "--workers=1", f"--out={out}"]
    flags.append(f"--source={tmp_path}/a.txt")
    assert run(*flags, before=functools.partial(die, name, number)).result().code == -signal.SIGKILL
    with pytest.raises(ValueError, match="is half prepared: run the command that prepares it again"):
        Store.open(out)
    made = {path.stat().st_mtime_ns for path in out.rglob("train*.array_record*")}
    prepare_lines(tmp_path, "out", max_length=60)
    assert files(out) == files(tmp_path / "whole")
    assert len(made & {path.stat().st_mtime_ns for path in out.glob("train*")}) == kept, "finished shards are kept"


def test_a_shard_that_was_half_written_is_made_again(tmp_path, monkeypatch):
    prepare_lines(tmp_path, "whole")

    def torn(path, records):
        path.with_name(path.name + ".1.tmp").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "write_records", torn)
    with pytest.raises(KeyboardInterrupt):
        prepare_lines(tmp_path, "out")
    monkeypatch.undo()
    prepare_lines(tmp_path, "out")
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_second_time_nothing_is_done(tmp_path, monkeypatch):
    manifest = prepare_lines(tmp_path, "out")
    before = files(tmp_path / "out")
    monkeypatch.setattr(store, "write_records", None)
    assert prepare_lines(tmp_path, "out") == manifest
    assert files(tmp_path / "out") == before


def test_another_recipe_in_the_directory(tmp_path):
    prepare_lines(tmp_path, "out", max_length=60)
    with pytest.raises(
        ValueError, match=r"out was prepared with another max_length \(60, now 50\), overlong \(trunc.*drop"
    ):
        prepare_lines(tmp_path, "out", max_length=50, overlong="drop")
    chars = tokenizers.load_tokenizer("chars", "abc")
    with pytest.raises(
        ValueError, match=r"with another tokenizer \(bytes \w{8}, now chars \w{8}\): delete it, or choose"
    ):
        prepare_lines(tmp_path, "out", max_length=60, tokenizer=chars)
    (tmp_path / "out" / store.UNFINISHED).mkdir()
    shutil.move(tmp_path / "out" / store.PREPARED, tmp_path / "prepared.json")
    recipe = json.loads((tmp_path / "prepared.json").read_text())["recipe"]
    (tmp_path / "out" / store.UNFINISHED / "recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "a.txt").write_text("other\n" * 300)
    with pytest.raises(ValueError, match=r"out was prepared with another source \(\w{8}, now \w{8}\): delete it"):
        prepare_lines(tmp_path, "out", max_length=60)
    assert (tmp_path / "out" / "train-00000-of-00010.array_record").exists()


def test_workers_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "CHUNK_ROWS", 32)
    prepare_lines(tmp_path, "one", max_length=60, shard_rows=500)
    prepare_lines(tmp_path, "two", max_length=60, shard_rows=500, workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")


@pytest.mark.slow
def test_a_worker_names_the_row(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "CHUNK_ROWS", 32)
    lines = ["x" * 9] * 1000
    lines[777] = "x" * 11
    with pytest.raises(ValueError, match=r"a\.txt:778: 11 tokens, more than max_length 10"):
        prepare_lines(tmp_path, "out", lines, workers=2, max_length=10, overlong="error")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_worker_that_dies_keeps_what_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "CHUNK_ROWS", 32)
    monkeypatch.setattr(prepare, "_start_worker", die_at_once)
    with pytest.raises(ChildProcessError, match="a process that tokenises has ended .* finished files are kept"):
        prepare_lines(tmp_path, "out", workers=2)
    monkeypatch.undo()
    assert (tmp_path / "out" / store.UNFINISHED / "train-00000.json").exists()
    prepare_lines(tmp_path, "out")
    prepare_lines(tmp_path, "whole")
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def die_at_once(*args):
    os._exit(9)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"{i} " + "x" * 2000 for i in range(60_000)))
    flags = [f"--source={tmp_path}/a.txt", "--tokenizer=chars", f"--out={tmp_path}/out", "--workers=2"]
    parent = subprocess.Popen([sys.executable, "-m", PREPARE, *flags], cwd=children.ROOT, start_new_session=True)
    try:
        workers = wait_for(lambda: len(found := members(parent.pid) - {parent.pid}) >= 2 and found)
        assert (tmp_path / "out" / store.UNFINISHED).is_dir()
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not members(parent.pid))
    assert workers


def members(session: int) -> set[int]:
    """Processes of a session."""
    found = set()
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)
    return found


# --- Reports ---------------------------------------------------------------------------------------------------------


def test_lengths_are_described():
    counts = Counts(lengths={2: 1, 10: 90, 20: 8, 50: 1})
    assert prepare.describe_lengths(counts).startswith("2–50, mean 11.1, median 10, 90% 10, 99% 20  ")
    assert len(prepare.describe_lengths(counts).split("  ", 1)[1]) == prepare.BARS
    assert prepare.describe_lengths(Counts(lengths={7: 3})) == "7–7, mean 7.0, median 7, 90% 7, 99% 7  █"
    assert (
        Counts(dropped={"overlong": 1200, "empty": 1}).describe_dropped() == "1,201 dropped (1 empty, 1,200 overlong)"
    )


@pytest.mark.parametrize("family", ["joint", "independent"])
def test_the_proposed_schedule_covers_the_lengths(family):
    counts = Counts(lengths={5: 20, 28: 70, 126: 10})
    schedule = prepare.propose_schedule(family, BYTES, counts)
    total = float(schedule.total(np.float32(1.0)))
    if family == "joint":
        from scipy import stats

        left = {n: stats.poisson.cdf(n - 1, total) for n in counts.lengths}
    else:
        left = {n: 1 - (1 - np.exp(-total)) ** n for n in counts.lengths}
    mean = sum(left[n] * number for n, number in counts.lengths.items()) / 100
    assert mean == pytest.approx(0.005, rel=0.02)


def test_more_noise_than_a_config_may_have_is_told():
    assert "joint: sigma_min=" in (told := prepare.schedule_report(BYTES, Counts(lengths={20_000: 1})))
    assert "more than a config may have: lower --max_length" in told.splitlines()[1]


def test_progress_in_a_log(capsys):
    progress = prepare._Progress("train", every_s=0.0)
    progress.add(1500)
    progress.close()
    assert re.fullmatch(r"train: 1,500 rows read, [\d,]+ rows/s\n", capsys.readouterr().err)
