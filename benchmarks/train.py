"""A training step with a canvas a row, packed, and of a plain PyTorch program, on texts of real lengths.

    python -m benchmarks.train [--lengths=lm1b|owt|FILE --config=configs/lm1b_joint.py --rows=8 --json=FILE]

Texts are random ids: only their lengths matter. `lm1b` draws lengths of 28 tokens on average, `owt` of some 500 of up
to 1,024; of a FILE they are those of its lines in --tokenizer's tokens. For uniform and importance-drawn t, a batch of
--batch_size texts is noised and packed whole; what is timed is a slice of --rows rows, packed or with a canvas each,
and a packed batch costs as many slices as training gives it rows, and finding them. Printed, and in --json:

- packed_ideal: columns of a row over those that a noised text needs, L/E[m+2];
- packed_over_padded_examples: examples a second, packed over a canvas a row, both with fused scores, for uniform t;
- ours_over_torch_examples: packed over a step of the same network in eager PyTorch, as one would write it first: a
  canvas a row, dense targets, float32, as many threads;
- fused_over_dense_temp_bytes: temporary memory of the token loss and its gradient, fused over dense, by ahead-of-time
  analysis (AOT), for --rows canvases of the network's width and vocabulary (as benchmarks/loss.py); and
  step_temp_bytes: that of whole steps of the slice, each way.

The losses of all ways are compared on the slice before anything is timed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import token_loss
from benchmarks.common import (
    ONE_DEVICE,
    drawn_around,
    load_parts,
    print_row,
    random_texts,
    read_lines,
    seconds_in_turn,
    temporary_bytes,
    write_json,
)
from dilm_jax import cli, evals, packing, train
from dilm_jax import config as config_lib
from dilm_jax.canvas import NUM_SPECIAL_COLUMNS
from dilm_jax.compile import typical_lengths
from dilm_jax.data.tokenizers import load_tokenizer

_CONFIG = flags.DEFINE_string("config", "configs/lm1b_joint.py", "The network, the schedule and the loss.")
_LENGTHS = flags.DEFINE_string("lengths", "lm1b", "lm1b, owt, or a text file.")
_TOKENIZER = flags.DEFINE_string("tokenizer", "tests/data/bert-base-uncased", "Its ids, and the lengths of a file.")
_BATCH = flags.DEFINE_integer("batch_size", 512, "Texts that are packed together.", lower_bound=2)
_ROWS = flags.DEFINE_integer("rows", 8, "Rows that are timed.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed steps, after one that compiles.", lower_bound=1)
_MODEL = flags.DEFINE_list("model", [], "Overrides of config.model: key=value,…")
_TORCH = flags.DEFINE_bool("torch", True, "Time PyTorch, too.")
_JSON = flags.DEFINE_string("json", None, "Write the figures here too.")

TIMES = ("uniform", "importance")


def lengths_like(name: str, num: int, max_length: int) -> np.ndarray:
    """Lengths of texts, shuffled."""
    if name == "owt" and max_length < 1000:
        raise ValueError(f"--lengths=owt needs texts of 1,024 tokens, not {max_length}: --config=configs/owt_joint.py")
    if name in ("lm1b", "owt"):
        return typical_lengths(name, num, max_length)
    encode = load_tokenizer(_TOKENIZER.value).encode
    found = np.array([min(len(encode(line)), max_length) for line in read_lines(name)])
    return np.random.default_rng(0).permutation(np.resize(found[found > 0], num)).astype(np.int32)


def load(times: str):
    """The config of a step with one way to draw t, and its parts."""
    overrides = {"data.tokenizer": _TOKENIZER.value, "batch_size": _BATCH.value, "loss.time_sampling": times}
    overrides |= {"model.dropout": 0.0, "model.dtype": "float32", "train.micro_batches": 1}
    overrides |= {f"model.{key}": int(value) for key, value in (pair.split("=") for pair in _MODEL.value)}
    return load_parts(_CONFIG.value, overrides)


def fitted(length, num_columns: int, num_rows: int) -> packing.Packing:
    return packing.first_fit(length, jnp.ones(length.shape, bool), num_columns, num_rows, 1)


def gradient(parts: config_lib.Parts, params, batch, packed=None, fused=True):
    """The loss of noised texts, summed over them, and its gradient."""
    network = evals.network(parts, ONE_DEVICE)

    def loss(params):
        t, weight, canvas, targets = batch
        scores = network(params, canvas, t, None, packed, fused)
        return (weight * parts.process.loss(scores, canvas, targets)["loss"]).sum()

    return jax.value_and_grad(loss)(params)


def measure(times: str) -> dict:
    """Figures of one way to draw t."""
    config, parts = load(times)
    vocabulary, L = parts.process.vocabulary, parts.task.max_length
    x0 = random_texts(lengths_like(_LENGTHS.value, _BATCH.value, L), vocabulary, L)
    budget = train.num_packed_rows(config, parts, ONE_DEVICE, lambda step, rows: vars(x0))
    assert budget, "the config does not pack"
    draw = jax.jit(lambda x0: train.corrupt_batch(parts.process, ONE_DEVICE, 0, 0, x0)[:4])
    batch = draw(x0)
    canvas = batch[2]
    num_columns = canvas.num_columns
    rows = int(packing.rows_needed(canvas.length, num_columns, 1)[0])
    assert budget >= 0.9 * rows, f"{budget} rows are not those of the batch, which needs {rows}"
    fit = jax.jit(lambda length, num_rows: fitted(length, num_columns, num_rows), static_argnums=1)
    whole = fit(canvas.length, rows)

    # A slice of the packed rows has the texts that lie in every so many-th row: long and short ones.
    mine = np.asarray(whole.place[0, :, 0]) // num_columns
    chosen = np.unique(np.linspace(0, rows - 1, min(_ROWS.value, rows)).round().astype(int))
    inside = np.flatnonzero(np.isin(mine, chosen))
    take = lambda index: jax.tree.map(lambda x: x[index], batch)  # noqa: E731
    packed_slice, padded_slice = take(inside), take(inside[: len(chosen)])
    assert fit(packed_slice[2].length, len(chosen)).placed.all()

    optimizer, _ = train.make_optimizer(config)
    params = jax.device_put(drawn_around(train.init_state(config, parts, optimizer, ONE_DEVICE).params))
    run = {
        "packed": jax.jit(lambda p, b: gradient(parts, p, b, fitted(b[2].length, num_columns, len(chosen)))),
        "fused": jax.jit(lambda p, b: gradient(parts, p, b)),
        "dense": jax.jit(lambda p, b: gradient(parts, p, b, fused=False)),
    }
    slices = {"packed": packed_slice, "fused": padded_slice, "dense": padded_slice}
    temp = {name: temporary_bytes(run[name].lower(params, of).compile()) for name, of in slices.items()}
    packed, fused = (float(run[name](params, packed_slice)[0]) for name in ("packed", "fused"))
    np.testing.assert_allclose(packed, fused, rtol=1e-5)
    fused, dense = (float(run[name](params, padded_slice)[0]) for name in ("fused", "dense"))
    np.testing.assert_allclose(fused, dense, rtol=1e-5)
    calls = {name: functools.partial(run[name], params, of) for name, of in slices.items()}
    seconds = seconds_in_turn(calls | {"fit": functools.partial(fit, canvas.length, budget)}, _REPEATS.value)

    examples = {
        "packed": _BATCH.value / (seconds["packed"] * budget / len(chosen) + seconds["fit"]),
        **{name: len(chosen) / seconds[name] for name in ("fused", "dense")},
    }
    results = {
        "times": times,
        "mean_length": float(x0.length.mean()),
        "columns": num_columns,
        "mean_columns": float(canvas.length.mean()),
        "packed_rows": budget,
        "packed_ideal": num_columns / float(canvas.length.mean()),
        "packed_over_padded_examples": examples["packed"] / examples["fused"],
        "fused_over_dense_examples": examples["fused"] / examples["dense"],
        "step_temp_bytes": temp,
        "examples_per_s": examples,
    }
    if _TORCH.value and times == "uniform" and config.process.family == "joint":
        from benchmarks import torch_baseline  # torch is optional

        t, _, canvas, targets = padded_slice
        scores = jax.jit(evals.network(parts, ONE_DEVICE))(params, canvas, t)
        args = params, dict(config.model), parts.process.spec.predictable, canvas, t, targets
        loss, each = torch_baseline.seconds_of_step(*args, _REPEATS.value)
        np.testing.assert_allclose(loss, torch_baseline.plain_loss(scores, canvas, targets), rtol=1e-4)
        results["ours_over_torch_examples"] = examples["packed"] / (len(chosen) / each)
    return results


def main() -> None:
    results = [measure(times) for times in TIMES]
    keys = ["times", "mean_columns", "packed_ideal", "packed_over_padded_examples"]
    print_row(
        [*keys, "of the ideal", "fused_over_dense_examples", "MiB of a step (AOT): packed", "fused", "dense"],
        header=True,
    )
    for row in results:
        share = row["packed_over_padded_examples"] / row["packed_ideal"]
        memory = [row["step_temp_bytes"][name] / 2**20 for name in ("packed", "fused", "dense")]
        print_row([row[key] for key in keys] + [share, row["fused_over_dense_examples"], *memory])
    first = dict(results[0])
    config, parts = load("uniform")
    columns, V = parts.task.max_length + NUM_SPECIAL_COLUMNS, parts.process.vocabulary.size
    of_loss = token_loss.measure((_ROWS.value, columns, V), config.model.width, "sampled", "float32", repeats=0)
    first["fused_over_dense_temp_bytes"] = of_loss["fused_over_dense_temp_bytes"]
    print(f"\ntemporaries of the loss, fused over dense (AOT): {of_loss['fused_over_dense_temp_bytes']:.3f}")
    if "ours_over_torch_examples" in first:
        print(f"\npacked over PyTorch: {first['ours_over_torch_examples']:.2f} times as many examples a second")
    write_json(_JSON.value, first | {"lengths": _LENGTHS.value, "importance": results[1]})


if __name__ == "__main__":
    cli.run(main)
