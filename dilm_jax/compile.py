"""Compiles a config's train step for a machine that is not there: `python -m dilm_jax.compile
--config=configs/X.py[:variant] --topology=v5e:16x16 [--compare --json=FILE --config.a.b=v]`.

Prints the memory of a device, the collectives of a step and of its noising, whether logits are gathered, and the
largest arrays. What does not fit is compiled again with other overrides, and the first that fit are printed; where
much room is left, the batch that would fill it is estimated. `--compare` prints a row for each of several topologies.

All figures are ahead-of-time (AOT): the compiler's. Nothing is run, and no accelerator is used. Nor are data needed:
where a text config's are not there, texts are random and of typical lengths. They decide how many rows packing takes.
"""

import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

# Before jax is imported: its messages of level INFO and WARNING are not for users.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import ml_collections
import numpy as np
from absl import flags, logging
from jax.sharding import Mesh
from ml_collections import config_flags

from dilm_jax import cli, hlo, sharding, train
from dilm_jax import config as config_lib
from dilm_jax.backbone import REMAT
from dilm_jax.canvas import NUM_SPECIAL_COLUMNS, Example, Vocabulary
from dilm_jax.config import Parts
from dilm_jax.data import loader
from dilm_jax.data.task import make_example, make_examples
from dilm_jax.data.text import TOKENIZER
from dilm_jax.data.tokenizers import load_tokenizer
from dilm_jax.hlo import MIB

GIB = 2**30
UNKNOWN = "?"  # what a compiler that found too little memory did not say
NUM_LARGEST = 8  # arrays that are printed
MAX_TRIES = 5  # further compiles of what does not fit

MakeBatch = Callable[[int, slice], dict[str, Any]]  # (step, rows) → the fields of an `Example`


# --- Machines --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of device."""

    platform: str  # that programs are lowered for
    num_sizes: int  # in the name of a topology
    memory: int  # bytes of a device that a program may have
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of jax's description of a topology


# Memory of TPUs is what their compiler offers, of GPUs what JAX takes by default, three quarters.
MEGACORE = {"chip_config_name": "megacore"}  # both cores of a chip are one device
CHIPS = {
    "v4": Chip(platform="tpu", num_sizes=3, memory=int(30.75 * GIB), options=MEGACORE),
    "v5e": Chip(platform="tpu", num_sizes=2, memory=int(15.75 * GIB)),
    "v5p": Chip(platform="tpu", num_sizes=3, memory=int(95.73 * GIB)),
    "v6e": Chip(platform="tpu", num_sizes=2, memory=int(31.24 * GIB)),
    "h100": Chip(platform="cuda", num_sizes=2, memory=84_929_347_584 * 3 // 4),
}
FORMS = (
    "v4:2x2x2 or v5p:2x2x2, v5e:4x4 or v6e:4x4 (the chips of a TPU slice), 2*v5e:4x4 (two of them), or h100:2x8 (nodes "
    "x GPUs of each)"
)
# Packages with a platform's compiler, the extra of this package that installs one.
COMPILERS = {"tpu": (("libtpu",), "tpu"), "cuda": (("jax-cuda13-plugin", "jax-cuda12-plugin"), "cuda13")}
# For libtpu: there is no TPU to ask about, nor one that only one process may use; what it would complain not to know.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # of a host, whatever the topology is
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind, and how they are connected."""

    name: str
    chip: Chip
    num_slices: int
    sizes: tuple[int, ...]


def parse_topology(name: str) -> Topology:
    """Raises ValueError for what is none."""
    match = re.fullmatch(r"(?:(\d+)\*)?(\w+):(\d+(?:x\d+)*)", name)
    chip = CHIPS.get(match[2]) if match else None
    if match and chip:
        num_slices, sizes = int(match[1] or 1), tuple(map(int, match[3].split("x")))
        is_slices = num_slices > 1 and chip.platform == "tpu"
        if len(sizes) == chip.num_sizes and min(sizes) > 0 and (is_slices or num_slices == 1):
            return Topology(name, chip, num_slices, sizes)
    raise ValueError(f"--topology: {name!r} is none that is known, expected one such as {FORMS}")


def compiler(platform: str) -> str | None:
    """Package and version of a platform's compiler; None: it is not installed."""
    for package in COMPILERS[platform][0]:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def devices_of(topology: Topology) -> Sequence[Any]:
    """Raises ValueError where the compiler is not installed, or knows no such topology."""
    from jax.experimental import topologies

    platform, extra = topology.chip.platform, COMPILERS[topology.chip.platform][1]
    if compiler(platform) is None:
        raise ValueError(
            f"--topology={topology.name} needs the compiler of that hardware, not the hardware: "
            f"pip install 'dilm_jax[{extra}]'"
        )
    sizes = "x".join(map(str, topology.sizes))
    if platform == "tpu":
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        of_host = (min(topology.sizes[0], 2), min(topology.sizes[1], 2), 1)
        options = {"topology_name": topology.name.split("*")[-1], "chips_per_host_bounds": of_host}
        options |= {"num_slices": topology.num_slices}
    else:
        options = {
            "topology": f"1x{sizes}",
            "target_config": (pathlib.Path(__file__).parent / "h100.txtpb").read_text(),
        }
    try:
        return topologies.get_topology_desc(platform=platform, **options, **topology.chip.options).devices
    except RuntimeError as error:
        raise ValueError(f"--topology={topology.name}: {str(error).splitlines()[0]}") from None


# --- Configs without their data --------------------------------------------------------------------------------------


def load_parts(config: ml_collections.ConfigDict) -> tuple[Parts, MakeBatch]:
    """The parts of a validated config, and its training examples, or such as they may be. Raises ValueError for a
    tokenizer that cannot be loaded without the data."""
    if has_data(config):
        parts = config_lib.build(config)
        return parts, lambda step, rows: batches(config, parts).batch(step, rows)
    config = config.copy_and_resolve_references()
    config.data.path = config.data.path or "texts"
    with tempfile.TemporaryDirectory() as workdir:  # of a run, which is built without its data
        load_tokenizer(config.data.tokenizer).save(pathlib.Path(workdir) / TOKENIZER)
        parts = config_lib.build(config, pathlib.Path(workdir))
    vocabulary, L = parts.process.vocabulary, parts.task.max_length
    texts = functools.cache(lambda: random_texts(typical_lengths(like(L), config.batch_size, L), vocabulary, L))
    return parts, lambda step, rows: {name: values[rows] for name, values in texts().items()}


def has_data(config: ml_collections.ConfigDict) -> bool:
    path = config.data.path
    return config.data.source != "text" or bool(path and pathlib.Path(path).exists())


def batches(config: ml_collections.ConfigDict, parts: Parts) -> loader.Batches:
    return loader.train_batches(parts.task.source("train"), config.batch_size, config.seed)


def random_texts(lengths: np.ndarray, vocabulary: Vocabulary, max_length: int) -> dict[str, Any]:
    """The fields of an `Example`: texts of random tokens."""
    rng, ids = np.random.default_rng(1), np.flatnonzero(vocabulary.ordinary)
    return make_examples(vocabulary, max_length, [rng.choice(ids, length) for length in lengths], [-1] * len(lengths))


def like(max_length: int) -> str:
    """Whose texts a model takes: sentences of `lm1b`, or documents of `owt` where 1,000 tokens and more have room."""
    return "lm1b" if max_length < 1000 else "owt"


def typical_lengths(name: str, num: int, max_length: int) -> np.ndarray:
    """Of texts like those of `lm1b`, 28 tokens on average, or `owt`, some 500 of up to 1,024; shuffled."""
    rng = np.random.default_rng(0)
    if name == "lm1b":
        fits = np.minimum(rng.gamma(4.0, 7.0, num), max_length)
    else:
        drawn = rng.gamma(4.0, 150.0, 4 * num)
        fits = drawn[drawn <= max_length][:num]
    return np.maximum(fits, 2).astype(np.int32)


# --- Compiling -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Of a step that is compiled for a topology; bytes are a device's. None: what a compiler that found the memory too
    small does not say."""

    topology: str
    chips: int
    mesh: dict[str, int]
    batch_size: int
    micro_batches: int
    remat: str
    columns_per_chip: int  # that the network computes at a time
    memory_bytes: int  # that there are
    state_bytes: int  # of parameters, their average and the optimizer's moments
    argument_bytes: int | None = None
    temp_bytes: int | None = None
    program_bytes: int | None = None
    total_bytes: int | None = None
    fits: bool = False
    collectives: dict[str, dict] | None = None
    gathers_logits: bool | None = None
    attention: str | None = None  # the kernel: cuDNN's is taken where cuDNN is installed
    largest: list[hlo.Array] = dataclasses.field(default_factory=list)
    compile_s: float


def measure(config: ml_collections.ConfigDict, parts: Parts, topology: Topology, make_batch: MakeBatch) -> Figures:
    """Compiles the step of a validated config."""
    mesh = mesh_of(config, topology)
    shards, S = sharding.num_shards(mesh), parts.task.max_length + NUM_SPECIAL_COLUMNS
    here = sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1})
    rows = train.num_packed_rows(config, parts, here, make_batch, shards)
    state = abstract_state(config, parts, mesh)
    step = train.make_train_step(config, parts, mesh, rows)
    started = time.monotonic()
    lowered = step.trace(state, abstract_batch(config, parts, mesh)).lower(lowering_platforms=(topology.chip.platform,))
    compiled, needed = compile_or_say(lowered)
    seconds = time.monotonic() - started
    of_program: dict[str, Any] = {"total_bytes": needed}
    if compiled is not None:
        of_program = figures_of(compiled, topology.chip.memory, parts)
    return Figures(
        topology=topology.name,
        chips=mesh.size,
        mesh=dict(mesh.shape),
        batch_size=config.batch_size,
        micro_batches=config.train.micro_batches,
        remat=config.model.remat,
        columns_per_chip=(rows or config.batch_size // config.train.micro_batches) // shards * S,
        memory_bytes=topology.chip.memory,
        state_bytes=sum(map(bytes_held, jax.tree.leaves(state))),
        compile_s=seconds,
        **of_program,
    )


def compile_or_say(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled | None, int | None]:
    """The program; or None, and the memory that the compiler says it would take."""
    try:
        return lowered.compile(), None
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, bytes_needed(str(error))


def figures_of(compiled: jax.stages.Compiled, memory: int, parts: Parts) -> dict[str, Any]:
    sizes, text = compiled.memory_analysis(), text_of(compiled)
    assert sizes is not None
    found = hlo.collectives(text)
    parts_of = {
        "argument_bytes": sizes.argument_size_in_bytes,
        "temp_bytes": sizes.temp_size_in_bytes,
        "program_bytes": sizes.generated_code_size_in_bytes,
    }
    total = sum(parts_of.values()) + sizes.output_size_in_bytes - sizes.alias_size_in_bytes  # donated: there already
    return parts_of | {
        "total_bytes": total,
        "fits": total <= memory,
        "collectives": hlo.summary(found),
        "gathers_logits": hlo.gathers_logits(found, parts.process.vocabulary.size, parts.model["width"]),
        "attention": hlo.attention(text),
        "largest": hlo.largest_arrays(text, NUM_LARGEST),
    }


def text_of(compiled: jax.stages.Compiled) -> str | None:
    """Raises ValueError where the compiler is of another version than JAX."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"the compiled program cannot be read: the compiler is not of the version that jax {jax.__version__} asks "
            f"for; pip install 'dilm_jax[tpu]' or [cuda13] brings that ({str(error).splitlines()[0]})"
        ) from None


def noising(config: ml_collections.ConfigDict, parts: Parts, mesh: Mesh, platform: str) -> dict[str, dict]:
    """The collectives of the noising alone, by kind."""

    def draw(step, x0: Example):
        *drawn, _ = train.corrupt_batch(parts.process, mesh, config.seed, step, x0, config.data.infill_fraction)
        return drawn

    step = jax.ShapeDtypeStruct((), np.int32, sharding=sharding.replicated(mesh))
    drawn = jax.jit(draw, out_shardings=sharding.batch_sharding(mesh)).trace(step, abstract_batch(config, parts, mesh))
    return hlo.summary(hlo.collectives(text_of(drawn.lower(lowering_platforms=(platform,)).compile())))


def mesh_of(config: ml_collections.ConfigDict, topology: Topology) -> Mesh:
    devices = devices_of(topology)
    return sharding.make_mesh(config_lib.mesh_shape(config, len(devices)), devices)


def abstract_state(config: ml_collections.ConfigDict, parts: Parts, mesh: Mesh) -> train.TrainState:
    """Shapes, types and places of a training state."""
    optimizer, _ = train.make_optimizer(config)
    state = jax.eval_shape(lambda: train.init_state(config, parts, optimizer, mesh))
    return _placed(state, sharding.state_shardings(state, state.params, mesh))


def abstract_batch(config: ml_collections.ConfigDict, parts: Parts, mesh: Mesh) -> Example:
    row = make_example(parts.process.vocabulary, parts.task.max_length, ())
    batch = {name: jax.ShapeDtypeStruct((config.batch_size, *x.shape), x.dtype) for name, x in row.items()}
    return Example(**_placed(batch, dict.fromkeys(batch, sharding.batch_sharding(mesh))))


def _placed(tree, places):
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)


def bytes_held(x: Any) -> int:
    """By each device, of an abstract array."""
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize


def bytes_needed(message: str) -> int | None:
    """What a compiler says that it would have needed."""
    said = re.search(r"\(([\d.]+)([KMGT])\) exceeds|[Uu]sed ([\d.]+)([KMGT]) of", message)
    if said is None:
        return None
    number, unit = (group for group in said.groups() if group)
    return int(float(number) * 2 ** (10 * (1 + "KMGT".index(unit))))


# --- Advice ----------------------------------------------------------------------------------------------------------


def attempts(config: ml_collections.ConfigDict, num_shards: int) -> list[dict[str, Any]]:
    """Overrides that take less memory, the ones that take least time first: more of the blocks computed anew, then
    smaller micro-batches too."""
    remats = list(REMAT)
    tries = [{"model.remat": name} for name in remats[remats.index(config.model.remat) + 1 :]]
    most, parts = tries[-1] if tries else {}, 2 * config.train.micro_batches
    while config.batch_size % (num_shards * parts) == 0 and len(tries) < MAX_TRIES:
        tries.append(most | {"train.micro_batches": parts})
        parts *= 2
    return tries


def advise(
    config: ml_collections.ConfigDict, figures: Figures, compiled: Callable[[dict[str, Any]], Figures]
) -> dict[str, Any]:
    """Prints what would make a step fit that does not, or what would fill the memory, and returns such overrides.
    `compiled` gives the figures of a step with overrides."""
    if figures.fits:
        batch_size = filling_batch(figures)
        if batch_size < 2 * figures.batch_size:
            return {}
        print(
            f"there is room: about {flags_of({'batch_size': batch_size})} would fill it, if temporaries grew in "
            "proportion to the batch (an estimate; nothing was compiled for it)"
        )
        return {"batch_size": batch_size}
    if figures.state_bytes >= figures.memory_bytes:
        state, fsdp = size_text(figures.state_bytes), figures.mesh["fsdp"]
        print(f"the state alone takes {state}: raise config.mesh.fsdp, now {fsdp}")
        return {}
    tries = attempts(config, figures.mesh["data"] * figures.mesh["fsdp"])
    if tries:
        print(f"up to {len(tries)} further compiles follow, until one fits", flush=True)
    for overrides in tries:
        figures = compiled(overrides)
        print(f"  {flags_of(overrides)}: {memory_text(figures)}", flush=True)
        if figures.fits:
            return overrides
    print("what is left: raise config.mesh.fsdp or config.mesh.tensor, lower config.batch_size, or take more devices")
    return {}


def filling_batch(figures: Figures) -> int:
    """The batch that would fill the memory if temporaries, of which some are of the parameters, were all of the batch:
    one that is too small rather than too large."""
    assert figures.total_bytes is not None and figures.temp_bytes is not None
    free = figures.memory_bytes - (figures.total_bytes - figures.temp_bytes)
    unit = figures.mesh["data"] * figures.mesh["fsdp"] * figures.micro_batches
    return int(figures.batch_size * free / max(figures.temp_bytes, 1)) // unit * unit


def flags_of(overrides: dict[str, Any]) -> str:
    return " ".join(f"--config.{key}={value}" for key, value in overrides.items())


# --- The command -----------------------------------------------------------------------------------------------------


def define_flags() -> None:
    config_flags.DEFINE_config_file("config", None, "A file of configs/, with an optional :variant.")
    flags.DEFINE_list("topology", None, f"What to compile for: {FORMS}.")
    flags.DEFINE_bool("compare", False, "A row for each of several topologies, and no further compiles.")
    flags.DEFINE_string("json", None, "Write the figures here too.")


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # whatever else is here
    logging.set_verbosity(logging.WARNING)  # not which axes do not divide
    config = cli.load_config()
    name = config_flags.get_config_filename(flags.FLAGS["config"])
    topologies = [parse_topology(text) for text in cli.required("topology")]
    compare, path = flags.FLAGS.compare, flags.FLAGS.json
    if len(topologies) > 1 and not compare:
        raise ValueError(f"--topology names {len(topologies)} of them: add --compare, or name one")
    for topology in topologies:  # before minutes are spent on any
        config_lib.validate(config, len(devices_of(topology)))
        mesh_of(config, topology)
    parts, make_batch = load_parts(config)
    compilers = ", ".join(sorted({f"{compiler(topology.chip.platform)}" for topology in topologies}))
    print(f"{name}, compiled ahead of time (AOT) by {compilers}: nothing is run")
    print("seconds for a small network, minutes for a large one", flush=True)
    if config.train.packing and not has_data(config):
        mean = typical_lengths(like(config.data.max_length), config.batch_size, config.data.max_length).mean()
        print(f"without the data: packed rows are those of random texts of {mean:.0f} tokens on average")
    if compare:
        print("\n" + row(TITLES) + "\n" + row(["---"] * len(TITLES)))
    results = []
    for topology in topologies:
        figures = measure(config, parts, topology, make_batch)
        of_noising = noising(config, parts, mesh_of(config, topology), topology.chip.platform)
        results.append(dataclasses.asdict(figures) | {"noising": of_noising})
        print(row(cells(figures, of_noising)) if compare else report(figures, of_noising), flush=True)
        if not compare:
            again = functools.partial(measure_with, config, parts, topology, make_batch)
            results[-1]["advice"] = advise(config, figures, again)
    if path:
        said = {"config": name, "compilers": compilers, "jax": jax.__version__, "rows": results}
        pathlib.Path(path).write_text(json.dumps(said, indent=2) + "\n")


def measure_with(
    config: ml_collections.ConfigDict,
    parts: Parts,
    topology: Topology,
    make_batch: MakeBatch,
    overrides: dict[str, Any],
) -> Figures:
    """`measure` with overrides by dotted key."""
    config = config.copy_and_resolve_references()
    config_lib.update(config, overrides)
    return measure(config, dataclasses.replace(parts, model=dict(config.model)), topology, make_batch)


def report(figures: Figures, of_noising: dict[str, dict]) -> str:
    """All figures of one topology."""
    lines = ["", *(f"{title}: {cell}" for title, cell in zip(TITLES, cells(figures, of_noising), strict=True))]
    if figures.largest:
        lines += ["largest arrays of a device, × operations that make one of this shape:"]
        lines += [f"  {array_text(array)}" for array in figures.largest]
    return "\n".join(lines)


TITLES = (
    "topology",
    "devices",
    "mesh",
    "batch",
    "micro-batches",
    "remat",
    "columns of a device at a time",
    "memory of a device",
    "arguments",
    "temporaries",
    "program",
    "collectives of a step (MiB)",
    "of the noising",
    "logits",
    "attention",
    "s to compile",
)


def cells(figures: Figures, of_noising: dict[str, dict]) -> list[str]:
    """A row of TITLES."""
    return [
        figures.topology,
        str(figures.chips),
        axes_text(figures.mesh),
        str(figures.batch_size),
        str(figures.micro_batches),
        figures.remat,
        str(figures.columns_per_chip),
        memory_text(figures),
        size_text(figures.argument_bytes),
        size_text(figures.temp_bytes),
        size_text(figures.program_bytes),
        UNKNOWN if figures.collectives is None else hlo.described(figures.collectives),
        hlo.described(of_noising),
        {None: UNKNOWN, True: "gathered", False: "not gathered"}[figures.gathers_logits],
        figures.attention or UNKNOWN,
        f"{figures.compile_s:.0f}",
    ]


def memory_text(figures: Figures) -> str:
    share = "" if figures.total_bytes is None else f" ({figures.total_bytes / figures.memory_bytes:.0%})"
    verdict = "fits" if figures.fits else "does not fit"
    return f"{size_text(figures.total_bytes)} of {size_text(figures.memory_bytes)}{share}, {verdict}"


def axes_text(mesh: dict[str, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in mesh.items())


def array_text(array: hlo.Array) -> str:
    shape = ",".join(map(str, array.shape))
    return f"{size_text(array.num_bytes)} × {array.count}  {array.dtype}[{shape}]  {array.name}"


def size_text(num_bytes: int | None) -> str:
    if num_bytes is None:
        return UNKNOWN
    return f"{num_bytes / GIB:.3g} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.3g} MiB"


def row(texts: Sequence[str]) -> str:
    """Of a Markdown table."""
    return "| " + " | ".join(texts) + " |"


if __name__ == "__main__":
    define_flags()
    cli.run(main)
