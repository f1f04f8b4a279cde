"""The task's evaluation: complete the prompts of a split, compare with the answers, count network calls."""

import functools
import json
import pathlib
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, Float, Int, UInt

from dilm_jax import canvas as canvas_lib
from dilm_jax import coverage, likelihood, metrics, sampling, schedules, sharding
from dilm_jax.backbone import Scores
from dilm_jax.canvas import Canvas, Example
from dilm_jax.config import Parts
from dilm_jax.data import loader, star
from dilm_jax.processes.base import Process
from dilm_jax.request import Request


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
    """(params by name, canvas, time, dropout keys or None) → Scores. `mesh` is where the parameters live."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: parts.init_network(0)), nnx.Param)

    def apply(params, canvas, time, dropout_keys=None):
        full = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(full, sharding.gather(params, mesh))
        with jax.default_matmul_precision(parts.matmul_precision):
            return nnx.merge(graphdef, full)(canvas, time, dropout_keys)

    return apply


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
    apply = network(parts, mesh)
    rows = sharding.batch_sharding(mesh)

    @functools.partial(jax.jit, in_shardings=(None, rows, rows, rows, rows), out_shardings=rows)
    def sample(params, x0: Example, seed, index, request: Request | None) -> Samples:
        key = row_keys(seed, index)
        goes = x0.free if request is None else jnp.zeros_like(x0.free)
        prompt, _ = canvas_lib.drop_tokens(x0, goes, parts.process.vocabulary)
        net = functools.partial(apply, params)
        state = sampling.generate(net, sampler, key, prompt, parts.filters, request, parts.corrector, rates)
        tokens, length = sampler.decode(state.canvas)
        group = None if state.request is None else state.request.group
        return Samples(tokens, length, state.nfe, state.saturated, state.truncated, group, state.born, state.trace)

    return sample


def log_gap_rates(process: Process, scores: Scores, canvas: Canvas, t: Float[Array, " B"]) -> Float[Array, "B S"]:
    """log of the rate at which each gap gets tokens; NaN where the family has no rate of each insertion."""
    if not isinstance(process, likelihood.Bounded):
        return jnp.full(canvas.tokens.shape, jnp.nan)
    return process.log_rates(scores, canvas, t) + scores.lse()


def make_bound(parts: Parts, process: likelihood.Bounded, mesh, num_times: int) -> Callable[..., jax.Array]:
    """Jitted (params, examples, seed [B], index [B]) → draws [B, T] of the likelihood bound in nats.

    Row b depends on (seed[b], index[b]) and its own text alone.
    """
    apply = network(parts, mesh)
    rows = sharding.batch_sharding(mesh)

    @functools.partial(jax.jit, in_shardings=(None, rows, rows, rows), out_shardings=rows)
    def bound(params, x0: Example, seed, index):
        key, place = row_keys(seed, index), schedules.evenly_spread(seed, index)
        return likelihood.bound_samples(process, functools.partial(apply, params), key, place, x0, num_times).T

    return bound


class Evaluator:
    """Evaluates a split. The batch size, rounded up to fill the devices, is a matter of memory only."""

    def __init__(self, parts: Parts, mesh, batch_size: int, num_times: int):
        self._parts, self._mesh, self._batch_size = parts, mesh, sharding.fill_up(batch_size, mesh)
        self._sample = make_sampler(parts, mesh)
        self._process = parts.process if isinstance(parts.process, likelihood.Bounded) else None
        self._bound = make_bound(parts, self._process, mesh, num_times) if self._process else None

    def __call__(
        self, params, split: str, num_examples: int | None, seed: int
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Means over the first `num_examples` (None: all) of the split, by metric; and one dict a sample.

        Raises ValueError for an unknown split, or more examples than it has.
        """
        if split not in self._parts.sources:
            raise ValueError(f"unknown split {split!r}; choose one of {', '.join(self._parts.sources)}")
        batches = loader.eval_batches(self._parts.sources[split], self._batch_size, num_examples)
        rows = loader.local_rows(self._batch_size, jax.process_index(), jax.process_count())
        samples, bounds = [], []
        for step in range(len(batches)):
            reference = Example(**batches.batch(step))
            index = np.arange(self._batch_size) + step * self._batch_size
            local = jax.tree.map(lambda x: x[rows], (reference, np.full(index.shape, seed, np.uint32), index))
            inputs = sharding.put_batch(local, self._mesh, self._batch_size)
            drawn = multihost_utils.process_allgather(self._sample(params, *inputs, None), tiled=True)
            scores = star.score(reference, drawn.tokens, drawn.length)
            real = np.flatnonzero(batches.weight(step))
            for b in real:
                samples.append(describe_sample(reference, drawn, scores, int(b), len(samples)))
            if self._bound:
                draws = multihost_utils.process_allgather(self._bound(params, *inputs), tiled=True)
                n = np.asarray(reference.free).sum(-1)
                bounds.append((draws[real], n[real], np.asarray(reference.num_bytes)[real]))
        results = {name: float(np.mean([row[name] for row in samples])) for name in _AVERAGED}
        if self._process:
            draws, n, num_bytes = map(np.concatenate, zip(*bounds, strict=True))
            results |= likelihood.summarize(draws.T, n, num_bytes)
            results["p_start_nonempty"] = float(np.mean(self._process.start_nonempty(jnp.asarray(n))))
        return {f"eval/{name}": value for name, value in results.items()}, samples


def likelihood_note(parts: Parts, split: str, num: int = 1000) -> str | None:
    """One line if the family has no likelihood bound, or its schedule does not cover the first texts of a split (see
    coverage.py)."""
    if not isinstance(parts.process, likelihood.Bounded):
        return f"{type(parts.process).__name__} has no likelihood bound: none is printed"
    source = parts.sources[split]
    rows = [source[i] for i in range(min(num, len(source)))]
    return coverage.warning(parts.process, [int(row["length"] - row["frozen"].sum()) for row in rows])


_AVERAGED = ("exact_match", "token_accuracy", "length_match", "nfe", "saturated", "truncated")


def describe_sample(reference: Example, drawn: Samples, scores: Mapping[str, np.ndarray], b: int, index: int) -> dict:
    prompt_length = int(reference.frozen[b].sum())
    ids = reference.tokens[b, : int(reference.length[b])].tolist()
    generated = drawn.tokens[b, prompt_length : int(drawn.length[b])].tolist()
    return {
        "index": index,
        "prompt": star.format_prompt(ids[:prompt_length]),
        "answer": star.format_path(ids[prompt_length:]),
        "generated": star.format_path(generated),
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
    options = parts.sampling
    if parts.sampler != "event":
        effort = f"{options.num_steps} steps"
    elif options.events_per_call > 1:
        effort = f"{options.events_per_call} events a call"
    else:
        effort = f"{options.calls} calls a token"
    if parts.corrector.steps:
        effort += f", {parts.corrector.steps} corrections from t = {parts.corrector.strength:g}"
    return {
        "split": split,
        "n": num,
        "protocol": f"star_{parts.task.name}: complete the prompt, compare the whole answer; EMA weights, seed {seed}",
        "sampler": f"{parts.sampler}, {effort}, gap {describe_filter(gap)}, token {describe_filter(token)}",
        "checkpoint": checkpoint,
        "commit": commit(),
        **results,
    }


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


def write_card(directory: pathlib.Path, results: Mapping[str, Any]) -> None:
    """A number that is not finite becomes null."""
    rows = {name: metrics.or_null(value) for name, value in results.items()}
    (directory / "eval.json").write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n")


def format_card(results: Mapping[str, Any]) -> str:
    """The card as a table, a line a row."""
    width = max(map(len, results))
    rows = (
        f"{name:<{width}}  {value:.4f}" if isinstance(value, float) else f"{name:<{width}}  {value}"
        for name, value in results.items()
    )
    return "\n".join(rows)
