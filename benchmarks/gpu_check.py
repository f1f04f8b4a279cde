"""An accelerator in under six minutes: is it right, how fast does it train and sample, and where does the time go?

    python -m benchmarks.gpu_check [--json=FILE --profile_dir=DIR]

Each section prints when it ends, and writes to --json. If one fails it says so, the others run, the exit status is 1.

1. ceiling: FLOP/s of a bfloat16 product of 8192², and the maker's figure.
2. numerics. `network`: loss and gradient of a small float32 network on the same canvases, here and on the CPU.
   `attention`: values and gradients of this backend's kernel in bfloat16 against XLA's in float32, with packed rows and
   not, causal and not. Largest difference over largest entry (of a row, for attention); above a tolerance it fails.
3. training: for each --config, packed and with a canvas a row ("padded"), steps on random ids of typical lengths, in
   BERT's vocabulary whatever the config's own is. MFU is of the measured ceiling: model FLOPs (dilm_jax/flops.py) of
   the columns that noise has left; "padded-equivalent" counts whole canvases, and may exceed 1 for packed rows. Goal:
   0.45 for owt_joint (12 × 768, texts of up to 1,022 tokens), packed. GiB of the step are the compiler's count, those
   in use the most that this process has held so far.
   `profile`: device time of a few packed steps, by kernel and kind; `busy` is its share of the time that they took.
4. sampling: samples a second of `event`: of star_tiny trained as configured, with its exact match; and of lm1b's
   network as initialised, whose lengths are uniform, with the packed loop and with whole canvases.
5. loss: the token loss, fused over dense (benchmarks/token_loss.py).

--small, which a CPU gets by default, shrinks networks, texts (in bytes), numbers of steps and the compiler's effort: it
shows that all of it runs, and its times mean nothing.
"""

import collections
import dataclasses
import functools
import pathlib
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import dilm_jax
from benchmarks import token_loss
from benchmarks.common import (
    ONE_DEVICE,
    empty_canvas,
    load_config,
    load_parts,
    print_row,
    random_texts,
    row_keys,
    seconds_in_turn,
    write_json,
)
from dilm_jax import attention, cli, evals, flops, sampling, sharding, train, watch
from dilm_jax import config as config_lib
from dilm_jax.canvas import NUM_SPECIAL_COLUMNS, Example
from dilm_jax.compile import typical_lengths
from dilm_jax.config import Parts
from dilm_jax.data import loader

_CONFIG = flags.DEFINE_list("config", ["configs/owt_joint.py", "configs/lm1b_joint.py"], "Networks of texts to train.")
_BATCH = flags.DEFINE_list("batch_size", None, "Texts a step, for each config: 256,512; 8 each with --small.")
_REMAT = flags.DEFINE_enum("remat", None, config_lib.CHOICES["model.remat"], "In place of config.model.remat.")
_STEPS = flags.DEFINE_integer("steps", None, "Timed steps: 20; 2 with --small.", lower_bound=1)
_PROFILE = flags.DEFINE_string("profile_dir", None, "Keep the profiles here, for TensorBoard.")
_TRAIN = flags.DEFINE_string("train", None, "What is trained: star_tiny; its :smoke with --small.")
_ONLY = flags.DEFINE_multi_enum("only", None, ["numerics", "training", "sampling", "loss"], "Sections; default: all.")
_SMALL = flags.DEFINE_bool("small", None, "Shrink everything; default: on a CPU.")
_JSON = flags.DEFINE_string("json", None, "Write the figures here too.")

SMALL = {"data.tokenizer": "bytes", "data.max_length": 62, "model.num_layers": 2, "model.width": 32}
SMALL |= {"model.num_heads": 2, "model.mlp_width": 64, "model.cond_width": 16}
FLOAT32_TOLERANCE = 1e-3  # of a network that is differentiated, with sums in another order
BFLOAT16_TOLERANCE = 2**-6  # four units in the last place of the largest entry
KERNELS = {"__cudnn$fmha": "cuDNN", "tpu_custom_call": "splash"}  # what a program calls them
HEAD = 64  # width of the heads of attention that are compared
GOAL = 0.45
WARM_UP, PROFILED = 2, 3  # steps
NUM_SAMPLES = 64
# Of a profile's kernels by name, in this order: cuDNN's attention is named after its products, too.
KINDS = {
    "attention": re.compile("fmha|sdpa|flash|splash|mha", re.IGNORECASE),
    "matmul": re.compile("gemm|nvjet|cutlass|xmma|wgmma|dot|matmul|convolution", re.IGNORECASE),
    "other": re.compile(""),
}
LARGEST = 12  # kernels that are printed


def main() -> None:
    started, device = time.monotonic(), jax.devices()[0]
    configs = chosen_configs()
    said = f"{device.device_kind} ({device.platform}), jax {jax.__version__}, commit {evals.commit()}"
    print(said + (", --small" if small() else ""), flush=True)
    if small():
        jax.config.update("jax_disable_most_optimizations", True)
    report = Report(_JSON.value, {"device": said, "small": small(), "goal": GOAL})
    ceiling = report.add("ceiling", measured_ceiling)
    if wanted("numerics"):
        numerics(report)
    if wanted("training"):
        for name, batch_size in configs:
            of_config(report, name, batch_size, ceiling["flops_per_s"] if ceiling else None)
    if wanted("sampling"):
        report.add("trained", trained)
        report.add("samples", samples)
    if wanted("loss"):
        report.add("loss", fused_over_dense)
    report.results["seconds"] = time.monotonic() - started
    report.write()
    print(f"\n{report.results['seconds']:.0f} s in all", flush=True)
    if report.errors:
        cli.fail(f"{len(report.errors)} sections failed: {'; '.join(report.errors)}", status=1)


def wanted(section: str) -> bool:
    return not _ONLY.value or section in _ONLY.value


def small() -> bool:
    return jax.default_backend() == "cpu" if _SMALL.value is None else _SMALL.value


def chosen_configs() -> list[tuple[str, int]]:
    """Each config and its batch size. Raises ValueError for numbers that are none, or not one for each."""
    sizes = _BATCH.value or (["8"] * len(_CONFIG.value) if small() else ["256", "512"])
    if len(sizes) != len(_CONFIG.value) or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"--batch_size={','.join(sizes)} is not one number for each of --config={_CONFIG.value}")
    return [(name, int(size)) for name, size in zip(_CONFIG.value, sizes, strict=True)]


class Report:
    """What sections found, in a file as soon as one ends, and what became of those that failed."""

    def __init__(self, path: str | None, results: dict[str, Any]):
        self._path, self.errors, self._seconds = path, {}, {}
        self.results = results | {"errors": self.errors, "section_s": self._seconds}

    def attempt(self, name: str, section: Callable, *args) -> Any:
        """What it returns. None if it failed, which is printed and in the report."""
        started = time.monotonic()
        try:
            return section(*args)
        except Exception as error:  # whatever it is: the other sections have figures to give
            traceback.print_exc()
            self.errors[name] = f"{type(error).__name__}: {error}"[:2000]
            print(f"\n{name} FAILED: {self.errors[name]}", flush=True)
            self.write()
        finally:
            self._seconds[name] = time.monotonic() - started

    def add(self, name: str, section: Callable, *args) -> Any:
        """The same, with what it returns in the report."""
        result = self.attempt(name, section, *args)
        if result is not None:
            self.results[name] = result
            self.write()
        return result

    def write(self) -> None:
        write_json(self._path, self.results)


# --- the ceiling


def measured_ceiling() -> dict[str, Any]:
    """FLOP/s of this device in bfloat16."""
    size, device = 512 if small() else 8192, jax.devices()[0]
    measured = flops.measured_peak(device, size, jnp.bfloat16)
    peak, said = flops.peak(device)
    print(f"\nceiling: {measured / 1e12:.4g} TFLOP/s, a bfloat16 product of {size}²", end="")
    print(f"; {peak / 1e12:.4g} {said}", flush=True)
    return {"flops_per_s": measured, "size": size, "peak_flops_per_s": peak, "peak": said}


# --- numerics


def numerics(report: Report) -> None:
    report.add("network", network_differences)
    for packed in (True, False):
        for causal in (False, True):
            name = f"attention, {'packed' if packed else 'not packed'}{', causal' * causal}"
            report.add(name, attention_differences, packed, causal)


def network_differences() -> dict[str, float]:
    """Largest difference from the CPU, over the largest entry. Raises ValueError for one above the tolerance."""
    config, parts = load_parts("configs/star_easy_joint.py:smoke", {"train.matmul_precision": "highest"})
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
    found = {"loss": abs(float(loss - there)) / abs(float(loss)), "gradient": float(error / scale)}
    print(f"\nnetwork, from the CPU: {listed(found)}", flush=True)
    check_within("the network", found, FLOAT32_TOLERANCE)
    return found


def cpu_mesh():
    return sharding.make_mesh(dict(ONE_DEVICE.shape), jax.devices("cpu")[:1])


def attention_differences(packed: bool, causal: bool) -> dict[str, Any]:
    """Of this backend's kernel in bfloat16 from XLA's in float32: of what it returns for columns that are no PAD, and
    of the gradients of q, k, v, where PAD has none. Raises ValueError for one above the tolerance, or not finite."""
    S, N = (130, 2) if small() else (1026, 12)
    segment = jnp.asarray(packed_rows(S) if packed else single_rows(S))
    there, rng = (segment > 0)[..., None, None], np.random.default_rng(0)
    draw = lambda: jnp.asarray(rng.normal(size=(len(segment), S, N, HEAD)), jnp.bfloat16)  # noqa: E731
    *qkv, cotangent = draw(), draw(), draw(), draw() * there
    kernel = functools.partial(attention.attention, segment=segment, causal=causal, packed=packed)
    run = jax.jit(functools.partial(value_and_gradients, kernel)).lower(qkv, cotangent).compile()
    program = run.as_text() or ""
    name = next((name for call, name in KERNELS.items() if call in program), "XLA")
    exact = functools.partial(attention.xla, segment=segment, causal=causal)
    with jax.default_matmul_precision("highest"):
        as_float32 = [x.astype(jnp.float32) for x in qkv], cotangent.astype(jnp.float32)
        wanted = jax.jit(functools.partial(value_and_gradients, exact))(*as_float32)
    found = run(qkv, cotangent)
    # Times 0 at PAD, so that what is not finite stays so.
    pairs = {"value": (found[0] * there, wanted[0] * there)}
    pairs |= dict(zip("qkv", zip(found[1:], wanted[1:], strict=True), strict=True))
    errors = {of: row_difference(*map(np.asarray, pair)) for of, pair in pairs.items()}
    what = f"attention by {name}, {S} columns, {'packed' if packed else 'not packed'}{', causal' * causal}"
    print(f"{what}: {listed(errors)}", flush=True)
    check_within(what, errors, BFLOAT16_TOLERANCE)
    return {"kernel": name, "columns": S} | errors


def packed_rows(S: int) -> np.ndarray:
    """Segments of half a row, of a tenth and of four columns; two of unlike length, then PAD; PAD alone."""
    at = np.arange(S)
    halves = [at // -(-S // part) + 1 for part in (2, 10)]
    return np.array([*halves, at // 4 + 1, (at < S // 3) + (at < S - 9), 0 * at], np.int32)


def single_rows(S: int) -> np.ndarray:
    """One segment, then PAD: none, one column, half a row, almost all, all."""
    return (np.arange(S) < np.array([[S], [S - 1], [S // 2], [3], [0]])).astype(np.int32)


def value_and_gradients(kernel: Callable, qkv: list[jax.Array], cotangent: jax.Array) -> tuple[jax.Array, ...]:
    value, transpose = jax.vjp(kernel, *qkv)
    return value, *transpose(cotangent)


def row_difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference in a row over its largest entry of b, of all rows; of a row of zeros the difference."""
    a, b = (x.astype(np.float32).reshape(len(x), -1) for x in (a, b))
    scale = np.abs(b).max(-1)
    return float((np.abs(a - b).max(-1) / np.where(scale > 0, scale, 1)).max())


def check_within(what: str, differences: dict[str, float], tolerance: float) -> None:
    """Raises ValueError if one is above the tolerance, or not a number."""
    if not all(value <= tolerance for value in differences.values()):
        raise ValueError(f"{what} is wrong: {listed(differences)}, above the tolerance of {tolerance:.2g}")


def listed(figures: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())


# --- training


TITLES = ["config", "canvases", "rows at a time", "ms a step", "tokens/s", "TFLOP a step", "MFU", "padded-equivalent"]
TITLES += ["GiB of the step (AOT)", "GiB in use", "s to compile"]


def of_config(report: Report, name: str, batch_size: int, ceiling: float | None) -> None:
    """A row of figures each, packed and padded, then the packed profile."""
    print()
    print_row(TITLES, header=True)
    stem, profiled = pathlib.Path(name).stem, None
    for packing in (True, False):
        what = f"{stem}, {'packed' if packing else 'padded'}"
        training = report.attempt(f"{what}: compilation", Training.of, name, batch_size, packing)
        if training is None:
            continue
        report.add(what, speed, training, ceiling)
        if packing:
            profiled = report.attempt(f"{what}: profile", profile, training, what)
        del training  # its memory
    if profiled:
        report.add(f"{stem}, profile", print_profile, profiled)


@dataclasses.dataclass
class Training:
    """The compiled step of a config on a batch of random texts."""

    name: str
    packing: bool
    parts: Parts
    x0: Example  # on the device
    num_tokens: int
    rows: int
    step: Any
    compile_s: float
    state: train.TrainState

    @classmethod
    def of(cls, name: str, batch_size: int, packing: bool) -> "Training":
        remat = {"model.remat": _REMAT.value} if _REMAT.value else {}
        overrides = {"batch_size": batch_size, "train.packing": packing} | remat
        config, parts = load_parts(name, (SMALL if small() else {}) | overrides)
        texts, L = "owt" if parts.task.max_length > 1000 else "lm1b", parts.task.max_length
        batch = random_texts(typical_lengths(texts, batch_size, L), parts.process.vocabulary, L)
        num_rows = train.num_packed_rows(config, parts, ONE_DEVICE, lambda step, rows: vars(batch))
        optimizer, _ = train.make_optimizer(config)
        state = train.init_state(config, parts, optimizer, ONE_DEVICE)
        x0 = sharding.put_batch(batch, ONE_DEVICE, batch_size)
        started = time.monotonic()
        step = train.make_train_step(config, parts, ONE_DEVICE, num_rows).lower(state, x0).compile()
        seconds = time.monotonic() - started
        rows = num_rows or batch_size // config.train.micro_batches
        return cls(name, packing, parts, x0, int(batch.length.sum()), rows, step, seconds, state)

    def run(self, num_steps: int) -> tuple[float, list[dict[str, jax.Array]]]:
        """Seconds of so many steps, and their metrics."""
        each = []
        jax.block_until_ready(self.state)
        started = time.monotonic()
        for _ in range(num_steps):
            self.state, metrics = self.step(self.state, self.x0)
            each.append(metrics)
        jax.block_until_ready(self.state)
        return time.monotonic() - started, each


def speed(training: Training, ceiling: float | None) -> dict[str, Any]:
    """Figures of timed steps. Raises ValueError if the loss is not finite."""
    training.run(WARM_UP)
    seconds, metrics = training.run(num_steps := _STEPS.value or (2 if small() else 20))
    if not metrics[-1][watch.FINITE]:
        raise ValueError(f"the loss is {metrics[-1]['train/loss']} after {WARM_UP + num_steps} steps, or was before")
    B, columns = len(training.x0.length), training.parts.task.max_length + NUM_SPECIAL_COLUMNS
    useful = sum(float(of_step[watch.FLOPS]) for of_step in metrics) / num_steps
    padded = float(flops.of_step(training.state.params, training.parts.process.spec, jnp.full(B, columns)))
    each = seconds / num_steps
    row = {
        "config": training.name,
        "canvases": "packed" if training.packing else "padded",
        "rows": training.rows,
        "step_ms": 1000 * each,
        "tokens_per_s": training.num_tokens / each,
        "tflop": useful / 1e12,
        "mfu": useful / each / ceiling if ceiling else None,
        "mfu_padded": padded / each / ceiling if ceiling else None,
        "program_gib": program_bytes(training.step) / 2**30,
        "peak_gib": peak_gib(),
        "compile_s": training.compile_s,
    }
    print_row(["—" if cell is None else cell for cell in row.values()])
    passes = [int(of_step["train/passes"]) for of_step in metrics if "train/passes" in of_step]
    return row | {"batch_size": B, "columns": columns, "steps": num_steps, "passes": passes}


def program_bytes(compiled: Any) -> int:
    """What a program needs of the device's memory, by ahead-of-time analysis. Donated arguments count once."""
    of = compiled.memory_analysis()
    sizes = of.argument_size_in_bytes, of.temp_size_in_bytes, of.output_size_in_bytes
    return sum(sizes) - of.alias_size_in_bytes


def peak_gib() -> float | None:
    """The most that the device held since the process began, where it counts that."""
    held = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None if held is None else held / 2**30


# --- where the time goes


def profile(training: Training, what: str) -> dict[str, Any]:
    """Device seconds of a few steps by kernel, and seconds that these took."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(_PROFILE.value or temporary) / re.sub(r"\W+", "_", what)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(str(directory), profiler_options=options):
            seconds, _ = training.run(PROFILED)
        newest = max(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        kernels = kernel_seconds(jax.profiler.ProfileData.from_file(str(newest)))
    return {"what": what, "steps": PROFILED, "seconds": seconds, "kernels": kernels}


def kernel_seconds(data: Any) -> dict[str, float]:
    """Seconds of each kernel on the devices, without those of kernels inside it; on the CPU of each operation."""
    planes = {plane.name: list(plane.lines) for plane in data.planes}
    of_devices = [line for name, lines in planes.items() if name.startswith("/device:") for line in lines]
    streams = [line for line in of_devices if line.name.startswith("Stream")]  # of a GPU
    lines = streams or [line for line in of_devices if line.name == "XLA Ops"]  # of a TPU
    total = collections.Counter()
    for line in lines:
        total.update(own_times((event.start_ns, event.duration_ns, event.name) for event in line.events))
    if jax.default_backend() == "cpu":
        for line in planes.get("/host:CPU", []):
            events = [event for event in line.events if "hlo_op" in dict(event.stats)]
            total.update(own_times((event.start_ns, event.duration_ns, event.name) for event in events))
    return {name: nanoseconds / 1e9 for name, nanoseconds in total.most_common()}


def own_times(events: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """Of (start, duration, name) on one line: the sum of durations by name, without those of events inside them."""
    total, around = collections.defaultdict(float), []
    for start, duration, name in sorted(events, key=lambda event: (event[0], -event[1])):
        while around and around[-1][0] <= start:
            around.pop()
        if around:
            total[around[-1][1]] -= duration
        total[name] += duration
        around.append((start + duration, name))
    return total


def print_profile(of: dict[str, Any]) -> dict[str, Any]:
    """By kind and by kernel. Raises ValueError if the profile has no kernels."""
    kernels, total = of["kernels"], sum(of["kernels"].values())
    if not total:
        raise ValueError(f"the profile of {of['what']} has no kernels")
    shares = dict.fromkeys(KINDS, 0.0)
    for name, seconds in kernels.items():
        shares[kind(name)] += seconds / total
    busy, step_ms = total / of["seconds"], 1000 * of["seconds"] / of["steps"]
    print(f"\nprofile of {of['what']}, {step_ms:.3g} ms a step: busy {busy:.2f}; of that {listed(shares)}\n")
    print_row(["kernel", "kind", "ms a step", "share"], header=True)
    for name in list(kernels)[:LARGEST]:
        seconds = kernels[name]
        print_row([name[:80].replace("|", "/"), kind(name), 1000 * seconds / of["steps"], seconds / total])
    ms = {name: 1000 * kernels[name] / of["steps"] for name in list(kernels)[: 4 * LARGEST]}
    return {"step_ms": step_ms, "busy": busy, "shares": shares, "kernel_ms": ms}


def kind(kernel: str) -> str:
    return next(name for name, pattern in KINDS.items() if pattern.search(kernel))


# --- sampling


def trained() -> dict[str, Any]:
    """Exact match of a run as configured, and samples a second."""
    name = _TRAIN.value or "configs/star_tiny_joint.py" + ":smoke" * small()
    config = load_config(name)
    with tempfile.TemporaryDirectory() as workdir:
        started = time.monotonic()
        card = train.train(config, workdir)
        assert card is not None, "told to stop"
        seconds = time.monotonic() - started
        run = dilm_jax.load(workdir)
        rows, _ = run.parts.task.default_rows(config.eval.batch_size)
        sampling_s = seconds_in_turn({"event": lambda: run.generate(rows)}, 1)["event"]
    found = {
        "train": pathlib.Path(name).name,
        "steps": config.num_steps,
        "seconds": seconds,
        "exact_match": card["eval/exact_match"],
        "samples_per_s": len(rows) / sampling_s,
    }
    print(f"\ntrained: {listed(found)}", flush=True)
    return found


def samples() -> dict[str, Any]:
    """Samples a second of lm1b's network as initialised, packed and with whole canvases."""
    config, parts = load_parts("configs/lm1b_joint.py", SMALL if small() else {})
    optimizer, _ = train.make_optimizer(config)
    params = train.init_state(config, parts, optimizer, ONE_DEVICE).params
    sampler = parts.process.samplers(parts.sampling)[parts.sampler]
    empty = empty_canvas(NUM_SAMPLES, parts.task.max_length, parts.process.vocabulary)

    @functools.partial(jax.jit, static_argnums=0)
    def generate(packed: bool, params):
        network = evals.for_sampling(parts, ONE_DEVICE, params)
        assert isinstance(network, sampling.Packed) and network.sizes(*empty.tokens.shape)[0]
        network = network if packed else functools.partial(whole, network)
        state = sampling.generate(network, sampler, row_keys(0, NUM_SAMPLES), empty, parts.filters)
        return state.canvas.length - NUM_SPECIAL_COLUMNS, state.nfe

    def whole(network, canvas, clock):
        return network.call(canvas, clock, None)

    drawn = {}

    def run(name: str, packed: bool):
        drawn[name] = generate(packed, params)
        return drawn[name]

    ways = {"packed": True, "whole canvases": False}
    seconds = seconds_in_turn({name: functools.partial(run, name, packed) for name, packed in ways.items()}, 1)
    found = {}
    for name, (length, nfe) in drawn.items():
        found |= {f"samples_per_s, {name}": NUM_SAMPLES / seconds[name], f"mean_length, {name}": float(length.mean())}
        found |= {f"network_calls, {name}": int(nfe.max())}
    print(f"\nlm1b_joint as initialised, {NUM_SAMPLES} texts: {listed(found)}", flush=True)
    return found


# --- the loss


def fused_over_dense() -> dict[str, Any]:
    """Of memory, numbers and time."""
    shape, width = ((2, 16, 50), 16) if small() else ((8, 128, 30522), 768)
    row = token_loss.measure(shape, width, "sampled", "float32", 1 if small() else 3)
    over = {name: row[f"fused_over_dense_{name}"] for name in ("temp_bytes", "seconds")}
    of = {f"difference of {name}": value for name, value in row["difference"].items()}
    print(f"\nloss, {'×'.join(map(str, shape))}, fused over dense: {listed(over | of)}", flush=True)
    return row


if __name__ == "__main__":
    cli.run(main)
