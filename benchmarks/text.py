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

import collections
import gc
import math
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
from absl import flags

import dilm_jax
from benchmarks.common import print_row, write_json
from dilm_jax import cli, evals, metrics
from dilm_jax.data.sources import open_source
from dilm_jax.judge import PLAIN, Judge

_DATA = flags.DEFINE_string("data", "benchmarks/data/sotu.*.txt.gz", "What --tokenizer is made of.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Make a tokenizer in this directory.")
_WORKDIR = flags.DEFINE_list("workdir", [], "Runs.")
_CONFIG = flags.DEFINE_string("config", "configs/text_joint.py:large", "What --minutes trains.")
_MINUTES = flags.DEFINE_float("minutes", None, "Train the run in --workdir for about so long first.")
_JUDGE = flags.DEFINE_string("judge", None, "A causal language model that scores the texts.")
_NUM_SAMPLES = flags.DEFINE_integer("num_samples", 100, "Texts of each run.", lower_bound=10)
_TIMES = flags.DEFINE_integer("times", 4, "Draws of the noising time a text, for the bound.")
_JSON = flags.DEFINE_string("json", None, "Write the figures here too.")

VOCABULARY_SIZE = 4096
DISCOUNTS = (0.5, 0.6, 0.7, 0.8, 0.9)
START, END = -1, -2
Texts = Sequence[Sequence[int]]


# --- N-grams ---------------------------------------------------------------------------------------------------------


def unigram_bits(train: Texts, held_out: Texts, vocab_size: int, max_length: int) -> float:
    """Of all held-out texts: their tokens, one pseudo-count each, and their lengths, one pseudo-count each."""
    tokens, lengths = np.ones(vocab_size), np.ones(max_length + 1)
    for text in train:
        np.add.at(tokens, text, 1)
        lengths[len(text)] += 1
    log_token, log_length = np.log2(tokens / tokens.sum()), np.log2(lengths / lengths.sum())
    return -float(sum(log_length[len(text)] + log_token[np.asarray(text, int)].sum() for text in held_out))


def bigram_bits(train: Texts, held_out: Texts, vocab_size: int) -> tuple[float, float]:
    """Of all held-out texts, ends included, and the discount that each bigram's count gives to unigrams."""
    counts, contexts, followers, tokens = (collections.Counter() for _ in range(4))
    for text in train:
        for pair in zip([START, *text], [*text, END], strict=True):
            followers[pair[0]] += pair not in counts
            counts[pair] += 1
            contexts[pair[0]] += 1
            tokens[pair[1]] += 1
    total = sum(tokens.values()) + vocab_size + 1

    def bits(discount):
        of_all = 0.0
        for text in held_out:
            for a, b in zip([START, *text], [*text, END], strict=True):
                p = (tokens[b] + 1) / total
                if contexts[a]:
                    p = (max(counts[a, b] - discount, 0) + discount * followers[a] * p) / contexts[a]
                of_all -= math.log2(p)
        return of_all

    return min((bits(discount), discount) for discount in DISCOUNTS)


def ngrams(run: dilm_jax.Run) -> dict[str, float]:
    """Bits per byte of the validation texts whose bytes are known."""
    task = run.parts.task
    train, valid = ([source[i] for i in range(len(source))] for source in map(task.source, ("train", "valid")))
    texts = [evals.content_ids(row["tokens"], row["length"]) for row in train]
    whole = [row for row in valid if row["num_bytes"] >= 0]
    held_out = [evals.content_ids(row["tokens"], row["length"]) for row in whole]
    num_bytes = sum(int(row["num_bytes"]) for row in whole)
    bigram, discount = bigram_bits(texts, held_out, task.vocabulary.size)
    return {
        "texts": len(held_out),
        "bytes": num_bytes,
        "unigram": unigram_bits(texts, held_out, task.vocabulary.size, task.max_length) / num_bytes,
        "bigram": bigram / num_bytes,
        "discount": discount,
    }


# --- Runs ------------------------------------------------------------------------------------------------------------


def make_tokenizer(directory: str) -> None:
    """Byte-level BPE of the training texts: lossless, and small enough for a softmax on a CPU."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY_SIZE, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator((row.text for row in open_source(_DATA.value)["train"]), trainer)
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(directory)


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
    beside = ngrams(run)
    card, samples = run.evaluate("valid", num_times=_TIMES.value, num_samples=_NUM_SAMPLES.value, judge=judge)
    (bound,) = (value for name, value in card.items() if name.startswith("eval/nelbo_bits_per_byte"))
    error = card["eval/nelbo_stderr"] / card["eval/nelbo_nats_per_token"] * bound
    print(f"\n{workdir}: {len(samples)} texts in {time.monotonic() - started:.0f} s\n")
    print_row(["model", "bits per byte"], header=True)
    rows = {"unigrams and lengths": f"{beside['unigram']:.3f}", "bigrams": f"{beside['bigram']:.3f}"}
    rows[f"{run.config.process.family}, bound"] = f"{bound:.3f} ± {error:.3f}"
    for row in rows.items():
        print_row(row)
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
    return {"workdir": workdir, "ngrams": beside, "card": card, "curve": curve, "samples": samples[:10]}


def main() -> None:
    if _TOKENIZER.value:
        make_tokenizer(_TOKENIZER.value)
    for workdir in _WORKDIR.value if _MINUTES.value else []:
        train(workdir, _MINUTES.value)
    judge = evals.TextScorer(Judge.load(_JUDGE.value), PLAIN) if _JUDGE.value else None
    rows = []
    for workdir in _WORKDIR.value:
        rows.append(report(workdir, judge))
        gc.collect()
    write_json(_JSON.value, {"runs": rows})


if __name__ == "__main__":
    cli.run(main)
