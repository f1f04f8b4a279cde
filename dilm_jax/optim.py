"""The optimizer: clipping, AdamW with decay on kernels only, the learning-rate schedules, and the EMA."""

import math

import jax
import jax.numpy as jnp
import optax


def learning_rate(
    *, learning_rate: float, schedule: str, warmup_steps: int, cosine_cycles: float, floor: float, num_steps: int
) -> optax.Schedule:
    """Linear warm-up from 0, then constant, or a cosine between `learning_rate` and `floor` that runs
    `cosine_cycles` full periods by `num_steps` (one half period is a plain decay)."""

    def value(step):
        warm = jnp.minimum(step / warmup_steps, 1.0) if warmup_steps else jnp.float32(1.0)
        if schedule == "constant":
            return learning_rate * warm
        progress = jnp.clip((step - warmup_steps) / max(num_steps - warmup_steps, 1), 0.0, 1.0)
        cosine = 0.5 * (1 + jnp.cos(2 * math.pi * cosine_cycles * progress))
        return jnp.where(step < warmup_steps, learning_rate * warm, floor + (learning_rate - floor) * cosine)

    return value


def adamw(
    schedule: optax.Schedule, *, weight_decay: float, beta1: float, beta2: float, adam_eps: float, clip_norm: float
) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, b1=beta1, b2=beta2, eps=adam_eps, weight_decay=weight_decay, mask=decay_mask),
    )


def decay_mask(params):
    """Which parameters decay: kernels. Embeddings, biases and norms do not."""
    return jax.tree.map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), params)


def update_ema(ema, params, decay: float, step):
    """float32 average of the parameters; the decay warms up as (1 + step)/(10 + step) so that early averages forget
    the initialisation."""
    warm = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda e, p: warm * e + (1 - warm) * p.astype(jnp.float32), ema, params)
