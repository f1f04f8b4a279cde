"""The task's evaluation: generate anew what is free in a split's texts, score it, count network calls; and the
likelihood bound of the texts."""

import functools
import json
import math
import pathlib
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int, UInt

from dilm_jax import canvas as canvas_lib
from dilm_jax import coverage, likelihood, metrics, sampling, schedules, sharding, text_metrics
from dilm_jax import packing as packing_lib
from dilm_jax.backbone import Transformer
from dilm_jax.canvas import Canvas, Example
from dilm_jax.config import Parts
from dilm_jax.data import loader
from dilm_jax.data.task import Task
from dilm_jax.data.text import TextTask
from dilm_jax.judge import JudgeResult
from dilm_jax.processes.base import Process
from dilm_jax.request import Request
from dilm_jax.scores import LastScores, OfAllGaps, num_chunks


@struct.dataclass
class Samples:
    """Generated texts, prompt included, with what they cost."""

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]
    nfe: Int[Array, " B"]  # network calls
    saturated: Int[Array, " B"]  # moves in which more insertions were due than could be made
    truncated: Bool[Array, " B"]  # an insertion was left out: the canvas was full
    group: Int[Array, "B S"] | None  # of each gap, under a request
    born: Int[Array, "B S"]  # of each column, the call that its token came at, from 1; 0: there from the start
    trace: sampling.Trace | None  # if it was asked for


def network(parts: Parts, mesh) -> Callable:
    """(params by name, canvas, time, dropout keys or None, packing or None, fused) → scores, as `Transformer.__call__`
    has them. `mesh` is where the parameters live; fused scores are cut into chunks for one of its devices."""
    module = _module(parts, mesh)

    def apply(params, canvas, time, dropout_keys=None, packing=None, fused=False):
        columns = (canvas.tokens if packing is None else packing.source).size // sharding.num_shards(mesh)
        chunks = num_chunks(columns, parts.process.vocabulary.size, mesh.devices.flat[0].platform) if fused else None
        with jax.default_matmul_precision(parts.matmul_precision):
            return module(params)(canvas, time, dropout_keys, packing, chunks, mesh)

    return apply


def for_sampling(
    parts: Parts, mesh, params, forbids: bool = False
) -> sampling.Network | sampling.Packed | sampling.Cached:
    """The network, with what it has computed of a text's beginning kept where texts only grow at their end; packed
    where they grow anywhere, unless a request `forbids` tokens, which needs scores that are held."""
    apply = functools.partial(network(parts, mesh), params)
    if not parts.process.spec.append_only:
        if forbids or not parts.process.TRAITS.grows:
            return apply
        return sampling.Packed(
            call=lambda canvas, clock, packing: apply(canvas, clock, packing=packing, fused=True),
            num_shards=sharding.num_shards(mesh),
        )
    module = _module(parts, mesh)

    def call(method, *args, **kwargs):
        with jax.default_matmul_precision(parts.matmul_precision):
            return getattr(module(params), method)(*args, **kwargs)

    return sampling.Cached(
        prefill=functools.partial(call, "prefill", mesh=mesh),
        extend=functools.partial(call, "extend"),
    )


def _module(parts: Parts, mesh) -> Callable[[Any], Transformer]:
    """Params by name → the network with them."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: parts.init_network(0)), nnx.Param)

    def bind(params):
        full = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(full, sharding.gather(params, mesh))
        return nnx.merge(graphdef, full)

    return bind


def abstract_params(parts: Parts, mesh):
    """Shapes, types and places of the parameters by name."""
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: parts.init_network(0)), nnx.Param))
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        params,
        sharding.param_shardings(params, mesh),
    )


def row_keys(seed: UInt[Array, " B"], index: Int[Array, " B"]) -> jax.Array:
    """A key [B] for each row."""
    return jax.vmap(lambda seed, i: jax.random.fold_in(jax.random.key(seed), i))(seed, index)


def make_sampler(parts: Parts, mesh, trace: bool = False) -> Callable[..., Samples]:
    """Jitted (params, examples, seed [B], index [B], request or None) → Samples: deletes what is free and generates it
    anew; under a request what is free is a context, and stays.

    Row b depends on (seed[b], index[b]), its own prompt and its request alone. With `trace` the samples have one,
    and are otherwise the same.
    """
    sampler = parts.process.samplers(parts.sampling)[parts.sampler]
    rates = functools.partial(log_gap_rates, parts.process) if trace else None
    rows = sharding.batch_sharding(mesh)

    @functools.partial(jax.jit, in_shardings=(None, rows, rows, rows, rows), out_shardings=rows)
    def sample(params, x0: Example, seed, index, request: Request | None) -> Samples:
        key = row_keys(seed, index)
        goes = x0.free if request is None else jnp.zeros_like(x0.free)
        prompt, _ = canvas_lib.drop_tokens(x0, goes, parts.process.vocabulary)
        forbids = request is not None and request.forbidden is not None
        net = for_sampling(parts, mesh, params, forbids)
        state = sampling.generate(net, sampler, key, prompt, parts.filters, request, parts.corrector, rates)
        tokens, length = sampler.decode(state.canvas)
        group = None if state.request is None else state.request.group
        return Samples(tokens, length, state.nfe, state.saturated, state.truncated, group, state.born, state.trace)

    return sample


def log_gap_rates(
    process: Process, scores: OfAllGaps | LastScores, canvas: Canvas, t: Float[Array, " B"]
) -> Float[Array, "B S"]:
    """log of the rate at which each gap gets tokens; NaN where the family has no rate of each insertion."""
    if isinstance(scores, LastScores) or not isinstance(process, likelihood.Bounded):
        return jnp.full(canvas.tokens.shape, jnp.nan)
    return process.log_rates(scores, canvas, t) + scores.lse()


def make_nll(parts: Parts, process: likelihood.Likelihood, mesh, num_times: int) -> Callable[..., jax.Array]:
    """Jitted (params, examples, seed [B], index [B]) → draws [B, T] of −log p, or of a bound on it, in nats.

    Row b depends on (seed[b], index[b]) and its own text alone, but for the rounding of sums.
    """
    rows = sharding.batch_sharding(mesh)
    apply = network(parts, mesh)

    @functools.partial(jax.jit, in_shardings=(None, rows, rows, rows), out_shardings=rows)
    def nll(params, x0: Example, seed, index):
        key, place = row_keys(seed, index), schedules.evenly_spread(seed, index)
        net = functools.partial(packed_values, functools.partial(apply, params, fused=True), sharding.num_shards(mesh))
        return process.nll_draws(net, key, place, x0, num_times).T

    return nll


def packed_values(network, num_shards: int, canvas: Canvas, time, value_of: likelihood.ValueOf) -> Float[Array, " B"]:
    """`value_of` the scores of each canvas, in passes of an eighth as many rows as there are canvases, into which these
    are packed: as many passes as they need, and no gradient that a pass more would cost."""
    num_rows = -(-len(canvas.length) // (8 * num_shards))

    def visit(values, packing):
        return jnp.where(packing.placed, value_of(network(canvas, time, packing=packing)), values)

    zeros = jnp.zeros(canvas.length.shape)
    return packing_lib.in_passes(visit, zeros, canvas.length, canvas.num_columns, num_rows, num_shards)[0]


class Evaluator:
    """Evaluates a split. The batch size, rounded up to fill the devices, is a matter of memory only. Texts are
    generated for the first `num_samples` examples only (0: for all)."""

    def __init__(self, parts: Parts, mesh, batch_size: int, num_times: int, num_samples: int = 0, bound: bool = True):
        self._parts, self._mesh, self._batch_size = parts, mesh, sharding.fill_up(batch_size, mesh)
        self._num_samples = num_samples or math.inf
        self._sample = make_sampler(parts, mesh)
        self._process = parts.process if bound and isinstance(parts.process, likelihood.Likelihood) else None
        self._nll = make_nll(parts, self._process, mesh, num_times) if self._process else None

    def __call__(
        self, params, split: str, num_examples: int | None, seed: int, between: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Figures of the first `num_examples` (None: all) of the split, by metric; and one dict a sample. `between` is
        called after each batch.

        Raises ValueError for an unknown split, or more examples than it has.
        """
        task = self._parts.task
        batches = loader.eval_batches(task.source(split), self._batch_size, num_examples)
        rows = loader.local_rows(self._batch_size, jax.process_index(), jax.process_count())
        samples, bounds, references, generated = [], [], [], []
        for step in range(len(batches)):
            reference = Example(**batches.batch(step))
            index = np.arange(self._batch_size) + step * self._batch_size
            local = jax.tree.map(lambda x: x[rows], (reference, np.full(index.shape, seed, np.uint32), index))
            inputs = sharding.put_batch(local, self._mesh, self._batch_size)
            real = np.flatnonzero(batches.weight(step))
            references += [content_ids(reference.tokens[b], reference.length[b]) for b in real]
            if index[0] < self._num_samples:
                drawn = sharding.fetch(self._sample(params, *inputs, None), self._mesh)
                scores = task.score(reference, drawn.tokens, drawn.length)
                for b in real[index[real] < self._num_samples]:
                    samples.append(describe_sample(task, reference, drawn, scores, int(b), len(samples)))
                    generated.append(content_ids(drawn.tokens[b], drawn.length[b]))
            if self._nll:
                draws = sharding.fetch(self._nll(params, *inputs), self._mesh)
                n = np.asarray(reference.free).sum(-1)
                bounds.append((draws[real], n[real], np.asarray(reference.num_bytes)[real]))
            between()
        averaged = [name for name, value in samples[0].items() if isinstance(value, int | float) and name != "index"]
        results = {name: float(np.mean([row[name] for row in samples])) for name in averaged}
        results |= task.summarize(references, generated)
        data = task.summarize(references, references[: len(generated)])
        if self._process:
            draws, n, num_bytes = map(np.concatenate, zip(*bounds, strict=True))
            bound = likelihood.summarize(draws.T, n, num_bytes, self._process.EXACT)
            if not task.lossless and "nelbo_bits_per_byte" in bound:  # never to be compared with those of raw text
                bound["nelbo_bits_per_byte_lossy"] = bound.pop("nelbo_bits_per_byte")
            results |= bound
            if isinstance(self._process, likelihood.Bounded):
                results["p_start_nonempty"] = float(np.mean(self._process.start_nonempty(jnp.asarray(n))))
        return {f"data/{name}": value for name, value in data.items()} | {
            f"eval/{name}": value for name, value in results.items()
        }, samples


TextScorer = Callable[[list[str]], JudgeResult]  # a judge that is asked by some protocol


def judged(scorer: TextScorer, references: list[str], generated: list[str]) -> dict[str, Any]:
    """NLL of the data's texts and of those generated, in nats a token, how they were taken, and MAUVE if it is
    installed."""
    of_data, of_samples = scorer(references), scorer(generated)
    figures = {
        "data/judge_nll": of_data.nll,
        "eval/judge_nll": of_samples.nll,
        "judge_of_data": of_data.describe(),
        "judge": of_samples.describe(),
    }
    mauve = text_metrics.mauve(generated, references)
    return figures if mauve is None else figures | {"eval/mauve": mauve}


def text_figures(
    task: TextTask, split: str, num: int | None, texts: list[str], scorer: TextScorer | None
) -> dict[str, Any]:
    """What is said of texts that any system wrote, beside as many of a split's first `num` rows (None: all)."""
    source = task.source(split)
    if num is not None and not 1 <= num <= len(source):
        raise ValueError(f"cannot compare with {num} texts: the {split} split has {len(source)}")
    references = [content_ids(row["tokens"], row["length"]) for row in (source[i] for i in range(num or len(source)))]
    generated = [task.tokenizer.encode(text) for text in texts]
    beside = references[: len(generated)]
    figures = {f"data/{name}": value for name, value in task.summarize(references, beside).items()}
    figures |= {f"eval/{name}": value for name, value in task.summarize(references, generated).items()}
    return figures if scorer is None else figures | judged(scorer, [*map(task.tokenizer.decode, beside)], texts)


def content_ids(tokens, length) -> list[int]:
    return np.asarray(tokens)[: int(length)].tolist()


def notes(parts: Parts, split: str) -> list[str]:
    """What the user of a run should know: of the data, and of the bound of a split."""
    return [*parts.task.notes(), *filter(None, [likelihood_note(parts, split)])]


def likelihood_note(parts: Parts, split: str, num: int = 1000) -> str | None:
    """One line if the family has no likelihood, or its schedule does not cover the first texts of a split (see
    coverage.py)."""
    if not isinstance(parts.process, likelihood.Likelihood):
        return f"{type(parts.process).__name__} has no likelihood bound: none is printed"
    if not isinstance(parts.process, likelihood.Bounded):
        return None
    source = parts.task.source(split)
    rows = [source[i] for i in range(min(num, len(source)))]
    return coverage.warning(parts.process, [int(row["length"] - row["frozen"].sum()) for row in rows])


def describe_sample(
    task: Task, reference: Example, drawn: Samples, scores: Mapping[str, np.ndarray], b: int, index: int
) -> dict[str, Any]:
    num_prompt = int(reference.frozen[b].sum())
    ids = content_ids(reference.tokens[b], reference.length[b])
    return {
        "index": index,
        "prompt": task.format_prompt(ids[:num_prompt]),
        "answer": task.format_answer(ids[num_prompt:]),
        "generated": task.format_answer(content_ids(drawn.tokens[b], drawn.length[b])[num_prompt:]),
        **{name: float(value[b]) for name, value in scores.items()},
        "nfe": int(drawn.nfe[b]),
        "saturated": int(drawn.saturated[b]),
        "truncated": bool(drawn.truncated[b]),
    }


def write_samples(path: pathlib.Path, samples: list[dict[str, Any]]) -> None:
    """One JSON object a line; only the first process writes."""
    if jax.process_index() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in samples))


def card(
    parts: Parts, results: Mapping[str, float], *, split: str, num: int, checkpoint: int, seed: int
) -> dict[str, Any]:
    """The content of eval.json: how the numbers were obtained, then the numbers."""
    gap, token = parts.filters.gap, parts.filters.token
    effort = [parts.sampler, *_describe_options(parts)]
    if parts.corrector.steps:
        effort.append(f"{parts.corrector.steps} corrections from t = {parts.corrector.strength:g}")
    return {
        "split": split,
        "n": num,
        "protocol": f"{parts.task.name}: {parts.task.protocol}; EMA weights, seed {seed}",
        "sampler": f"{', '.join(effort)}, gap {describe_filter(gap)}, token {describe_filter(token)}",
        "checkpoint": checkpoint,
        "commit": commit(),
        **results,
    }


def _describe_options(parts: Parts) -> list[str]:
    """What the sampler was told."""
    options, read = parts.sampling, parts.process.TRAITS.samplers[parts.sampler]
    said = {
        "num_steps": f"{options.num_steps} steps",
        "calls": f"{options.calls} calls a token" if options.events_per_call == 1 else "",
        "events_per_call": f"{options.events_per_call} events a call" if options.events_per_call > 1 else "",
        "rate_scale": f"rate × {options.rate_scale:g}" if options.rate_scale != 1 else "",
        "stop_threshold": f"stops above {options.stop_threshold:g}" if options.stop_threshold else "stops are drawn",
    }
    return [text for option, text in said.items() if option in read and text]


def describe_filter(filter: sampling.Filter) -> str:
    if filter.temperature == 0:
        return "greedy"
    return f"temperature {filter.temperature:g} top-k {filter.top_k} top-p {filter.top_p:g}"


def commit() -> str:
    """The commit of this code, with "-dirty" if it was changed since; "unknown" outside a checkout."""
    here = pathlib.Path(__file__).parent

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", str(here), *command], capture_output=True, text=True, check=True).stdout

    try:
        if pathlib.Path(git("rev-parse", "--show-toplevel").strip()) != here.parent.resolve():
            return "unknown"  # another project's, which this package was copied into
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_card(path: pathlib.Path, *cards: Mapping[str, Any]) -> None:
    """One card, or a list of several. A number that is not finite becomes null: JSON has none."""
    rows = [{name: metrics.or_null(value) for name, value in card.items()} for card in cards]
    path.write_text(json.dumps(rows if len(rows) > 1 else rows[0], indent=2, allow_nan=False) + "\n")


def format_card(results: Mapping[str, Any]) -> str:
    """The card, a line a figure; first, where the data have such figures too, theirs beside those of the samples."""
    both = [name.removeprefix("data/") for name in results if name.startswith("data/")]
    rest = {name: value for name, value in results.items() if name.partition("/")[2] not in both}
    table = [["", *both], *(_table_row(row, f"{prefix}/", results, both) for row, prefix in _CARD_ROWS)] if both else []
    width = max(map(len, rest))
    lines = (
        f"{name:<{width}}  {value:.4f}" if isinstance(value, float) else f"{name:<{width}}  {value}"
        for name, value in rest.items()
    )
    return "\n".join([*_aligned(table), *lines])


_CARD_ROWS = (("data", "data"), ("samples", "eval"))


def samplers_to_compare(parts: Parts, sampler: str | None, steps: list[int]) -> list[dict[str, Any]]:
    """The family's first sampler without a time grid, then one with each number of steps: the one asked for, or that of
    training, or the first that has them."""
    samplers = parts.process.TRAITS.samplers
    on_grid = [name for name, options in samplers.items() if "num_steps" in options]
    if not on_grid:
        raise ValueError(f"--steps has no effect on {', '.join(samplers)}; leave it out")
    default = parts.sampler if parts.sampler in on_grid else on_grid[0]
    exact = [{"sampler": name} for name in samplers if name not in on_grid][:1]
    return exact + [{"sampler": sampler or default, "num_steps": n} for n in steps]


def format_quality(cards: list[Mapping[str, Any]]) -> str:
    """Cards of several samplers as a table, the data first."""
    names = [name.removeprefix("eval/") for name in cards[0] if name.startswith("eval/")]
    rows = [_table_row("data", "data/", cards[0], names)] if any(name.startswith("data/") for name in cards[0]) else []
    rows += [_table_row(card["sampler"].split(", gap")[0], "eval/", card, names) for card in cards]
    return "\n".join(_aligned([["", *names], *rows]))


def plot_quality(cards: list[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Figures of the samples over network calls, the data's as a line."""
    from matplotlib.figure import Figure  # not pyplot: no display and no global state

    names = [name for name in ("judge_nll", "entropy", "length_mean", "exact_match") if f"eval/{name}" in cards[0]]
    figure = Figure(figsize=(4.5 * len(names), 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        if f"data/{name}" in cards[0]:
            axes.axhline(cards[0][f"data/{name}"], color="black", linewidth=0.8, label="data")
        of_sampler: dict[str, list] = {}
        for card in cards:
            of_sampler.setdefault(card["sampler"].split(",")[0], []).append((card["eval/nfe"], card[f"eval/{name}"]))
        for sampler, points in of_sampler.items():
            axes.plot(*zip(*points, strict=True), ".-" if len(points) > 1 else "*", label=sampler)
        axes.set(xscale="log", xlabel="network calls a text", ylabel=name)
    figure.axes[0].legend()
    figure.savefig(path, dpi=100)


def _table_row(row: str, prefix: str, results: Mapping[str, Any], names: list[str]) -> list[str]:
    values = (results.get(prefix + name) for name in names)
    return [row, *("—" if value is None else f"{value:.4g}" for value in values)]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
