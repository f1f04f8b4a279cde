"""Model FLOPs: what a training step must compute for the tokens that noise has left, and what a device could.

Of a canvas of c occupied columns a forward pass takes

    2·c·(weights of the blocks' attention and MLP, of the token head, and of the length head where it reads every gap)
    + 4·c²·width·layers (logits and mixtures of attention; 2·c·(c + 1) in place of 4·c² where it is causal)
    + 2·(weights that a canvas meets once: time embedding, modulations, length and stop head at CLS)

and a step three times that. Only matrix multiplications count, only once what is recomputed in the backward pass, and
of the loss no dot product of a single score: model FLOPs utilisation, as in PaLM (Chowdhery et al. 2022, app. B), for
columns that hold something alone.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dilm_jax.backbone import NetSpec

# Dense bfloat16 FLOP/s of a device by its maker; the first name that a device's kind contains counts.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "V100": 125e12,
    "TPU v6 lite": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}
PROBE = 512  # of the square product that a device of no known peak is measured by


def of_step(params, spec: NetSpec, columns: Int[Array, " B"]) -> Float[Array, ""]:
    """Of a forward and a backward pass over canvases of so many occupied columns each, float32."""
    per_column = per_canvas = 0
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not name.endswith("kernel"):
            continue
        once = "modulation" in name or name.startswith(("time", "stop_head"))
        once = once or (name.startswith("length_head") and spec.length_head == "cls")
        per_canvas, per_column = per_canvas + once * leaf.size, per_column + (not once) * leaf.size
    layers, width = params["blocks"]["attention_norm"]["scale"].shape
    c = columns.astype(jnp.float32)
    pairs = c * (c + 1) / 2 if spec.causal else c * c
    return 3 * (2 * c * per_column + 4 * pairs * width * layers + 2 * per_canvas).sum()


def peak(device: Any) -> tuple[float, str]:
    """(FLOP/s, where that is from): the maker's for bfloat16, or, of devices that are not in PEAKS, measured."""
    for name, value in PEAKS.items():
        if name in device.device_kind:
            return value, "by its maker"
    return measured_peak(device, PROBE, jnp.float32), f"measured, a float32 product of {PROBE}²"


def measured_peak(device: Any, size: int, dtype) -> float:
    """FLOP/s of the fastest of some square products of this size, of random numbers: ones draw less power."""
    a = jax.device_put(jax.random.normal(jax.random.key(0), (size, size), dtype), device)
    product, seconds = jax.jit(jnp.matmul), []
    jax.block_until_ready(product(a, a))
    for _ in range(4):
        started = time.perf_counter()
        jax.block_until_ready(product(a, a))
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)
