import io
import json
import math
import re
import subprocess
import sys
import textwrap
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from dilm_jax import metrics, watch


def _write(workdir, steps, resume_step=-1, extra=None):
    writer = metrics.MetricsWriter(workdir, resume_step)
    for step in steps:
        writer.write(step, {"train/loss": 1.0 / (step + 1), **(extra or {})})
    writer.close()


def _steps(workdir):
    return [row["step"] for row in metrics.read(workdir / metrics.FILE)]


def test_a_line_is_step_time_and_python_numbers(tmp_path):
    values = {"a": jnp.float32(0.1), "b": np.float64(0.1), "c": np.int32(3), "d": True, "e": jnp.bfloat16(1.5), "f": 2}
    writer = metrics.MetricsWriter(tmp_path / "new" / "run", -1)
    writer.write(7, values)
    writer.close()
    (line,) = (tmp_path / "new" / "run" / metrics.FILE).read_text().splitlines()
    assert list(json.loads(line)) == ["step", "time", *values]
    assert line.partition('"a"')[2] == ': 0.10000000149011612, "b": 0.1, "c": 3, "d": 1, "e": 1.5, "f": 2}'


def test_equal_float32_give_equal_text_and_come_back_exactly(tmp_path):
    values = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    writer = metrics.MetricsWriter(tmp_path, -1)
    for step, value in enumerate(values):
        writer.write(step, {"numpy": value, "jax": jnp.asarray(value), "python": float(value)})
    writer.close()
    for row, value in zip(metrics.read(tmp_path / metrics.FILE), values, strict=True):
        assert row["numpy"] == row["jax"] == row["python"] == value


def test_what_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path):
    _write(tmp_path, [1], extra={"bad": math.inf, "worse": jnp.float32(jnp.nan)})
    assert '"bad": null, "worse": null' in (tmp_path / metrics.FILE).read_text()
    (row,) = metrics.read(tmp_path / metrics.FILE)
    assert math.isnan(row["bad"]) and math.isnan(row["worse"])


def test_resuming_cuts_the_lines_after_the_checkpoint_before_the_first_new_one(tmp_path):
    _write(tmp_path, range(1, 11))
    before = (tmp_path / metrics.FILE).read_bytes().splitlines()
    writer = metrics.MetricsWriter(tmp_path, resume_step=6)
    assert (tmp_path / metrics.FILE).read_bytes().splitlines() == before[:6]
    writer.write(7, {"train/loss": 0.0})
    writer.close()
    assert _steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


def test_starting_anew_keeps_no_line(tmp_path):
    _write(tmp_path, range(4))
    _write(tmp_path, [0, 1], resume_step=-1)
    assert _steps(tmp_path) == [0, 1]


def test_a_torn_last_line_is_skipped_and_cut(tmp_path):
    _write(tmp_path, [1, 2])
    with open(tmp_path / metrics.FILE, "ab") as file:
        file.write(b'{"step": 2, "time": 17')
    assert _steps(tmp_path) == [1, 2]
    _write(tmp_path, [3], resume_step=2)
    assert _steps(tmp_path) == [1, 2, 3]


def test_a_broken_line_and_a_missing_file_are_named(tmp_path):
    (tmp_path / metrics.FILE).write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2 is not JSON"):
        metrics.read(tmp_path / metrics.FILE)
    with pytest.raises(ValueError, match="no metrics at .*elsewhere"):
        metrics.read(tmp_path / "elsewhere")


def test_lines_outlive_a_kill(tmp_path):
    script = textwrap.dedent("""
        import os, signal, sys
        from dilm_jax.metrics import MetricsWriter
        writer = MetricsWriter(sys.argv[1], -1)
        for step in range(100):
            writer.write(step, {"train/loss": 0.5})
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert subprocess.run([sys.executable, "-c", script, tmp_path], check=False).returncode == -9
    assert _steps(tmp_path) == list(range(100))


def test_tensorboard_events_carry_the_values(tmp_path):
    _write(tmp_path, [1, 2])
    (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    assert events.read_bytes().count(b"train/loss") == 2


def test_other_processes_write_nothing(tmp_path):
    writer = metrics.MetricsWriter(tmp_path / "run", -1, is_main=False)
    writer.write(1, {"train/loss": 1.0})
    writer.close()
    assert not (tmp_path / "run").exists()


def test_plot_draws_curves(tmp_path):
    _write(tmp_path, range(1, 6), extra={"eval/exact_match": 0.5, "eval/nfe": 20.0, "perf/examples_per_s": 9.0})
    path = metrics.plot(tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


def test_plot_of_a_run_without_a_line_is_an_empty_picture(tmp_path):
    _write(tmp_path, [])
    assert metrics.plot(tmp_path).is_file()


def test_a_log_gets_plain_lines_at_most_one_an_interval_and_the_last():
    stream = io.StringIO()
    progress = metrics.Progress(100, start=50, stream=stream, every_s=60)
    for step in range(51, 101):
        progress.update(step, {"train/loss": jnp.float32(1.25), "perf/examples_per_s": 512.0})
    progress.note("eval  exact_match 1")
    progress.close()
    first, last, note = stream.getvalue().splitlines()
    assert first.startswith("step 51/100  loss 1.25  examples_per_s 512  ") and first.endswith(" left")
    assert last == "step 100/100  loss 1.25  examples_per_s 512"
    assert note == "eval  exact_match 1"


def test_a_terminal_gets_a_bar():
    stream = io.StringIO()
    stream.isatty = lambda: True
    progress = metrics.Progress(4, stream=stream)
    for step in range(1, 5):
        progress.update(step, {"train/loss": 0.5})
    progress.note("a line")
    progress.close()
    assert "4/4" in stream.getvalue() and "loss 0.5" in stream.getvalue() and "a line\n" in stream.getvalue()


def test_other_processes_show_nothing():
    stream = io.StringIO()
    progress = metrics.Progress(1, stream=stream, is_main=False)
    progress.update(1, {"train/loss": 0.5})
    progress.note("a line")
    progress.close()
    assert stream.getvalue() == ""


# --- Watching --------------------------------------------------------------------------------------------------------


def test_weights_and_biases_gets_the_same_numbers_and_one_run_a_workdir(tmp_path, monkeypatch):
    runs = []

    class Run:
        def __init__(self, **options):
            self.options, self.logged, self.finished = options, [], False
            runs.append(self)

        def log(self, values, step):
            self.logged.append((step, values))

        def finish(self):
            self.finished = True

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=Run))
    for resume_step in (-1, 1):
        writer = metrics.MetricsWriter(tmp_path / "run", resume_step, wandb="star graphs")
        writer.write(resume_step + 1, {"train/loss": np.float32(0.5)})
        writer.close()
    assert [run.logged for run in runs] == [[(0, {"train/loss": 0.5})], [(2, {"train/loss": 0.5})]]
    assert all(run.finished and run.options["project"] == "star graphs" for run in runs)
    assert runs[0].options["id"] == runs[1].options["id"] and runs[0].options["resume"] == "allow"


def test_weights_and_biases_that_is_missing_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"wandb is not installed: pip install 'dilm_jax\[wandb\]'"):
        metrics.MetricsWriter(tmp_path, -1, wandb="project")


def test_a_loss_far_above_those_before_it_is_told():
    spikes = watch.Spikes()
    losses = np.random.default_rng(0).normal(5, 0.1, 200)
    assert not any(map(spikes.told, losses))
    assert re.fullmatch(r"train/loss 9 is a spike: the 100 logged before it are [45]\.\S+ ± 0\.\S+", spikes.told(9.0))
    assert watch.Spikes().told(1e9) is None  # nothing to compare with


def test_a_heartbeat_says_what_the_run_last_did(tmp_path):
    path = tmp_path / "heartbeat.json"
    heartbeat = watch.Heartbeat(path)

    def beaten(step, doing):
        heartbeat.beat(step, doing)
        said = json.loads(path.read_text())
        assert abs(time.time() - said.pop("time")) < 5
        return said

    assert beaten(3, "training") == {"step": 3, "doing": "training"}
    assert beaten(4, "training") == {"step": 3, "doing": "training"}  # too soon
    assert beaten(4, "evaluating") == {"step": 4, "doing": "evaluating"}
    watch.Heartbeat(tmp_path / "none", is_main=False).beat(1, "training")
    assert not (tmp_path / "none").exists()


class Clock:
    """Time that passes where it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now)


def test_the_speed_of_steps_is_that_between_their_ends(monkeypatch, tmp_path):
    """Of the steps since the last line, but the first after a pause; the host's own time beside it."""
    made, parts, mesh, _ = tiny.world("joint")
    lines, clock = [], Clock(monkeypatch)
    writer = types.SimpleNamespace(write=lambda step, values: lines.append((step, values)))
    progress = types.SimpleNamespace(note=lambda text: None, update=lambda step, values: None)
    heartbeat = watch.Heartbeat(tmp_path / "heartbeat.json")
    report = watch.Reporter(made, parts, mesh, writer, progress, heartbeat)
    took = {}

    def ready(metrics):
        clock.now += took.pop(metrics["train/step"])
        return metrics

    monkeypatch.setattr(watch.jax, "block_until_ready", ready)
    batch = {"length": np.full(made.batch_size, 3)}
    seconds = [50.0, 1.0, 2.0, 3.0, 4.0, 90.0, 1.0]  # the first compiles
    for i, s in enumerate(seconds):
        took[i] = s
        clock.now += 0.25  # loading
        if i == 5:
            report.pause(i, "evaluating")
            clock.now += 1000.0
        metrics = {"train/loss": 1.0, "train/step": i, watch.FINITE: True, watch.FLOPS: 2e9}
        report.saw(i + 1, batch, metrics, is_logged=i in (3, 6))
    report.flush()
    (step, first), (last_step, last) = lines
    assert (step, last_step) == (4, 7) and watch.FINITE not in first
    between = [1.25, 2.25, 3.25]
    assert first["perf/examples_per_s"] == pytest.approx(3 * made.batch_size / sum(between))
    assert first["perf/tokens_per_s"] == pytest.approx(9 * made.batch_size / sum(between))
    assert [first[f"perf/step_s_p{q}"] for q in (50, 95, 100)] == pytest.approx(np.percentile(between, [50, 95, 100]))
    assert first["perf/host_s"] == first["perf/host_s_max"] == pytest.approx(0.25)
    assert last["perf/step_s_p100"] == pytest.approx(1.0)


def test_an_evaluation_that_is_due_has_no_line_yet(tmp_path):
    """A run that was stopped within the evaluation of step 2, resumed, and killed after it."""
    writer = metrics.MetricsWriter(tmp_path, -1)
    for step, values in ((1, {"train/loss": 1.0}), (2, {"train/loss": 2.0}), (2, {"eval/nfe": 3.0}), (3, {})):
        writer.write(step, values)
    writer.close()
    for due, left in ((False, [1, 2, 2]), (True, [1, 2])):
        metrics.MetricsWriter(tmp_path, 2, evaluation_due=due).close()
        assert [row["step"] for row in metrics.read(tmp_path / metrics.FILE)] == left
    assert "train/loss" in metrics.read(tmp_path / metrics.FILE)[-1]
