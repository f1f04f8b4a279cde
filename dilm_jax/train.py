"""Training: one jitted, donated step over a mesh, and the loop around it.

Noise depends on (seed, step, example's place in the global batch) alone: not on hosts, devices, mesh or
micro-batches. Everything a step needs is in (state, batch of that step), so resuming is restoring the state.
"""

import contextlib
import dataclasses
import functools
import math
import sys
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
from dilm_jax import evals, flops, optim, schedules, sharding, watch
from dilm_jax import packing as packing_lib
from dilm_jax import workdir as workdir_lib
from dilm_jax.canvas import Example
from dilm_jax.checkpoint import Checkpointer
from dilm_jax.config import Parts
from dilm_jax.data import loader
from dilm_jax.data.task import SPLITS, Task
from dilm_jax.distributed import Stopped, StopRequest
from dilm_jax.metrics import MetricsWriter, Progress, plot
from dilm_jax.processes.base import Process
from dilm_jax.watch import FINITE, FLOPS, NotFinite

PACKING_TRIALS = 8  # batches that the number of packed rows is chosen by


@struct.dataclass
class TrainState:
    """All that a step changes. `params` and `ema` are the network's parameters by name, float32."""

    step: jax.Array
    params: Any
    ema: Any
    opt_state: Any
    finite: jax.Array  # False once the loss or the update of a step was not: that step and the next ones change nothing


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
            finite=jnp.bool(True),
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
    batches = (sharding.put_batch(Example(**make_batch(i, rows)), mesh, B) for i in range(PACKING_TRIALS))
    count = np.concatenate([jax.device_get(needed(i, batch)) for i, batch in enumerate(batches)])
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
        norms = {"train/grad_norm": optax.global_norm(grads), "train/param_norm": optax.global_norm(params)}
        metrics = {f"train/{name}": value for name, value in terms.items()} | norms
        metrics["train/learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
        after = TrainState(
            step=state.step + 1,
            params=params,
            ema=optim.update_ema(state.ema, params, config.optim.ema_decay, state.step),
            opt_state=opt_state,
            finite=state.finite & jnp.isfinite(jnp.stack([metrics["train/loss"], *norms.values()])).all(),
        )
        metrics |= {FINITE: after.finite, FLOPS: flops.of_step(state.params, process.spec, canvas.length)}
        kept = jax.tree.map(lambda new, old: jnp.where(after.finite, new, old), after, state)
        return kept.replace(finite=after.finite), metrics

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
) -> dict[str, Any] | None:
    """Trains until config.num_steps, resuming from the latest checkpoint in `workdir` if there is one, then runs the
    task's full evaluation on the test split. `profile` records some steps.

    Returns the evaluation; None if the run was told to stop (SIGTERM), and saved. Raises ValueError for a config that
    does not fit the devices or the run in `workdir`, for a checkpoint that cannot be read or written, and when the loss
    is no longer finite.
    """
    config_lib.validate(config, jax.device_count())
    check_float32()
    is_main = jax.process_index() == 0
    place = workdir_lib.opened(workdir)
    workdir_lib.check_resume(config, place)
    other = None if init_from is None else workdir_lib.opened(init_from)
    if other is not None:
        workdir_lib.read_config(other)  # there must be a run, whether it is needed or not

    parts = config_lib.build(config)
    check_splits(parts.task)  # reads the data: what is wrong with them comes before anything is written
    notes = evals.notes(parts, "train")
    mesh = sharding.make_mesh(config_lib.mesh_shape(config, jax.device_count()))
    optimizer, _ = make_optimizer(config)
    state = init_state(config, parts, optimizer, mesh)
    with contextlib.ExitStack() as stack:
        if is_main:
            stack.enter_context(workdir_lib.sole_writer(place.directory))
            stack.callback(place.push)  # however it ends
        checkpointer = stack.enter_context(contextlib.closing(make_checkpointer(config, place)))
        state, evaluation_due = restore(checkpointer, state, other)
        start = int(state.step)
        if start > config.num_steps:
            raise ValueError(
                f"config.num_steps is {config.num_steps}, but the run in {workdir} is at step {start}; raise it, or "
                "use another workdir"
            )
        if is_main:
            workdir_lib.write_config(config, place.directory)
            parts.task.save(place.directory)
        progress = stack.enter_context(contextlib.closing(Progress(config.num_steps, start, is_main=is_main)))
        writer = MetricsWriter(
            place.directory, start, evaluation_due=evaluation_due, wandb=config.train.wandb, is_main=is_main
        )
        stack.enter_context(contextlib.closing(writer))
        first_line = describe(config, parts, state, mesh, start, workdir)
        progress.note(first_line)
        if not is_main:
            print(first_line, file=sys.stderr)
        if init_from is not None and start > 0:
            progress.note(f"{workdir} has a checkpoint: parameters come from there, not from {init_from}")
        for line in notes:
            progress.note(line)
        return Fit(config, parts, mesh, state, evaluation_due, checkpointer, writer, progress, place)(profile)


class Fit:
    """The loop from `state.step` on, and the evaluation after it. Metrics are on disk before the checkpoint of their
    step is: what a killed run repeats is cut from metrics.jsonl, and nothing is missing."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        parts: Parts,
        mesh,
        state: TrainState,
        evaluation_due: bool,
        checkpointer: Checkpointer,
        writer: MetricsWriter,
        progress: Progress,
        place: workdir_lib.Workdir,
    ):
        self._config, self._parts, self._mesh = config, parts, mesh
        self._place, self._directory = place, place.directory
        self._state, self._evaluation_due = state, evaluation_due  # of its step
        self._results = (-1, {})  # of the last evaluation, with its step
        self._checkpointer, self._progress = checkpointer, progress
        heartbeat = watch.Heartbeat(self._directory / workdir_lib.HEARTBEAT, is_main=jax.process_index() == 0)
        self._report = watch.Reporter(config, parts, mesh, writer, progress, heartbeat)
        self._batches = loader.train_batches(parts.task.source("train"), config.batch_size, config.seed)
        sizes = config.eval
        self._evaluator = evals.Evaluator(parts, mesh, sizes.batch_size, sizes.num_times, sizes.num_samples)

    @property
    def _step(self) -> int:
        return int(self._state.step)

    def __call__(self, profile: bool) -> dict[str, Any] | None:
        try:
            with StopRequest() as stop:
                try:
                    self._train(stop, profile)
                    return self._test(stop)
                except Stopped:
                    self._save_and_say()
        except NotFinite as error:
            raise ValueError(self._keep_evidence(error)) from None
        return None

    def _train(self, stop: StopRequest, profile: bool) -> None:
        config, start = self._config, self._step
        profiler = watch.Profiler(self._directory / workdir_lib.PROFILE, self._progress) if profile else None
        packed_rows = num_packed_rows(config, self._parts, self._mesh, self._batches.batch)
        if packed_rows:
            self._progress.note(f"canvases are packed: {packed_rows} rows at a time for {config.batch_size} of them")
        train_step = make_train_step(config, self._parts, self._mesh, packed_rows)
        if self._evaluation_due:
            self._evaluate(stop)

        rows = loader.local_rows(config.batch_size, jax.process_index(), jax.process_count())
        for step, batch in loader.prefetch(lambda i: self._batches.batch(i, rows), range(start, config.num_steps)):
            if profiler:
                profiler.before(step - start, self._state)
            x0 = sharding.put_batch(Example(**batch), self._mesh, config.batch_size)
            self._state, metrics = train_step(self._state, x0)
            step += 1
            is_last = step == config.num_steps
            self._report.saw(step, batch, metrics, step % config.train.log_every == 0 or is_last)
            if step % config.train.eval_every == 0:
                self._evaluate(stop)
            if step % config.train.checkpoint_every == 0 or is_last:
                self._report.pause(step, "saving")
                self._save()
            stop.check()
        self._checkpointer.wait()
        if profiler:
            profiler.close()

    def _evaluate(self, stop: StopRequest) -> None:
        """The periodic evaluation."""
        num = min(self._config.eval.num_valid, len(self._parts.task.source("valid")))
        self._report.pause(self._step, "evaluating")
        self._evaluation_due = True  # until it is done
        results, samples = self._evaluator(self._state.ema, "valid", num, self._config.seed, stop.check)
        self._report.evaluation(self._step, results)
        if self._config.train.keep_best not in ("", *results):
            best, there = self._config.train.keep_best, ", ".join(results)
            raise ValueError(f"config.train.keep_best is {best!r}, but the evaluation has {there}")
        evals.write_samples(self._directory / workdir_lib.SAMPLES / f"step_{self._step:08d}.jsonl", samples)
        self._evaluation_due, self._results = False, (self._step, results)

    def _test(self, stop: StopRequest) -> dict[str, Any]:
        """The evaluation after training."""
        num, seed = min(self._config.eval.num_test, len(self._parts.task.source("test"))), self._config.seed
        self._report.pause(self._step, "testing")
        results, samples = self._evaluator(self._state.ema, "test", num, seed, stop.check)
        evals.write_samples(self._directory / workdir_lib.SAMPLES / "test.jsonl", samples)
        card = evals.card(self._parts, results, split="test", num=num, checkpoint=self._step, seed=seed)
        if jax.process_index() == 0:
            evals.write_card(self._directory / "eval.json", card)
            plot(self._directory)
        self._progress.note(evals.format_card(card))
        self._report.pause(self._step, "done")
        return card

    def _save(self) -> None:
        if jax.process_index() == 0:
            self._place.push()
        step, results = self._results
        save(self._checkpointer, self._state, self._evaluation_due, results if step == self._step else None)

    def _save_and_say(self) -> None:
        self._report.pause(self._step, "stopping")
        self._save()
        self._checkpointer.wait()
        self._progress.note(f"told to stop: saved at step {self._step}, from where the same command goes on")
        self._report.pause(self._step, "stopped")

    def _keep_evidence(self, error: NotFinite) -> str:
        """Saves the state before a step that is not finite, beside the batch and the key that make it so again, and
        says it in one line."""
        config, step = self._config, self._step
        self._save()
        self._checkpointer.wait()
        path = self._directory / workdir_lib.NOT_FINITE / f"step_{step:08d}.npz"
        if jax.process_index() == 0:
            path.parent.mkdir(exist_ok=True)
            key = jax.random.key_data(jax.random.fold_in(jax.random.key(config.seed), step))
            np.savez(path, key=np.asarray(key), **self._batches.batch(step))
            workdir_lib.write_json(path.with_suffix(".json"), {"step": step, "seed": config.seed} | error.metrics)
        values = ", ".join(f"{name} {error.metrics[name]:.4g}" for name in ("train/loss", "train/grad_norm"))
        return (
            f"step {error.step} is not finite ({values}) and changed nothing: the state before it is saved as step "
            f"{step}, its batch and key are in {path}; the same command repeats it, with a lower "
            "config.optim.learning_rate it goes on"
        )


def check_splits(task: Task) -> None:
    """Raises ValueError for a split without examples, which training would need at its end only."""
    for split in SPLITS:
        if not len(task.source(split)):
            raise ValueError(
                f"the {split} split of {task.name} has 0 examples: give more text, or files that are named train, "
                "valid and test"
            )


def check_float32() -> None:
    """Raises ValueError where JAX would make every new array float64."""
    if jnp.result_type(float) != jnp.float32:
        raise ValueError("jax_enable_x64 is on, but runs are float32: unset JAX_ENABLE_X64")


def make_checkpointer(config: ml_collections.ConfigDict, place: workdir_lib.Workdir) -> Checkpointer:
    return Checkpointer(
        place.checkpoints,
        keep=config.train.keep_checkpoints,
        every=config.train.keep_every or None,
        best=config.train.keep_best or None,
    )


def save(
    checkpointer: Checkpointer, state: TrainState, evaluation_due: bool = False, results: dict[str, float] | None = None
) -> None:
    """Starts to write a checkpoint. `evaluation_due`: the step's periodic evaluation is still to be made; `results` are
    those of it, if it was."""
    step = int(state.step)
    if checkpointer.latest_step() != step:  # a run that was complete already has it
        progress = {"step": step, "evaluation_due": evaluation_due}
        trees = {"params": state.params, "ema": state.ema, "opt_state": state.opt_state}
        checkpointer.save(step, progress=progress, results=results, **trees)


def restore(
    checkpointer: Checkpointer, state: TrainState, init_from: workdir_lib.Workdir | None
) -> tuple[TrainState, bool]:
    """The latest checkpoint of the run, and whether its evaluation is due; without one, parameters of the run in
    `init_from`, or the fresh state."""
    step = checkpointer.latest_step()
    if step is not None:
        items = checkpointer.restore(step, params=state.params, ema=state.ema, opt_state=state.opt_state)
        progress = items.pop("progress")
        step = jax.device_put(jnp.int32(progress["step"]), state.step.sharding)
        return dataclasses.replace(state, step=step, **items), progress.get("evaluation_due", False)
    if init_from is None:
        return state, False
    other = Checkpointer(init_from.checkpoints)
    ema = other.restore_item(other.latest_step(), "ema", state.ema)
    other.close()
    return dataclasses.replace(state, params=ema, ema=jax.tree.map(jnp.copy, ema)), False


def describe(config, parts: Parts, state: TrainState, mesh, start: int, workdir: str) -> str:
    """The first line of each process."""
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return (
        f"process {jax.process_index()} of {jax.process_count()}: {jax.local_device_count()} of {jax.device_count()} "
        f"{jax.devices()[0].platform} devices, mesh {axes}; {parts.task.name}, {config.process.family}, "
        f"{num_params:,} parameters; steps {start} to {config.num_steps} of {config.batch_size} examples; {workdir}"
    )
