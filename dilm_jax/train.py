"""Training: one jitted, donated step over a mesh, and the loop around it.

Noise depends on (seed, step, example's place in the global batch) alone: not on hosts, devices, mesh or
micro-batches. Everything a step needs is in (state, batch of that step), so resuming is restoring the state.
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import nnx, struct
from jax.sharding import PartitionSpec as P

from dilm_jax import canvas as canvas_lib
from dilm_jax import config as config_lib
from dilm_jax import evals, flops, optim, schedules, sharding
from dilm_jax import packing as packing_lib
from dilm_jax.canvas import Example
from dilm_jax.checkpoint import Checkpointer
from dilm_jax.config import Parts
from dilm_jax.data import loader
from dilm_jax.data.task import SPLITS, Task
from dilm_jax.metrics import MetricsWriter, Progress, plot
from dilm_jax.processes.base import Process

CHECKPOINTS, CONFIG, LOCK, PROFILE = "checkpoints", "config.json", "lock", "profile"
PACKING_TRIALS = 8  # batches that the number of packed rows is chosen by
FLOPS = "perf/flops"  # of a step, among its metrics; the log has what they come to
PROFILED = range(10, 15)  # steps after the start that --profile records


@struct.dataclass
class TrainState:
    """All that a step changes. `params` and `ema` are the network's parameters by name, float32."""

    step: jax.Array
    params: Any
    ema: Any
    opt_state: Any


def make_optimizer(config: ml_collections.ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    o = config.optim
    schedule = optim.learning_rate(
        learning_rate=o.learning_rate,
        schedule=o.schedule,
        warmup_steps=o.warmup_steps,
        cosine_cycles=o.cosine_cycles,
        floor=o.floor,
        num_steps=config.num_steps,
    )
    optimizer = optim.adamw(
        schedule,
        weight_decay=o.weight_decay,
        beta1=o.beta1,
        beta2=o.beta2,
        adam_eps=o.adam_eps,
        clip_norm=o.clip_norm,
    )
    return optimizer, schedule


def init_state(config: ml_collections.ConfigDict, parts: Parts, optimizer, mesh) -> TrainState:
    """A fresh state, made on the mesh: no device ever holds all of it."""

    def init():
        params = nnx.to_pure_dict(nnx.state(parts.init_network(config.seed), nnx.Param))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            ema=jax.tree.map(jnp.copy, params),
            opt_state=optimizer.init(params),
        )

    abstract = jax.eval_shape(init)
    return jax.jit(init, out_shardings=sharding.state_shardings(abstract, abstract.params, mesh))()


def corrupt_batch(process: Process, mesh, seed: int, step, x0: Example, infill_fraction: float = 0.0):
    """Draws t (stratified over the global batch) and X_t for each example, a fraction of them turned into infills.

    Returns t and its weights, the canvas, the loss's targets, and one key an example for dropout. The draws run
    inside shard_map: a rejection loop then ends when its own device's rows are done.
    """
    B = x0.length.shape[0]
    cells = schedules.spread_cells(B)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(sharding.BATCH_AXES), P(sharding.BATCH_AXES)),
        out_specs=P(sharding.BATCH_AXES), check_vma=False,
    )  # fmt: skip
    def draw(key, index, x0):
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(index)
        k_time, k_noise, k_dropout = canvas_lib.split_keys(keys, 3)
        t, weight = process.times(schedules.stratified(k_time, cells[index], B))
        if infill_fraction:
            k_infill = jax.vmap(lambda k: jax.random.fold_in(k, 2**16))(k_noise)  # not a child of corrupt's
            x0 = canvas_lib.freeze_spans(k_infill, x0, infill_fraction)
        return t, weight, process.corrupt(k_noise, x0, t), k_dropout

    key = jax.random.fold_in(jax.random.key(seed), step)
    t, weight, (canvas, targets), k_dropout = draw(key, jnp.arange(B), x0)
    return t, weight, canvas, targets, k_dropout


def num_packed_rows(
    config: ml_collections.ConfigDict,
    parts: Parts,
    mesh,
    make_batch: Callable[[int, slice], dict[str, Any]],
    num_shards: int | None = None,
) -> int | None:
    """How many rows of the mesh a step computes at a time, for the noised canvases of a micro-batch packed: three
    standard deviations above what the neediest shard of each in the first batches needs. `make_batch(step, rows)` gives
    their examples. `num_shards` are those of another mesh that the step is for. None: config.train.packing is off."""
    if not config.train.packing:
        return None
    B, micro_batches, shards = config.batch_size, config.train.micro_batches, num_shards or sharding.num_shards(mesh)

    @functools.partial(jax.jit, out_shardings=sharding.replicated(mesh))
    def needed(step, x0):
        _, _, canvas, *_ = corrupt_batch(parts.process, mesh, config.seed, step, x0, config.data.infill_fraction)
        rows_needed = functools.partial(packing_lib.rows_needed, num_columns=canvas.num_columns, num_shards=shards)
        return jax.vmap(rows_needed)(split(canvas.length, micro_batches)).max(-1)

    rows = loader.local_rows(B, jax.process_index(), jax.process_count())
    trials = [needed(i, sharding.put_batch(Example(**make_batch(i, rows)), mesh, B)) for i in range(PACKING_TRIALS)]
    count = np.concatenate(jax.device_get(trials))
    return min(math.ceil(count.mean() + 3 * count.std()), B // micro_batches // shards) * shards


def split(x: jax.Array, num_parts: int) -> jax.Array:
    """[B, …] → [parts, B/parts, …]. Each takes every num_parts-th row: all of them span all devices."""
    return jnp.moveaxis(x.reshape(-1, num_parts, *x.shape[1:]), 1, 0)


def make_train_step(config: ml_collections.ConfigDict, parts: Parts, mesh, packed_rows: int | None):
    """The jitted step: (state, batch of clean examples) → (state, metrics). The state is donated.

    Given `packed_rows` (see `num_packed_rows`) the network computes so many rows at a time, into which the noised
    canvases are packed: the same loss and gradient. What needs more rows takes further passes.
    """
    process, micro_batches, shards = parts.process, config.train.micro_batches, sharding.num_shards(mesh)
    optimizer, schedule = make_optimizer(config)
    network, num_rows = evals.network(parts, mesh), (packed_rows or 0) // shards

    def loss(params, t, weight, canvas, targets, k_dropout, packing=None):
        scores = network(params, canvas, t, k_dropout if config.model.dropout else None, packing, fused=True)
        terms = process.loss(scores, canvas, targets)
        terms = {name: (weight * value).sum() / config.batch_size for name, value in terms.items()}
        return terms["loss"], terms

    def gradient(params, batch, packing=None):
        return jax.grad(loss, has_aux=True)(params, *batch, packing)

    def zeros_like(function, *args):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))

    def packed(params, batch):
        """Sum over passes, each of as many canvases as find room."""
        t, weight, canvas, targets, k_dropout = batch

        def add(total, packing):
            here = t, weight * packing.placed, canvas, targets, k_dropout
            return jax.tree.map(jnp.add, total, gradient(params, here, packing))

        (grads, terms), passes = packing_lib.in_passes(
            add, zeros_like(gradient, params, batch), canvas.length, canvas.num_columns, num_rows, shards
        )
        return grads, terms | {"passes": passes}

    of_part = packed if packed_rows else gradient

    def in_parts(params, batch):
        """Sum over micro-batches."""
        parts_of = jax.tree.map(lambda x: split(x, micro_batches), batch)

        def add(total, part):
            return jax.tree.map(jnp.add, total, of_part(params, part)), None

        first = jax.tree.map(lambda x: x[0], parts_of)
        return jax.lax.scan(add, zeros_like(of_part, params, first), parts_of)[0]

    def step(state: TrainState, x0: Example):
        batch = corrupt_batch(process, mesh, config.seed, state.step, x0, config.data.infill_fraction)
        canvas = batch[2]
        grads, terms = (in_parts if micro_batches > 1 else of_part)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {f"train/{name}": value for name, value in terms.items()} | {
            "train/grad_norm": optax.global_norm(grads),
            "train/learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            FLOPS: flops.of_step(state.params, process.spec, canvas.length),
        }
        return TrainState(
            step=state.step + 1,
            params=params,
            ema=optim.update_ema(state.ema, params, config.optim.ema_decay, state.step),
            opt_state=opt_state,
        ), metrics

    abstract = jax.eval_shape(lambda: init_state(config, parts, optimizer, mesh))
    shardings = sharding.state_shardings(abstract, abstract.params, mesh)
    return jax.jit(
        step,
        in_shardings=(shardings, sharding.batch_sharding(mesh)),
        out_shardings=(shardings, sharding.replicated(mesh)),
        donate_argnums=0,
    )


def train(
    config: ml_collections.ConfigDict, workdir: str, init_from: str | None = None, profile: bool = False
) -> dict[str, Any]:
    """Trains until config.num_steps, resuming from the latest checkpoint in `workdir` if there is one, then runs the
    task's full evaluation on the test split. `profile` records some steps.

    Returns the evaluation. Raises ValueError for a config that does not fit the devices or the run in `workdir`, for
    a checkpoint that cannot be read, and when the loss is no longer finite.
    """
    config_lib.validate(config, jax.device_count())
    check_float32()
    is_main = jax.process_index() == 0
    directory = local_directory(workdir)
    check_resume(config, directory)
    if init_from is not None:
        read_config(local_directory(init_from))  # there must be a run, whether it is needed or not

    parts = config_lib.build(config)
    check_splits(parts.task)  # reads the data: what is wrong with them comes before anything is written
    notes = evals.notes(parts, "train")
    mesh = sharding.make_mesh(config_lib.mesh_shape(config, jax.device_count()))
    optimizer, _ = make_optimizer(config)
    state = init_state(config, parts, optimizer, mesh)
    with contextlib.ExitStack() as stack:
        if is_main:
            stack.enter_context(sole_writer(directory))
        checkpointer = stack.enter_context(
            contextlib.closing(Checkpointer(directory / CHECKPOINTS, keep=config.train.keep_checkpoints))
        )
        state = restore(checkpointer, state, init_from)
        start = int(state.step)
        if start > config.num_steps:
            raise ValueError(
                f"config.num_steps is {config.num_steps}, but the run in {workdir} is at step {start}; raise it, or "
                "use another workdir"
            )
        if is_main:
            write_config(config, directory)
            parts.task.save(directory)
        progress = stack.enter_context(contextlib.closing(Progress(config.num_steps, start, is_main=is_main)))
        writer = stack.enter_context(contextlib.closing(MetricsWriter(directory, start, is_main=is_main)))
        progress.note(describe(config, parts, state, mesh, start, workdir))
        if init_from is not None and start > 0:
            progress.note(f"{workdir} has a checkpoint: parameters come from there, not from {init_from}")
        for line in notes:
            progress.note(line)
        return fit(config, parts, mesh, state, checkpointer, writer, progress, directory, profile)


def fit(
    config: ml_collections.ConfigDict,
    parts: Parts,
    mesh,
    state: TrainState,
    checkpointer: Checkpointer,
    writer: MetricsWriter,
    progress: Progress,
    directory: pathlib.Path,
    profile: bool,
) -> dict[str, Any]:
    """The loop from `state.step` on, and the evaluation after it. Metrics are on disk before the checkpoint of their
    step is: what a killed run repeats is cut from metrics.jsonl, and nothing is missing."""
    report = Reporter(config, parts, mesh, writer, progress)
    profiler = Profiler(directory / PROFILE, progress) if profile else None
    batches = loader.train_batches(parts.task.source("train"), config.batch_size, config.seed)
    rows = loader.local_rows(config.batch_size, jax.process_index(), jax.process_count())
    sizes = config.eval
    evaluator = evals.Evaluator(parts, mesh, sizes.batch_size, sizes.num_times, sizes.num_samples)
    num_valid, num_test = (min(sizes[f"num_{name}"], len(parts.task.source(name))) for name in ("valid", "test"))
    packed_rows = num_packed_rows(config, parts, mesh, batches.batch)
    if packed_rows:
        progress.note(f"canvases are packed: {packed_rows} rows at a time for {config.batch_size} of them")
    train_step = make_train_step(config, parts, mesh, packed_rows)

    start = int(state.step)
    for step, batch in loader.prefetch(lambda i: batches.batch(i, rows), range(start, config.num_steps)):
        if profiler:
            profiler.before(step - start, state)
        x0 = sharding.put_batch(Example(**batch), mesh, config.batch_size)
        state, metrics = train_step(state, x0)
        report.saw(batch, metrics)
        report.flush()  # the last metrics, now that the device has work again
        step += 1
        if step % config.train.log_every == 0 or step == config.num_steps:
            report.add(step, metrics)
        if step % config.train.eval_every == 0:
            report.flush()
            results, samples = evaluator(state.ema, "valid", num_valid, config.seed)
            report.evaluation(step, results)
            evals.write_samples(directory / "samples" / f"step_{step:08d}.jsonl", samples)
        if step % config.train.checkpoint_every == 0 or step == config.num_steps:
            report.flush()
            check_finite(step, metrics)  # a step without a line of its own in the log
            check_finite_params(state)
            save(checkpointer, state)

    checkpointer.wait()
    if profiler:
        profiler.close()
    results, samples = evaluator(state.ema, "test", num_test, config.seed)
    evals.write_samples(directory / "samples" / "test.jsonl", samples)
    card = evals.card(parts, results, split="test", num=num_test, checkpoint=int(state.step), seed=config.seed)
    if jax.process_index() == 0:
        evals.write_card(directory / "eval.json", card)
        plot(directory)
    progress.note(evals.format_card(card))
    return card


def check_splits(task: Task) -> None:
    """Raises ValueError for a split without examples, which training would need at its end only."""
    for split in SPLITS:
        if not len(task.source(split)):
            raise ValueError(
                f"the {split} split of {task.name} has 0 examples: give more text, or files that are named train, "
                "valid and test"
            )


def local_directory(workdir: str) -> pathlib.Path:
    """Raises ValueError for a URL, which would silently become a directory of that name."""
    if "://" in workdir:
        raise ValueError(f"{workdir} is a URL: workdirs are local directories, or mounted ones")
    return pathlib.Path(workdir)


def check_float32() -> None:
    """Raises ValueError where JAX would make every new array float64."""
    if jnp.result_type(float) != jnp.float32:
        raise ValueError("jax_enable_x64 is on, but runs are float32: unset JAX_ENABLE_X64")


@contextlib.contextmanager
def sole_writer(directory: pathlib.Path):
    """Holds the lock of a workdir, which ends with the process. Raises ValueError if another process has it."""
    for path in (directory, directory / CHECKPOINTS):
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is not a directory; remove it, or use another workdir")
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process trains in {directory}; wait until it ends, or use another workdir"
            ) from None
        yield


def read_config(directory: pathlib.Path) -> ml_collections.ConfigDict:
    """The config of the run in a directory. Raises ValueError, naming the file, if there is none that can be read."""
    path = directory / CONFIG
    if not path.is_file():
        raise ValueError(
            f"no run in {directory}: {path} is missing; train one with python -m dilm_jax.main, or fix the path"
        )
    try:
        return config_lib.from_json(json.loads(path.read_text("utf-8")))
    except ValueError as error:  # also what json and the decoder raise
        raise ValueError(f"{path} cannot be read: {error}") from None


def write_config(config: ml_collections.ConfigDict, directory: pathlib.Path) -> None:
    """Whole or not at all: a kill must not leave half of what resuming reads."""
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / (CONFIG + ".tmp")
    temporary.write_text(config.to_json(indent=2) + "\n")
    temporary.replace(directory / CONFIG)


class Reporter:
    """Writes metrics one step late: reading them at once would wait for the device."""

    def __init__(self, config, parts: Parts, mesh, writer: MetricsWriter, progress: Progress):
        self._writer, self._progress = writer, progress
        self._batch_size = config.batch_size
        self._pending = None
        self._since, self._since_step = time.monotonic(), None
        self._tokens, self._flops = 0, []  # since the last step that was added
        columns = jnp.full(config.batch_size, parts.task.max_length + canvas_lib.NUM_SPECIAL_COLUMNS)
        self._padded_flops = float(flops.of_step(evals.abstract_params(parts, mesh), parts.process.spec, columns))
        peak, said = flops.peak(jax.local_devices()[0])
        self._peak = peak * jax.device_count()
        progress.note(f"MFU is of {peak / 1e12:.3g} TFLOP/s a device ({said})")

    def saw(self, batch, metrics) -> None:
        """Counts a step: the content tokens of this process's rows (all processes have about as many), and FLOPs, which
        it takes from the metrics."""
        self._tokens += int(batch["length"].sum()) * jax.process_count()
        self._flops.append(metrics.pop(FLOPS))

    def add(self, step: int, metrics) -> None:
        self._pending = step, metrics, self._tokens, self._flops
        self._tokens, self._flops = 0, []

    def flush(self) -> None:
        """Writes what is pending. Raises ValueError if the loss is not finite."""
        if self._pending is None:
            return
        (step, metrics, tokens, of_steps), self._pending = self._pending, None
        metrics = {name: float(value) for name, value in metrics.items()}
        check_finite(step, metrics)
        now = time.monotonic()
        if self._since_step is not None:
            seconds = now - self._since
            metrics["perf/examples_per_s"] = self._batch_size * (step - self._since_step) / seconds
            metrics["perf/tokens_per_s"] = tokens / seconds
            metrics["perf/mfu"] = sum(map(float, jax.device_get(of_steps))) / seconds / self._peak
            metrics["perf/mfu_padded"] = self._padded_flops * len(of_steps) / seconds / self._peak
        self._since, self._since_step = now, step
        self._writer.write(step, metrics)
        self._progress.update(step, metrics)

    def evaluation(self, step: int, results) -> None:
        self._writer.write(step, results)
        said = (f"{name} {value:.4g}" for name, value in results.items() if name.startswith("eval/"))
        self._progress.note(f"step {step}  " + "  ".join(said))
        self._since_step = None  # the time spent here is not training


class Profiler:
    """Records the steps of PROFILED, counted from the first of this process, in a directory that TensorBoard reads."""

    def __init__(self, directory: pathlib.Path, progress: Progress):
        self._directory, self._progress = directory, progress
        self._is_on = self._is_done = False

    def before(self, index: int, state: TrainState) -> None:
        """What is due before a step. Waits for the ones before it where it begins or ends."""
        if index == PROFILED.start:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._directory)
            self._is_on = True
        if index == PROFILED.stop:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Ends the record. Says so where the run was too short to begin one."""
        if self._is_on:
            jax.profiler.stop_trace()
            self._progress.note(f"profile in {self._directory}: tensorboard --logdir={self._directory}")
        elif not self._is_done:
            self._progress.note(f"--profile: fewer than {PROFILED.start} steps were left, nothing was recorded")
        self._is_on, self._is_done = False, True


def check_finite(step: int, metrics) -> None:
    """Raises ValueError if the loss or its gradient is not finite."""
    for name in ("train/loss", "train/grad_norm"):
        if not jnp.isfinite(metrics[name]):
            raise ValueError(
                f"{name} is {metrics[name]} at step {step}; lower config.optim.learning_rate, or resume from an "
                "earlier checkpoint"
            )


@jax.jit
def _all_finite(tree) -> jax.Array:
    return jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda x: jnp.isfinite(x).all(), tree), jnp.bool(True))


def check_finite_params(state: TrainState) -> None:
    """Raises ValueError rather than let a checkpoint hold parameters that the last update has made useless."""
    if not _all_finite((state.params, state.ema)):
        raise ValueError(
            f"the update to step {int(state.step)} made parameters that are not finite, which are not saved; lower "
            "config.optim.learning_rate and run again: it resumes from the checkpoint before"
        )


def save(checkpointer: Checkpointer, state: TrainState) -> None:
    step = int(state.step)
    if checkpointer.latest_step() != step:  # a run that was complete already has it
        checkpointer.save(step, progress={"step": step}, params=state.params, ema=state.ema, opt_state=state.opt_state)


def restore(checkpointer: Checkpointer, state: TrainState, init_from: str | None) -> TrainState:
    """The latest checkpoint of the run; without one, parameters of the run in `init_from`, or the fresh state."""
    step = checkpointer.latest_step()
    if step is not None:
        items = checkpointer.restore(step, params=state.params, ema=state.ema, opt_state=state.opt_state)
        return TrainState(
            step=jax.device_put(jnp.int32(items["progress"]["step"]), state.step.sharding),
            params=items["params"],
            ema=items["ema"],
            opt_state=items["opt_state"],
        )
    if init_from is None:
        return state
    other = Checkpointer(pathlib.Path(init_from) / CHECKPOINTS)
    ema = other.restore_item(other.latest_step(), "ema", state.ema)
    other.close()
    return dataclasses.replace(state, params=ema, ema=jax.tree.map(jnp.copy, ema))


def check_resume(config: ml_collections.ConfigDict, directory: pathlib.Path) -> None:
    """Prints what differs from the config of the run in `directory`, if it has a checkpoint to resume from. Raises
    ValueError if that makes it another run."""
    if not any(step.name.isdigit() for step in (directory / CHECKPOINTS).glob("*")):
        return
    before, now = map(config_lib.flatten, (read_config(directory), config))
    changed = {key: (before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)}
    for key in sorted(changed):
        old, new = changed[key]
        if key.split(".")[0] in config_lib.FIXED_ON_RESUME and key not in config_lib.FREE_ON_RESUME:
            raise ValueError(
                f"{directory} was trained with {key} = {old}, now {new}: that is another run; use another workdir, "
                "with --init_from to start from these parameters"
            )
        if jax.process_index() == 0:
            print(f"resuming with {key} = {new} (was {old})")


def describe(config, parts: Parts, state: TrainState, mesh, start: int, workdir: str) -> str:
    """The first line of a run."""
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return (
        f"process {jax.process_index()} of {jax.process_count()}: {jax.device_count()} {jax.devices()[0].platform} "
        f"devices, mesh {axes}; {parts.task.name}, {config.process.family}, {num_params:,} parameters; steps "
        f"{start} to {config.num_steps} of {config.batch_size} examples; {workdir}"
    )
