"""Workdirs: buckets, what they refuse, and what is told when they cannot be written to."""

import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import children
import gcs
from dilm_jax import workdir as workdir_lib
from dilm_jax.checkpoint import Checkpointer

MAIN, EVALUATE = "dilm_jax.main", "dilm_jax.evaluate"
SMOKE = "--config=configs/star_tiny_joint.py:smoke"


def test_a_url_of_another_kind_is_refused():
    for url in ("s3://bucket/run", "http://host/run"):
        with pytest.raises(
            ValueError, match=f"^{url}: workdirs are directories, mounted ones too, or gs://BUCKET/PATH$"
        ):
            workdir_lib.opened(url)


def test_a_bucket_without_gcsfs_names_what_to_install(monkeypatch):
    monkeypatch.setattr(workdir_lib.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^gs://bucket/run needs gcsfs: pip install 'dilm_jax\[gcs\]'$"):
        workdir_lib.opened("gs://bucket/run")


@pytest.mark.parametrize("path, said", [("file/run", "Not a directory"), ("file", "not a directory; remove it")])
def test_a_workdir_that_cannot_be_made_is_told_in_one_line(tmp_path, cache, path, said):
    (tmp_path / "file").touch()
    result = children.command(MAIN, SMOKE, f"--workdir={tmp_path / path}", cache=cache).result()
    assert result.code == 2
    assert result.err.startswith("error: ") and said in result.err and str(tmp_path) in result.err
    assert result.err.count("\n") == 1


def set_variables(variables: dict[str, str]) -> None:
    os.environ.update(variables)


@pytest.mark.slow
def test_a_run_in_a_bucket_is_the_run_in_a_directory(tmp_path, cache):
    """Trained in two goes, evaluated, and its parameters taken by another run."""
    pytest.importorskip("gcsfs")
    with gcs.served() as (bucket, variables):
        there = functools.partial(set_variables, variables)

        def run(module, *argv):
            result = children.command(module, *argv, cache=cache, before=there).result()
            assert result.code == 0, result.err
            return result

        run(MAIN, SMOKE, "--workdir=gs://bucket/a/run", "--config.num_steps=2", "--config.optim.schedule=constant")
        run(MAIN, SMOKE, "--workdir=gs://bucket/a/run", "--config.optim.schedule=constant")
        run(MAIN, SMOKE, f"--workdir={tmp_path / 'run'}", "--config.optim.schedule=constant")
        rows = [json.loads(line) for line in bucket.objects["a/run/metrics.jsonl"][1].splitlines()]
        same = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        for row, other in zip(rows, same, strict=True):
            for key in row.keys() | other.keys():
                if key != "time" and not key.startswith("perf/"):
                    assert row[key] == other[key], (row["step"], key)
        evaluated = run(EVALUATE, "--workdir=gs://bucket/a/run", "--num=8").out
        alone = children.command(EVALUATE, f"--workdir={tmp_path / 'run'}", "--num=8", cache=cache).result().out
        assert evaluated == alone
        assert json.loads(bucket.objects["a/run/eval.json"][1])["n"] == 8
        assert "a/run/samples/test.jsonl" in bucket.objects and "a/run/lock" not in bucket.objects
        other = run(MAIN, SMOKE, "--workdir=gs://bucket/b", "--init_from=gs://bucket/a/run", "--config.num_steps=2")
        assert "steps 0 to 2" in other.err
        nowhere = children.command(EVALUATE, "--workdir=gs://bucket/nowhere", cache=cache, before=there).result()
        assert nowhere.code == 2 and "no run in gs://bucket/nowhere: gs://bucket/nowhere/config.json" in nowhere.err


# --- Which checkpoints are kept --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, kept",
    [
        ({}, [60, 70]),
        ({"every": 30}, [30, 60, 70]),
        ({"best": "eval/exact_match"}, [20, 60, 70]),
        ({"best": "eval/nelbo_nats_per_token"}, [50, 60, 70]),
        ({"best": "eval/exact_match", "every": 40}, [20, 40, 60, 70]),
    ],
)
def test_the_best_every_so_many_and_the_last_checkpoints_are_kept(tmp_path, options, kept):
    """Also across a restart."""
    good = {20: 0.9, 50: 0.1}  # exact match is best high, nats are best low
    for steps in ((10, 20, 30), (40, 50, 60, 70)):
        checkpointer = Checkpointer(tmp_path, keep=2, **options)
        for step in steps:
            value = good.get(step, 0.5)
            results = {"eval/exact_match": value, "eval/nelbo_nats_per_token": value}
            checkpointer.save(step, progress={"step": step}, results=results, params={"x": jnp.float32(step)})
        checkpointer.close()
    assert Checkpointer(tmp_path).all_steps() == kept
    for step in kept:
        abstract = {"x": jax.ShapeDtypeStruct((), jnp.float32)}
        assert np.asarray(Checkpointer(tmp_path).restore(step, params=abstract)["params"]["x"]) == step
