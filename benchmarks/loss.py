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

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.common import DEFAULT, print_row, random_texts, seconds_in_turn, temporary_bytes, write_json
from dilm_jax import cli, losses
from dilm_jax.canvas import NUM_SPECIAL_COLUMNS, Vocabulary
from dilm_jax.processes.joint import Joint
from dilm_jax.schedules import LogLinear
from dilm_jax.scores import FusedScores, Scores, TokenHead, fused_lse, num_chunks

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


def noised(B: int, S: int, V: int):
    """(canvas, targets) of random texts of S − 2 tokens."""
    vocabulary, L = Vocabulary(size=V, pad=0, cls=1, bos=2, eos=3, mask=4), S - NUM_SPECIAL_COLUMNS
    process = Joint(
        vocabulary=vocabulary,
        max_length=L,
        schedule=LogLinear(sigma_min=L / 8, sigma_max=2 * L),
        eps=1e-3,
        loss_config=DEFAULT,
        time_sampling="uniform",
    )
    keys, t = jax.random.split(jax.random.key(0), B), jnp.linspace(0.1, 0.9, B)
    x0 = random_texts(np.full(B, L), vocabulary, L)
    return jax.jit(process.corrupt)(keys, jax.tree.map(jnp.asarray, x0), t)


def token_loss(config: losses.LossConfig, fused: bool, head: TokenHead, hidden, kernel, canvas, targets):
    """Scores as the network gives them (backbone.Transformer), and their loss."""
    if fused:
        log_sums = fused_lse(hidden, kernel, head, num_chunks(canvas.tokens.size, len(head.predictable)))
        scores = FusedScores(hidden, kernel, log_sums, None, None, None, head)
    else:
        scores = Scores(head.scores(hidden, kernel), None, None)
    offset = jnp.broadcast_to(-losses.log_normalizer(scores, canvas)[:, None], canvas.tokens.shape)
    return -losses.log_token_terms(scores, offset, jnp.zeros_like(offset), canvas, targets, config).sum()


def difference(a: jax.Array, b: jax.Array) -> float:
    """The largest, over the largest entry of b."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.abs(a - b).max() / jnp.abs(b).max())


def measure(shape: str, alignment: str) -> dict:
    B, S, V = parse_shape(shape)
    D, dtype = _WIDTH.value, _DTYPE.value
    canvas, targets = noised(B, S, V)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((B, S, D), np.float32), dtype)
    kernel = jnp.asarray(rng.standard_normal((D, V), np.float32) / np.sqrt(D))
    head = TokenHead(predictable=(False,) * 5 + (True,) * (V - 5), dtype=dtype, precision=None)
    config = dataclasses.replace(DEFAULT, alignment=alignment)
    args = hidden, kernel, canvas, targets

    def compiled(fused):
        function = functools.partial(token_loss, config, fused, head)
        return jax.jit(jax.value_and_grad(function, (0, 1))).lower(*args).compile()

    runs = {"dense": compiled(False), "fused": compiled(True)}
    temp = {name: temporary_bytes(run) for name, run in runs.items()}
    results = {"shape": shape, "alignment": alignment, "temp_bytes": temp}
    results["fused_over_dense_temp_bytes"] = temp["fused"] / temp["dense"]
    if _REPEATS.value:
        dense, fused = (jax.tree.leaves(runs[name](*args)) for name in ("dense", "fused"))
        results["difference"] = dict(zip(("value", "hidden", "kernel"), map(difference, fused, dense), strict=True))
        del dense, fused
        calls = {name: functools.partial(run, *args) for name, run in runs.items()}
        results["seconds"] = seconds_in_turn(calls, _REPEATS.value)
        results["fused_over_dense_seconds"] = results["seconds"]["fused"] / results["seconds"]["dense"]
    return results


def main() -> None:
    shapes = [(shape, alignment) for shape in _SHAPES.value for alignment in _ALIGNMENTS.value]
    for shape, _ in shapes:
        parse_shape(shape)
    titles = ["shape", "alignment", "dense MiB", "fused MiB", "ratio of temporaries (AOT)"]
    timed = ["value", "hidden", "kernel", "ratio of times"] if _REPEATS.value else []
    print_row([*titles, *timed], header=True)
    rows = []
    for shape, alignment in shapes:
        rows.append(measure(shape, alignment))
        row = rows[-1]
        cells = [row["temp_bytes"][name] / 2**20 for name in ("dense", "fused")]
        cells += [row["fused_over_dense_temp_bytes"], *row.get("difference", {}).values()]
        print_row([shape, alignment, *cells] + ([row["fused_over_dense_seconds"]] if timed else []))
    write_json(_JSON.value, {"width": _WIDTH.value, "dtype": _DTYPE.value, "rows": rows})


if __name__ == "__main__":
    cli.run(main)
