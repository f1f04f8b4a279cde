"""What sampling costs, and what each sampler makes of it, on star graphs.

    python -m benchmarks.sampling [--config=configs/star_easy_joint.py:small,… | --workdir=DIR,…] [--num=256 …]

For networks as initialised (--config; all lengths are then equally likely) or as trained (--workdir):
1. sequences/s of the jitted sampler `event` by batch size, against a loop in Python over single sequences with the same
   jitted network call and the same jitted `advance`, and the milliseconds of a network call by batch size;
2. network calls of each sampler on the first --num test graphs and, if the network is trained, exact match with two
   standard errors, drawn as the run's config says (greedy, for star graphs).
"""

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

from benchmarks.common import Loaded, Setting, event, grids, load_config, print_row, row_keys, write_json
from dilm_jax import canvas as canvas_lib
from dilm_jax import cli
from dilm_jax import config as config_lib
from dilm_jax.canvas import Canvas, Example
from dilm_jax.data import star

_CONFIG = flags.DEFINE_list(
    "config",
    ["configs/star_easy_joint.py:small", "configs/star_easy_independent.py:small"],
    "Config files, each with an optional :variant.",
)
_WORKDIR = flags.DEFINE_list("workdir", [], "Trained runs, in place of configs.")
_NUM = flags.DEFINE_integer("num", 256, "Test graphs.", lower_bound=1)
_BATCHES = flags.DEFINE_list("batches", ["1", "8", "64"], "Batch sizes to time.")
_SECONDS = flags.DEFINE_float("seconds", 3.0, "A time is the mean over at least so many, after a run that compiles.")
_ONLY = flags.DEFINE_string("only", "", "Samplers whose name contains this.")
_JSON = flags.DEFINE_string("json", None, "Write the rows here too.")

SETTINGS: dict[str, Setting] = {
    "event": event(),
    "event, 1 call": event(calls=1),
    "event, 2 a call": event(events_per_call=2),
}
SETTINGS |= grids(16, 64)
TIMED: Setting = event()


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


def main() -> None:
    results = []
    for net in networks():
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
            if _ONLY.value not in name:
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
