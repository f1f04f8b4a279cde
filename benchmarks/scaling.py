"""What a train step costs on more devices and more tokens, from programs compiled here: no accelerator is used.

    python -m benchmarks.scaling [--only=meshes,pods,tokens --plot=FILE.png --json=FILE]

- meshes: a small network of --config takes --steps steps on one, then on eight fake CPU devices, in several meshes. The
  largest difference of a loss from one device's, relative; the collectives of a step; whether the noising has any, and
  whether a step gathers logits, arrays with a row of V numbers that are no part of a kernel.
- pods: --config as it is, with --global_batch texts a step, compiled ahead of time (AOT) for TPU pods that are not
  there: a row of `python -m dilm_jax.compile --compare` for each of --topologies. Nothing runs: these are the
  compiler's figures, not measurements. Skipped where libtpu is not installed.
- tokens: seconds of a step of a small network with packed canvases in 1, 2, 4, … rows, all full; its temporaries
  (AOT); and r² of a straight line through each. --plot draws them. Up to some 4 million scores are held at once, which
  bends the temporaries of few columns.

Collectives are `kind × how many a step (MiB that each device has of their results)`. What is in a loop counts as often
as it runs where that can be read, else once: `+` marks these. With packing, that is a pass over the canvases,
of which most steps need one.
"""

import dataclasses
import math

import jax

NUM_DEVICES = 8
if __name__ == "__main__":  # before anything below uses a device
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)

import numpy as np  # noqa: E402
from absl import flags, logging  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from benchmarks.common import (  # noqa: E402
    drawn_around,
    load_parts,
    print_row,
    random_texts,
    seconds_in_turn,
    temporary_bytes,
    write_json,
)
from dilm_jax import cli, sharding, train  # noqa: E402
from dilm_jax import compile as compile_lib  # noqa: E402
from dilm_jax import config as config_lib  # noqa: E402
from dilm_jax.canvas import NUM_SPECIAL_COLUMNS  # noqa: E402
from dilm_jax.compile import typical_lengths  # noqa: E402
from dilm_jax.hlo import MIB, collectives, described, gathers_logits, summary  # noqa: E402

_CONFIG = flags.DEFINE_string("config", "configs/lm1b_joint.py", "FILE[:variant]; its data are not read.")
_ONLY = flags.DEFINE_list("only", ["meshes", "pods", "tokens"], "Some of meshes, pods, tokens.")
_MESHES = flags.DEFINE_list("meshes", ["8x1x1", "1x8x1", "4x1x2", "2x2x2"], "Of eight devices: data x fsdp x tensor.")
_STEPS = flags.DEFINE_integer("steps", 10, "Of each mesh.", lower_bound=1)
_TOPOLOGIES = flags.DEFINE_list("topologies", ["v5e:2x4", "v5e:8x8", "v5e:16x16"], "TPU pods.")
_BATCH = flags.DEFINE_integer("global_batch", 2048, "Texts a step on a pod.", lower_bound=1)
_FSDP = flags.DEFINE_integer("fsdp", 8, "Chips of a pod that share a copy of the state.", lower_bound=1)
_MODEL = flags.DEFINE_list("model", [], "Overrides of config.model on pods: key=value,…")
_ROWS = flags.DEFINE_list("rows", ["1", "2", "4", "8"], "Packed rows of a step.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed steps of each number of rows.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "Draw cost against tokens here.")
_JSON = flags.DEFINE_string("json", None, "Write the figures here too.")

SMALL = {"num_layers": 2, "width": 48, "num_heads": 4, "mlp_width": 96, "cond_width": 48, "dropout": 0.0}


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """(slope, value at 0, r²) of the least-squares line."""
    slope, start = np.polyfit(x, y, 1)
    residue = y - (slope * x + start)
    return float(slope), float(start), float(1 - residue @ residue / ((y - y.mean()) @ (y - y.mean())))


# --- Steps -----------------------------------------------------------------------------------------------------------


def mesh_of(config, devices) -> Mesh:
    return sharding.make_mesh(config_lib.mesh_shape(config, len(devices)), devices)


def mesh_overrides(name: str) -> dict[str, int]:
    """Raises ValueError for what is no mesh of eight devices."""
    sizes = [int(part) if part.isdecimal() else 0 for part in name.split("x")]
    if len(sizes) != 3 or math.prod(sizes) != NUM_DEVICES:
        raise ValueError(f"--meshes: {name} is not data x fsdp x tensor of {NUM_DEVICES} devices, such as 2x2x2")
    return dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), sizes, strict=True))


def on_mesh(overrides: dict, num_devices: int) -> dict:
    """Losses of some steps of a small network, and the collectives of one and of its noising."""
    small = {f"model.{key}": value for key, value in SMALL.items()} | {"model.dtype": "float32"}
    exact = {"train.matmul_precision": "highest", "data.max_length": 30, "batch_size": 32}
    config, parts = load_parts(_CONFIG.value, small | exact | overrides, num_devices)
    mesh, vocabulary = mesh_of(config, jax.devices()[:num_devices]), parts.process.vocabulary
    x0 = random_texts(typical_lengths("lm1b", config.batch_size, parts.task.max_length), vocabulary, 30)
    rows = 2 * sharding.num_shards(mesh) if config.train.packing else None  # what finds no room takes another pass
    x0 = sharding.put_batch(x0, mesh, config.batch_size)

    optimizer, _ = train.make_optimizer(config)
    state = train.init_state(config, parts, optimizer, mesh)
    places = jax.tree.map(lambda x: x.sharding, state.params)
    state = dataclasses.replace(state, params=jax.device_put(drawn_around(state.params), places))
    step = train.make_train_step(config, parts, mesh, rows).lower(state, x0).compile()
    of_step, losses = collectives(step.as_text()), []
    for _ in range(_STEPS.value):
        state, metrics = step(state, x0)
        losses.append(float(metrics["train/loss"]))

    return {
        "losses": losses,
        "step": summary(of_step),
        "noising": compile_lib.noising(config, parts, mesh, "cpu"),
        "gathers_logits": gathers_logits(of_step, vocabulary.size, config.model.width),
    }


def meshes() -> list[dict]:
    titles = [
        "data x fsdp x tensor",
        "loss: difference from one device",
        "collectives of a step (MiB)",
        "of the noising",
        "logits",
    ]
    print_row(titles, header=True)
    of_names = {name: mesh_overrides(name) for name in _MESHES.value}
    alone, rows = on_mesh({}, 1)["losses"], []
    for name, overrides in of_names.items():
        row = on_mesh(overrides, NUM_DEVICES)
        difference = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], alone, strict=True))
        rows.append({"mesh": name, "loss_difference": difference} | row)
        gathered = "gathered" if row["gathers_logits"] else "not gathered"
        print_row([name, difference, described(row["step"]), described(row["noising"]), gathered])
    return rows


def on_pod(name: str) -> tuple[compile_lib.Figures, dict[str, dict]]:
    """The figures of a step that is compiled for a pod, and the collectives of its noising."""
    topology = compile_lib.parse_topology(name)
    model = {f"model.{key}": int(value) for key, value in (pair.split("=") for pair in _MODEL.value)}
    size = {"batch_size": _BATCH.value, "mesh.fsdp": _FSDP.value}
    config, parts = load_parts(_CONFIG.value, size | model, len(compile_lib.devices_of(topology)))
    L = parts.task.max_length
    texts = random_texts(typical_lengths(compile_lib.like(L), config.batch_size, L), parts.process.vocabulary, L)
    figures = compile_lib.measure(config, parts, topology, lambda step, rows: vars(texts))
    return figures, compile_lib.noising(config, parts, compile_lib.mesh_of(config, topology), topology.chip.platform)


def pods() -> list[dict]:
    if compile_lib.compiler("tpu") is None:
        print("pods: skipped, libtpu is not installed: pip install 'dilm_jax[tpu]'")
        return []
    print(f"{_CONFIG.value}, {_BATCH.value} texts a step, ahead-of-time compiled: nothing is run\n")
    print_row(compile_lib.TITLES, header=True)
    rows = []
    for name in _TOPOLOGIES.value:
        figures, of_noising = on_pod(name)
        rows.append(dataclasses.asdict(figures) | {"noising": of_noising})
        print_row(compile_lib.cells(figures, of_noising))
    return rows


def of_rows(num: int):
    """(a call that takes a step with so many packed rows, its temporaries, its columns): all columns hold something.
    Four texts fill a row, whatever the noise leaves of them."""
    small = {f"model.{key}": value for key, value in (SMALL | {"width": 128, "mlp_width": 512}).items()}
    overrides = {"model.dtype": "float32", "train.packing": True, "train.micro_batches": 1}
    config, parts = load_parts(_CONFIG.value, {"batch_size": 4 * num} | small | overrides)
    mesh, S = mesh_of(config, jax.devices()[:1]), parts.task.max_length + NUM_SPECIAL_COLUMNS
    lengths = np.full(4 * num, S // 4 - NUM_SPECIAL_COLUMNS)
    x0 = sharding.put_batch(random_texts(lengths, parts.process.vocabulary, parts.task.max_length), mesh, 4 * num)
    optimizer, _ = train.make_optimizer(config)
    state = [train.init_state(config, parts, optimizer, mesh)]
    step = train.make_train_step(config, parts, mesh, num).lower(state[0], x0).compile()

    def call():
        state[0], metrics = step(state[0], x0)
        assert metrics["train/passes"] == 1
        return metrics

    return call, temporary_bytes(step), num * S


def tokens() -> dict:
    made = {num: of_rows(num) for num in map(int, _ROWS.value)}
    seconds = seconds_in_turn({str(num): call for num, (call, _, _) in made.items()}, _REPEATS.value)
    columns = np.array([S for _, _, S in made.values()], float)
    cost = {
        "seconds": np.array([seconds[str(num)] for num in made]),
        "temp_bytes": np.array([temp for _, temp, _ in made.values()], float),
    }
    print_row(["rows", "columns", "s a step", "temporaries, MiB (AOT)"], header=True)
    for num, S, each, temp in zip(made, columns, cost["seconds"], cost["temp_bytes"], strict=True):
        print_row([num, int(S), each, temp / MIB])
    lines = {name: line(columns, values) for name, values in cost.items()}
    if len(columns) > 2:
        print("\n" + ", ".join(f"{name}: r² {r2:.4f} of a straight line" for name, (_, _, r2) in lines.items()))
    results = {"columns": columns.tolist()} | {name: values.tolist() for name, values in cost.items()}
    results |= {"r2": {name: r2 for name, (_, _, r2) in lines.items()}}
    if _PLOT.value:
        plot(columns, cost, lines, _PLOT.value)
    return results


def plot(columns: np.ndarray, cost: dict[str, np.ndarray], lines: dict, path: str) -> None:
    """Cost of a step against the columns of its packed rows, with the straight lines."""
    from matplotlib.figure import Figure  # not pyplot: no display and no global state

    labels = {"seconds": ("s a step", 1), "temp_bytes": ("temporaries, MiB (AOT)", MIB)}
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (name, (label, unit)) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        slope, start, r2 = lines[name]
        axes.plot(columns, cost[name] / unit, "o", color="C0")
        axes.plot(columns, (slope * columns + start) / unit, color="C1", linewidth=1.2, label=f"r² = {r2:.4f}")
        axes.set(xlabel="packed columns a step", ylabel=label, ylim=(0, None))
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)


PARTS = {"meshes": meshes, "pods": pods, "tokens": tokens}


def main() -> None:
    if unknown := set(_ONLY.value) - set(PARTS):
        raise ValueError(f"--only: {', '.join(sorted(unknown))} is unknown, expected some of {', '.join(PARTS)}")
    logging.set_verbosity(logging.WARNING)  # not which axes do not divide, for each program
    results = {}
    for name in _ONLY.value:
        results[name] = PARTS[name]()
        print()
    write_json(_JSON.value, results | {"config": _CONFIG.value, "global_batch": _BATCH.value, "jax": jax.__version__})


if __name__ == "__main__":
    cli.run(main)
