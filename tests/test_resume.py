"""Killed at any moment and started again by the same command, a run goes on as if nothing had happened."""

import functools
import json
import pathlib
import random
import re
import shutil
import signal
import time

import pytest

import children
from dilm_jax import metrics


def lines(workdir):
    """The lines of metrics.jsonl as text, without what a clock tells."""
    rows = map(json.loads, (workdir / metrics.FILE).read_text().splitlines())
    return [json.dumps({k: v for k, v in row.items() if k != "time" and not k.startswith("perf/")}) for row in rows]


def assert_killed(child):
    result = child.result()
    assert result.code == -signal.SIGKILL, result.err


def assert_same(workdir, reference):
    assert lines(workdir) == lines(reference)
    assert children.eval_card(workdir) == children.eval_card(reference)


def assert_completes_as(reference, family, workdir, cache):
    result = children.train_smoke(family, workdir, cache).result()
    assert result.code == 0, result.err
    assert_same(workdir, reference)


def test_killed_past_a_checkpoint_and_right_after_one(smoke_runs, tmp_path, cache):
    """Past step 10, whose later lines are cut, and right after step 20 was complete, where no line may be missing."""
    kills = (
        functools.partial(children.kill_after_line, 13),
        functools.partial(children.kill_after_checkpoint, 20),
        None,
    )
    results = [children.train_smoke("joint", tmp_path, cache, kill).result() for kill in kills]
    past, after, complete = results
    assert past.code == after.code == -signal.SIGKILL, past.err + after.err
    assert complete.code == 0, complete.err
    starts = [re.search(r"steps (\d+) to 30", result.err)[1] for result in results]
    assert starts == ["0", "10", "20"]
    assert_same(tmp_path, smoke_runs["joint"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["joint", "independent"])
def test_killed_while_checkpoints_are_written(smoke_runs, tmp_path, cache, family):
    for step in (10, 10, 20, 30):
        assert_killed(
            children.train_smoke(family, tmp_path, cache, functools.partial(children.kill_while_saving, step))
        )
    assert_completes_as(smoke_runs[family], family, tmp_path, cache)


@pytest.mark.slow
def test_a_complete_run_has_nothing_left_to_train(smoke_runs, tmp_path, cache):
    """It is evaluated again, and no line changes."""
    workdir = pathlib.Path(shutil.copytree(smoke_runs["joint"], tmp_path / "run"))
    assert_completes_as(smoke_runs["joint"], "joint", workdir, cache)


@pytest.mark.slow
def test_killed_at_random_moments(smoke_runs, tmp_path, cache):
    """Ten kills, each after the run has gone on a little; then it completes."""
    rng, file = random.Random(0), tmp_path / metrics.FILE

    def size(file):
        return file.stat().st_size if file.exists() else 0

    for _ in range(10):
        before = size(file)
        child = children.train_smoke("joint", tmp_path, cache)
        while child.running() and size(file) <= before:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.2))
        child.kill()
    assert_completes_as(smoke_runs["joint"], "joint", tmp_path, cache)
