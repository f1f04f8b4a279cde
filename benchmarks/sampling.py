"""What sampling costs, and what each sampler makes of it, on star graphs; and of texts, against a loop in PyTorch.

    python -m benchmarks.sampling [--config=configs/star_easy_joint.py:small,… | --workdir=DIR,…] [--num=256 …]

Of a trained run of DILM-S on texts (--workdir), batches of --batch_size texts from nothing:
- "growing buffer": `euler` with --steps as a loop in eager PyTorch whose buffer grows by a column a step, each awaited
  by the host (torch_baseline.GrowingLoop); "cut" to the longest text; the same network and as many threads;
- `euler` of ours with as many steps, a canvas a row ("whole") or packed; and `event`, which has no steps.
Texts a second, the ratio to the first of them, tokens a text, unigram entropy and, with --judge, NLL under that model,
nats a token: both with one standard error, drawn without filters.

Of star graphs, for networks as initialised (--config; all lengths are then equally likely) or as trained (--workdir):
1. sequences/s of the jitted sampler `event` by batch size, against a loop in Python over single sequences with the same
   jitted network call and the same jitted `advance`, and the milliseconds of a network call by batch size;
2. network calls of each sampler on the first --num test graphs and, if the network is trained, exact match with two
   standard errors, drawn as the run's config says (greedy, for star graphs).
"""

import functools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from benchmarks.common import (
    ONE_DEVICE,
    Loaded,
    Samplers,
    Setting,
    empty_canvas,
    event,
    grids,
    load_config,
    print_row,
    row_keys,
    write_json,
)
from dilm_jax import canvas as canvas_lib
from dilm_jax import cli, evals, text_metrics, worlds
from dilm_jax import config as config_lib
from dilm_jax.canvas import Canvas, Example
from dilm_jax.data import star
from dilm_jax.data.text import TextTask
from dilm_jax.judge import PLAIN, Judge
from dilm_jax.sampling import Filters, SamplingOptions
from dilm_jax.scores import Scores

_CONFIG = flags.DEFINE_list(
    "config",
    ["configs/star_easy_joint.py:small", "configs/star_easy_independent.py:small"],
    "Config files, each with an optional :variant.",
)
_WORKDIR = flags.DEFINE_list("workdir", [], "Trained runs, in place of configs.")
_NUM = flags.DEFINE_integer("num", 256, "Test graphs.", lower_bound=1)
_BATCHES = flags.DEFINE_list("batches", ["1", "8", "64"], "Batch sizes to time.")
_SECONDS = flags.DEFINE_float("seconds", 3.0, "A time is the mean over at least so many, after a run that compiles.")
_BATCH = flags.DEFINE_integer("batch_size", 64, "Texts at once.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 200, "Of the loop on texts.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 2, "Batches of texts that are timed, after one of ours.", lower_bound=1)
_JUDGE = flags.DEFINE_string("judge", None, "A causal language model that scores texts.")
_ONLY = flags.DEFINE_list("only", [""], "Samplers whose name contains one of these.")
_JSON = flags.DEFINE_string("json", None, "Write the rows here too.")

SETTINGS: dict[str, Setting] = {
    "event": event(),
    "event, 1 call": event(calls=1),
    "event, 2 a call": event(events_per_call=2),
}
SETTINGS |= grids(16, 64)
TIMED: Setting = event()


def is_asked_for(name: str) -> bool:
    return any(part in name for part in _ONLY.value)


def prompts(net: Loaded, x0: Example) -> Canvas:
    return canvas_lib.drop_tokens(x0, x0.free, net.parts.process.vocabulary)[0]


def graphs(net: Loaded, first: int, num: int) -> Example:
    return jax.tree.map(jnp.asarray, net.texts("test", first, num))


def networks() -> list[Loaded]:
    if _WORKDIR.value:
        return [Loaded.of_run(workdir) for workdir in _WORKDIR.value]
    made = []
    for name in _CONFIG.value:
        config = load_config(name)
        config_lib.validate_values(config)
        parts = config_lib.build(config)
        params = nnx.to_pure_dict(nnx.state(parts.init_network(0), nnx.Param))
        made.append(Loaded(pathlib.Path(name).name.replace(".py", ""), parts, params, False))
    return made


# --- Speed -----------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[int], Any]) -> float:
    """Mean time of run(0), run(1), … over --seconds."""
    jax.block_until_ready(run(0))
    start, repeats = time.monotonic(), 0
    while time.monotonic() - start < _SECONDS.value:
        repeats += 1
        jax.block_until_ready(run(repeats))
    return (time.monotonic() - start) / repeats


def python_loop(net: Loaded) -> Callable[[int], Any]:
    """One sequence: a network call and an `advance` at a time, until it is done."""
    name, options = TIMED
    sampler = net.parts.process.samplers(options)[name]
    advance = jax.jit(lambda scores, state: sampler.advance(scores, state, net.parts.filters))
    start, prompt = jax.jit(sampler.start), prompts(net, graphs(net, 0, 1))

    def run(i: int):
        state = start(row_keys(i, 1), prompt)
        while not state.done.all():
            state = advance(net.network(state.canvas, state.clock), state)
        return state

    return run


def speed(net: Loaded, batches: list[int]) -> list[dict]:
    """Sequences/s in the loop, then by batch size, with the milliseconds of a network call."""
    loop = 1 / seconds(python_loop(net))
    rows = [{"how": "Python loop", "batch": 1, "sequences_per_s": loop, "ratio": 1.0, "call_ms": None}]
    for batch in batches:
        canvas, at_one = prompts(net, graphs(net, 0, batch)), jnp.ones(batch)
        rate = batch / seconds(lambda i, b=batch, p=canvas: net.samplers(TIMED, row_keys(i, b), p))
        call = 1000 * seconds(lambda _, p=canvas, t=at_one: net.network(p, t))
        rows.append({"how": "jitted", "batch": batch, "sequences_per_s": rate, "ratio": rate / loop, "call_ms": call})
    return rows


# --- Calls -----------------------------------------------------------------------------------------------------------


def calls(net: Loaded, setting: Setting, num: int) -> dict:
    """Means over the first `num` test graphs."""
    batch_size, rows = min(num, 250), []
    for first in range(0, num, batch_size):
        x0 = graphs(net, first, batch_size)
        state = jax.device_get(net.samplers(setting, row_keys(first, batch_size), prompts(net, x0)))
        tokens, length = map(np.asarray, canvas_lib.content(state.canvas))
        right = star.score(x0, tokens, length)["exact_match"]
        inserted = length - np.asarray(x0.frozen.sum(-1))
        rows.append(np.stack([state.nfe, inserted, state.saturated, state.truncated, right])[:, : num - first])
    nfe, inserted, saturated, truncated, right = (float(x) for x in np.concatenate(rows, axis=1).mean(1))
    return {
        "nfe": nfe,
        "tokens": inserted,
        "nfe_per_token": nfe / inserted if inserted else math.nan,
        "saturated": saturated,
        "truncated": truncated,
        "exact_match": right if net.trained else None,
        "two_stderr": 2 * math.sqrt(right * (1 - right) / num) if net.trained else None,
    }


# --- Texts -----------------------------------------------------------------------------------------------------------


def growing_loop(net: Loaded, num_steps: int):
    """`euler` of a run in PyTorch."""
    from benchmarks import torch_baseline  # torch is optional

    process: Any = net.parts.process
    vocabulary = process.vocabulary
    times = np.arange(num_steps, -1, -1) / num_steps
    network_times = np.maximum(times[:-1], process.eps).astype(np.float32)
    K = process.max_length + 1
    one_hot = Scores(jnp.zeros((K, process.max_length + 2, 1)), jnp.log(jnp.eye(K)), None)

    @jax.jit
    def rates(t):
        """[2, K] by whether the canvas is empty, and by how many are missing for sure."""
        texts = worlds.to_example([worlds.plain((int(np.flatnonzero(vocabulary.ordinary)[0]),))] * K, K - 1)
        some, none = canvas_lib.to_canvas(texts, vocabulary), empty_canvas(K, K - 1, vocabulary)
        return jnp.stack([process.insertion_rate(one_hot, x, jnp.full(K, t)) for x in (some, none)])

    model = dict(net.parts.model)
    special = {name: getattr(vocabulary, name) for name in ("cls", "bos", "pad")}
    table = np.stack([rates(t) for t in network_times])
    return torch_baseline.GrowingLoop(
        net.params,
        model,
        process.spec.predictable,
        special,
        np.nan_to_num(table),
        times.astype(np.float32),
        network_times,
    )


def ours(net: Loaded, setting: Setting, packed: bool) -> Callable[[int], list[list[int]]]:
    """Jitted."""
    process: Any = net.parts.process
    network = evals.for_sampling(net.parts, ONE_DEVICE, net.params) if packed else net.network
    samplers = Samplers(process, network, Filters())
    canvas = empty_canvas(_BATCH.value, process.max_length, process.vocabulary)

    def texts(seed: int):
        state = jax.device_get(samplers(setting, row_keys(seed, _BATCH.value), canvas))
        return [evals.content_ids(*row) for row in zip(*canvas_lib.content(state.canvas), strict=True)]

    texts(10**6)  # compiles
    return texts


def mean_and_error(values: np.ndarray, weights: np.ndarray | float = 1.0) -> tuple[float, float]:
    """Σ values / Σ weights, of independent pairs, and its standard error."""
    weights = np.broadcast_to(weights, values.shape)
    mean = values.sum() / weights.sum()
    return float(mean), float(np.sqrt(np.square(values - mean * weights).sum()) / weights.sum())


def texts_of_loops(net: Loaded, judge: Judge | None) -> list[dict]:
    task, loop = net.parts.task, growing_loop(net, _STEPS.value)
    assert isinstance(task, TextTask)
    grid: Setting = ("euler", SamplingOptions(num_steps=_STEPS.value))
    ways = {
        "euler in PyTorch, growing buffer": lambda: functools.partial(loop, _BATCH.value, cut=False),
        "euler in PyTorch, cut to the longest": lambda: functools.partial(loop, _BATCH.value, cut=True),
        "euler, whole": lambda: ours(net, grid, False),
        "euler, packed": lambda: ours(net, grid, True),
        "event, whole": lambda: ours(net, event(), False),
        "event, packed": lambda: ours(net, event(), True),
    }
    ways = {name: make() for name, make in ways.items() if is_asked_for(name)}
    seconds, made = {name: 0.0 for name in ways}, {name: [] for name in ways}
    for seed in range(_REPEATS.value):
        for name, way in ways.items():
            started = time.monotonic()
            made[name] += way(seed=seed)
            seconds[name] += time.monotonic() - started
    rows, first = [], next(iter(ways))
    for name, texts in made.items():
        entropy = mean_and_error(np.array([text_metrics.unigram_entropy(ids) for ids in texts]))
        row = {"how": name, "texts_per_s": len(texts) / seconds[name], "ratio": seconds[first] / seconds[name]}
        row |= {"tokens": float(np.mean([len(ids) for ids in texts])), "entropy": entropy, "judge_nll": None}
        if judge is not None:
            result = judge.score([task.tokenizer.decode(ids) for ids in texts], protocol=PLAIN)
            row["judge_nll"] = mean_and_error(result.nats, result.num_scored.astype(float))
        rows.append(row)
    print_row(["how", "texts/s", "of the first", "tokens", "entropy", "judge NLL"], header=True)
    for row in rows:
        error = ["—" if row[key] is None else "{:.3f} ± {:.3f}".format(*row[key]) for key in ("entropy", "judge_nll")]
        print_row([row["how"], row["texts_per_s"], row["ratio"], row["tokens"], *error])
    return rows


def main() -> None:
    results = []
    judge = Judge.load(_JUDGE.value) if _JUDGE.value else None
    for net in networks():
        if isinstance(net.parts.task, TextTask):
            print(f"\n{net.name}, texts in batches of {_BATCH.value}, {_STEPS.value} steps of euler\n")
            results.append({"network": net.name, "texts": texts_of_loops(net, judge)})
            continue
        print(f"\n{net.name}, {'trained' if net.trained else 'as initialised'}\n")
        fast, costs = speed(net, [int(batch) for batch in _BATCHES.value]), []
        print_row(["event", "batch", "sequences/s", "of the Python loop", "ms a network call"], header=True)
        for row in fast:
            call = "—" if row["call_ms"] is None else row["call_ms"]
            print_row([row["how"], row["batch"], row["sequences_per_s"], row["ratio"], call])
        print()
        columns = ["sampler", "calls", "tokens", "calls a token", "moves saturated", "truncated", "exact match"]
        print_row(columns, header=True)
        for name, setting in SETTINGS.items():
            if not is_asked_for(name):
                continue
            row = calls(net, setting, _NUM.value)
            costs.append({"sampler": name, **row})
            match = f"{row['exact_match']:.4f} ± {row['two_stderr']:.4f}" if net.trained else "—"
            numbers = [row[key] for key in ("nfe", "tokens", "nfe_per_token", "saturated", "truncated")]
            print_row([name, *(f"{x:.3f}" for x in numbers), match])
        results.append({"network": net.name, "trained": net.trained, "speed": fast, "calls": costs})
    write_json(_JSON.value, {"networks": results})


if __name__ == "__main__":
    cli.run(main)
