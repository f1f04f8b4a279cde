"""Text models beside n-gram models of the same tokens, in bits per byte of held-out text.

    python -m benchmarks.text --tokenizer=DIR                     # makes 4,096 byte-level pieces of --data
    python -m dilm_jax.main --config=configs/text_joint.py --config.data.path=… --config.data.tokenizer=DIR …
    python -m benchmarks.text --workdir=DIR,… [--judge=… --num_samples=… --times=…]
    python -m benchmarks.text --minutes=6 --config=configs/text_joint.py:large --workdir=DIR    # on a GPU: trains, too

A unigram model knows token frequencies and text lengths, a bigram model the token before (absolute discounting, the
discount chosen on the held-out text, in the bigram model's favour). Both are of the training split and both score the
texts that the network's bound is over: those of the validation split that are not truncated. Prints both, each run's
bound with its card, its curve, and ten texts.
"""

import functools
import pathlib
import subprocess
import sys
import time

import numpy as np
from absl import flags

import dilm_jax
from benchmarks.common import make_tokenizer, print_row, write_json
from benchmarks.ngrams import bigram_bits, unigram_bits
from dilm_jax import cli, evals, metrics
from dilm_jax.data.task import Task
from dilm_jax.data.text import open_text
from dilm_jax.judge import PLAIN, Judge

_DATA = flags.DEFINE_string(
    "data", "benchmarks/data/sotu.*.txt.gz", "What --tokenizer is made of, and --minutes trains on."
)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Make a tokenizer in this directory.")
_WORKDIR = flags.DEFINE_list("workdir", [], "Runs.")
_CONFIG = flags.DEFINE_string("config", "configs/text_joint.py:large", "What --minutes trains.")
_MINUTES = flags.DEFINE_float("minutes", None, "Train the run in --workdir for about so long first.")
_JUDGE = flags.DEFINE_string("judge", None, "A causal language model that scores the texts.")
_BESIDE = flags.DEFINE_list("beside", [], "Other tokenizers, whose n-gram models are printed too.")
_NUM_SAMPLES = flags.DEFINE_integer("num_samples", 100, "Texts of each run.", lower_bound=10)
_TIMES = flags.DEFINE_integer("times", 4, "Draws of the noising time a text, for the bound.")
_JSON = flags.DEFINE_string("json", None, "Write the figures here too.")


def ngrams(task: Task) -> dict[str, float]:
    """Bits per byte of the validation texts whose bytes are known."""
    train, valid = ([source[i] for i in range(len(source))] for source in map(task.source, ("train", "valid")))
    texts = [evals.content_ids(row["tokens"], row["length"]) for row in train]
    whole = [row for row in valid if row["num_bytes"] >= 0]
    held_out = [evals.content_ids(row["tokens"], row["length"]) for row in whole]
    if not whole:
        raise ValueError(f"all {len(valid)} validation texts of {task.name} are truncated: raise data.max_length")
    num_bytes = sum(int(row["num_bytes"]) for row in whole)
    bigram, discount = bigram_bits(texts, held_out, task.vocabulary.size)
    return {
        "texts": len(held_out),
        "bytes": num_bytes,
        "unigram": unigram_bits(texts, held_out, task.vocabulary.size, task.max_length) / num_bytes,
        "bigram": bigram / num_bytes,
        "discount": discount,
    }


def others_task(data, tokenizer: str) -> Task:
    """The run's texts in other tokens."""
    options = {key: data[key] for key in ("path", "origin", "max_length", "unit", "field", "overlong")}
    return open_text(tokenizer=tokenizer, **options)


def train(workdir: str, minutes: float) -> None:
    """As many steps as fit, by the rate of the first ones after compiling."""

    def main(num_steps: int, where: str) -> None:
        command = [sys.executable, "-m", "dilm_jax.main", f"--config={_CONFIG.value}", f"--workdir={where}"]
        command += [f"--config.data.path={_DATA.value}", f"--config.num_steps={num_steps}"]
        command += ["--config.eval.num_valid=500", "--config.eval.num_test=500", "--config.train.eval_every=1000000"]
        subprocess.run([*command, "--config.train.log_every=10"], check=True)

    probe = pathlib.Path(workdir) / "probe"
    main(60, str(probe))
    rates = [row["perf/examples_per_s"] for row in metrics.read(probe / metrics.FILE) if "perf/examples_per_s" in row]
    batch_size = dilm_jax.load(str(probe)).config.batch_size
    main(int(60 * minutes * np.median(rates[1:]) / batch_size), workdir)


def report(workdir: str, judge: evals.TextScorer | None) -> dict:
    """Prints and returns what is to be said of a run."""
    run = dilm_jax.load(workdir)
    started = time.monotonic()
    beside = ngrams(run.parts.task)
    card, samples = run.evaluate("valid", num_times=_TIMES.value, num_samples=_NUM_SAMPLES.value, judge=judge)
    (bound,) = (value for name, value in card.items() if name.startswith("eval/nelbo_bits_per_byte"))
    error = card["eval/nelbo_stderr"] / card["eval/nelbo_nats_per_token"] * bound
    print(f"\n{workdir}: {len(samples)} texts in {time.monotonic() - started:.0f} s\n")
    print_row(["model", "bits per byte"], header=True)
    data = run.config.data
    others = {name: ngrams(others_task(data, name)) for name in _BESIDE.value}
    for name, row in {"": beside, **{f" of {name}": row for name, row in others.items()}}.items():
        print_row([f"unigrams and lengths{name}", f"{row['unigram']:.3f}"])
        print_row([f"bigrams{name}", f"{row['bigram']:.3f}"])
    print_row([f"{run.config.process.family}, bound", f"{bound:.3f} ± {error:.3f}"])
    print(f"\n{evals.format_card(card)}\n")
    curve = [
        (row["step"], row[name])
        for row in metrics.read(run.workdir / metrics.FILE)
        for name in row
        if name.startswith("eval/nelbo_bits_per_byte")
    ]
    print("bits per byte by step: " + ", ".join(f"{step}: {value:.3f}" for step, value in curve))
    for row in samples[:10]:
        print(f"- {row['generated']}")
    return {
        "workdir": workdir,
        "ngrams": beside,
        "others": others,
        "card": card,
        "curve": curve,
        "samples": samples[:10],
    }


def main() -> None:
    if _TOKENIZER.value:
        make_tokenizer(_TOKENIZER.value, _DATA.value)
    if _MINUTES.value:
        for workdir in _WORKDIR.value:
            train(workdir, _MINUTES.value)
    judge = functools.partial(Judge.load(_JUDGE.value).score, protocol=PLAIN) if _JUDGE.value else None
    write_json(_JSON.value, {"runs": [report(workdir, judge) for workdir in _WORKDIR.value]})


if __name__ == "__main__":
    cli.run(main)
