"""What is told of a run while it trains: metrics, how long steps take and on which host, spikes, profiles."""

import collections
import dataclasses
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dilm_jax import canvas as canvas_lib
from dilm_jax import evals, flops, workdir
from dilm_jax.config import Parts
from dilm_jax.metrics import MetricsWriter, Progress

FLOPS = "perf/flops"  # of a step, among its metrics; the log has what they come to
FINITE = "train/finite"  # whether it, and all before it, made a finite update; the log has none that did not
PROFILED = range(10, 15)  # steps after the start that --profile records
HEARTBEAT_S = 5.0  # at least, between two heartbeats of one kind


class NotFinite(Exception):
    """The loss or the update of `step` (from 1) is not finite: the state stayed what it was before it."""

    def __init__(self, step: int, metrics: dict[str, float]):
        self.step, self.metrics = step, metrics


@dataclasses.dataclass
class Step:
    """One that was dispatched."""

    number: int  # from 1
    metrics: dict[str, Any]
    tokens: int  # of its texts
    is_logged: bool


class Reporter:
    """Tells of each step when the next one was dispatched: to read its metrics at once would leave the device without
    work."""

    def __init__(self, config, parts: Parts, mesh, writer: MetricsWriter, progress: Progress, heartbeat: "Heartbeat"):
        self._writer, self._progress, self._heartbeat = writer, progress, heartbeat
        self._batch_size = config.batch_size
        self._last: Step | None = None
        self._in_flight: Any = None
        self._spikes = Spikes()
        self._timed, self._seconds, self._host_seconds = [], [], []  # since the last line, but after a pause
        self._ready = self._left = None  # when the step before was, and when `saw` ended
        columns = jnp.full(config.batch_size, parts.task.max_length + canvas_lib.NUM_SPECIAL_COLUMNS)
        self._padded_flops = float(flops.of_step(evals.abstract_params(parts, mesh), parts.process.spec, columns))
        peak, said = flops.peak(jax.local_devices()[0])
        self._peak = peak * jax.device_count()
        progress.note(f"MFU is of {peak / 1e12:.3g} TFLOP/s a device ({said})")

    def saw(self, number: int, batch, metrics, is_logged: bool) -> None:
        """A step was dispatched: tells of the one before it. Raises NotFinite, of that one."""
        if self._left is not None:
            self._host_seconds.append(time.monotonic() - self._left)
        self._in_flight = metrics
        self.flush()
        tokens = int(batch["length"].sum()) * jax.process_count()  # other processes' rows have about as many
        self._last = Step(number, metrics, tokens, is_logged)
        self._heartbeat.beat(number, "training")
        self._left = time.monotonic()

    def flush(self) -> None:
        """Waits for the last step and tells of it. Raises NotFinite."""
        if self._last is None:
            return
        step, self._last = self._last, None
        metrics = jax.block_until_ready(step.metrics)
        now = time.monotonic()
        if self._ready is not None:
            self._seconds.append(now - self._ready)
            self._timed.append(step)
        self._ready = now
        if not metrics[FINITE]:
            raise NotFinite(step.number, {name: float(value) for name, value in metrics.items()})
        if step.is_logged:
            self._write(step.number, {name: float(metrics[name]) for name in metrics if name.startswith("train/")})

    def pause(self, step: int, doing: str) -> None:
        """What follows is not training. Raises NotFinite, of the last step, which has no time: none came after it."""
        self._ready = None
        self.flush()
        self._ready = self._left = None
        self._heartbeat.beat(step, doing)

    def evaluation(self, step: int, results) -> None:
        self._writer.write(step, results)
        said = (f"{name} {value:.4g}" for name, value in results.items() if name.startswith("eval/"))
        self._progress.note(f"step {step}  " + "  ".join(said))

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        del metrics[FINITE]
        if spike := self._spikes.told(metrics["train/loss"]):
            self._progress.note(f"step {step}: {spike}")
        metrics |= self._perf()
        self._writer.write(step, metrics)
        self._progress.update(step, metrics)

    def _perf(self) -> dict[str, float]:
        """Speed of the steps since the last line."""
        steps, seconds, host_seconds = self._timed, self._seconds, self._host_seconds
        self._timed, self._seconds, self._host_seconds = [], [], []
        if not steps:
            return {}
        total = sum(seconds)
        flops_done = sum(float(step.metrics[FLOPS]) for step in steps)
        if jax.process_count() > 1:
            jax.block_until_ready(self._in_flight)  # or its collectives and the next ones may cross
        of_hosts = multihost_utils.process_allgather(np.float32(np.mean(host_seconds or 0.0))).reshape(-1)
        return {
            "perf/examples_per_s": self._batch_size * len(steps) / total,
            "perf/tokens_per_s": sum(step.tokens for step in steps) / total,
            "perf/mfu": flops_done / total / self._peak,
            "perf/mfu_padded": self._padded_flops * len(steps) / total / self._peak,
            **{f"perf/step_s_p{q}": float(np.percentile(seconds, q)) for q in (50, 95, 100)},
            "perf/host_s": float(of_hosts.mean()),
            "perf/host_s_max": float(of_hosts.max()),
            "perf/slowest_host": int(of_hosts.argmax()),
        }


class Spikes:
    """Losses of the log that stand far above those before them."""

    NUM, AT_LEAST, DEVIATIONS = 100, 20, 6.0

    def __init__(self):
        self._losses = collections.deque(maxlen=self.NUM)

    def told(self, loss: float) -> str | None:
        """One line if it is such a one."""
        before = np.array(self._losses)
        self._losses.append(loss)
        if len(before) < self.AT_LEAST or loss <= before.mean() + self.DEVIATIONS * before.std():
            return None
        usual = f"{before.mean():.4g} ± {before.std():.2g}"
        return f"train/loss {loss:.4g} is a spike: the {len(before)} logged before it are {usual}"


class Heartbeat:
    """A file that says when the run last did what: for those who watch whether it hangs. Only one process has one."""

    def __init__(self, path: pathlib.Path, *, is_main: bool = True):
        self._path = path if is_main else None
        self._doing, self._at = "", -math.inf

    def beat(self, step: int, doing: str) -> None:
        """Writes {time, step, doing}, time in seconds since the epoch; not again what was just written."""
        now = time.monotonic()
        if self._path is not None and (doing != self._doing or now - self._at >= HEARTBEAT_S):
            self._doing, self._at = doing, now
            workdir.write_json(self._path, {"time": time.time(), "step": step, "doing": doing})


class Profiler:
    """Records the steps of PROFILED, counted from the first of this process, in a directory that TensorBoard reads."""

    def __init__(self, directory: pathlib.Path, progress: Progress):
        self._directory, self._progress = directory, progress
        self._is_on = self._is_done = False

    def before(self, index: int, state) -> None:
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
