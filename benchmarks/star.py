"""Trains star-graph configs over seeds and weightings, one run after the other, and prints a table.

    python -m benchmarks.star --config=configs/star_tiny_joint.py,configs/star_tiny_independent.py --seeds=0,1,2
    python -m benchmarks.star --config=configs/star_easy_joint.py:small --seeds=0 --cpu_minutes=20

Resumable: a run that is complete is read, not trained again. `--cpu_minutes` stops each run after so much time on CPUs,
summed over cores and over calls of this script, and reports its curve up to there. Columns: test exact match of a
complete run, the first evaluation on the validation split at or above 0.95, steps done, minutes of training.
"""

import json
import pathlib
import sys

from absl import flags

from benchmarks.common import run_timed
from dilm_jax import cli, metrics

_CONFIG = flags.DEFINE_list("config", None, "Config files, each with an optional :variant.", required=True)
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds of the run and of the graphs.")
_WEIGHTINGS = flags.DEFINE_list(
    "weightings", None, "loss.weighting[+importance] to compare; as configured if not given."
)
_CPU_MINUTES = flags.DEFINE_integer("cpu_minutes", None, "Stop each run after so many minutes on CPUs.")
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
        run_timed(command, workdir, _CPU_MINUTES.value)
    return {"config": stem, "weighting": weighting or "default", "seed": int(seed)} | read(workdir)


def read(workdir: pathlib.Path) -> dict:
    rows = metrics.read(workdir / metrics.FILE)
    curve = [(row["step"], row["eval/exact_match"]) for row in rows if "eval/exact_match" in row]
    return {
        "test_exact_match": exact_match(workdir),
        "step_at_0.95": next((step for step, value in curve if value >= 0.95), None),
        "steps": rows[-1]["step"],
        "minutes": round((rows[-1]["time"] - rows[0]["time"]) / 60, 1),
        "curve": curve,
    }


def exact_match(workdir: pathlib.Path) -> float | None:
    """From eval.json; None without one. Raises ValueError unless it is as training ends with it: on the config's
    eval.num_test examples of the test split (all of them unless overridden), with its sampler, at its last step."""
    path = workdir / "eval.json"
    if not path.is_file():
        return None
    card, config = json.loads(path.read_text()), json.loads((workdir / "config.json").read_text())
    found = card["split"], card["n"], card["sampler"].split(",")[0], card["checkpoint"]
    wanted = "test", config["eval"]["num_test"], config["sampling"]["sampler"], config["num_steps"]
    if found != wanted:
        raise ValueError(
            f"{path} has split, n, sampler, checkpoint {found}, not {wanted}: it is of another evaluation; delete it "
            "and run this again"
        )
    return card["eval/exact_match"]


def main() -> None:
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
    if _CPU_MINUTES.value:
        for row in rows:
            print(f"{row['config']} seed {row['seed']}: " + ", ".join(f"{s}: {v:.2f}" for s, v in row["curve"]))
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)
