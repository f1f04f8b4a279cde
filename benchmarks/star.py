"""Trains star-graph configs over seeds and weightings, one run after the other, and prints a table.

    python -m benchmarks.star --config=configs/star_tiny_joint.py,configs/star_tiny_independent.py --seeds=0,1,2
    python -m benchmarks.star --config=configs/star_easy_joint.py:small --seeds=0 --minutes=20

Resumable: a run that is complete is read, not trained again. `--minutes` stops each run after so much wall-clock time
and reports its curve up to there. Columns: test exact match of a complete run, the first evaluation on the validation
split at or above 0.95, steps done, minutes of training.
"""

import json
import pathlib
import subprocess
import sys

from absl import app, flags

from dilm_jax import metrics

_CONFIG = flags.DEFINE_list("config", None, "Config files, each with an optional :variant.", required=True)
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds of the run and of the graphs.")
_WEIGHTINGS = flags.DEFINE_list(
    "weightings", None, "loss.weighting[+importance] to compare; as configured if not given."
)
_MINUTES = flags.DEFINE_float("minutes", None, "Stop each run after so many minutes.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/benchmarks", "Where the runs live.")
_JSON = flags.DEFINE_string("json", None, "Write the rows here too.")


def run(config: str, seed: str, weighting: str | None) -> dict:
    """Trains one run in a process of its own, unless it is complete, and reads it."""
    stem = pathlib.Path(config.split(":")[0]).stem + config[len(config.split(":")[0]) :].replace(":", "-")
    workdir = pathlib.Path(_WORKDIR.value) / f"{stem}-{weighting or 'default'}-{seed}"
    command = [sys.executable, "-m", "dilm_jax.main", f"--config={config}", f"--workdir={workdir}"]
    command += [f"--config.seed={seed}", f"--config.data.seed={seed}"]
    if weighting:
        name, _, importance = weighting.partition("+")
        command += [f"--config.loss.weighting={name}"]
        command += [f"--config.loss.time_sampling={'importance' if importance else 'uniform'}"]
    if not (workdir / "eval.json").is_file():
        try:
            subprocess.run(command, check=True, timeout=_MINUTES.value and 60 * _MINUTES.value)
        except subprocess.TimeoutExpired:
            print(f"{workdir}: stopped after {_MINUTES.value:g} minutes", file=sys.stderr)
    return {"config": stem, "weighting": weighting or "default", "seed": int(seed)} | read(workdir)


def read(workdir: pathlib.Path) -> dict:
    rows = metrics.read(workdir / metrics.FILE)
    curve = [(row["step"], row["eval/exact_match"]) for row in rows if "eval/exact_match" in row]
    card = workdir / "eval.json"
    return {
        "test_exact_match": json.loads(card.read_text())["eval/exact_match"] if card.is_file() else None,
        "step_at_0.95": next((step for step, value in curve if value >= 0.95), None),
        "steps": rows[-1]["step"],
        "minutes": round((rows[-1]["time"] - rows[0]["time"]) / 60, 1),
        "curve": curve,
    }


def main(argv: list[str]) -> None:
    del argv
    rows = [
        run(config, seed, weighting)
        for config in _CONFIG.value
        for weighting in _WEIGHTINGS.value or [None]
        for seed in _SEEDS.value
    ]
    columns = ("config", "weighting", "seed", "test_exact_match", "step_at_0.95", "steps", "minutes")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join("—" if row[name] is None else str(row[name]) for name in columns) + " |")
    if _MINUTES.value:
        for row in rows:
            print(f"{row['config']} seed {row['seed']}: " + ", ".join(f"{s}: {v:.2f}" for s, v in row["curve"]))
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
