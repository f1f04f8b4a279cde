"""The paper's tables, ours beside them: every family on one task, alike in parameters, data and their order, steps.

    python -m benchmarks.table --task=star_tiny --seeds=0,1,2
    python -m benchmarks.table --task=star_easy --families=arm,joint --budget=20000       # one GPU: minutes
    python -m benchmarks.table --task=text --judge=HuggingFaceTB/SmolLM2-135M

Each run is one of `python -m dilm_jax.main`, with the family's config: loss, optimizer and sampler are its own;
batches, steps, layers and width those of all. Families that are not told the time, or have no length head, get a wider
MLP, so that all have the parameters of DILM-S. Resumable: a run that is complete is read, not trained again; families
may be shared out over calls. Prints Markdown: figures of the test split, mean ± standard deviation over seeds. The
minutes are those of training and evaluation on CPUs, summed over cores and over calls.
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
from absl import flags
from flax import nnx

from benchmarks.common import load_config, make_tokenizer, print_row, run_timed, write_json
from dilm_jax import cli, evals
from dilm_jax import config as config_lib
from dilm_jax.judge import PLAIN, Judge
from dilm_jax.processes.registry import PROCESSES

_TASK = flags.DEFINE_string("task", None, "star_tiny, star_cross, star_easy, … or text.", required=True)
_FAMILIES = flags.DEFINE_list("families", None, "Of the registry; all unless given.")
_BUDGET = flags.DEFINE_integer("budget", None, "Training steps of each run; the task's unless given.", lower_bound=1)
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds of the runs and of the graphs.")
_VARIANT = flags.DEFINE_string("variant", None, "Of the configs; the task's unless given.")
_DATA = flags.DEFINE_string("data", "benchmarks/data/sotu.*.txt.gz", "The texts of --task=text: a data.path.")
_JUDGE = flags.DEFINE_string("judge", None, "A causal language model that scores texts.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/table", "Where the runs live.")
_JSON = flags.DEFINE_string("json", None, "Write the cards here too.")

REFERENCE = "joint"  # the family whose parameters all have
STAR = {
    "exact match": "eval/exact_match",
    "token accuracy": "eval/token_accuracy",
    "nats/token": "eval/nelbo_nats_per_token",
    "calls": "eval/nfe",
}
TEXT = {
    "bits/byte": "eval/nelbo_bits_per_byte",
    "judge NLL": "eval/judge_nll",
    "entropy": "eval/entropy",
    "tokens": "eval/length_mean",
    "KS of lengths": "eval/length_ks",
    "calls": "eval/nfe",
}
LITTLE = {
    "batch_size": 128,
    "model.num_layers": 3,
    "model.width": 64,
    "model.mlp_width": 256,
    "model.cond_width": 64,
    "optim.warmup_steps": 200,
    "optim.ema_decay": 0.995,
    "eval.batch_size": 500,
    "eval.num_test": 1000,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and how the paper did.

    Attributes:
      config: of configs/<config>_<family>.py.
      columns: of the table, by the key of the card.
      of_text: not of graphs.
      variant, num_steps: unless flags say otherwise; None: the config's.
      overrides: of keys of the config, for all families.
      of_family: overrides for one.
      published: by family, of the paper's `of`: exact match in percent, or NLL/entropy/length.
    """

    config: str
    columns: Mapping[str, str]
    of_text: bool = False
    variant: str | None = None
    num_steps: int | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    of_family: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    of: str = "the paper"
    published: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _published(*values: str) -> dict[str, str]:
    return dict(zip(("arm", "mdm", "ilm", "joint", "independent"), values, strict=True))


MEDIUM = _published("75.0", "36.5", "100", "100", "98.6")
TASKS = {
    "star_tiny": Task(config="star_tiny", columns=STAR),
    "star_cross": Task(
        config="star_medium",
        columns=STAR,
        variant="small",
        num_steps=3_000,
        overrides={"data.difficulty": "cross", "optim.learning_rate": 2e-3, "train.eval_every": 1_000} | LITTLE,
        of="the paper, star_medium",
        published=MEDIUM,
    ),
    "star_easy": Task(
        config="star_easy",
        columns=STAR,
        variant="small",
        num_steps=900,
        overrides={"optim.warmup_steps": 100, "optim.ema_decay": 0.99, "eval.num_test": 1000},
        published=_published("32.3", "100", "100", "100", "100"),
    ),
    "star_medium": Task(
        config="star_medium",
        columns=STAR,
        variant="small",
        published=MEDIUM,
    ),
    "star_hard": Task(
        config="star_hard",
        columns=STAR,
        variant="small",
        published=_published("23.0", "21.0", "99.1", "99.3", "95.1"),
    ),
    "text": Task(
        config="text",
        columns=TEXT,
        of_text=True,
        num_steps=800,
        overrides={
            "data.max_length": 126,
            "model.num_layers": 3,
            "optim.warmup_steps": 100,
            "optim.ema_decay": 0.99,
            "train.eval_every": 1_000_000,
            "eval.num_test": 500,
        },
        of_family={  # what 45 minutes of each had shown to be best (RESULTS.md)
            "joint": {
                "process.schedule.name": "constant",
                "process.schedule.sigma_min": 170.0,
                "process.schedule.sigma_max": 170.0,
                "loss.weighting": "elbo",
                "optim.clip_norm": 100.0,
            },
            "independent": {"process.schedule.sigma_min": 1.0, "process.schedule.sigma_max": 40.0},
            "flexmdm": {"sampling.num_steps": 128},
        },
        of="the paper, LM1B: judge NLL, entropy, tokens",
        published=_published("3.94, 3.12, 30", "4.81, 3.70, 85", "4.67, 2.80, 21", "4.65, 2.87, 30", "4.76, 2.99, 48"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of a family."""

    workdir: pathlib.Path
    config_file: str  # with its variant
    overrides: Mapping[str, Any]
    num_parameters: int

    def card(self) -> dict[str, Any]:
        """Trains and evaluates it unless that is done."""
        changed = [f"--config.{key}={value}" for key, value in self.overrides.items()]
        main = [sys.executable, "-m", "dilm_jax.main", f"--config={self.config_file}", f"--workdir={self.workdir}"]
        if not self._read():
            run_timed([*main, *changed], self.workdir)
        spent = self.workdir / "cpu_seconds"
        minutes = float(spent.read_text()) / 60 if spent.is_file() else None
        judged = self._judged(_JUDGE.value) if _JUDGE.value else {}
        return self._read() | judged | {"parameters": self.num_parameters, "minutes": minutes}

    def _read(self) -> dict[str, Any]:
        """eval.json; empty before training is complete."""
        path = self.workdir / "eval.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def _judged(self, name: str) -> dict[str, Any]:
        """What a judge says of the samples that ended training, beside the data."""
        path = self.workdir / "judged.json"
        said = json.loads(path.read_text()) if path.is_file() else {}
        if said.get("judged_by") != name:
            samples = map(json.loads, (self.workdir / "samples" / "test.jsonl").read_text().splitlines())
            texts, generated = zip(*((row["answer"], row["generated"]) for row in samples), strict=True)
            said = evals.judged(_scorer(name), list(texts), list(generated)) | {"judged_by": name}
            path.write_text(json.dumps(said))
        return said


def plan(family: str, seed: int) -> Run:
    """The run of a family, with the MLP that its parameters need."""
    task, root = TASKS[_TASK.value], pathlib.Path(_WORKDIR.value)
    variant = _VARIANT.value or task.variant
    suffix = f":{variant}" if variant else ""
    if task.of_text:
        shared = dict(task.overrides) | {"data.path": _DATA.value, "data.tokenizer": str(_tokenizer(root / "pieces"))}
    else:
        shared = dict(task.overrides) | {"data.seed": seed}

    def made(family: str) -> tuple[str, dict[str, Any], ml_collections.ConfigDict]:
        file = f"configs/{task.config}_{family}.py{suffix}"
        config, of_family = load_config(file), shared | dict(task.of_family.get(family, {}))
        config.update_from_flattened_dict(of_family)
        return file, of_family, config

    _, _, reference = made(REFERENCE)
    file, overrides, config = made(family)
    wanted = count_parameters(reference)
    at_width = {width: count_parameters(config, width) for width in (8, 16)}
    width = 8 * round((wanted - at_width[8]) / (at_width[16] - at_width[8])) + 8
    num_steps = _BUDGET.value or task.num_steps or reference.num_steps
    overrides |= {"num_steps": num_steps, "batch_size": reference.batch_size, "model.mlp_width": width, "seed": seed}
    workdir = root / f"{_TASK.value}{suffix.replace(':', '-')}-{num_steps}" / f"{family}-{seed}"
    return Run(workdir, file, overrides, count_parameters(config, width))


def count_parameters(config: ml_collections.ConfigDict, mlp_width: int | None = None) -> int:
    parts = config_lib.build(config)
    model = parts.model | ({"mlp_width": mlp_width} if mlp_width else {})
    made = jax.eval_shape(lambda: nnx.state(dataclasses.replace(parts, model=model).init_network(0), nnx.Param))
    return sum(leaf.size for leaf in jax.tree.leaves(made))


@functools.cache
def _scorer(name: str) -> evals.TextScorer:
    return functools.partial(Judge.load(name).score, protocol=PLAIN)


def _tokenizer(directory: pathlib.Path) -> pathlib.Path:
    """Of the texts, made once."""
    if not directory.is_dir():
        make_tokenizer(str(directory), _DATA.value)
    return directory


def summary(cards: list[dict[str, Any]], key: str) -> str:
    """Mean ± standard deviation over seeds; — where a family does not have it."""
    values = [card[key] for card in cards if card.get(key) is not None]
    if not values:
        return "—"
    if all(isinstance(value, int) for value in values):
        return "/".join(f"{value:,}" for value in sorted(set(values)))
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4g}{spread}"


def main() -> None:
    families = _FAMILIES.value or list(PROCESSES)
    for flag, value, known in (("task", [_TASK.value], TASKS), ("families", families, PROCESSES)):
        if unknown := [name for name in value if name not in known]:
            raise ValueError(f"--{flag}={unknown[0]} is unknown: choose of {', '.join(known)}")
    task = TASKS[_TASK.value]
    if _JUDGE.value and not task.of_text:
        raise ValueError(f"--judge scores texts, but --task={_TASK.value} is of graphs; leave it out")
    cards = {family: [plan(family, int(seed)).card() for seed in _SEEDS.value] for family in families}
    columns = {"parameters": "parameters"} | dict(task.columns) | {"minutes": "minutes"}
    print_row(["family", *columns, *([task.of] if task.published else [])], header=True)
    for family, of_family in cards.items():
        row = [family, *(summary(of_family, key) for key in columns.values())]
        print_row(row + ([task.published.get(family, "—")] if task.published else []))
    write_json(_JSON.value, {"task": _TASK.value, "cards": cards, "published": dict(task.published)})


if __name__ == "__main__":
    cli.run(main)
