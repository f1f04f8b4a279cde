"""Metrics of a run: metrics.jsonl (the record), TensorBoard events and curves.png (views of it), progress.

A line of metrics.jsonl is one JSON object: `step`, `time` (seconds since the epoch), then the metrics, e.g.
`train/loss` (nats per example), `eval/exact_match`, `perf/examples_per_s`. Only `time` and `perf/*` differ between
two runs of one config and seed.
"""

import json
import math
import os
import pathlib
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any, TextIO

FILE = "metrics.jsonl"
CURVES = "curves.png"


class MetricsWriter:
    """Appends to `workdir`/metrics.jsonl and to TensorBoard events in `workdir`/tensorboard.

    Args:
      workdir: created if missing.
      resume_step: the step that training goes on from. Lines after it, which a killed run wrote beyond its last
        checkpoint, are cut, as is a torn last line. 0 for a run that starts anew; −1 also cuts a line of step 0.
      evaluation_due: the evaluation of that step is still to be made; a line of it, which a killed run may have
        written, is cut, too.
      wandb: project of Weights & Biases that the metrics go to as well, none if empty.
      is_main: False on all processes but the first; then nothing is read or written.

    Raises:
      ValueError: if `wandb` is given and not installed.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        resume_step: int,
        *,
        evaluation_due: bool = False,
        wandb: str = "",
        is_main: bool = True,
    ):
        self._file = None
        if not is_main:
            return
        import tensorboardX

        directory = pathlib.Path(workdir)
        directory.mkdir(parents=True, exist_ok=True)
        _cut(directory / FILE, resume_step, evaluation_due)
        self._file = open(directory / FILE, "ab", buffering=0)  # noqa: SIM115 — closed by close()
        self._events = tensorboardX.SummaryWriter(
            str(directory / "tensorboard"), purge_step=resume_step + 1, flush_secs=30
        )
        self._wandb = _wandb_run(wandb, directory) if wandb else None

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line. Values are Python, NumPy or JAX scalars; a float that is not finite becomes null."""
        if self._file is None:
            return
        values = {key: _number(value) for key, value in metrics.items()}
        line = {"step": int(step), "time": time.time()}
        line |= {key: or_null(value) for key, value in values.items()}
        self._file.write((json.dumps(line, allow_nan=False) + "\n").encode())  # one write: never half a line
        for key, value in values.items():
            self._events.add_scalar(key, value, int(step))
        if self._wandb is not None:
            self._wandb.log(values, step=int(step))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._events.close()
            if self._wandb is not None:
                self._wandb.finish()
            self._file = None


class Progress:
    """Shows how far training is: a bar on a terminal, elsewhere a plain line at most every `every_s` seconds.

    Args:
      num_steps: the last step.
      start: the step that training goes on from.
      is_main: False on all processes but the first; then nothing is shown.
      stream: where; standard error unless given.
    """

    def __init__(
        self,
        num_steps: int,
        start: int = 0,
        *,
        is_main: bool = True,
        stream: TextIO | None = None,
        every_s: float = 10.0,
    ):
        self._num_steps, self._start, self._is_main, self._every_s = num_steps, start, is_main, every_s
        self._stream = stream or sys.stderr
        self._began = time.monotonic()
        self._last_line = -math.inf
        self._bar = None
        if is_main and self._stream.isatty():
            import tqdm

            self._bar = tqdm.tqdm(
                total=num_steps, initial=start, file=self._stream, unit="step", dynamic_ncols=True, smoothing=0.05
            )

    def update(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """`step` steps are done. `metrics`, where there are new ones, follow the step number in the order given."""
        if self._bar is not None:
            if metrics:
                self._bar.set_postfix_str(_summary(metrics), refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._is_main and metrics and self._is_due(step):
            self._last_line = time.monotonic()
            self.note(f"step {step}/{self._num_steps}  {_summary(metrics)}{self._left(step)}")

    def note(self, text: str) -> None:
        """A line of its own, e.g. an evaluation's result."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        elif self._is_main:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _is_due(self, step: int) -> bool:
        return time.monotonic() - self._last_line >= self._every_s or step == self._num_steps

    def _left(self, step: int) -> str:
        done = step - self._start
        if done <= 0 or step >= self._num_steps:
            return ""
        seconds = (time.monotonic() - self._began) * (self._num_steps - step) / done
        return f"  {seconds / 60:.0f} min left" if seconds >= 90 else f"  {seconds:.0f} s left"


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, in order; null (a value that was not finite) becomes nan. A torn last line, as a
    kill can leave, is skipped.

    Raises:
      ValueError: if the file is missing, or a line before the last is not JSON.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"no metrics at {path}: the file is missing; train first, or fix the path")
    return [{key: math.nan if value is None else value for key, value in row.items()} for _, row in _rows(path)]


def plot(workdir: str | os.PathLike) -> pathlib.Path:
    """Draws `workdir`/curves.png from its metrics.jsonl: losses, and evaluations, against the step.

    Returns the picture's path. Raises ValueError as `read`.
    """
    from matplotlib.figure import Figure  # not pyplot: no display and no global state

    rows = read(pathlib.Path(workdir) / FILE)
    curves: dict[str, tuple[list, list]] = {}
    for row in rows:
        for key in row.keys() - {"step", "time"}:
            steps, values = curves.setdefault(key, ([], []))
            steps.append(row["step"])
            values.append(row[key])
    losses = sorted(key for key in curves if "loss" in key)
    evals = sorted(key for key in curves if key.startswith("eval/") and key not in losses)
    shares = [key for key in evals if all(0 <= v <= 1 for v in curves[key][1] if math.isfinite(v))]
    others = [key for key in evals if key not in shares]
    panels = [
        (title, keys)
        for title, keys in (("loss", losses), ("evaluation", shares), ("evaluation, other", others))
        if keys
    ]

    figure = Figure(figsize=(5.5 * max(len(panels), 1), 3.6), layout="constrained")
    for i, (title, keys) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        for key in keys:
            steps, values = curves[key]
            axes.plot(steps, values, label=key, linewidth=1.2, marker="." if len(steps) < 30 else None)
        if title == "evaluation":
            axes.set_ylim(-0.02, 1.02)
        elif title == "loss" and all(v > 0 for key in keys for v in curves[key][1] if math.isfinite(v)):
            axes.set_yscale("log")
        axes.set(xlabel="step", title=title)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    path = pathlib.Path(workdir) / CURVES
    figure.savefig(path, dpi=120)
    return path


def or_null(value: Any) -> Any:
    """None, JSON's null, in place of a float that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> int | float:
    """A Python number. A float32 is widened exactly, so equal float32 values give equal text."""
    if isinstance(value, int):
        return int(value)
    number = value.item() if hasattr(value, "item") else float(value)
    return int(number) if isinstance(number, bool) else number


def _rows(path: pathlib.Path) -> list[tuple[bytes, dict]]:
    """The whole lines of a metrics.jsonl with what they say."""
    lines = path.read_bytes().splitlines(keepends=True)
    rows = []
    for i, line in enumerate(lines):
        if not line.endswith(b"\n"):  # only the last can be torn
            break
        try:
            rows.append((line, json.loads(line)))
        except ValueError as error:
            raise ValueError(f"{path}, line {i + 1} is not JSON ({error}); delete the line") from None
    return rows


def _wandb_run(project: str, directory: pathlib.Path) -> Any:
    """The run of Weights & Biases that belongs to a workdir: made once, and gone on with by each process after."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            "config.train.wandb is set, but wandb is not installed: pip install 'dilm_jax[wandb]', or leave it empty"
        ) from None
    file = directory / "wandb_id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    return wandb.init(project=project, name=directory.name, id=file.read_text(), resume="allow", dir=str(directory))


def _cut(path: pathlib.Path, last_step: int, evaluation_due: bool) -> None:
    """Drops the lines after `last_step`, and that of its evaluation if it is due: whole or not at all, however the
    process ends."""
    if not path.is_file():
        return

    def stays(row):
        is_evaluation = any(key.startswith("eval/") for key in row)
        return row["step"] < last_step or (row["step"] == last_step and not (evaluation_due and is_evaluation))

    kept = b"".join(line for line, row in _rows(path) if stays(row))
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(kept)
    os.replace(temporary, path)


def _summary(metrics: Mapping[str, Any]) -> str:
    """`train/loss 1.234  perf/examples_per_s 512`: names without their group."""
    return "  ".join(f"{key.split('/')[-1]} {_number(value):.4g}" for key, value in metrics.items())
