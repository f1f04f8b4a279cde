"""What the samplers make of real sentences, from networks that were trained on them.

    python -m benchmarks.quality --workdir=DIR,DIR [--num=200 --plot=FILE.png --json=FILE]

DIR are runs of configs/text_joint.py and text_independent.py. Texts are drawn at temperature 1, without filters.

1. --num texts by each sampler: network calls, length, unigram entropy of a text's tokens (nats; mean over texts), moves
   saturated, texts truncated; those of as many validation texts beside them.
2. Infilling: --masks times a random share of a validation text's tokens stays as a context and `event` fills all gaps
   between them. In how many texts are they all there, in order, and at the columns that the request says?
3. Length: of --lengths texts for which 20 tokens are asked, how many have 20?
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.common import Loaded, Setting, empty_canvas, event, grids, print_row, row_keys, write_json
from dilm_jax import canvas as canvas_lib
from dilm_jax import cli, request, text_metrics
from dilm_jax.canvas import NUM_SPECIAL_COLUMNS
from dilm_jax.request import NO_GROUP, UNBOUNDED
from dilm_jax.sampling import Filters

_WORKDIR = flags.DEFINE_list("workdir", None, "Runs.", required=True)
_NUM = flags.DEFINE_integer("num", 200, "Texts of each sampler.", lower_bound=1)
_MASKS = flags.DEFINE_integer("masks", 1000, "Contexts to fill.", lower_bound=1)
_LENGTHS = flags.DEFINE_integer("lengths", 10_000, "Texts whose length is asked for.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "Draw length and entropy over network calls here.")
_ONLY = flags.DEFINE_string("only", "", "Samplers whose name contains this.")
_JSON = flags.DEFINE_string("json", None, "Write the rows here too.")

STEPS = (8, 16, 32, 64, 128)
SETTINGS: dict[str, Setting] = {
    "event": event(),
    "event, 1 call": event(calls=1),
    "event, 4 a call": event(events_per_call=4),
}
SETTINGS |= grids(*STEPS)
ASKED = 20  # tokens
FREE: tuple[int, int] = (0, UNBOUNDED)


# --- Texts of each sampler -------------------------------------------------------------------------------------------


def describe(tokens, length) -> dict:
    """Means over texts, and the standard error of the length's."""
    found = [
        text_metrics.unigram_entropy(row[:n]) for row, n in zip(np.asarray(tokens), np.asarray(length), strict=True)
    ]
    stderr = float(np.std(length) / np.sqrt(len(length)))
    return {"length": float(np.mean(length)), "length_stderr": stderr, "entropy": float(np.mean(found))}


def of_sampler(net: Loaded, setting: Setting, num: int) -> dict:
    task = net.parts.task
    state = net.samplers(setting, row_keys(0, num), empty_canvas(num, task.max_length, task.vocabulary))
    tokens, length = canvas_lib.content(jax.device_get(state.canvas))
    counts = {"calls": float(state.nfe.mean()), "saturated": float(state.saturated.mean())}
    return counts | describe(tokens, length) | {"truncated": int(state.truncated.sum())}


# --- What is asked for -----------------------------------------------------------------------------------------------


def infill(net: Loaded, num: int, batch_size: int = 250) -> dict:
    """How many of `num` contexts are kept: as a subsequence, and at the columns where the request has them."""
    rng, in_order, in_place, calls = np.random.default_rng(0), 0, 0, 0.0
    batch_size, vocabulary = min(num, batch_size), net.parts.task.vocabulary
    for first in range(0, num, batch_size):
        x0 = jax.tree.map(jnp.asarray, net.texts("valid", first, batch_size))
        dropped = rng.random(x0.tokens.shape) < rng.random((batch_size, 1))
        context, _ = canvas_lib.drop_tokens(x0, jnp.asarray(dropped), vocabulary)
        # Groups that alternate from gap to gap tell where a context's token is: there the group changes.
        group = np.where(context.open_gap, np.arange(context.num_columns) % 2, NO_GROUP)
        gaps = [[(0, 0, UNBOUNDED)] * 2] * batch_size
        asked = request.build(context.num_columns, vocabulary.size, gaps, [FREE] * batch_size, [[]] * batch_size, 2)
        asked = jax.tree.map(jnp.asarray, dataclasses.replace(asked, group=group.astype(np.int32)))
        state = jax.device_get(net.samplers(event(), row_keys(first, batch_size), context, asked))
        for b in range(min(batch_size, num - first)):
            there = context.tokens[b, NUM_SPECIAL_COLUMNS : context.length[b]].tolist()
            end = state.canvas.length[b]
            text, groups = (x[b, NUM_SPECIAL_COLUMNS - 1 : end] for x in (state.canvas.tokens, state.request.group))
            changes = np.flatnonzero(groups[1:] != groups[:-1]) + 1
            remaining = iter(text[1:].tolist())
            in_order += all(w in remaining for w in there)
            in_place += text[changes].tolist() == there
            calls += float(state.nfe[b]) / num
    return {"contexts": num, "in_order": in_order, "in_place": in_place, "calls": calls}


def exact_length(net: Loaded, num: int, batch_size: int = 1000) -> dict:
    """How many of `num` texts have the ASKED tokens, on canvases with room for half as many more."""
    batch_size, right, vocabulary = min(num, batch_size), 0, net.parts.task.vocabulary
    canvas = empty_canvas(batch_size, ASKED + ASKED // 2, vocabulary)
    gaps, total = [[(1, *FREE)]] * batch_size, [(ASKED, ASKED)] * batch_size
    asked = request.build(canvas.num_columns, vocabulary.size, gaps, total, [[]] * batch_size, 1)
    for first in range(0, num, batch_size):
        state = net.samplers(event(), row_keys(first, batch_size), canvas, jax.tree.map(jnp.asarray, asked))
        right += int((canvas_lib.content(state.canvas)[1] == ASKED)[: num - first].sum())
    return {"texts": num, "right": right}


# --- The report ------------------------------------------------------------------------------------------------------


def plot(rows: list[dict], data: dict, path: str) -> None:
    """Mean length and unigram entropy over network calls."""
    from matplotlib.figure import Figure  # not pyplot: no display and no global state

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 2), ("length", "entropy"), ("tokens a text", "entropy, nats"), strict=True
    ):
        axes.axhline(data[name], color="black", linewidth=0.8, label="data")
        for color, family in enumerate(dict.fromkeys(row["family"] for row in rows)):
            for sampler, style in (("event", "*"), ("leap", ".-"), ("euler", "x--")):
                of = [row for row in rows if (row["family"], row["sampler"].split(",")[0]) == (family, sampler)]
                points = [row["calls"] for row in of], [row[name] for row in of]
                axes.plot(*points, style, color=f"C{color}", linewidth=1.2, label=f"{family}, {sampler}")
        axes.set(xscale="log", xlabel="network calls a text", ylabel=label)
    figure.axes[0].legend(fontsize="x-small")
    figure.savefig(path, dpi=100)


def main() -> None:
    nets = [Loaded.of_run(workdir) for workdir in _WORKDIR.value]
    texts = nets[0].texts("valid", 0, _NUM.value)
    data = describe(texts.tokens, texts.length)
    columns = ["family", "sampler", "calls", "tokens", "entropy", "moves saturated", "truncated"]
    print_row(columns, header=True)
    print_row(["data", "—", "—", f"{data['length']:.1f}", f"{data['entropy']:.3f}", "—", "—"])
    rows, asked = [], []
    for net in nets:
        net = dataclasses.replace(net, parts=dataclasses.replace(net.parts, filters=Filters()))
        family = type(net.parts.process).__name__.lower()
        for name, setting in SETTINGS.items():
            if _ONLY.value not in name:
                continue
            row = of_sampler(net, setting, _NUM.value)
            rows.append({"family": family, "sampler": name, **row})
            length = f"{row['length']:.1f} ± {row['length_stderr']:.1f}"
            numbers = [f"{row['calls']:.1f}", length, f"{row['entropy']:.3f}", f"{row['saturated']:.2f}"]
            print_row([family, name, *numbers, f"{row['truncated']} of {_NUM.value}"])
        asked.append({"family": family} | infill(net, _MASKS.value) | exact_length(net, _LENGTHS.value))
    print()
    columns = ["family", "contexts in order", "in place", "calls", f"of {ASKED} tokens"]
    print_row(columns, header=True)
    for row in asked:
        kept = [f"{row[key]} of {_MASKS.value}" for key in ("in_order", "in_place")]
        print_row([row["family"], *kept, f"{row['calls']:.1f}", f"{row['right']} of {_LENGTHS.value}"])
    if _PLOT.value:
        plot(rows, data, _PLOT.value)
    write_json(_JSON.value, {"data": data, "samplers": rows, "asked": asked})


if __name__ == "__main__":
    cli.run(main)
