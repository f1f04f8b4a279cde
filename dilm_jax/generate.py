"""Completes prompts: `python -m dilm_jax.generate --workdir=DIR [--num=8 | --prompt='0>1 1>2 0>3 3>4 0>>2' |
--input=FILE.jsonl] [--sampler=… --steps=… --calls=… --seed=… --temperature=… --top_k=… --top_p=… --output=FILE.jsonl]`.

Without a prompt the graphs come from the test split, and paths that are not the answer are marked. With --output
the rows are written as jsonl instead; rows of --input are `{"prompt": …, "id": …, "seed": …}`, the last two optional.
"""

import json
import pathlib
from typing import Any

from absl import flags

import dilm_jax
from dilm_jax import cli
from dilm_jax.data import star

_WORKDIR = flags.DEFINE_string("workdir", None, "The run.")
_CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "Its step; the latest unless given.")
_NUM = flags.DEFINE_integer(
    "num", None, "Samples of a prompt, or graphs of the test split; 8 unless given.", lower_bound=1
)
_PROMPT = flags.DEFINE_string("prompt", None, "Edges u>v, then source>>goal.")
_INPUT = flags.DEFINE_string("input", None, "A jsonl file of prompts.")
_OUTPUT = flags.DEFINE_string("output", None, "Write jsonl here instead of text to the screen.")
_SAMPLER = flags.DEFINE_string("sampler", None, "leap, euler or event; as in training unless given.")
_STEPS = flags.DEFINE_integer("steps", None, "Steps of the time grid; as in training unless given.")
_CALLS = flags.DEFINE_integer("calls", None, "Network calls a token of event, 2 (exact) or 1.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the sampling noise.", lower_bound=0, upper_bound=2**32 - 1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Of the token; 0 is greedy.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Of the token; 0 is off.")
_TOP_P = flags.DEFINE_float("top_p", None, "Of the token; 1 is off.")


def main() -> None:
    if _INPUT.value is not None and (_PROMPT.value is not None or _NUM.value is not None):
        other = "num" if _PROMPT.value is None else "prompt"
        raise ValueError(f"--{other} and --input exclude each other; give one")
    run = dilm_jax.load(
        cli.required("workdir"),
        _CHECKPOINT.value,
        sampler=_SAMPLER.value,
        num_steps=_STEPS.value,
        calls=_CALLS.value,
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
    )
    task, answers, num = run.parts.task, None, 8 if _NUM.value is None else _NUM.value
    if _INPUT.value is not None:
        rows = read_rows(task, pathlib.Path(_INPUT.value))
    elif _PROMPT.value is not None:
        rows = [{"prompt": star.parse_prompt(task, _PROMPT.value)}] * num
    else:
        rows, answers = test_rows(run.parts.sources["test"], num)
    if _OUTPUT.value:
        pathlib.Path(_OUTPUT.value).open("a").close()  # better an error now than after the work
    generated = run.generate([{"seed": _SEED.value} | row for row in rows])
    if _OUTPUT.value:
        pathlib.Path(_OUTPUT.value).write_text("".join(json.dumps(row) + "\n" for row in generated))
    else:
        print(format_rows(generated, answers))


def read_rows(task: star.StarTask, path: pathlib.Path) -> list[dict[str, Any]]:
    """Rows of a jsonl file. Raises ValueError naming file and line."""
    if not path.is_file():
        raise ValueError(f"--input: no file {path}")
    try:
        lines = path.read_text("utf-8-sig").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                raise ValueError('expected an object with a string "prompt"')
            if unknown := sorted(row.keys() - {"prompt", "id", "seed"}):
                raise ValueError(f"unknown key {unknown[0]!r}; a row has prompt, id, seed")
            if type(row.get("seed", 0)) is not int or not 0 <= row.get("seed", 0) < 2**32:
                raise ValueError(f"seed {row['seed']!r} is not an integer in [0, 2^32)")
            rows.append(row | {"prompt": star.parse_prompt(task, row["prompt"])})
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return rows


def test_rows(source: star.StarSource, num: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Prompts and answers of the first graphs of a split."""
    if num > len(source):
        raise ValueError(f"--num={num}: the test split has {len(source)} graphs")
    examples = [source[i] for i in range(num)]
    split = [(x["tokens"][: x["frozen"].sum()], x["tokens"][x["frozen"].sum() : int(x["length"])]) for x in examples]
    return [{"prompt": prompt.tolist()} for prompt, _ in split], [star.format_path(answer) for _, answer in split]


def format_rows(rows: list[dict[str, Any]], answers: list[str] | None) -> str:
    """A block a row: the graph, the path, and whether it is the right one."""
    blocks = []
    for i, row in enumerate(rows):
        verdict = "" if answers is None else "  right" if row["spans"][0] == answers[i] else f"  wrong: {answers[i]}"
        counts = [f"{row['nfe']} network calls"]
        counts += [f"{row['saturated']} moves saturated"] * (row["saturated"] > 0) + ["truncated"] * row["truncated"]
        blocks.append(f"graph  {row['prompt']}\npath   {row['spans'][0]}{verdict}  ({', '.join(counts)})")
    return "\n\n".join(blocks)


if __name__ == "__main__":
    cli.run(main)
