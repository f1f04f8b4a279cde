"""What the exact kernel and marginal targets do to the variance of a gradient, and what the marginal ones cost.

    python -m benchmarks.variance [--data=FILE.txt --draws=200 --steps=300 --json=FILE]

For star_easy and for real sentences (in bytes and in BERT's word pieces), both families: a small network is trained for
--steps on the default loss (exact kernel, sampled targets); then the gradient is drawn again and again, each time from
other texts, times and noise, the same ones for all losses. Printed is the trace of its covariance over all parameters,
relative to the default's, with the standard error of that ratio, and the squared norm of its mean likewise: that of
marginal targets is the same, that of the paper's kernel need not be.

Then the share of a gradient's time that the dynamic program of marginal targets takes, at L = 1024, batch 8.
"""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from benchmarks.common import (
    DEFAULT,
    FAMILIES,
    ONE_DEVICE,
    Model,
    read_lines,
    sentences,
    star_easy,
    word_pieces,
    write_json,
)
from dilm_jax import alignment, cli, train

_DATA = flags.DEFINE_string("data", "tests/data/sotu.txt", "Sentences, one a line.")
_DRAWS = flags.DEFINE_integer("draws", 200, "Gradients of each loss.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 300, "Of training, before the gradients are drawn.")
_BATCH = flags.DEFINE_integer("batch_size", 16, "Texts of a gradient.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Write the rows here too.")

LOSSES = {
    "exact, sampled": DEFAULT,
    "exact, marginal": dataclasses.replace(DEFAULT, alignment="marginal"),
    "paper, sampled": dataclasses.replace(DEFAULT, kernel="paper"),
    "paper, marginal": dataclasses.replace(DEFAULT, kernel="paper", alignment="marginal"),
}


def measure(model: Model, num_steps: int, num_draws: int, batch_size: int) -> list[dict]:
    """A row a loss."""
    params = model.trained(num_steps)
    gradients = model.gradients(list(LOSSES.values()))
    total = [jax.tree.map(jnp.zeros_like, params) for _ in LOSSES]
    squared_norms = np.zeros((num_draws, len(LOSSES)))
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    for draw in range(num_draws):
        step = num_steps + draw
        drawn = gradients(params, model.batch(step, batch_size), step)
        squared_norms[draw] = [float(optax.global_norm(g)) ** 2 for g in drawn]
        total = [add(a, b) for a, b in zip(total, drawn, strict=True)]
    of_mean = np.array([float(optax.global_norm(g)) ** 2 for g in total]) / num_draws**2
    trace = (squared_norms.mean(0) - of_mean) * num_draws / (num_draws - 1)
    mean = of_mean - trace / num_draws  # without what the variance adds to it
    spread = squared_norms - of_mean
    error = np.std(spread - spread[:, :1] * (trace / trace[0]), axis=0, ddof=1) / math.sqrt(num_draws) / trace[0]
    return [
        {
            "loss": name,
            "trace": trace[i],
            "ratio": trace[i] / trace[0],
            "ratio_stderr": error[i],
            "mean_ratio": mean[i] / mean[0],
        }
        for i, name in enumerate(LOSSES)
    ]


def measure_cost(lines: list[str], family: str) -> dict:
    """Seconds of a gradient with sampled and with marginal targets, and of the dynamic program alone."""
    L, batch_size = 1024, 8
    pages = [" ".join(lines[10 * i : 10 * i + 30]).encode()[:L].decode(errors="ignore") for i in range(batch_size)]
    sigma = {"joint": (200.0, 4000.0), "independent": (0.1, 40.0)}
    corpus = dataclasses.replace(sentences(pages, L), sigma=sigma)
    model = Model(corpus, family, width=128, num_layers=4)
    params, _ = model.network
    x0 = jax.tree.map(jnp.asarray, corpus.texts)
    process = corpus.process(family)
    canvas = jax.jit(lambda x0: train.corrupt_batch(process, ONE_DEVICE, 0, 0, x0)[2])(x0)
    seconds = {
        "sampled": _seconds(model.gradients([LOSSES["exact, sampled"]]), params, x0, 0),
        "marginal": _seconds(model.gradients([LOSSES["exact, marginal"]]), params, x0, 0),
        "dynamic program": _seconds(jax.jit(alignment.gap_posterior), x0, canvas),
    }
    return {"family": family, **seconds, "share": seconds["dynamic program"] / seconds["marginal"]}


def _seconds(run, *inputs, repeats=2) -> float:
    """The fastest of some runs, after one that compiles."""
    jax.block_until_ready(run(*inputs))
    times = []
    for _ in range(repeats):
        start = time.monotonic()
        jax.block_until_ready(run(*inputs))
        times.append(time.monotonic() - start)
    return min(times)


def main() -> None:
    lines = read_lines(_DATA.value)
    corpora = {
        "star_easy": star_easy(),
        "sentences, bytes": sentences(lines, 160),
        "sentences, word pieces": word_pieces(lines, 64),
    }
    rows = []
    print("| data | family | loss | trace | of the default's | squared norm of the mean, of the default's |")
    print("|" + "---|" * 6, flush=True)
    for data, corpus in corpora.items():
        for family in FAMILIES:
            model = Model(corpus, family, width=64, num_layers=3)
            for row in measure(model, _STEPS.value, _DRAWS.value, _BATCH.value):
                rows.append({"data": data, "family": family, **row})
                print(
                    f"| {data} | {family} | {row['loss']} | {row['trace']:.3g} | {row['ratio']:.3f} ± "
                    f"{row['ratio_stderr']:.3f} | {row['mean_ratio']:.2f} |",
                    flush=True,
                )
    costs = [measure_cost(lines, family) for family in FAMILIES]
    for cost in costs:
        print(
            f"L = 1024, batch 8, {cost['family']}: a gradient takes {cost['sampled']:.2f} s with sampled targets, "
            f"{cost['marginal']:.2f} s with marginal ones, of which the dynamic program is {100 * cost['share']:.1f}%"
        )
    write_json(_JSON.value, {"variance": rows, "cost": costs})


if __name__ == "__main__":
    cli.run(main)
