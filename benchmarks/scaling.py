"""What a train step costs on more devices and more tokens, from programs compiled here: no accelerator is used.

    python -m benchmarks.scaling [--only=meshes,pods,tokens --plot=FILE.png --json=FILE]

- meshes: a small network of --config takes --steps steps on one, then on eight fake CPU devices, in several meshes. The
  largest difference of a loss from one device's, relative; the collectives of a step; whether the noising has any, and
  whether a step gathers logits, arrays with a row of V numbers that are no part of a kernel.
- pods: --config as it is, with --global_batch texts a step, compiled ahead of time (AOT) for TPU pods that are not
  there: for each of --topologies bytes a chip (arguments, temporaries, and all with what is not donated of the
  outputs, against the memory of a chip), the collectives of a step with bytes a chip, seconds to compile. Nothing runs:
  these are the compiler's figures, not measurements. Skipped where libtpu is not installed.
- tokens: seconds of a step of a small network with packed canvases in 1, 2, 4, … rows, all full; its temporaries
  (AOT); and r² of a straight line through each. --plot draws them. Up to some 4 million scores are held at once, which
  bends the temporaries of few columns.

Collectives are `kind × how many a step (MiB that each device has of their results)`. What is in a loop counts as often
as it runs where that can be read, else once: `+` marks these. With packing, that is a pass over the canvases,
of which most steps need one.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import re
import time
from collections import Counter

import jax

NUM_DEVICES = 8
if __name__ == "__main__":  # before anything below uses a device
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)

import numpy as np  # noqa: E402
from absl import flags, logging  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from benchmarks.common import (  # noqa: E402
    ONE_DEVICE,
    drawn_around,
    load_parts,
    print_row,
    random_texts,
    seconds_in_turn,
    temporary_bytes,
    typical_lengths,
    write_json,
)
from dilm_jax import cli, sharding, train  # noqa: E402
from dilm_jax import config as config_lib  # noqa: E402
from dilm_jax.canvas import NUM_SPECIAL_COLUMNS  # noqa: E402

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
MEMORY = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}  # GiB of a chip, by the maker
MIB = 2**20


# --- Programs as text ------------------------------------------------------------------------------------------------

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf" = (?P<type>\(?\w+\[.*?) (?P<kind>{_KINDS})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)[a-z0-9]*\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_CALLED = re.compile(r"%([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BOUND = re.compile(r"ROOT .* compare\(.*%([\w.-]+)\), direction=LT")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One of a program, with what a device has of its result."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    times: int  # that it runs a step, as far as known
    unknown: bool  # whether it runs more often: in a loop without a known end


def shapes_and_bytes(text: str) -> tuple[list[tuple[int, ...]], list[int]]:
    """Of the arrays of an HLO type, such as `(f32[8,2]{1,0}, pred[])`."""
    shapes, sizes = [], []
    for dtype, dims in _ARRAY.findall(text):
        shapes.append(tuple(map(int, dims.split(","))) if dims else ())
        bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
        sizes.append(math.prod(shapes[-1]) * bits // 8)
    return shapes, sizes


def computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """The name of the entry, and the lines of each computation of an HLO module."""
    entry, lines, here = "", {}, []
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            here = lines.setdefault(found["name"], [])
            entry = found["name"] if found["entry"] else entry
        else:
            here.append(line)
    return entry, lines


def num_trips(loop: str, lines: dict[str, list[str]]) -> int | None:
    """Of a while: what the compiler says, or the constant that its counter stays below; None: neither."""
    if known := _TRIPS.search(loop):
        return int(known[1])
    condition = re.search(r"condition=%([\w.-]+)", loop)
    text = "\n".join(lines[condition[1]]) if condition else ""
    bound = _BOUND.search(text)
    limit = bound and re.search(rf"%{re.escape(bound[1])} = s32\[\]\S* constant\((\d+)\)", text)
    return int(limit[1]) if limit else None


def collectives(text: str | None) -> list[Collective]:
    """Those that a compiled HLO module runs; there is a text wherever XLA compiles. What a compiler has cut into pieces
    (start, steps, end) keeps its channel and counts once."""
    assert text is not None
    entry, lines = computations(text)
    found: dict[tuple, Collective] = {}

    def visit(name: str, times: int, unknown: bool) -> None:
        for line in lines[name]:
            if match := _COLLECTIVE.search(line):
                shapes, sizes = shapes_and_bytes(match["type"])
                if match["start"] and match["kind"] != "all-reduce":  # (operands, results)
                    shapes, sizes = shapes[len(shapes) // 2 :], sizes[len(sizes) // 2 :]
                channel = re.search(r"channel_id=(\d+)", line)
                key = (match["kind"], channel[1]) if channel else (name, line)
                found.setdefault(key, Collective(match["kind"], tuple(shapes), sum(sizes), times, unknown))
            trips = num_trips(line, lines) if " while(" in line else 1
            for called in dict.fromkeys(_CALLED.findall(line.split(", metadata=")[0])):
                if called in lines:
                    visit(called, times * (trips or 1), unknown or trips is None)

    visit(entry, 1, False)
    return list(found.values())


def summary(found: list[Collective]) -> dict[str, dict]:
    """By kind: how many, their bytes, and whether any is in a loop without a known end."""
    count, total, loops = Counter(), Counter(), set()
    for one in found:
        count[one.kind] += one.times
        total[one.kind] += one.times * one.num_bytes
        loops |= {one.kind} if one.unknown else set()
    return {kind: {"count": count[kind], "bytes": total[kind], "in_loops": kind in loops} for kind in sorted(count)}


def described(of_kinds: dict[str, dict]) -> str:
    texts = [f"{kind} × {of['count']}{'+' * of['in_loops']} ({of['bytes'] / MIB:.3g})" for kind, of in of_kinds.items()]
    return ", ".join(texts) or "none"


def gathers_logits(found: list[Collective], vocab_size: int, width: int) -> bool:
    """Whether one gathers rows of all or a share of V numbers that are no part of a kernel or an embedding."""

    def is_logits(shape):
        shares = {vocab_size // n for n in (1, 2, 4, 8) if vocab_size % n == 0}
        rows = [math.prod(shape) // size for size in shares & set(shape)]
        return bool(rows) and all(max(n, width) % min(n, width) for n in rows)

    return any(one.kind == "all-gather" and any(map(is_logits, one.shapes)) for one in found)


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

    placed = sharding.batch_sharding(mesh)
    draw = lambda x0: train.corrupt_batch(parts.process, mesh, 0, 0, x0)[:4]  # noqa: E731
    noise = jax.jit(draw, in_shardings=placed, out_shardings=placed)
    return {
        "losses": losses,
        "step": summary(of_step),
        "noising": summary(collectives(noise.lower(x0).compile().as_text())),
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


def on_pod(topology: str) -> dict:
    """The figures of a step that is compiled for a pod."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    model = {f"model.{key}": int(value) for key, value in (pair.split("=") for pair in _MODEL.value)}
    size = {"batch_size": _BATCH.value, "mesh.fsdp": _FSDP.value}
    config, parts = load_parts(_CONFIG.value, size | model, len(devices))
    mesh, L = mesh_of(config, devices), parts.task.max_length
    lengths = typical_lengths("lm1b" if L < 1000 else "owt", _BATCH.value, L)
    x0 = random_texts(lengths, parts.process.vocabulary, L)
    rows = train.num_packed_rows(config, parts, ONE_DEVICE, lambda step, rows: vars(x0), sharding.num_shards(mesh))

    optimizer, _ = train.make_optimizer(config)
    state = jax.eval_shape(lambda: train.init_state(config, parts, optimizer, mesh))
    places = sharding.state_shardings(state, state.params, mesh)
    abstract = functools.partial(jax.tree.map, lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at))
    batch = abstract(x0, jax.tree.map(lambda _: sharding.batch_sharding(mesh), x0))
    started = time.monotonic()
    step = train.make_train_step(config, parts, mesh, rows).trace(abstract(state, places), batch)
    compiled = step.lower(lowering_platforms=("tpu",)).compile()
    seconds = time.monotonic() - started
    memory, found = compiled.memory_analysis(), collectives(compiled.as_text())
    assert memory is not None
    arguments, temporaries = memory.argument_size_in_bytes, temporary_bytes(compiled)
    total = arguments + temporaries + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "topology": topology,
        "chips": len(devices),
        "mesh": dict(mesh.shape),
        "columns_per_chip": (rows or _BATCH.value) // sharding.num_shards(mesh) * (L + NUM_SPECIAL_COLUMNS),
        "argument_bytes": arguments,
        "temp_bytes": temporaries,
        "total_bytes": total,
        "fits": total <= MEMORY[topology.split(":")[0]] * 2**30,
        "collectives": summary(found),
        "gathers_logits": gathers_logits(found, parts.process.vocabulary.size, config.model.width),
        "compile_s": seconds,
    }


def pods() -> list[dict]:
    if importlib.util.find_spec("libtpu") is None:
        print("pods: skipped, libtpu is not installed: pip install 'dilm_jax[tpu]'")
        return []
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask about
    titles = ["topology", "mesh", "columns a chip", "arguments, MiB", "temporaries, MiB", "all, MiB", "fits"]
    titles += ["collectives (MiB a chip)", "s to compile"]
    print(f"{_CONFIG.value}, {_BATCH.value} texts a step, ahead-of-time compiled: nothing is run\n")
    print_row(titles, header=True)
    rows = []
    for topology in _TOPOLOGIES.value:
        rows.append(on_pod(topology))
        row = rows[-1]
        sizes = [row[f"{name}_bytes"] / MIB for name in ("argument", "temp", "total")]
        axes = " × ".join(f"{name} {size}" for name, size in row["mesh"].items())
        cells = [*sizes, "yes" if row["fits"] else "no", described(row["collectives"]), row["compile_s"]]
        print_row([topology, axes, row["columns_per_chip"], *cells])
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
