"""The replay of samples: one HTML page, trace.html with the data in it, that needs nothing else."""

import dataclasses
import json
from collections.abc import Callable
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from dilm_jax.canvas import NUM_SPECIAL_COLUMNS
from dilm_jax.evals import Samples
from dilm_jax.metrics import or_null

DATA = "{{data}}"  # in trace.html


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """Samples and how they came about. A notebook shows it.

    Attributes:
      rows: what `Run.generate` returns.
      html: the page. It opens at a fragment like #sample=0&frame=7.
    """

    rows: list[dict[str, Any]]
    html: str

    def _repr_html_(self) -> str:
        page = escape(self.html)  # in a frame, so that no style of it leaks
        return f'<iframe title="replay" style="width: 100%; height: 420px; border: 0" srcdoc="{page}"></iframe>'


def replay(samples: list[tuple[dict[str, Any], Samples, int]], piece: Callable[[int], str]) -> Replay:
    """Of rows, each with traced samples and its place in them; `piece` is the text of a token."""
    data = json.dumps([describe(*sample, piece) for sample in samples], allow_nan=False)
    template = resources.files("dilm_jax").joinpath("trace.html").read_text("utf-8")
    html = template.replace(DATA, data.replace("<", "\\u003c"))  # no token may end the script
    return Replay(rows=[row for row, *_ in samples], html=html)


def describe(row: dict[str, Any], drawn: Samples, b: int, piece: Callable[[int], str]) -> dict[str, Any]:
    """What the page shows of a sample, as JSON.

    Frame 0 is what was there from the start, at t = 1; each call that inserted adds one. `calls` and `times` are those
    of the frames. `tokens` are those of the last frame; `frame` says which one each came with, `prob` and `rate` how
    (nothing in frame 0).
    """
    trace: Any = drawn.trace
    columns = b, slice(NUM_SPECIAL_COLUMNS, NUM_SPECIAL_COLUMNS + row["length"])
    born = drawn.born[columns]
    calls, first = np.unique(np.append(0, born), return_index=True)
    return {
        "label": str(row["id"]),
        "sampler": row["sampler"],
        "nfe": row["nfe"],
        "calls": calls.tolist(),
        "times": [1.0, *_numbers(trace.time[columns][first[1:] - 1])],
        "tokens": [piece(token) for token in row["ids"]],
        "frame": np.searchsorted(calls, born).tolist(),
        "prob": _numbers(np.exp(trace.log_prob[columns])),
        "rate": _numbers(np.exp(trace.log_rate[columns])),
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    """Of four digits; null if not finite."""
    return [or_null(float(f"{value:.4g}")) for value in values]
