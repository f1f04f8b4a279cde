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
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from flax import nnx

from dilm_jax import alignment, cli, sharding, train
from dilm_jax import config as config_lib
from dilm_jax.backbone import Transformer
from dilm_jax.canvas import Example, Vocabulary
from dilm_jax.data import loader
from dilm_jax.data.star import TASKS, StarSource
from dilm_jax.losses import LossConfig
from dilm_jax.processes.registry import PROCESSES
from dilm_jax.schedules import LogLinear

_DATA = flags.DEFINE_string("data", "tests/data/sotu.txt", "Sentences, one a line.")
_DRAWS = flags.DEFINE_integer("draws", 200, "Gradients of each loss.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 300, "Of training, before the gradients are drawn.")
_BATCH = flags.DEFINE_integer("batch_size", 16, "Texts of a gradient.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Write the rows here too.")

ONE_DEVICE = sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1})
BERT_VOCABULARY = "tests/data/bert-base-uncased"
DEFAULT = config_lib.loss_config(config_lib.default_config())
LOSSES = {
    "exact, sampled": DEFAULT,
    "exact, marginal": dataclasses.replace(DEFAULT, alignment="marginal"),
    "paper, sampled": dataclasses.replace(DEFAULT, kernel="paper"),
    "paper, marginal": dataclasses.replace(DEFAULT, kernel="paper", alignment="marginal"),
}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Clean texts, all in one `Example`, and what they need."""

    texts: Example  # numpy
    vocabulary: Vocabulary
    sigma: tuple[float, float]  # smallest and largest, of the joint family's schedule: σ̄_1 covers the lengths

    def process(self, family: str, loss_config: LossConfig):
        sigma_min, sigma_max = {"joint": self.sigma, "independent": (0.1, 40.0)}[family]
        return PROCESSES[family](
            vocabulary=self.vocabulary,
            max_length=self.texts.tokens.shape[1],
            schedule=LogLinear(sigma_min=sigma_min, sigma_max=sigma_max),
            eps=1e-3,
            loss_config=loss_config,
            time_sampling="uniform",
        )


def star_easy() -> Corpus:
    task = TASKS["easy"]
    source = StarSource(task=task, split="train", seed=0)
    rows = [source[i] for i in range(4000)]
    return Corpus(Example(**loader.stack(rows)), task.vocabulary, (3.0, 60.0))


def sentences(lines: list[str], max_length: int) -> Corpus:
    """In bytes; those that fit."""
    ids = [[5 + byte for byte in line.encode()] for line in lines]
    return Corpus(_texts(ids, max_length), Vocabulary(size=261, pad=0, cls=1, bos=2, eos=3, mask=4), (35.0, 700.0))


def word_pieces(lines: list[str], max_length: int) -> Corpus:
    """In BERT's word pieces; those that fit. BOS and EOS are two of its unused entries."""
    from transformers import BertTokenizer

    tokenizer = BertTokenizer.from_pretrained(BERT_VOCABULARY)
    ids = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines]
    pad, cls, mask = tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.mask_token_id
    vocabulary = Vocabulary(size=len(tokenizer), pad=pad, cls=cls, bos=1, eos=2, mask=mask)
    return Corpus(_texts(ids, max_length), vocabulary, (15.0, 300.0))


def _texts(ids: list[list[int]], L: int) -> Example:
    """Every token free, every gap open. Texts that do not fit are left out."""
    rows = [
        {
            "tokens": np.array(row + [0] * (L - len(row)), np.int32),
            "length": np.array(len(row), np.int32),
            "frozen": np.zeros(L, bool),
            "open_gap": np.arange(L + 1) <= len(row),
            "num_bytes": np.array(0, np.int32),
        }
        for row in ids
        if len(row) <= L
    ]
    return Example(**loader.stack(rows))


@dataclasses.dataclass(frozen=True)
class Model:
    """A family with a small network, and one program for the gradients of several losses on the same noise."""

    corpus: Corpus
    family: str
    width: int
    num_layers: int

    @functools.cached_property
    def network(self):
        """Parameters, and (parameters, canvas, t) → scores."""
        process = self.corpus.process(self.family, DEFAULT)
        made = Transformer(
            vocab_size=process.vocabulary.size,
            spec=process.spec,
            rngs=nnx.Rngs(0),
            **dict(config_lib.default_config().model)
            | {
                "num_layers": self.num_layers,
                "width": self.width,
                "num_heads": 4,
                "mlp_width": 4 * self.width,
                "cond_width": self.width,
                "dropout": 0.0,
                "dtype": "float32",
            },
        )
        graphdef, params = nnx.split(made, nnx.Param)
        return params, lambda params, canvas, t: nnx.merge(graphdef, params)(canvas, t)

    def gradients(self, losses: list[LossConfig]) -> Callable:
        """Jitted (parameters, texts, step) → the gradient of each loss, on the same noise."""
        processes = [self.corpus.process(self.family, config) for config in losses]
        _, network = self.network

        @jax.jit
        def gradients(params, x0: Example, step):
            t, _, canvas, targets, _ = train.corrupt_batch(processes[0], ONE_DEVICE, 0, step, x0)
            scores, pull = jax.vjp(lambda params: network(params, canvas, t), params)
            of_scores = [
                jax.grad(lambda scores, p=p: p.loss(scores, canvas, targets)["loss"].mean())(scores) for p in processes
            ]
            return [pull(cotangent)[0] for cotangent in of_scores]

        return gradients

    def batch(self, step: int, batch_size: int) -> Example:
        rows = np.random.default_rng(step).integers(len(self.corpus.texts.length), size=batch_size)
        return jax.tree.map(lambda x: jnp.asarray(x[rows]), self.corpus.texts)

    def trained(self, num_steps: int):
        """Parameters after so many steps of Adam on the default loss."""
        params, _ = self.network
        gradients, optimizer = self.gradients([DEFAULT]), optax.adam(1e-3)
        update = jax.jit(optimizer.update)
        state = optimizer.init(params)
        for step in range(num_steps):
            (gradient,) = gradients(params, self.batch(step, 32), step)
            updates, state = update(gradient, state)
            params = optax.apply_updates(params, updates)
        return params


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
    ids = [[5 + byte for byte in " ".join(lines[10 * i : 10 * i + 30]).encode()[:L]] for i in range(batch_size)]
    corpus = dataclasses.replace(sentences(lines, L), texts=_texts(ids, L), sigma=(200.0, 4000.0))
    model = Model(corpus, family, width=128, num_layers=4)
    params, _ = model.network
    x0 = jax.tree.map(jnp.asarray, corpus.texts)
    process = corpus.process(family, DEFAULT)
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
    path = pathlib.Path(_DATA.value)
    if not path.is_file():
        raise ValueError(f"--data: no file {path}")
    lines = path.read_text("utf-8").splitlines()
    corpora = {
        "star_easy": star_easy(),
        "sentences, bytes": sentences(lines, 160),
        "sentences, word pieces": word_pieces(lines, 64),
    }
    rows = []
    print("| data | family | loss | trace | of the default's | squared norm of the mean, of the default's |")
    print("|" + "---|" * 6, flush=True)
    for data, corpus in corpora.items():
        for family in ("joint", "independent"):
            model = Model(corpus, family, width=64, num_layers=3)
            for row in measure(model, _STEPS.value, _DRAWS.value, _BATCH.value):
                rows.append({"data": data, "family": family, **row})
                print(
                    f"| {data} | {family} | {row['loss']} | {row['trace']:.3g} | {row['ratio']:.3f} ± "
                    f"{row['ratio_stderr']:.3f} | {row['mean_ratio']:.2f} |",
                    flush=True,
                )
    costs = [measure_cost(lines, family) for family in ("joint", "independent")]
    for cost in costs:
        print(
            f"L = 1024, batch 8, {cost['family']}: a gradient takes {cost['sampled']:.2f} s with sampled targets, "
            f"{cost['marginal']:.2f} s with marginal ones, of which the dynamic program is {100 * cost['share']:.1f}%"
        )
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps({"variance": rows, "cost": costs}, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)
