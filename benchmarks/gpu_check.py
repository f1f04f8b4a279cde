"""An accelerator in under six minutes: its numbers against the CPU's, then training, samples and how fast they are.

    python -m benchmarks.gpu_check [--json=FILE]

1. Loss and gradient of a small float32 network on the same canvases, here and on the CPU: the largest difference over
   the largest entry.
2. For each of --config, packed and with a canvas a row: seconds a step, content tokens a second, and
   model FLOPs utilisation: FLOPs of the matrix multiplications of a forward and backward pass, 6 a weight and column
   and 12·D·(columns that it may see) a column and layer for attention, over the peak of the card in bfloat16 (float32
   networks are held against the same): of the columns that hold something, and of all that are computed.
3. star_tiny, trained as configured: exact match on test graphs, and samples a second of `event`.
"""

import functools
import pathlib
import tempfile
import time

import jax
import numpy as np
from absl import flags
from jax.sharding import AxisType

import dilm_jax
from benchmarks.common import ONE_DEVICE, load_config, print_row, write_json
from dilm_jax import cli, evals, sharding, train
from dilm_jax import config as config_lib
from dilm_jax.canvas import NUM_SPECIAL_COLUMNS, Example
from dilm_jax.data import loader

_CONFIG = flags.DEFINE_list(
    "config",
    ["configs/star_easy_joint.py", "configs/lm1b_joint.py", "configs/lm1b_independent.py"],
    "Config files to time, each with an optional :variant; text is that of tests/data.",
)
_BATCH = flags.DEFINE_integer("batch_size", 128, "Of the timed steps.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 20, "Timed steps.", lower_bound=1)
_TRAIN = flags.DEFINE_string("train", "configs/star_tiny_joint.py", "What is trained.")
_JSON = flags.DEFINE_string("json", None, "Write the figures here too.")

PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12}  # dense bfloat16 FLOP/s, by the maker
TEXT = {"data.path": "tests/data/sotu.txt", "data.tokenizer": "tests/data/bert-base-uncased", "data.origin": ""}


def load(name: str, **overrides):
    """The config of a file, and its parts."""
    config = load_config(name)
    config.update_from_flattened_dict(overrides | (TEXT if config.data.source == "text" else {}))
    config_lib.validate(config, 1)
    return config, config_lib.build(config)


def numerics() -> dict[str, float]:
    """Largest difference from the CPU, over the largest entry."""
    config, parts = load("configs/star_easy_joint.py:smoke", **{"train.matmul_precision": "highest"})
    x0 = Example(**loader.train_batches(parts.task.source("train"), config.batch_size, 0).batch(0))
    with jax.default_device(jax.devices("cpu")[0]):
        draw = jax.jit(functools.partial(train.corrupt_batch, parts.process, cpu_mesh(), 0, 0))
        t, weight, canvas, targets, _ = jax.device_get(draw(x0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: (0.1 * rng.normal(size=x.shape)).astype(np.float32), evals.abstract_params(parts, ONE_DEVICE)
    )

    def on(mesh):
        network = evals.network(parts, mesh)

        def loss(params):
            return (weight * parts.process.loss(network(params, canvas, t), canvas, targets)["loss"]).mean()

        return jax.device_get(jax.jit(jax.value_and_grad(loss))(jax.device_put(params, sharding.replicated(mesh))))

    (loss, gradient), (there, of_there) = on(cpu_mesh()), on(ONE_DEVICE)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
    error = max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (gradient, of_there)), strict=True))
    return {"loss": abs(float(loss - there)) / abs(float(loss)), "gradient": float(error / scale)}


def cpu_mesh():
    names = tuple(ONE_DEVICE.axis_names)
    return jax.make_mesh((1, 1, 1), names, axis_types=(AxisType.Auto,) * 3, devices=jax.devices("cpu")[:1])


def speed(name: str, packing: bool) -> dict:
    config, parts = load(name, **{"batch_size": _BATCH.value, "train.packing": packing})
    optimizer, _ = train.make_optimizer(config)
    state = train.init_state(config, parts, optimizer, ONE_DEVICE)
    batches = loader.train_batches(parts.task.source("train"), config.batch_size, 0)
    num_rows = train.num_packed_rows(config, parts, ONE_DEVICE, batches.batch)
    step = train.make_train_step(config, parts, ONE_DEVICE, num_rows)
    batch = batches.batch(0)
    x0 = sharding.put_batch(Example(**batch), ONE_DEVICE, config.batch_size)
    draw = jax.jit(lambda x0: train.corrupt_batch(parts.process, ONE_DEVICE, config.seed, 0, x0)[2].length)
    occupied = np.asarray(draw(x0))
    started = time.monotonic()
    for i in range(_STEPS.value + 3):
        if i == 3:
            jax.block_until_ready(state)
            compiled, started = time.monotonic() - started, time.monotonic()
        state, _ = step(state, x0)
    jax.block_until_ready(state)
    seconds = (time.monotonic() - started) / _STEPS.value
    columns = parts.task.max_length + NUM_SPECIAL_COLUMNS
    flops = flops_of_step(config, occupied, state.params)
    computed = flops_of_step(config, np.full(num_rows or config.batch_size, columns), state.params)
    peak = next((value for card, value in PEAK.items() if card in jax.devices()[0].device_kind), None)
    return {
        "config": name,
        "rows": num_rows or config.batch_size,
        "step_ms": 1000 * seconds,
        "tokens_per_s": float(batch["length"].sum()) / seconds,
        "flops": flops,
        "mfu": flops / seconds / peak if peak else None,
        "mfu_computed": computed / seconds / peak if peak else None,
        "compile_s": compiled,
    }


def flops_of_step(config, columns: np.ndarray, params) -> float:
    """Of a forward and a backward pass over texts of so many columns each."""
    blocks, head = params["blocks"], params["head"]["kernel"]
    weights = sum(np.prod(x.shape) for name in ("attention", "mlp") for x in jax.tree.leaves(blocks[name]))
    attention = 12 * config.model.num_layers * config.model.width * columns.astype(float)
    return float((columns * (6 * (weights + np.prod(head.shape)) + attention)).sum())


def trained() -> dict:
    """Exact match of a run as configured, and samples a second."""
    config, _ = load(_TRAIN.value)
    with tempfile.TemporaryDirectory() as workdir:
        started = time.monotonic()
        card = train.train(config, workdir)
        seconds = time.monotonic() - started
        run = dilm_jax.load(workdir)
        rows, _ = run.parts.task.default_rows(config.eval.batch_size)
        run.generate(rows)  # compiles
        sampling = time.monotonic()
        run.generate(rows)
        sampling = time.monotonic() - sampling
    return {
        "steps": config.num_steps,
        "seconds": seconds,
        "exact_match": card["eval/exact_match"],
        "samples_per_s": len(rows) / sampling,
    }


def main() -> None:
    device = jax.devices()[0]
    print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}, commit {evals.commit()}\n")
    differences = numerics()
    print("from the CPU: " + ", ".join(f"{name} {value:.2g}" for name, value in differences.items()) + "\n")
    titles = ["config", "rows", "ms a step", "tokens/s", "TFLOP a step", "MFU", "MFU, all columns", "s to compile"]
    print_row(titles, header=True)
    rows = []
    for name in _CONFIG.value:
        for packing in (True, False):
            rows.append(speed(name, packing))
            row = rows[-1]
            mfu = ["—" if row[key] is None else f"{row[key]:.3f}" for key in ("mfu", "mfu_computed")]
            numbers = [row["step_ms"], row["tokens_per_s"], row["flops"] / 1e12, *mfu, row["compile_s"]]
            print_row([name, row["rows"], *numbers])
    of_run = trained()
    print(f"\n{_TRAIN.value}: " + ", ".join(f"{name} {value:.4g}" for name, value in of_run.items()))
    results = {"device": device.device_kind, "numerics": differences, "speed": rows, "trained": of_run}
    write_json(_JSON.value, results | {"train": pathlib.Path(_TRAIN.value).name})


if __name__ == "__main__":
    cli.run(main)
