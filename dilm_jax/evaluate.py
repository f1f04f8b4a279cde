"""Evaluates a run: `python -m dilm_jax.evaluate --workdir=DIR [--checkpoint=STEP --split=test --num=… --num_samples=…
--sampler=… --steps=… --calls=… --stop_threshold=… --times=… --seed=… --judge=… --protocol=…]`.

Prints a table and writes DIR/eval.json, and one line a sample to DIR/samples/<split>.jsonl. Of texts the first row is
the data's own, of as many held-out texts as were generated. `--judge` adds their NLL under another language model, by
a protocol that is printed with it.

`--steps=16,64,256` generates with each number of steps, beside the family's sampler without a time grid, and writes
DIR/quality.json and DIR/quality.png: quality against network calls.

`--samples=FILE.jsonl` scores texts that any system wrote (field `text` of each line) by the same figures. The data row
is then of the split of a run's data, or of `--data=FILE` in tokens of `--tokenizer`. Writes FILE.eval.json.
"""

import functools
import os
import pathlib
from typing import Any

import jax
from absl import flags

import dilm_jax
from dilm_jax import cli, distributed, evals
from dilm_jax.data.sources import File
from dilm_jax.data.store import Settings, tokenize_in_memory
from dilm_jax.data.text import TextTask
from dilm_jax.data.tokenizers import load_tokenizer
from dilm_jax.evals import TextScorer
from dilm_jax.judge import PROTOCOLS, Judge, protocol_named
from dilm_jax.run import Run

distributed.define_flags()
_WORKDIR = flags.DEFINE_string("workdir", None, "The run.")
_CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "Its step; the latest unless given.")
_SPLIT = flags.DEFINE_string("split", "test", "train, valid or test.")
_NUM = flags.DEFINE_integer("num", None, "Examples; all of the split unless given.")
_NUM_SAMPLES = flags.DEFINE_integer(
    "num_samples", None, "Of them for which a text is generated, 0: all; as in training unless given.", lower_bound=0
)
_SAMPLER = flags.DEFINE_string("sampler", None, "One of the family's; as in training unless given.")
_STEPS = flags.DEFINE_list(
    "steps", None, "Steps of the time grid, as in training unless given; several, as 16,64,256, for a table."
)
_TIMES = flags.DEFINE_integer(
    "times", None, "Draws of the noising time an example for the likelihood bound; as in training.", lower_bound=1
)
_CALLS = flags.DEFINE_integer("calls", None, "Network calls a token of event, 2 (exact) or 1.")
_STOP = flags.DEFINE_float("stop_threshold", None, "Probability of stopping above which ILM stops; 0 draws it.")
_SEED = flags.DEFINE_integer(
    "seed", None, "Of the sampling noise; as in training unless given.", lower_bound=0, upper_bound=2**32 - 1
)
_JUDGE = flags.DEFINE_string(
    "judge", None, "A causal language model that scores texts: a Hugging Face name, a directory, or a file DIR/X.gguf."
)
_PROTOCOL = flags.DEFINE_string("protocol", None, f"How it scores them: {', '.join(PROTOCOLS)}; plain unless given.")
_SAMPLES = flags.DEFINE_string("samples", None, "Score the texts of this jsonl file instead of generating any.")
_DATA = flags.DEFINE_string("data", None, "With --samples and no run: a file of held-out texts, as prepare reads it.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "With --data: bytes, chars, or a Hugging Face name or directory.")


def main() -> None:
    check_flags()
    distributed.start(is_training=False)
    judge = None
    if _JUDGE.value and is_first():  # texts and figures come to all processes, and the first one reports them
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the judge needs a GPU's memory too
        protocol = protocol_named(_PROTOCOL.value or "plain")
        judge = functools.partial(Judge.load(_JUDGE.value).score, protocol=protocol)
    steps = [_number(text) for text in _STEPS.value or ()]
    if _SAMPLES.value:
        if is_first():
            print(evals.format_card(score_file(pathlib.Path(_SAMPLES.value), judge)))
    elif len(steps) > 1:
        compare_steps(steps, judge)
    else:
        run = load(
            sampler=_SAMPLER.value,
            num_steps=steps[0] if steps else None,
            calls=_CALLS.value,
            stop_threshold=_STOP.value,
        )
        card, samples = evaluate(run, judge)
        if is_first():
            print(evals.format_card(card))
            for line in evals.notes(run.parts, _SPLIT.value):
                print(line)
            evals.write_card(run.workdir / "eval.json", card)
            evals.write_samples(run.workdir / "samples" / f"{_SPLIT.value}.jsonl", samples)
            run.place.push()


def is_first() -> bool:
    return jax.process_index() == 0


def check_flags() -> None:
    """Raises ValueError for flags that would have no effect."""
    if _PROTOCOL.value and not _JUDGE.value:
        raise ValueError("--protocol has no effect without --judge")
    if _SAMPLES.value and not _WORKDIR.value and not (_DATA.value and _TOKENIZER.value):
        raise ValueError("--samples needs held-out text to compare with: give --workdir, or --data and --tokenizer")
    for flag in (_DATA, _TOKENIZER):
        if flag.value and (not _SAMPLES.value or _WORKDIR.value):
            raise ValueError(f"--{flag.name} has no effect but with --samples and without --workdir")
    for flag in (_NUM_SAMPLES, _SAMPLER, _STEPS, _TIMES, _CALLS, _STOP, _SEED):
        if flag.value is not None and _SAMPLES.value:
            raise ValueError(f"--{flag.name} has no effect with --samples, which generates nothing; leave it out")
    for flag in (_TIMES, _CALLS, _STOP):
        if flag.value is not None and _STEPS.value and len(_STEPS.value) > 1:
            raise ValueError(f"--{flag.name} has no effect with several --steps, a table of samplers; leave it out")


def load(**sampling: Any) -> Run:
    cli.cache_compilations()
    return dilm_jax.load(cli.required("workdir"), _CHECKPOINT.value, **sampling)


def evaluate(run: Run, judge: TextScorer | None, bound: bool = True):
    if judge is not None and not isinstance(run.parts.task, TextTask):
        raise ValueError(f"--judge scores texts, but {run.workdir} is a run of {run.parts.task.name}")
    return run.evaluate(
        _SPLIT.value,
        _NUM.value,
        _SEED.value,
        num_times=_TIMES.value,
        num_samples=_NUM_SAMPLES.value,
        judge=judge,
        bound=bound,
    )


def compare_steps(steps: list[int], judge: TextScorer | None) -> None:
    """The table of quality against network calls."""
    trained, rows = load(), []
    for options in evals.samplers_to_compare(trained.parts, _SAMPLER.value, steps):
        card, _ = evaluate(trained.with_sampling(**options), judge, bound=False)
        rows.append(card)
        if is_first():
            print(evals.format_quality(rows), flush=True)
    if is_first():
        evals.write_card(trained.workdir / "quality.json", *rows)
        evals.plot_quality(rows, trained.workdir / "quality.png")
        trained.place.push()


def score_file(path: pathlib.Path, judge: TextScorer | None) -> dict[str, Any]:
    """The card of texts that others wrote."""
    split = _SPLIT.value
    if _WORKDIR.value:
        task = load().parts.task
        if not isinstance(task, TextTask):
            raise ValueError(f"--samples: {task.name} is not a task of texts")
    else:
        data = File(path=cli.required("data"), unit="line", field="text")
        made = load_tokenizer(cli.required("tokenizer"), (row.text for row in data))
        rows, counts = tokenize_in_memory({split: data}, made, Settings())
        task = TextTask(
            name=f"text {_DATA.value}",
            tokenizer=made,
            max_length=max(counts[split].lengths),
            open_rows=lambda: (rows, counts),
        )
    texts = [row.text for row in File(path=str(path), unit="line", field="text")]
    card = {"split": split, "n": len(texts), "protocol": f"{task.name}: texts of {path.name}", "commit": evals.commit()}
    card |= evals.text_figures(task, split, _NUM.value, texts, judge)
    evals.write_card(path.with_suffix(".eval.json"), card)
    return card


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"--steps: {text!r} is not a number of steps")
    return int(text)


if __name__ == "__main__":
    cli.run(main)
