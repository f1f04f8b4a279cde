"""What the samplers make of real sentences, from a small network of each family trained on them.

    python -m benchmarks.quality [--data=FILE.txt --steps=3000 --workdir=DIR --num=200 --plot=FILE.png --json=FILE]

Sentences of up to --max_length bytes; one in ten is held out. The schedules are those that coverage.py proposes.

1. --num texts by each sampler: network calls, length, unigram entropy of a text's bytes (nats; mean over texts), moves
   saturated, texts truncated; the data's beside them.
2. Infilling: --masks times a random share of a held-out sentence's bytes stays as a context and `event` fills all gaps
   between them. In how many texts are they all there, in order, and at the columns that the request says?
3. Length: of --lengths texts for which 20 bytes are asked, how many have 20?
"""

import collections
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from benchmarks.common import (
    FAMILIES,
    Corpus,
    Model,
    Samplers,
    Setting,
    empty_canvas,
    event,
    grids,
    print_row,
    read_lines,
    row_keys,
    sentences,
    write_json,
)
from dilm_jax import canvas as canvas_lib
from dilm_jax import cli, coverage, request
from dilm_jax.canvas import NUM_SPECIAL_COLUMNS, Example
from dilm_jax.request import NO_GROUP, UNBOUNDED
from dilm_jax.sampling import Filters

_DATA = flags.DEFINE_string("data", "tests/data/sotu.txt", "Sentences, one a line.")
_MAX_LENGTH = flags.DEFINE_integer("max_length", 128, "Longest sentence, in bytes.", lower_bound=20)
_FAMILY = flags.DEFINE_list("family", list(FAMILIES), "Families.")
_STEPS = flags.DEFINE_integer("steps", 3000, "Of training, 32 sentences each.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 64, "Of the network.")
_LAYERS = flags.DEFINE_integer("layers", 3, "Of the network.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Keeps trained parameters, which the next call then takes.")
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
ASKED = 20  # bytes
FREE: tuple[int, int] = (0, UNBOUNDED)


# --- Data and network ------------------------------------------------------------------------------------------------


def take(texts: Example, rows: np.ndarray) -> Example:
    return jax.tree.map(lambda x: x[rows], texts)


def split(corpus: Corpus) -> tuple[Corpus, Example]:
    """A corpus of nine in ten texts, with schedules that cover them, and the other texts."""
    order = np.random.default_rng(0).permutation(len(corpus.texts.length))
    num_held_out = max(1, len(order) // 10)
    texts = take(corpus.texts, order[num_held_out:])
    sigma = {family: coverage.propose(corpus.process(family), np.asarray(texts.length).tolist()) for family in FAMILIES}
    return dataclasses.replace(corpus, texts=texts, sigma=sigma), take(corpus.texts, order[:num_held_out])


def trained(model: Model, num_steps: int, workdir: str | None):
    """Parameters by Adam, half a cosine; those in the workdir if it has them."""
    leaves, tree = jax.tree.flatten(model.network[0])
    name = f"{model.family}-{model.width}x{model.num_layers}-{num_steps}.npz"
    path = pathlib.Path(workdir) / name if workdir else None
    if path and path.is_file():
        with np.load(path) as file:
            return jax.tree.unflatten(tree, [jnp.asarray(file[f"arr_{i}"]) for i in range(len(leaves))])
    params = model.trained(num_steps, optax.cosine_decay_schedule(2e-3, num_steps))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, *map(np.asarray, jax.tree.leaves(params)))
    return params


def samplers(model: Model, params) -> Samplers:
    return Samplers(model.corpus.process(model.family), functools.partial(model.network[1], params), Filters())


# --- Texts of each sampler -------------------------------------------------------------------------------------------


def entropy(tokens) -> float:
    """Of the tokens of one text, by their frequency in it, in nats."""
    counts = np.array(list(collections.Counter(tokens).values()))
    return float(-(counts / counts.sum() * np.log(counts / counts.sum())).sum()) if len(counts) else 0.0


def describe(tokens, length) -> dict:
    """Means over texts, and the standard error of the length's."""
    found = [entropy(row[:n].tolist()) for row, n in zip(np.asarray(tokens), np.asarray(length), strict=True)]
    stderr = float(np.std(length) / np.sqrt(len(length)))
    return {"length": float(np.mean(length)), "length_stderr": stderr, "entropy": float(np.mean(found))}


def of_sampler(run: Samplers, corpus: Corpus, setting: Setting, num: int) -> dict:
    state = run(setting, row_keys(0, num), empty_canvas(num, corpus.texts.max_length, corpus.vocabulary))
    tokens, length = canvas_lib.content(jax.device_get(state.canvas))
    counts = {"calls": float(state.nfe.mean()), "saturated": float(state.saturated.mean())}
    return counts | describe(tokens, length) | {"truncated": int(state.truncated.sum())}


# --- What is asked for -----------------------------------------------------------------------------------------------


def infill(run: Samplers, corpus: Corpus, held_out: Example, num: int, batch_size: int = 250) -> dict:
    """How many of `num` contexts are kept: as a subsequence, and at the columns where the request has them."""
    rng, in_order, in_place, calls = np.random.default_rng(0), 0, 0, 0.0
    batch_size = min(num, batch_size)
    for first in range(0, num, batch_size):
        x0 = jax.tree.map(jnp.asarray, take(held_out, rng.integers(len(held_out.length), size=batch_size)))
        dropped = rng.random(x0.tokens.shape) < rng.random((batch_size, 1))
        context, _ = canvas_lib.drop_tokens(x0, jnp.asarray(dropped), corpus.vocabulary)
        # Groups that alternate from gap to gap tell where a context's token is: there the group changes.
        group = np.where(context.open_gap, np.arange(context.num_columns) % 2, NO_GROUP)
        gaps, size = [[(0, 0, UNBOUNDED)] * 2] * batch_size, corpus.vocabulary.size
        asked = request.build(context.num_columns, size, gaps, [FREE] * batch_size, [[]] * batch_size, 2)
        asked = jax.tree.map(jnp.asarray, dataclasses.replace(asked, group=group.astype(np.int32)))
        state = jax.device_get(run(event(), row_keys(first, batch_size), context, asked))
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


def exact_length(run: Samplers, corpus: Corpus, num: int, batch_size: int = 1000) -> dict:
    """How many of `num` texts have the ASKED bytes, on canvases with room for half as many more."""
    batch_size, right = min(num, batch_size), 0
    canvas = empty_canvas(batch_size, ASKED + ASKED // 2, corpus.vocabulary)
    gaps, total, size = [[(1, *FREE)]] * batch_size, [(ASKED, ASKED)] * batch_size, corpus.vocabulary.size
    asked = request.build(canvas.num_columns, size, gaps, total, [[]] * batch_size, 1)
    for first in range(0, num, batch_size):
        state = run(event(), row_keys(first, batch_size), canvas, jax.tree.map(jnp.asarray, asked))
        right += int((canvas_lib.content(state.canvas)[1] == ASKED)[: num - first].sum())
    return {"texts": num, "right": right}


# --- The report ------------------------------------------------------------------------------------------------------


def plot(rows: list[dict], data: dict, path: str) -> None:
    """Mean length and unigram entropy over network calls."""
    from matplotlib.figure import Figure  # not pyplot: no display and no global state

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 2), ("length", "entropy"), ("bytes a text", "entropy, nats"), strict=True
    ):
        axes.axhline(data[name], color="black", linewidth=0.8, label="data")
        for family, color in zip(FAMILIES, ("C0", "C1"), strict=True):
            for sampler, style in (("event", "*"), ("leap", ".-"), ("euler", "x--")):
                of = [row for row in rows if (row["family"], row["sampler"].split(",")[0]) == (family, sampler)]
                points = [row["calls"] for row in of], [row[name] for row in of]
                axes.plot(*points, style, color=color, linewidth=1.2, label=f"{family}, {sampler}")
        axes.set(xscale="log", xlabel="network calls a text", ylabel=label)
    figure.axes[0].legend(fontsize="x-small")
    figure.savefig(path, dpi=100)


def main() -> None:
    corpus, held_out = split(sentences(read_lines(_DATA.value), _MAX_LENGTH.value))
    data = describe(corpus.texts.tokens, corpus.texts.length)
    print(f"{len(corpus.texts.length)} sentences to train on, {len(held_out.length)} held out\n")
    columns = ["family", "sampler", "calls", "bytes", "entropy", "moves saturated", "truncated"]
    print_row(columns, header=True)
    print_row(["data", "—", "—", f"{data['length']:.1f}", f"{data['entropy']:.3f}", "—", "—"])
    rows, asked = [], []
    for family in _FAMILY.value:
        model = Model(corpus, family, _WIDTH.value, _LAYERS.value)
        run = samplers(model, trained(model, _STEPS.value, _WORKDIR.value))
        for name, setting in SETTINGS.items():
            if _ONLY.value not in name:
                continue
            row = of_sampler(run, corpus, setting, _NUM.value)
            rows.append({"family": family, "sampler": name, **row})
            length = f"{row['length']:.1f} ± {row['length_stderr']:.1f}"
            numbers = [f"{row['calls']:.1f}", length, f"{row['entropy']:.3f}", f"{row['saturated']:.2f}"]
            print_row([family, name, *numbers, f"{row['truncated']} of {_NUM.value}"])
        asked.append({"family": family, "sigma": corpus.sigma[family]})
        asked[-1] |= infill(run, corpus, held_out, _MASKS.value) | exact_length(run, corpus, _LENGTHS.value)
    print()
    columns = ["family", "sigma", "contexts in order", "in place", "calls", f"of {ASKED} bytes"]
    print_row(columns, header=True)
    for row in asked:
        kept = [f"{row[key]} of {_MASKS.value}" for key in ("in_order", "in_place")]
        sigma = "{:.3g} to {:.3g}".format(*row["sigma"])
        print_row([row["family"], sigma, *kept, f"{row['calls']:.1f}", f"{row['right']} of {_LENGTHS.value}"])
    if _PLOT.value:
        plot(rows, data, _PLOT.value)
    results = {"data": data, "steps": _STEPS.value, "samplers": rows, "asked": asked}
    write_json(_JSON.value, results)


if __name__ == "__main__":
    cli.run(main)
