"""A model of two thin layers on star_tiny, and some steps of its training: what the tests of training share.

Weights are drawn with numpy at every leaf, the ones that start at zero included, so that every gradient is alive.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from dilm_jax import config as config_lib
from dilm_jax import sharding, train
from dilm_jax.canvas import Example
from dilm_jax.data import loader
from dilm_jax.processes.registry import PROCESSES

# The run of each family that others are compared with: its family and overrides.
BASE = {"joint": ("joint", ("model.dropout", 0.25))} | {family: (family,) for family in PROCESSES if family != "joint"}
# What a config of each family has to say.
OF_FAMILY = {
    "ilm": {"loss.weighting": "elbo", "sampling.sampler": "one_by_one"},
    "mdm": {"sampling.sampler": "confidence"},
    "arm": {"sampling.sampler": "left_to_right"},
    "flexmdm": {"sampling.sampler": "leap"},
}
OVERRIDES = config_lib.SMOKE | {
    "data.difficulty": "tiny",
    "model.width": 16,
    "model.mlp_width": 32,
    "model.cond_width": 8,
    "model.dropout": 0.0,
    "optim.learning_rate": 1e-3,
    "optim.warmup_steps": 0,
    "optim.clip_norm": 1e9,
    "optim.ema_decay": 0.9,
    "train.matmul_precision": "highest",
}


def config(family: str = "joint", *overrides: tuple[str, Any]) -> ml_collections.ConfigDict:
    """The config with overrides by dotted key."""
    made = config_lib.default_config()
    of_family = {"process.family": family} | OF_FAMILY.get(family, {})
    made.update_from_flattened_dict(OVERRIDES | of_family | dict(overrides))
    return made


def batch(parts: config_lib.Parts, made: ml_collections.ConfigDict, step: int = 0) -> Example:
    """Clean examples, numpy."""
    return Example(**loader.train_batches(parts.task.source("train"), made.batch_size, made.seed).batch(step))


def random_params(abstract, seed: int = 0):
    """0.1 normal, around one for LayerNorm scales."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        return (0.1 * rng.normal(size=leaf.shape) + ("scale" in jax.tree_util.keystr(path))).astype(leaf.dtype)

    return jax.tree.map_with_path(draw, abstract)


def random_state(made: ml_collections.ConfigDict, parts: config_lib.Parts, mesh) -> train.TrainState:
    """A training state at step 0 with random weights."""
    optimizer, _ = train.make_optimizer(made)
    abstract = jax.eval_shape(lambda: train.init_state(made, parts, optimizer, mesh))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
    params = random_params(abstract.params)
    state = zeros.replace(params=params, ema=jax.tree.map(np.copy, params), finite=np.bool_(True))
    return jax.device_put(state, sharding.state_shardings(abstract, abstract.params, mesh))


@dataclasses.dataclass(frozen=True)
class Run:
    """What some steps of training gave, in numpy."""

    gradient: Any  # of the first step
    metrics: list[dict[str, float]]  # a dict a step
    state: train.TrainState  # after the last


@functools.cache
def world(family: str, *overrides: tuple[str, Any], num_devices: int = 1):
    """(config, parts, mesh, jitted train step) on the first `num_devices` devices."""
    made = config(family, *overrides)
    config_lib.validate(made, num_devices)
    parts, mesh = config_lib.build(made), sharding.make_mesh(config_lib.mesh_shape(made, num_devices))
    batches = loader.train_batches(parts.task.source("train"), made.batch_size, made.seed)
    packed_rows = train.num_packed_rows(made, parts, mesh, batches.batch)
    return made, parts, mesh, train.make_train_step(made, parts, mesh, packed_rows)


@functools.cache
def run(family: str, *overrides: tuple[str, Any], steps: int = 20, num_devices: int = 1) -> Run:
    """Trains from random weights."""
    made, parts, mesh, _ = world(family, *overrides, num_devices=num_devices)
    return continued(random_state(made, parts, mesh), range(steps), family, *overrides, num_devices=num_devices)


def continued(state, steps, family: str, *overrides: tuple[str, Any], num_devices: int = 1) -> Run:
    """The given steps from `state`, which is donated."""
    made, parts, mesh, step = world(family, *overrides, num_devices=num_devices)
    metrics, gradient = [], None
    with jax.default_matmul_precision(made.train.matmul_precision):
        for i in steps:
            state, measured = step(state, sharding.put_batch(batch(parts, made, i), mesh, made.batch_size))
            metrics.append({name: float(value) for name, value in measured.items()})
            gradient = gradient or first_gradient(state, made)
    return Run(gradient, metrics, jax.device_get(state))


def first_gradient(state, made: ml_collections.ConfigDict):
    """Adam's first moment after the first step is (1 − β₁)·gradient."""
    moment = optax.tree_utils.tree_get(state.opt_state, "mu")
    return jax.tree.map(lambda m: np.asarray(m) / np.float32(1 - made.optim.beta1), moment)


def assert_close(got, want, tolerance: float) -> None:
    """Every leaf within `tolerance` of the largest entry of all leaves: the scale on which a gradient matters."""
    scale = max(np.abs(np.asarray(leaf, np.float64)).max() for leaf in jax.tree.leaves(want))
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()
        assert error <= tolerance * scale, f"{jax.tree_util.keystr(path)} differs by {error:.2g} of {scale:.2g}"


def losses(run: Run) -> np.ndarray:
    return np.array([row["train/loss"] for row in run.metrics])


def abstract_like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)
