"""Completes prompts: `python -m dilm_jax.generate --workdir=DIR [--num=8 | --prompt='0>1 1>2 0>3 3>4 0>>2' |
--infill='0>1 1>2 0>3 3>4 0>>2 [GAP:1-2] 1 2' | --input=FILE.jsonl] [--length=… | --max_length=…]
[--forbid='3 4'] [--require='2'] [--sampler=… --steps=… --calls=… --events_per_call=… --stop_threshold=…
--corrector_steps=… --corrector_strength=… --temperature=… --top_k=… --top_p=… --gap_temperature=… --gap_top_k=…
--gap_top_p=…] [--seed=… --output=FILE.jsonl --trace=FILE.html]`.

Without a prompt texts are generated from nothing; star graphs come from the test split, and paths that are not the
answer are marked. A text is completed after --prompt='The house' and filled at the marks of --infill='The [GAP] of
[GAP:2-5].'; tokens of --forbid and --require are words that are one token each. With --output
the rows are written as jsonl instead, with --trace a page that replays them too; rows of --input are `{"prompt" or
"infill": …, "id": …, "seed": …, "length": …, "max_length": …, "forbid": "3 4", "require": "2"}`, all but the first
optional.
"""

import json
import pathlib
from typing import Any

from absl import flags

import dilm_jax
from dilm_jax import cli
from dilm_jax.data.task import Task

_WORKDIR = flags.DEFINE_string("workdir", None, "The run.")
_CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "Its step; the latest unless given.")
_NUM = flags.DEFINE_integer(
    "num", None, "Samples of a prompt or of none, or graphs of the test split; 8 unless given.", lower_bound=1
)
_PROMPT = flags.DEFINE_string("prompt", None, "A text; of star graphs edges u>v, then source>>goal.")
_INFILL = flags.DEFINE_string(
    "infill",
    None,
    "A text with gaps, of star graphs after a prompt: [GAP] for any number of tokens, [GAP:2-5] for 2 to 5.",
)
_LENGTH = flags.DEFINE_integer("length", None, "Tokens of the whole text, exactly.", lower_bound=0)
_MAX_LENGTH = flags.DEFINE_integer("max_length", None, "Tokens of the whole text, at most.", lower_bound=0)
_FORBID = flags.DEFINE_string("forbid", None, "Tokens that are not inserted, for example nodes '3 4'.")
_REQUIRE = flags.DEFINE_string("require", None, "Tokens that the text has, in any order; it may have others too.")
_INPUT = flags.DEFINE_string("input", None, "A jsonl file of prompts and infills.")
_OUTPUT = flags.DEFINE_string("output", None, "Write jsonl here instead of text to the screen.")
_TRACE = flags.DEFINE_string("trace", None, "Write a replay of the insertions here too: one HTML file.")
_SAMPLER = flags.DEFINE_string("sampler", None, "One of the family's; as in training unless given.")
_STEPS = flags.DEFINE_integer("steps", None, "Steps of the time grid; as in training unless given.")
_CALLS = flags.DEFINE_integer("calls", None, "Network calls a token of event, 2 (exact) or 1.")
_EVENTS = flags.DEFINE_integer("events_per_call", None, "Insertions of event from one network call.")
_STOP = flags.DEFINE_float("stop_threshold", None, "Probability of stopping above which ILM stops; 0 draws it.")
_CORRECTOR_STEPS = flags.DEFINE_integer("corrector_steps", None, "Revisions of a finished text.")
_CORRECTOR_STRENGTH = flags.DEFINE_float("corrector_strength", None, "Noising time that each goes back to, up to 1.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the sampling noise.", lower_bound=0, upper_bound=2**32 - 1)
_FILTERS = [
    flags.DEFINE_float("temperature", None, "Of the token; 0 is greedy."),
    flags.DEFINE_integer("top_k", None, "Of the token; 0 is off."),
    flags.DEFINE_float("top_p", None, "Of the token; 1 is off."),
    flags.DEFINE_float("gap_temperature", None, "Of the gap, where one of all gaps is chosen; 0 is greedy."),
    flags.DEFINE_integer("gap_top_k", None, "Of the gap; 0 is off."),
    flags.DEFINE_float("gap_top_p", None, "Of the gap; 1 is off."),
]


def main() -> None:
    given = [flag.name for flag in (_PROMPT, _INFILL, _NUM, _INPUT) if flag.value is not None]
    if len(given) > 1 and (_INPUT.value is not None or {"prompt", "infill"} <= set(given)):
        one, other = (given[0], given[-1]) if "input" in given else ("prompt", "infill")
        raise ValueError(f"--{one} and --{other} exclude each other; give one")
    if _LENGTH.value is not None and _MAX_LENGTH.value is not None:
        raise ValueError("--length and --max_length exclude each other; give one")
    cli.cache_compilations()
    run = dilm_jax.load(
        cli.required("workdir"),
        _CHECKPOINT.value,
        sampler=_SAMPLER.value,
        num_steps=_STEPS.value,
        calls=_CALLS.value,
        events_per_call=_EVENTS.value,
        stop_threshold=_STOP.value,
        corrector_steps=_CORRECTOR_STEPS.value,
        corrector_strength=_CORRECTOR_STRENGTH.value,
        **{flag.name: flag.value for flag in _FILTERS},
    )
    task, answers, num = run.parts.task, None, 8 if _NUM.value is None else _NUM.value
    if _INPUT.value is not None:
        rows = read_rows(task, pathlib.Path(_INPUT.value))
    elif _PROMPT.value is not None:
        rows = [task.parse_prompt(_PROMPT.value)] * num
    elif _INFILL.value is not None:
        rows = [task.parse_infill(_INFILL.value)] * num
    else:
        rows, answers = task.default_rows(num)
    for file in filter(None, (_OUTPUT.value, _TRACE.value)):
        pathlib.Path(file).open("a").close()  # better an error now than after the work
    asked = {"seed": _SEED.value, "length": _LENGTH.value, "max_length": _MAX_LENGTH.value}
    asked |= {flag.name: _tokens(task, flag.name, flag.value) for flag in (_FORBID, _REQUIRE) if flag.value is not None}
    asked = {name: value for name, value in asked.items() if value is not None}
    rows = [asked | row for row in rows]
    if _TRACE.value:
        replay = run.show_trace(rows)
        generated = replay.rows
        pathlib.Path(_TRACE.value).write_text(replay.html, "utf-8")
    else:
        generated = run.generate(rows)
    if _OUTPUT.value:
        pathlib.Path(_OUTPUT.value).write_text("".join(json.dumps(row) + "\n" for row in generated))
    else:
        print(format_rows(task, generated, answers))


def read_rows(task: Task, path: pathlib.Path) -> list[dict[str, Any]]:
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
            kinds = [name for name in ("prompt", "infill") if isinstance(row, dict) and isinstance(row.get(name), str)]
            if len(kinds) != 1:
                raise ValueError('expected an object with a string "prompt" or a string "infill"')
            if unknown := sorted(row.keys() - {*kinds, *_ROW_LIMITS, *_TOKENS, "id"}):
                known = ", ".join((*_ROW_LIMITS, *sorted(_TOKENS)))
                raise ValueError(f"unknown key {unknown[0]!r}; a row has {kinds[0]}, id, {known}")
            row |= {name: _tokens(task, name, row[name]) for name in _TOKENS & row.keys()}
            for name, limit in _ROW_LIMITS.items():
                if type(row.get(name, 0)) is not int or not 0 <= row.get(name, 0) < limit:
                    raise ValueError(f"{name} {row[name]!r} is not an integer in [0, {limit})")
            if kinds == ["prompt"]:
                rows.append(row | task.parse_prompt(row["prompt"]))
            else:
                rows.append(row | task.parse_infill(row["infill"]))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return rows


def _tokens(task: Task, name: str, text: Any) -> list[int]:
    """Raises ValueError naming the key or flag."""
    if not isinstance(text, str):
        raise ValueError(f"{name} {text!r} is not a string of tokens")
    try:
        return task.parse_tokens(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


_TOKENS = {"forbid", "require"}
_ROW_LIMITS = {"seed": 2**32, "length": 2**31, "max_length": 2**31}


def format_rows(task: Task, rows: list[dict[str, Any]], answers: list[str] | None) -> str:
    """A block a row, with what it cost."""
    blocks = []
    for i, row in enumerate(rows):
        counts = [f"{row['nfe']} network calls"]
        counts += [f"{row['saturated']} moves saturated"] * (row["saturated"] > 0) + ["truncated"] * row["truncated"]
        blocks.append(f"{task.format_row(row, answers[i] if answers else None)}  ({', '.join(counts)})")
    return "\n\n".join(blocks)


if __name__ == "__main__":
    cli.run(main)
