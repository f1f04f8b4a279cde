"""Every configuration key, the checks on them, and the parts they describe.

`default_config()` lists the keys with their units; a file in configs/ overrides some. `validate` fails before any
device work. `build` turns the config into parts; beside this file only train.py and run.py, which make the optimizer
and the loop, read a ConfigDict.
"""

import dataclasses
import difflib
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections
from flax import nnx

from dilm_jax.backbone import REMAT, Transformer
from dilm_jax.data.sources import UNITS
from dilm_jax.data.star import SPLIT_SIZES, TASKS, StarGraphs
from dilm_jax.data.store import OVERLONG
from dilm_jax.data.task import Task
from dilm_jax.data.text import TextTask, open_text
from dilm_jax.losses import LossConfig
from dilm_jax.processes.base import Process, Traits
from dilm_jax.processes.registry import PROCESSES, make_process
from dilm_jax.sampling import Corrector, Filter, Filters, SamplingOptions
from dilm_jax.schedules import MASKING, SCHEDULES, Schedule, concrete_total

# Keys whose change makes a checkpoint another run's: refused on resume. But for those that change no number.
FIXED_ON_RESUME = ("model", "process", "data", "seed", "batch_size")
FREE_ON_RESUME = ("model.remat", "model.scan")

MAX_TOTAL = 1e4  # of the noise: what special.log_S is exact for
CHOICES = {
    "data.source": ("star", "text"),
    "data.difficulty": tuple(TASKS),
    "data.unit": UNITS,
    "data.overlong": OVERLONG,
    "process.family": tuple(PROCESSES),
    "process.schedule.name": tuple(SCHEDULES),
    "process.masking": tuple(MASKING),
    "model.dtype": ("float32", "bfloat16"),
    "model.remat": tuple(REMAT),
    "loss.kernel": ("exact", "paper"),
    "loss.alignment": ("sampled", "marginal"),
    "loss.length": ("cross_entropy", "poisson_mean"),
    "loss.weighting": ("elbo", "self_normalized", "normalized"),
    "loss.targets": ("gather", "dense"),
    "loss.time_sampling": ("uniform", "importance"),
    "optim.schedule": ("constant", "cosine"),
    "train.matmul_precision": ("default", "highest"),
}


class _AtLeastOne:
    """The values of a key that counts."""

    def __contains__(self, value: int) -> bool:
        return value >= 1

    def __iter__(self):
        yield "1 or more"


# Keys that have an effect only where these values hold: refused otherwise, unless at their default. (`needs` adds what
# the families say of themselves.)
_STAR, _TEXT = {"data.source": ("star",)}, {"data.source": ("text",)}
NEEDS: dict[str, dict[str, Any]] = {
    "data.difficulty": _STAR,
    "data.seed": _STAR,
    "data.path": _TEXT,
    "data.origin": _TEXT,
    "data.tokenizer": _TEXT,
    "data.max_length": _TEXT,
    "data.unit": _TEXT,
    "data.field": _TEXT,
    "data.overlong": _TEXT,
    "eval.num_samples": _TEXT,
    "loss.targets": {"loss.alignment": ("sampled",)},
    "loss.max_weight": {"loss.weighting": ("elbo",)},
    "optim.cosine_cycles": {"optim.schedule": ("cosine",)},
    "optim.floor": {"optim.schedule": ("cosine",)},
    "sampling.calls": {"sampling.events_per_call": (1,)},
    "sampling.corrector_strength": {"sampling.corrector_steps": _AtLeastOne()},
}
_OF_GAP = ("sampling.gap_temperature", "sampling.gap_top_k", "sampling.gap_top_p")
_OF_SAMPLER = tuple(f"sampling.{field.name}" for field in dataclasses.fields(SamplingOptions))


def needs(key: str) -> tuple[dict[str, Any], ...]:
    """Where a key has an effect: where all values of one of these hold."""
    here = NEEDS.get(key, {})
    if key.startswith(("process.", "loss.")) and key != "process.family":
        return (here | _families(lambda traits: any(f"{key}.".startswith(f"{read}.") for read in traits.reads)),)
    if key in _OF_SAMPLER:
        option, families = key.removeprefix("sampling."), {}
        for family, process in PROCESSES.items():
            names = tuple(name for name, options in process.TRAITS.samplers.items() if option in options)
            families.setdefault(names, []).append(family)
        return tuple(
            {"process.family": tuple(of), "sampling.sampler": names} | here for names, of in families.items() if names
        )
    if key in _OF_GAP:
        filters = {name: process.TRAITS.gap_filter for name, process in PROCESSES.items()}
        return tuple({"process.family": (name,)} | of for name, of in filters.items() if of is not None)
    if key == "sampling.corrector_steps":
        return (_families(lambda traits: traits.revises),)
    if key == "data.infill_fraction":
        return (_families(lambda traits: traits.fills != "end"),)
    return (here,)


def _families(have: Callable[[Traits], bool]) -> dict[str, Any]:
    return {"process.family": tuple(name for name, process in PROCESSES.items() if have(process.TRAITS))}


def default_config() -> ml_collections.ConfigDict:
    """All keys at their defaults, locked."""
    config = ml_collections.ConfigDict()
    config.seed = 0  # of parameters, noise, dropout and the order of the data
    config.batch_size = 64  # examples a step, over all hosts, devices and micro-batches
    config.num_steps = 80_000  # optimizer steps

    config.data = ml_collections.ConfigDict()
    config.data.source = "star"  # or "text"
    config.data.difficulty = "easy"  # of star graphs
    config.data.seed = 0  # of the graphs themselves
    config.data.path = ""  # of text: what `prepare` made, or a source that it takes, which is then held in memory
    config.data.origin = ""  # the --source of `prepare` that made it, and where that is: said where nothing is there
    config.data.tokenizer = "bytes"  # or "chars", or a Hugging Face name or directory
    config.data.max_length = 128  # tokens of the longest text, special columns not counted
    config.data.unit = "line"  # what of a file is one text
    config.data.field = "text"  # of a row of jsonl or csv
    config.data.overlong = "truncate"  # what happens to longer texts
    config.data.infill_fraction = 0.0  # of the training examples that become infills, for generate --infill

    config.model = ml_collections.ConfigDict()
    config.model.num_layers = 12
    config.model.width = 768
    config.model.num_heads = 12
    config.model.mlp_width = 3072
    config.model.cond_width = 384  # of the time embedding
    config.model.dropout = 0.1  # rate
    config.model.rope_theta = 1e4
    config.model.dtype = "bfloat16"  # of the activations inside blocks
    config.model.remat = "none"  # of a block, what the backward pass computes anew: "full": all, "dots": the cheap part
    config.model.scan = True  # compile one block and loop over it

    config.process = ml_collections.ConfigDict()
    config.process.family = "joint"
    config.process.eps = 1e-3  # smallest noising time that training draws
    config.process.schedule = ml_collections.ConfigDict()
    config.process.schedule.name = "log_linear"
    config.process.schedule.sigma_min = 3.0  # deletion rate at t = 0, per unit of noising time
    config.process.schedule.sigma_max = 30.0  # at t = 1
    config.process.masking = "log_linear"  # of "mdm": how the share of masks grows with t
    config.process.time_conditioning = False  # of "mdm": whether the network is told t

    config.loss = ml_collections.ConfigDict()
    config.loss.kernel = "exact"
    config.loss.alignment = "sampled"
    config.loss.length = "cross_entropy"
    config.loss.weighting = "self_normalized"
    config.loss.max_weight = math.inf  # clips the coefficient of weighting "elbo"
    config.loss.targets = "gather"
    config.loss.time_sampling = "uniform"

    config.optim = ml_collections.ConfigDict()
    config.optim.learning_rate = 1e-4
    config.optim.schedule = "constant"
    config.optim.warmup_steps = 500
    config.optim.cosine_cycles = 0.5  # full periods of the cosine from the end of warm-up to num_steps, half = decay
    config.optim.floor = 0.0  # smallest learning rate of the cosine
    config.optim.weight_decay = 0.01  # on matrices only
    config.optim.beta1 = 0.9
    config.optim.beta2 = 0.999
    config.optim.adam_eps = 1e-8
    config.optim.clip_norm = 1.0  # of the global gradient
    config.optim.ema_decay = 0.9999  # of the averaged parameters that evaluation uses

    config.train = ml_collections.ConfigDict()
    config.train.micro_batches = 1  # gradient accumulation: parts of a batch
    config.train.packing = False  # several noised canvases to a row of the network: pays where noise leaves rows short
    config.train.log_every = 100  # steps
    config.train.eval_every = 2_000
    config.train.checkpoint_every = 2_000
    config.train.keep_checkpoints = 2  # of the latest
    config.train.keep_every = 0  # steps: the checkpoints of its multiples are kept, too; 0: of none
    config.train.keep_best = ""  # so is the best one by this figure of the periodic evaluation, as "eval/exact_match"
    config.train.wandb = ""  # project of Weights & Biases that metrics go to as well
    config.train.matmul_precision = "default"

    config.mesh = ml_collections.ConfigDict()
    config.mesh.data = -1  # devices along each axis; -1: all that the others leave
    config.mesh.fsdp = 1
    config.mesh.tensor = 1

    config.sampling = ml_collections.ConfigDict()
    config.sampling.sampler = "event"
    config.sampling.num_steps = 200  # of samplers that have a number of them
    config.sampling.calls = 2  # network calls a token of "event": 2 is exact
    config.sampling.events_per_call = 1  # insertions of "event" from one call, above 1 an approximation
    config.sampling.corrector_steps = 0  # rounds of noise and generation that revise a finished text
    config.sampling.corrector_strength = 0.1  # noising time that each goes back to
    config.sampling.rate_scale = 1.0  # multiplies the rate of "euler"
    config.sampling.stop_threshold = 0.9  # of the probability that a text of "one_by_one" is complete; 0: it is drawn
    config.sampling.temperature = 0.0  # of the token; 0 is greedy
    config.sampling.top_k = 0  # 0 is off
    config.sampling.top_p = 1.0
    config.sampling.gap_temperature = 0.0  # of the gap, in families that choose one of all gaps
    config.sampling.gap_top_k = 0
    config.sampling.gap_top_p = 1.0

    config.eval = ml_collections.ConfigDict()
    config.eval.num_valid = 100  # examples of the periodic evaluation, or as many as there are
    config.eval.num_test = 5_000  # examples of the evaluation after training, or as many as there are
    config.eval.num_samples = 0  # of them for which a text is generated; 0: all
    config.eval.batch_size = 100  # examples sampled at once
    config.eval.num_times = 4  # draws of the noising time an example for the likelihood bound
    return config.lock()


def validate(config: ml_collections.ConfigDict, num_devices: int) -> None:
    """Raises ValueError, naming the value and the fix, for a config that cannot run on `num_devices` devices. (What
    concerns one part alone, such as a width, the part's constructor checks when it is built.)"""
    validate_values(config)
    for key, default in flatten(default_config()).items():
        if _get(config, key) != default and not has_effect(config, key):
            raise ValueError(
                f"config.{key} = {_get(config, key)} has no effect {what_is_needed(config, key)}; leave it at {default}"
            )
    axes = mesh_shape(config, num_devices)
    shards, parts = axes["data"] * axes["fsdp"], config.train.micro_batches
    if config.batch_size % (shards * parts):
        raise ValueError(
            f"config.batch_size {config.batch_size} must be divisible by {shards} devices (data × fsdp) × {parts} "
            "micro-batches"
        )


def validate_values(config: ml_collections.ConfigDict) -> None:
    """The part of `validate` that holds on any devices, and after a command has overridden config.sampling."""
    for key, choices in CHOICES.items():
        _check_choice(config, key, choices)
    traits = PROCESSES[config.process.family].TRAITS
    _check_choice(config, "sampling.sampler", tuple(traits.samplers))
    for key, value in flatten(config).items():
        if isinstance(value, float) and not math.isfinite(value) and key != "loss.max_weight":
            raise ValueError(f"config.{key} must be a finite number, got {value}")
        if isinstance(value, int) and abs(value) >= 2**31 and not key.endswith("seed"):
            raise ValueError(f"config.{key} must be below 2^31, got {value}")
    for key in _POSITIVE:
        if not _get(config, key) > 0:
            raise ValueError(f"config.{key} must be positive, got {_get(config, key)}")
    for key in _NOT_NEGATIVE:
        if not _get(config, key) >= 0:
            raise ValueError(f"config.{key} must not be negative, got {_get(config, key)}")
    for key in ("seed", "data.seed"):
        if not _get(config, key) < 2**32:
            raise ValueError(f"config.{key} must be below 2^32, got {_get(config, key)}")
    if not 0 < config.process.eps < 1:
        raise ValueError(f"config.process.eps must be in (0, 1), got {config.process.eps}")
    if not 0 <= config.data.infill_fraction <= 1:
        raise ValueError(f"config.data.infill_fraction must be in [0, 1], got {config.data.infill_fraction}")
    for key in ("optim.ema_decay", "optim.beta1", "optim.beta2"):
        if not 0 <= _get(config, key) < 1:
            raise ValueError(f"config.{key} must be in [0, 1), got {_get(config, key)}")
    total = concrete_total(_schedule(config), 1.0)
    if total > MAX_TOTAL:
        raise ValueError(
            f"config.process.schedule deletes {total:g} times over by t = 1, more than {MAX_TOTAL:g}; lower sigma_max"
        )
    sampler, many = config.sampling.sampler, config.sampling.events_per_call > 1
    reads = many or sampler in traits.reads_posterior
    if reads and config.loss.length == "poisson_mean":
        named = f"config.sampling.sampler={sampler!r}" + " with events_per_call above 1" * many
        raise ValueError(
            f"{named} reads the length posterior, of which loss.length='poisson_mean' fits the mean only; use "
            "sampling.sampler='euler' or loss.length='cross_entropy'"
        )
    if config.train.keep_every % config.train.checkpoint_every:
        raise ValueError(
            f"config.train.keep_every is {config.train.keep_every}, which must be a multiple of train.checkpoint_every "
            f"({config.train.checkpoint_every})"
        )
    if config.train.keep_best and config.train.checkpoint_every % config.train.eval_every:
        raise ValueError(
            f"config.train.keep_best needs an evaluation at each checkpoint: train.checkpoint_every "
            f"({config.train.checkpoint_every}) must be a multiple of train.eval_every ({config.train.eval_every})"
        )
    for key, split in (("eval.num_valid", "valid"), ("eval.num_test", "test")):
        if config.data.source == "star" and _get(config, key) > SPLIT_SIZES[split]:
            raise ValueError(
                f"config.{key} is {_get(config, key)}, but the {split} split has {SPLIT_SIZES[split]} examples"
            )


def has_effect(config: ml_collections.ConfigDict, key: str) -> bool:
    """Whether the values beside a key let it have one."""
    return any(all(_get(config, other) in values for other, values in needed.items()) for needed in needs(key))


def what_is_needed(config: ml_collections.ConfigDict, key: str) -> str:
    """What would let a key have an effect, of its family if that has such a thing, to end a sentence."""
    family = config.process.family
    own = [needed for needed in needs(key) if family in needed.get("process.family", (family,))]
    return "without " + ", or ".join(
        " and ".join(
            f"{other} = {' or '.join(map(str, values))}"
            for other, values in needed.items()
            if _get(config, other) not in values
        )
        for needed in own or needs(key)
    )


def _check_choice(config: ml_collections.ConfigDict, key: str, choices: tuple[str, ...]) -> None:
    value = _get(config, key)
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"config.{key} is {value!r}, expected one of {', '.join(choices)}{hint}")


_POSITIVE = (
    "batch_size",
    "num_steps",
    "model.num_layers",
    "model.width",
    "model.num_heads",
    "model.mlp_width",
    "model.cond_width",
    "model.rope_theta",
    "loss.max_weight",
    "optim.learning_rate",
    "optim.clip_norm",
    "optim.cosine_cycles",
    "train.micro_batches",
    "train.log_every",
    "train.eval_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "eval.num_valid",
    "eval.num_test",
    "eval.batch_size",
    "eval.num_times",
    "data.max_length",
)
_NOT_NEGATIVE = (
    "eval.num_samples",
    "seed",
    "data.seed",
    "optim.warmup_steps",
    "optim.floor",
    "optim.weight_decay",
    "optim.adam_eps",
    "train.keep_every",
)


def mesh_shape(config: ml_collections.ConfigDict, num_devices: int) -> dict[str, int]:
    """Devices along each mesh axis. Raises ValueError where they do not multiply to `num_devices`."""
    axes = {name: config.mesh[name] for name in ("data", "fsdp", "tensor")}
    if any(size < 1 and size != -1 for size in axes.values()):
        raise ValueError(f"config.mesh sizes must be positive or -1, got {axes}")
    unknown = [name for name, size in axes.items() if size == -1]
    if len(unknown) > 1:
        raise ValueError(f"only one of config.mesh may be -1, got {axes}")
    known = math.prod(size for size in axes.values() if size != -1)
    if unknown:
        axes[unknown[0]] = num_devices // known
    if math.prod(axes.values()) != num_devices:
        raise ValueError(f"config.mesh {dict(config.mesh)} does not fit {num_devices} devices")
    return axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a config describes."""

    task: Task
    process: Process
    sampler: str  # a key of process.samplers(sampling)
    sampling: SamplingOptions
    filters: Filters
    corrector: Corrector
    model: dict[str, Any]  # constructor arguments of the Transformer
    matmul_precision: str

    def init_network(self, seed: int) -> Transformer:
        return Transformer(
            vocab_size=self.process.vocabulary.size, spec=self.process.spec, **self.model, rngs=nnx.Rngs(seed)
        )


def build(config: ml_collections.ConfigDict, workdir: pathlib.Path | None = None) -> Parts:
    """The parts of a validated config; `workdir`, where a run is loaded, has its tokenizer."""
    task = TASK_OF[config.data.source](config.data, workdir)
    process = make_process(
        config.process.family,
        vocabulary=task.vocabulary,
        max_length=task.max_length,
        schedule=_schedule(config),
        eps=config.process.eps,
        loss_config=loss_config(config),
        time_sampling=config.loss.time_sampling,
        masking=config.process.masking,
        time_conditioning=config.process.time_conditioning,
    )
    return Parts(
        task=task,
        process=process,
        sampler=config.sampling.sampler,
        sampling=SamplingOptions(
            num_steps=config.sampling.num_steps,
            rate_scale=config.sampling.rate_scale,
            calls=config.sampling.calls,
            events_per_call=config.sampling.events_per_call,
            stop_threshold=config.sampling.stop_threshold,
        ),
        filters=_filters(config),
        corrector=Corrector(steps=config.sampling.corrector_steps, strength=config.sampling.corrector_strength),
        model=dict(config.model),
        matmul_precision=config.train.matmul_precision,
    )


def _star_task(data: ml_collections.ConfigDict, workdir: pathlib.Path | None) -> StarGraphs:
    return StarGraphs(graphs=TASKS[data.difficulty], seed=data.seed)


def _text_task(data: ml_collections.ConfigDict, workdir: pathlib.Path | None) -> TextTask:
    options = {key: data[key] for key in ("path", "origin", "tokenizer", "max_length", "unit", "field", "overlong")}
    return open_text(**options, workdir=workdir)


TASK_OF: dict[str, Callable[[ml_collections.ConfigDict, pathlib.Path | None], Task]] = {
    "star": _star_task,
    "text": _text_task,
}


def loss_config(config: ml_collections.ConfigDict) -> LossConfig:
    return LossConfig(**{key: value for key, value in config.loss.items() if key != "time_sampling"})


def _schedule(config: ml_collections.ConfigDict) -> Schedule:
    values = dict(config.process.schedule)
    return SCHEDULES[values.pop("name")](**values)


def _filters(config: ml_collections.ConfigDict) -> Filters:
    """Raises ValueError, naming the filter, for a value out of range."""
    made = {}
    for name, prefix in (("token", ""), ("gap", "gap_")):
        options = {key: config.sampling[prefix + key] for key in ("temperature", "top_k", "top_p")}
        try:
            made[name] = Filter(**options)
        except ValueError as error:
            raise ValueError(f"config.sampling, filter of the {name}: {error}") from None
    return Filters(**made)


def from_json(tree: dict[str, Any]) -> ml_collections.ConfigDict:
    """The config that `to_json` wrote, with its types. Raises ValueError as `update`."""
    if not isinstance(tree, dict):
        raise ValueError(f"expected an object, got {type(tree).__name__}")
    config = default_config()
    update(config, flatten(tree))
    return config


def update(config: ml_collections.ConfigDict, values: Mapping[str, Any]) -> None:
    """Sets values by dotted key. Raises ValueError for a key that does not exist, or a value of another type."""
    for key, value in values.items():
        if key not in flatten(config):
            raise ValueError(f"unknown config key {key!r}; did you mean {nearest_key(config, key)!r}?")
        try:
            config.update_from_flattened_dict({key: value})
        except TypeError:
            kind = type(_get(config, key)).__name__
            raise ValueError(f"config.{key} is of type {kind}, got {value!r}") from None


def nearest_key(config: ml_collections.ConfigDict, key: str) -> str:
    """The valid dotted key that looks most like `key`, which may be a last name only."""
    keys = {name if "." in key else name.split(".")[-1]: name for name in flatten(config)}
    return keys[difflib.get_close_matches(key, keys, n=1, cutoff=0.0)[0]]


def flatten(config: Mapping[str, Any] | ml_collections.ConfigDict, prefix: str = "") -> dict[str, Any]:
    """The leaves by dotted key."""
    leaves = {}
    for name, value in config.items():
        if isinstance(value, Mapping | ml_collections.ConfigDict):
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def _get(config: ml_collections.ConfigDict, dotted: str) -> Any:
    for name in dotted.split("."):
        config = config[name]
    return config


# --- Variants of a config file ---------------------------------------------------------------------------------------

SMOKE = {
    "batch_size": 8,
    "num_steps": 4,
    "model.num_layers": 2,
    "model.width": 32,
    "model.num_heads": 2,
    "model.mlp_width": 64,
    "model.cond_width": 16,
    "model.dtype": "float32",
    "optim.warmup_steps": 1,
    "train.log_every": 1,
    "train.eval_every": 2,
    "train.checkpoint_every": 2,
    "train.micro_batches": 1,
    "eval.num_valid": 8,
    "eval.num_test": 8,
    "eval.batch_size": 8,
}

# One small GPU, or a CPU and patience.
SMALL = {
    "num_steps": 20_000,
    "model.num_layers": 4,
    "model.width": 128,
    "model.num_heads": 4,
    "model.mlp_width": 512,
    "model.cond_width": 128,
    "model.dropout": 0.0,
    "model.dtype": "float32",
    "optim.learning_rate": 1e-3,
    "optim.schedule": "cosine",
    "optim.ema_decay": 0.999,
    "train.eval_every": 500,
    "train.checkpoint_every": 500,
}

# The paper's star graphs (README says what still differs), its schedule aside, which each config adds. Network,
# optimizer and greedy decoding are the defaults of every star config; warm-up follows the paper's table (the released
# code ignores it).
STAR_PAPER = {
    "loss.kernel": "paper",
    "loss.length": "poisson_mean",
    "loss.weighting": "elbo",
    "loss.max_weight": 100.0,
    "loss.time_sampling": "uniform",
    "sampling.sampler": "euler",
    "sampling.num_steps": 200,
}


# Where the paper's texts come from.
LM1B = (
    "lm1b:1-billion-word-language-modeling-benchmark-r13output.tar.gz "
    "(https://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz)"
)
OWT = "hf:Skylion007/openwebtext (https://huggingface.co/datasets/Skylion007/openwebtext)"

# The paper's optimizer for language models. Its code multiplies the loss by 1e-3, which Adam does not see but for ε and
# the clipped norm: 5e-6 and 0.5 there are 5e-3 and 500 of the loss itself, in nats a text. Where text (a learning rate
# of 1e-4) and table (5e-5 and 1e-5) differ, the table.
LM_OPTIM = {
    "schedule": "cosine",
    "warmup_steps": 2_000,
    "cosine_cycles": 4.0,
    "floor": 1e-6,
    "weight_decay": 0.03,
    "adam_eps": 5e-3,
    "clip_norm": 500.0,
}

# The paper's language models, schedule aside. Decoding: gaps greedy, tokens by top-p 0.9.
LM_PAPER = STAR_PAPER | {
    "sampling.num_steps": 1024,
    "sampling.gap_temperature": 0.0,
}

# The paper's network, for a GPU.
TEXT_LARGE = {
    "batch_size": 256,
    "model.num_layers": 12,
    "model.width": 768,
    "model.num_heads": 12,
    "model.mlp_width": 3072,
    "model.cond_width": 384,
    "model.dropout": 0.1,
    "model.dtype": "bfloat16",
    "optim.learning_rate": 3e-4,
}

# A text from nothing in seconds: English sentences of this repository, cut to 32 bytes.
LM_SMOKE = {
    "data.path": str(pathlib.Path(__file__).parents[1] / "tests" / "data" / "sotu.txt"),
    "data.tokenizer": "bytes",
    "data.max_length": 32,
    "data.unit": "line",
    "data.overlong": "truncate",
    "eval.num_samples": 4,
}


def language_model() -> ml_collections.ConfigDict:
    """The defaults of a model of texts: texts from nothing at temperature 1."""
    config = default_config()
    config.data.source = "text"
    config.train.packing = True
    config.sampling.update(temperature=1.0, top_p=0.9)
    return config


def insertion_language_model() -> ml_collections.ConfigDict:
    """Of DILM-S and DILM-M: with the likelihood bound as its loss."""
    config = language_model()
    config.process.eps = 1e-4
    config.loss.update(weighting="elbo", time_sampling="importance")
    config.sampling.gap_temperature = 1.0
    return config


def smoke(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """What lets a config end in seconds, by dotted key: samplers with a grid take eight steps."""
    text = LM_SMOKE if config.data.source == "text" else {}
    grid = {"sampling.num_steps": 8} if has_effect(config, "sampling.num_steps") else {}
    return SMOKE | text | grid


def select(
    config: ml_collections.ConfigDict, variant: str | None, **variants: dict[str, Any]
) -> ml_collections.ConfigDict:
    """Applies the overrides of a variant, given by dotted key. Every config has `smoke`.

    Raises:
      ValueError: for a variant that the config does not have.
    """
    variants = {"smoke": smoke(config), **variants}
    if variant and variant not in variants:
        raise ValueError(f"unknown variant :{variant}; this config has {', '.join(f':{name}' for name in variants)}")
    config.update_from_flattened_dict(variants[variant] if variant else {})
    return config
