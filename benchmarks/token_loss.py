"""What loss, train and gpu_check share: the joint family's token loss from hidden states and kernel, fused or not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import DEFAULT, random_texts, seconds_in_turn, temporary_bytes
from dilm_jax import losses
from dilm_jax.canvas import NUM_SPECIAL_COLUMNS, Vocabulary
from dilm_jax.processes.joint import Joint
from dilm_jax.schedules import LogLinear
from dilm_jax.scores import FusedScores, Scores, TokenHead, fused_lse, num_chunks


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
        chunks = num_chunks(canvas.tokens.size, len(head.predictable), jax.default_backend())
        log_sums = fused_lse(hidden, kernel, head, chunks)
        scores = FusedScores(hidden, kernel, log_sums, None, None, None, head)
    else:
        scores = Scores(head.scores(hidden, kernel), None, None)
    offset = jnp.broadcast_to(-losses.log_normalizer(scores, canvas)[:, None], canvas.tokens.shape)
    return -losses.log_token_terms(scores, offset, jnp.zeros_like(offset), canvas, targets, config).sum()


def difference(a: jax.Array, b: jax.Array) -> float:
    """The largest, over the largest entry of b."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.abs(a - b).max() / jnp.abs(b).max())


def measure(shape: tuple[int, int, int], D: int, alignment: str, dtype: str, repeats: int) -> dict:
    """Of B canvases × S columns × V ids, of width D. Without repeats nothing runs: memory alone."""
    B, S, V = shape
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
    if repeats:
        dense, fused = (jax.tree.leaves(runs[name](*args)) for name in ("dense", "fused"))
        results["difference"] = dict(zip(("value", "hidden", "kernel"), map(difference, fused, dense), strict=True))
        del dense, fused
        calls = {name: functools.partial(run, *args) for name, run in runs.items()}
        results["seconds"] = seconds_in_turn(calls, repeats)
        results["fused_over_dense_seconds"] = results["seconds"]["fused"] / results["seconds"]["dense"]
    return results
