"""What the benchmarks share: corpora, a small network of each family on one of them, its training, samplers, tables."""

import dataclasses
import functools
import json
import pathlib
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import nnx

import dilm_jax
from dilm_jax import canvas as canvas_lib
from dilm_jax import compile as compile_lib
from dilm_jax import config as config_lib
from dilm_jax import evals, sharding, train, worlds
from dilm_jax.backbone import Transformer
from dilm_jax.canvas import Canvas, Example, Vocabulary
from dilm_jax.config import Parts
from dilm_jax.data import loader
from dilm_jax.data.sources import File, open_source
from dilm_jax.data.star import TASKS, StarSource
from dilm_jax.data.task import make_example
from dilm_jax.data.tokenizers import Tokenizer, load_tokenizer
from dilm_jax.losses import LossConfig
from dilm_jax.processes.base import Process
from dilm_jax.processes.registry import PROCESSES
from dilm_jax.request import Request
from dilm_jax.sampling import Cached, Filters, Grid, Network, Packed, SamplingOptions, State, generate
from dilm_jax.schedules import LogLinear

Setting = tuple[str, SamplingOptions]  # a sampler of a family, and what it is told

ONE_DEVICE = sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1})
BERT_VOCABULARY = "tests/data/bert-base-uncased"
FAMILIES = ("joint", "independent")
VOCABULARY_SIZE = 4096  # of pieces
DEFAULT = config_lib.loss_config(config_lib.default_config())


def event(**options) -> Setting:
    return "event", SamplingOptions(num_steps=1, **options)


def grids(*num_steps: int) -> dict[str, Setting]:
    """leap, then euler, at each number of steps."""
    return {f"{name}, {n} steps": (name, SamplingOptions(num_steps=n)) for name in ("leap", "euler") for n in num_steps}


class Samplers:
    """Jitted (setting, keys, canvas, request or None) → the state at the end. A grid's number of steps is given to the
    program: one serves all of them."""

    def __init__(self, process: Process, network: Network | Packed | Cached, filters: Filters):
        self._process, self._network, self._filters = process, network, filters
        self._run = jax.jit(self._generate, static_argnums=(0, 1))

    def __call__(self, setting: Setting, key: jax.Array, canvas: Canvas, asked: Request | None = None) -> State:
        name, options = setting
        return self._run(name, dataclasses.replace(options, num_steps=1), options.num_steps, key, canvas, asked)

    def _generate(self, name, options, num_steps, key, canvas, asked):
        sampler = self._process.samplers(options)[name]
        if isinstance(sampler, Grid):
            sampler = dataclasses.replace(sampler, num_steps=num_steps)
        return generate(self._network, sampler, key, canvas, self._filters, asked)


def empty_canvas(num: int, max_length: int, vocabulary: Vocabulary) -> Canvas:
    """Nothing, with room for so many tokens."""
    return canvas_lib.to_canvas(worlds.to_example([worlds.plain(())] * num, max_length), vocabulary)


def row_keys(seed: int, num: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), num)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Clean texts, all in one `Example`, and what they need."""

    texts: Example  # numpy
    vocabulary: Vocabulary
    sigma: dict[str, tuple[float, float]]  # smallest and largest rate of each family's schedule

    def process(self, family: str, loss_config: LossConfig = DEFAULT):
        sigma_min, sigma_max = self.sigma[family]
        return PROCESSES[family](
            vocabulary=self.vocabulary,
            max_length=self.texts.tokens.shape[1],
            schedule=LogLinear(sigma_min=sigma_min, sigma_max=sigma_max),
            eps=1e-3,
            loss_config=loss_config,
            time_sampling="uniform",
        )


def load_config(name: str) -> ml_collections.ConfigDict:
    """Of FILE[:variant]."""
    path, _, variant = name.partition(":")
    if not pathlib.Path(path).is_file():
        raise ValueError(f"--config: no file {path}")
    return runpy.run_path(path)["get_config"](variant or None)


def load_parts(name: str, overrides: dict[str, Any], num_devices: int = 1) -> tuple[ml_collections.ConfigDict, Parts]:
    """The config of FILE[:variant] with overrides by dotted key, and its parts. Of text it has but a vocabulary: what
    the data of these benchmarks are is random."""
    config = load_config(name)
    text = {"data.path": "tests/data/sotu.txt", "data.tokenizer": BERT_VOCABULARY, "data.origin": ""}
    config.update_from_flattened_dict((text if config.data.source == "text" else {}) | overrides)
    config_lib.validate(config, num_devices)
    return config, config_lib.build(config)


def drawn_around(params: Any) -> Any:
    """Parameters and a little noise: nothing is zero then, and optimised away or hidden. Numpy."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.asarray(x) + np.asarray(0.02 * rng.normal(size=x.shape), x.dtype), params)


def star_easy() -> Corpus:
    task = TASKS["easy"]
    source = StarSource(task=task, split="train", seed=0)
    rows = [source[i] for i in range(4000)]
    return Corpus(Example(**loader.stack(rows)), task.vocabulary, _sigma(3.0, 60.0))


def sentences(lines: list[str], max_length: int) -> Corpus:
    """In bytes; those that fit."""
    return _corpus(load_tokenizer("bytes"), lines, max_length, _sigma(35.0, 700.0))


def word_pieces(lines: list[str], max_length: int) -> Corpus:
    """In BERT's word pieces; those that fit."""
    return _corpus(load_tokenizer(BERT_VOCABULARY), lines, max_length, _sigma(15.0, 300.0))


def _corpus(tokenizer: Tokenizer, lines: list[str], max_length: int, sigma) -> Corpus:
    return Corpus(texts_of(map(tokenizer.encode, lines), tokenizer.vocabulary, max_length), tokenizer.vocabulary, sigma)


def _sigma(smallest: float, largest: float) -> dict[str, tuple[float, float]]:
    """Of the joint family: σ̄_1 covers the lengths."""
    return {"joint": (smallest, largest), "independent": (0.1, 40.0)}


def texts_of(ids: Iterable[list[int]], vocabulary: Vocabulary, L: int) -> Example:
    """Every token free, every gap open. Texts that do not fit are left out."""
    return Example(**loader.stack([make_example(vocabulary, L, (), row) for row in ids if len(row) <= L]))


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Parts of a config, with parameters that are fresh or a run's."""

    name: str
    parts: Parts
    params: Any
    trained: bool

    @classmethod
    def of_run(cls, workdir: str) -> "Loaded":
        run = dilm_jax.load(workdir)
        return cls(str(run.workdir), run.parts, run.params, True)

    def texts(self, split: str, first: int, num: int) -> Example:
        """So many, from the start again where the split ends."""
        source = self.parts.task.source(split)
        return Example(**loader.stack([source[(first + i) % len(source)] for i in range(num)]))

    @functools.cached_property
    def samplers(self) -> Samplers:
        return Samplers(self.parts.process, self.network, self.parts.filters)

    @functools.cached_property
    def network(self):
        """Jitted (canvas, t) → scores."""
        return jax.jit(functools.partial(evals.network(self.parts, ONE_DEVICE), self.params))


@dataclasses.dataclass(frozen=True)
class Model:
    """A family with a small network, and one program for the gradients of several losses on the same noise."""

    corpus: Corpus
    family: str
    width: int
    num_layers: int

    @functools.cached_property
    def network(self):
        """Parameters, and (parameters, canvas, t) → scores."""
        process = self.corpus.process(self.family)
        made = Transformer(
            vocab_size=process.vocabulary.size,
            spec=process.spec,
            rngs=nnx.Rngs(0),
            **dict(config_lib.default_config().model)
            | {
                "num_layers": self.num_layers,
                "width": self.width,
                "num_heads": 4,
                "mlp_width": 4 * self.width,
                "cond_width": self.width,
                "dropout": 0.0,
                "dtype": "float32",
            },
        )
        graphdef, params = nnx.split(made, nnx.Param)
        return params, lambda params, canvas, t: nnx.merge(graphdef, params)(canvas, t)

    def gradients(self, losses: list[LossConfig]) -> Callable:
        """Jitted (parameters, texts, step) → the gradient of each loss, on the same noise."""
        processes = [self.corpus.process(self.family, config) for config in losses]
        _, network = self.network

        @jax.jit
        def gradients(params, x0: Example, step):
            t, _, canvas, targets, _ = train.corrupt_batch(processes[0], ONE_DEVICE, 0, step, x0)
            scores, pull = jax.vjp(lambda params: network(params, canvas, t), params)
            of_scores = [
                jax.grad(lambda scores, p=p: p.loss(scores, canvas, targets)["loss"].mean())(scores) for p in processes
            ]
            return [pull(cotangent)[0] for cotangent in of_scores]

        return gradients

    def batch(self, step: int, batch_size: int) -> Example:
        rows = np.random.default_rng(step).integers(len(self.corpus.texts.length), size=batch_size)
        return jax.tree.map(lambda x: jnp.asarray(x[rows]), self.corpus.texts)

    def trained(self, num_steps: int):
        """Parameters after so many steps of Adam on the default loss."""
        params, _ = self.network
        gradients, optimizer = self.gradients([DEFAULT]), optax.adam(1e-3)
        update = jax.jit(optimizer.update)
        state = optimizer.init(params)
        for step in range(num_steps):
            (gradient,) = gradients(params, self.batch(step, 32), step)
            updates, state = update(gradient, state)
            params = optax.apply_updates(params, updates)
        return params


def random_texts(lengths: np.ndarray, vocabulary: Vocabulary, max_length: int) -> Example:
    return Example(**compile_lib.random_texts(lengths, vocabulary, max_length))


def temporary_bytes(compiled: Any) -> int:
    """By ahead-of-time analysis: neither arguments nor outputs."""
    return compiled.memory_analysis().temp_size_in_bytes


def seconds_in_turn(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The fastest of so many calls of each, after one that is not timed. They take turns: what else the machine does
    meets all of them."""
    for run in runs.values():
        jax.block_until_ready(run())
    each = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.monotonic()
            jax.block_until_ready(run())
            each[name].append(time.monotonic() - started)
    return {name: min(seconds) for name, seconds in each.items()}


def run_timed(command: list[str], workdir: pathlib.Path, cpu_minutes: float | None = None) -> None:
    """Runs the command, within what earlier calls have left of so many minutes on CPUs: the file cpu_seconds in the
    run's directory has their sum. What fails ends this process too, but for the limit."""
    path = workdir / "cpu_seconds"
    spent = float(path.read_text()) if path.is_file() else 0.0
    left = int(60 * cpu_minutes - spent) if cpu_minutes else None
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_CPU, (left, left + 60)) if left else None
    code, before = -signal.SIGXCPU, _children_seconds()
    if left is None or left > 0:
        try:
            code = subprocess.run(command, preexec_fn=limit).returncode
        finally:
            workdir.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{spent + _children_seconds() - before:.1f}\n")
    if code == -signal.SIGXCPU:
        print(f"{workdir}: stopped after {cpu_minutes} minutes on CPUs", file=sys.stderr)
    elif code:
        sys.exit(code)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def make_tokenizer(directory: str, data: str) -> None:
    """Byte-level BPE of the training texts: lossless, and small enough for a softmax on a CPU."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY_SIZE, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator((row.text for row in open_source(data)["train"]), trainer)
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(directory)


def read_lines(path: str) -> list[str]:
    """Of the text file that --data names."""
    return [row.text for row in File(path=path, unit="line", field="text")]


def print_row(cells: Sequence, *, header: bool = False) -> None:
    """A row of a Markdown table; numbers with three significant digits unless they are integers."""
    texts = [f"{cell:#.3g}".rstrip(".") if isinstance(cell, float) else str(cell) for cell in cells]
    print("| " + " | ".join(texts) + " |" + ("\n" + "|" + "---|" * len(texts) if header else ""), flush=True)


def write_json(path: str | None, results: dict) -> None:
    """Where --json says, if it does."""
    if path:
        pathlib.Path(path).write_text(json.dumps(results, indent=2) + "\n")
