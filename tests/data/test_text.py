"""The task of texts: what becomes an example, and how prompts and infills are read."""

import dataclasses
import gzip
import pathlib

import numpy as np
import pytest

from dilm_jax import canvas
from dilm_jax.canvas import Example
from dilm_jax.data import loader, text
from dilm_jax.data.store import InMemory
from dilm_jax.data.task import Task
from dilm_jax.data.tokenizers import CharTokenizer, load_tokenizer

DATA = pathlib.Path(__file__).parent
BYTES = CharTokenizer(name="bytes", alphabet="")
BERT = str(DATA / "bert-base-uncased")
OPTIONS = {
    "origin": "",
    "tokenizer": "bytes",
    "max_length": 16,
    "unit": "line",
    "field": "text",
    "overlong": "truncate",
}


def task_of(tokenizer=BYTES, rows=(), max_length=16) -> text.TextTask:
    made = InMemory.from_rows((np.array(tokenizer.encode(row), np.int32), num_bytes) for row, num_bytes in rows)
    return text.TextTask(
        name="text", tokenizer=tokenizer, max_length=max_length, open_rows=lambda: ({"train": made, "test": made}, {})
    )


def write(path: pathlib.Path, *lines: str) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def test_every_token_is_free_and_every_gap_open():
    task = task_of(rows=[("abc", 3), ("", 0), ("x" * 16, -1)])
    assert isinstance(task, Task)
    source = task.source("train")
    x0 = Example(**loader.stack([source[i] for i in range(3)]))
    canvas.validate_examples(x0, task.vocabulary)
    assert x0.length.tolist() == [3, 0, 16] and x0.num_bytes.tolist() == [3, 0, -1]
    assert not x0.frozen.any()
    assert x0.open_gap.sum(-1).tolist() == [4, 1, 17]
    assert (x0.tokens[0, 3:] == task.vocabulary.pad).all()


def test_bytes_are_those_of_the_text_that_the_ids_give_back():
    """A lossy tokenizer's model has the likelihood of the decoded text alone."""
    raw = "Hello,  World"
    task = task_of(load_tokenizer(BERT), [(raw, len(raw.encode()))])
    assert not task.lossless
    assert task.source("train")[0]["num_bytes"] == len(b"hello, world")
    assert task_of(rows=[(raw, 13)]).source("train")[0]["num_bytes"] == 13


@pytest.mark.parametrize(
    "infill, segments, gaps",
    [
        ("The [GAP] sat on [GAP:2-5].", ["The", " sat on", "."], [(3, 0, None), (10, 2, 5)]),
        ("[GAP]end", ["end"], [(0, 0, None)]),
        ("a  [GAP]", ["a "], [(2, 0, None)]),  # one space belongs to the mark
        ("[GAP]", [], [(0, 0, None)]),
        (r"\[GAP] x [GAP]", ["[GAP] x"], [(7, 0, None)]),
        (r"\[GAP:1-2][GAP:1-1]", ["[GAP:1-2]"], [(9, 1, 1)]),
    ],
)
def test_an_infill_is_segments_tokenised_apart(infill, segments, gaps):
    row = task_of().parse_infill(infill)
    assert row["answer"] == [token for segment in segments for token in BYTES.encode(segment)]
    assert (row["prompt"], row["gaps"], row["said"]) == ([], gaps, infill)


def test_segments_are_not_merged_across_a_mark():
    bert = load_tokenizer(BERT)
    row = task_of(bert).parse_infill("un[GAP]happy")
    assert row["answer"] == [*bert.encode("un"), *bert.encode("happy")] != bert.encode("unhappy")


def test_a_prompt_is_a_context_with_one_gap_at_its_end():
    assert task_of().parse_prompt("ab") == {"prompt": [], "answer": [97, 98], "gaps": [(2, 0, None)], "said": "ab"}
    assert task_of().parse_prompt("")["gaps"] == [(0, 0, None)]


def test_tokens_are_words_of_one_token_each():
    assert task_of().parse_tokens("a b") == [97, 98]
    with pytest.raises(ValueError, match="'ab' is 2 tokens, 'a' 'b': expected words of one token each"):
        task_of().parse_tokens("x ab")
    with pytest.raises(ValueError, match="no tokens are given"):
        task_of().parse_tokens(" ")


@pytest.mark.parametrize(
    "infill, says",
    [
        ("no mark", r"no \[GAP\] in 'no mark'"),
        (r"only \[GAP]", r"no \[GAP\]"),
        ("[GAP] [GAP]", r"\[GAP\] follows a gap"),
        ("[GAP:5-2]", r"\[GAP:5-2\]: at least 5 tokens, but at most 2"),
        ("half \ud800[GAP]", "is not text that UTF-8 can hold"),
    ],
)
def test_wrong_infills_are_named(infill, says):
    with pytest.raises(ValueError, match=says):
        task_of().parse_infill(infill)


def test_a_file_is_tokenised_in_memory_and_its_counts_are_told(tmp_path):
    path = write(tmp_path / "corpus.txt", *(f"row {i}" for i in range(500)), "a very long row, cut off")
    task = text.open_text(path=path, **OPTIONS)
    sizes = {split: len(task.source(split)) for split in ("train", "valid", "test")}
    assert sum(sizes.values()) == 501 and 0 < sizes["valid"] < 20 and 0 < sizes["test"] < 20
    notes = task.notes()
    assert [note.split(":")[0] for note in notes] == list(sizes)
    assert sum("(1 truncated)" in note for note in notes) == 1
    with pytest.raises(ValueError, match="unknown split 'dev'; choose one of train, valid, test"):
        task.source("dev")


def test_characters_come_from_the_training_texts(tmp_path):
    (tmp_path / "a.train.txt.gz").write_bytes(gzip.compress("äb\n".encode()))
    write(tmp_path / "a.valid.txt", "c")
    made = text.open_text(path=str(tmp_path), **OPTIONS | {"tokenizer": "chars"})
    assert made.tokenizer.alphabet == "bä"
    assert made.source("valid")[0]["tokens"][0] == 2 + ord("c")


def test_a_run_needs_no_data_to_generate(tmp_path):
    """Its tokenizer is in the workdir."""
    path = write(tmp_path / "corpus.txt", "abc")
    made = text.open_text(path=path, **OPTIONS | {"tokenizer": "chars"})
    made.save(tmp_path / "run")
    pathlib.Path(path).unlink()
    again = text.open_text(path=path, workdir=tmp_path / "run", **OPTIONS | {"tokenizer": "chars"})
    assert again.tokenizer == made.tokenizer
    with pytest.raises(ValueError, match="no file there"):
        again.source("train")


def test_missing_data_name_the_command_that_makes_them(tmp_path):
    with pytest.raises(ValueError, match=r"config.data.path is empty"):
        text.open_text(path="", **OPTIONS)
    options = OPTIONS | {"origin": "lm1b:X.tar.gz (https://a.b/X.tar.gz)", "tokenizer": "bytes"}
    says = (
        r"no file there; .* these data come from lm1b:X.tar.gz \(https://a.b/X.tar.gz\): python -m dilm_jax.prepare "
        rf"--source=lm1b:X.tar.gz --tokenizer=bytes --max_length=16 --overlong=truncate --out={tmp_path}/lm1b"
    )
    with pytest.raises(ValueError, match=says):
        text.open_text(path=str(tmp_path / "lm1b"), **options)


def test_the_fields_of_a_task_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        task_of().max_length = 3  # pyright: ignore[reportAttributeAccessIssue]
