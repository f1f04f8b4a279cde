"""Text from archive to card: prepare, main, evaluate and generate as a user starts them."""

import functools
import json
import os

import jax
import numpy as np
import pytest

import children
import corpora
import dilm_jax
from corpora import ARCHIVE, SENTENCES

MAIN, EVALUATE, GENERATE, PREPARE = (f"dilm_jax.{name}" for name in ("main", "evaluate", "generate", "prepare"))
TINY = ("--config.model.num_layers=1", "--config.model.width=16", "--config.model.mlp_width=32")
FIGURES = {"entropy", "length_mean", "length_ks", "distinct_1", "distinct_2", "distinct_3", "repeated_4gram"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """A run of configs/lm1b_joint.py on what prepare made of an archive, with the line of each command."""
    tmp = tmp_path_factory.mktemp("lm1b")
    corpora.write_archive(tmp / f"{ARCHIVE}.tar.gz")
    flags = [f"--source=lm1b:{tmp / ARCHIVE}.tar.gz", "--tokenizer=bytes", "--max_length=40", f"--out={tmp / 'data'}"]
    prepared = children.command(PREPARE, *flags, cache=cache).result()
    assert prepared.code == 0, prepared.err
    config = f"--config={children.ROOT}/configs/lm1b_joint.py:smoke"
    data = (f"--config.data.path={tmp / 'data'}", "--config.data.max_length=40")
    run = children.command(MAIN, config, f"--workdir={tmp / 'run'}", *data, *TINY, cache=cache).result()
    assert run.code == 0, run.err
    return tmp / "run", prepared.out + prepared.err, run.out + run.err


def command(module, workdir, *argv, cache, before=None):
    result = children.command(module, f"--workdir={workdir}", *argv, cache=cache, before=before).result()
    assert result.code == 0, result.err
    return result.out


def test_an_archive_becomes_a_card(trained):
    workdir, prepared, output = trained
    assert "train" in prepared and "truncated" in prepared
    card = json.loads((workdir / "eval.json").read_text())
    assert {f"{kind}/{name}" for name in FIGURES for kind in ("data", "eval")} <= card.keys()
    assert card["eval/nelbo_bits_per_byte"] > 0 and "eval/nelbo_bits_per_byte_lossy" not in card
    assert card["n"] == 8 and "EMA weights" in card["protocol"]
    lines = output.splitlines()
    first, second = (next(line for line in lines if line.startswith(name)) for name in ("data ", "samples "))
    assert lines.index(first) < lines.index(second)  # the data row comes first
    assert "tokens" in output


def set_data_dir(directory: str) -> None:
    os.environ["TFDS_DATA_DIR"] = directory


def test_a_tfds_builder_becomes_a_card(tmp_path, cache):
    corpora.write_tfds(tmp_path / "tfds", 400)
    there = functools.partial(set_data_dir, str(tmp_path / "tfds"))
    config = f"--config={children.ROOT}/configs/text_joint.py:smoke"
    argv = (config, "--config.data.path=tfds:tiny_news", *TINY)
    command(MAIN, tmp_path / "run", *argv, cache=cache, before=there)
    card = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert 1 <= card["n"] <= 8 and card["eval/nelbo_bits_per_byte"] > 0


def evaluate_numbered(workdir, batch_size: int) -> dict:
    run = dilm_jax.load(str(workdir))
    run.config.eval.batch_size = batch_size
    card, samples = run.evaluate("train", num_times=1, num_samples=3)
    assert len(samples) == 3
    return card


def evaluate_as_process(index: int, number: int, port: int, workdir: str) -> None:
    """One of several that evaluate together; the first prints the card."""
    jax.distributed.initialize(f"localhost:{port}", number, index)
    assert jax.device_count() == number
    card = evaluate_numbered(workdir, 64)
    if index == 0:
        print(json.dumps(card))


@pytest.mark.slow
def test_evaluation_counts_every_text_once_on_any_number_of_processes(tmp_path, cache):
    for split, number in (("train", 1003), ("valid", 8), ("test", 8)):
        rows = "".join(f"{split} {i} {'x' * (i % 7)}\n" for i in range(number))
        (tmp_path / f"numbered.{split}.txt").write_text(rows)
    config = f"--config={children.ROOT}/configs/text_joint.py:smoke"
    argv = (config, f"--config.data.path={tmp_path}/numbered.*", *TINY)
    command(MAIN, tmp_path / "run", *argv, cache=cache)
    cards = {"few at a time": evaluate_numbered(tmp_path / "run", 16), 1: evaluate_numbered(tmp_path / "run", 64)}
    for number in (2, 4):
        args = (number, children.free_port(), str(tmp_path / "run"))
        processes = [children.Child(evaluate_as_process, index, *args) for index in range(number)]
        results = [process.result() for process in processes]
        assert not any(result.code for result in results), [(result.code, result.err[-2000:]) for result in results]
        cards[number] = json.loads(results[0].out.splitlines()[-1])
    for card in cards.values():
        assert card["n"] == 1003
        for name in ("eval/nelbo_nats_per_token", "eval/nelbo_bits_per_byte", "eval/nelbo_stderr"):
            np.testing.assert_allclose(card[name], cards["few at a time"][name], rtol=1e-6)


def test_texts_of_others_are_scored_without_a_model(trained, tmp_path, cache):
    workdir, _, _ = trained
    texts = ["The house of the people.", "", "of of of of of of of of"]
    (tmp_path / "theirs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "held_out.txt").write_text("\n".join(SENTENCES[:20]) + "\n")
    flags = ["--tokenizer=bytes", f"--data={tmp_path / 'held_out.txt'}", f"--samples={tmp_path / 'theirs.jsonl'}"]
    result = children.command(EVALUATE, *flags, cache=cache).result()
    assert result.code == 0, result.err
    card = json.loads((tmp_path / "theirs.eval.json").read_text())
    assert card["n"] == 3 and card["eval/length_mean"] == np.mean([len(text) for text in texts])
    assert card["data/length_mean"] == np.mean([len(text.encode()) for text in SENTENCES[:3]])  # as many of the data
    assert result.out.splitlines()[1].startswith("data")
    beside = command(EVALUATE, workdir, f"--samples={tmp_path / 'theirs.jsonl'}", cache=cache)
    assert beside.splitlines()[1].startswith("data")


def test_quality_against_calls(trained, cache):
    workdir, _, _ = trained
    out = command(EVALUATE, workdir, "--steps=2,4", "--num=8", "--split=train", cache=cache)
    rows = json.loads((workdir / "quality.json").read_text())
    assert [row["sampler"].split(",")[:2] for row in rows] == [
        ["event", " 2 calls a token"],
        ["leap", " 2 steps"],
        ["leap", " 4 steps"],
    ]
    assert out.splitlines()[1].startswith("data") and (workdir / "quality.png").stat().st_size > 1000


def test_generation_from_nothing_prompts_and_infills(trained, tmp_path, cache):
    workdir, _, _ = trained
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "The ", "length": 12}\n{"infill": "A [GAP:2-3] b[GAP]", "max_length": 20, "id": "x"}\n'
    )
    flags = [f"--input={tmp_path / 'rows.jsonl'}", f"--output={tmp_path / 'out.jsonl'}"]
    command(GENERATE, workdir, *flags, cache=cache)
    first, second = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["text"].startswith("The ") and first["length"] == len(first["ids"]) == 12
    assert (first["prompt"], len(first["spans"]), first["inserted"]) == ("The ", 1, 8)
    assert second["id"] == "x" and second["length"] <= 20 and len(second["spans"]) == 2
    assert second["ids"][0] == ord("A") and second["prompt"] == "A [GAP:2-3] b[GAP]"
    out = command(GENERATE, workdir, "--num=2", "--max_length=10", f"--trace={tmp_path / 'x.html'}", cache=cache)
    assert out.count("network calls") == 2 and (tmp_path / "x.html").is_file()


@pytest.mark.parametrize(
    "module, argv, says",
    [
        (EVALUATE, ["--samples=x.jsonl"], "--samples needs held-out text"),
        (EVALUATE, ["--workdir={run}", "--protocol=paper_owt"], "--protocol has no effect without --judge"),
        (EVALUATE, ["--workdir={run}", "--data=x"], "--data has no effect but with --samples and without --workdir"),
        (EVALUATE, ["--workdir={run}", "--steps=2,x"], "--steps: 'x' is not a number of steps"),
        (EVALUATE, ["--workdir={run}", "--samples=/not/there.jsonl"], "/not/there.jsonl"),
        (GENERATE, ["--workdir={run}", "--forbid=ab"], "forbid: 'ab' is 2 tokens"),
        (GENERATE, ["--workdir={run}", "--prompt=" + "x" * 50], "the 50 that are there: more than 40"),
        (MAIN, ["--config=configs/text_joint.py"], "config.data.path is empty"),
        (MAIN, ["--config=configs/lm1b_joint.py"], "python -m dilm_jax.prepare --source=lm1b:1-billion"),
        (
            MAIN,
            ["--config=configs/text_joint.py:smoke", "--config.data.difficulty=hard"],
            "data.difficulty = hard has no",
        ),
        (MAIN, ["--config=configs/star_tiny_joint.py", "--config.data.path=x"], "data.path = x has no effect"),
        (MAIN, ["--config=configs/lm1b_joint.py:smoke", "--config.data.path={data}"], "has texts of 37 tokens"),
        (
            MAIN,
            ["--config=configs/lm1b_joint.py", "--config.data.path={data}"],
            "was prepared with tokenizer 'bytes', but config.data.tokenizer is 'bert-base-uncased'",
        ),
    ],
)
def test_wrong_input_is_one_line(trained, tmp_path, cache, module, argv, says):
    argv = [flag.format(run=trained[0], data=trained[0].parent / "data") for flag in argv]
    if module == MAIN:
        argv.append(f"--workdir={tmp_path / 'run'}")
    result = children.command(module, *argv, cache=cache).result()
    assert result.code == 2, result.err
    assert len(result.err.splitlines()) == 1 and says in result.err
    assert not (tmp_path / "run" / "config.json").exists()
