"""The joint family's token loss from hidden states and kernel, fused against dense: memory, numbers, time.

    python -m benchmarks.loss [--shapes=8x128x30522,4x1024x50257 --width=768 --alignments=sampled,marginal --json=FILE]

Shapes are canvases × columns × vocabulary. Texts that fill their canvas are noised; the loss is the sum over dropped
tokens of −log p under the exact kernel, its gradient that of hidden states [B, S, D] and kernel [D, V]. `dense` holds
the scores of all columns and ids; `fused` is what training does (dilm_jax/scores.py). `sampled` asks for single scores,
`marginal` (Rao–Blackwell) for those of each column and token of the text. Printed, and in --json:

- dense MiB, fused MiB: temporaries, by ahead-of-time analysis for this backend: neither arguments nor outputs, of
  which the kernel's gradient is one; fused_over_dense_temp_bytes is their ratio;
- value, hidden, kernel: the largest difference of the two, over the largest entry;
- fused_over_dense_seconds: ratio of the fastest of --repeats calls each, which take turns.
"""

from absl import flags

from benchmarks.common import print_row, write_json
from benchmarks.token_loss import measure
from dilm_jax import cli
from dilm_jax.canvas import NUM_SPECIAL_COLUMNS

_SHAPES = flags.DEFINE_list("shapes", ["8x128x30522", "4x1024x50257"], "Canvases × columns × vocabulary.")
_WIDTH = flags.DEFINE_integer("width", 768, "Of hidden states.", lower_bound=1)
_ALIGNMENTS = flags.DEFINE_list("alignments", ["sampled", "marginal"], "config.loss.alignment.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of both factors; sums are float32.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed calls; 0: time nothing.", lower_bound=0)
_JSON = flags.DEFINE_string("json", None, "Write the rows here too.")


def parse_shape(text: str) -> tuple[int, int, int]:
    """Raises ValueError for what is no canvases × columns × vocabulary."""
    sizes = [int(part) if part.isdecimal() else 0 for part in text.split("x")]
    if len(sizes) != 3 or sizes[0] < 1 or sizes[1] <= NUM_SPECIAL_COLUMNS or sizes[2] < 6:
        raise ValueError(f"--shapes: {text} is not canvases x columns x vocabulary, such as 8x128x30522")
    return sizes[0], sizes[1], sizes[2]


def main() -> None:
    shapes = [(parse_shape(shape), alignment) for shape in _SHAPES.value for alignment in _ALIGNMENTS.value]
    titles = ["shape", "alignment", "dense MiB", "fused MiB", "ratio of temporaries (AOT)"]
    timed = ["value", "hidden", "kernel", "ratio of times"] if _REPEATS.value else []
    print_row([*titles, *timed], header=True)
    rows = []
    for shape, alignment in shapes:
        rows.append(measure(shape, _WIDTH.value, alignment, _DTYPE.value, _REPEATS.value))
        row = rows[-1]
        cells = [row["temp_bytes"][name] / 2**20 for name in ("dense", "fused")]
        cells += [row["fused_over_dense_temp_bytes"], *row.get("difference", {}).values()]
        print_row(["×".join(map(str, shape)), alignment, *cells] + ([row["fused_over_dense_seconds"]] if timed else []))
    write_json(_JSON.value, {"width": _WIDTH.value, "dtype": _DTYPE.value, "rows": rows})


if __name__ == "__main__":
    cli.run(main)
