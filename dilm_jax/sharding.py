"""The device mesh and where each array lives on it.

Axes: `data` and `fsdp` share the batch, `fsdp` also the parameters, `tensor` the width of attention and MLP. Slices of
TPUs, which a data-centre network joins, are the outermost part of `data`: only sums over the batch cross it.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH_AXES = ("data", "fsdp")

# First match wins; specs are for the trailing axes (stacked blocks have a leading layer axis, never sharded).
RULES = (
    (r"embed.*embedding$", P("tensor", "fsdp")),
    (r"attention.*qkv.*kernel$", P("fsdp", "tensor")),
    (r"attention.*out.*kernel$", P("tensor", "fsdp")),
    (r"mlp.*in.*kernel$", P("fsdp", "tensor")),
    (r"mlp.*out.*kernel$", P("tensor", "fsdp")),
    (r"mlp.*in.*bias$", P("tensor")),
    (r"modulation.*kernel$", P("fsdp", None)),  # its output is split into parts, which would not match the shards
    (r"(head|linear|time).*kernel$", P("fsdp", "tensor")),
    (r"(bias|scale)$", P()),
)


def make_mesh(axes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over the first of these devices, or of all. `axes` maps names to sizes, in order.

    Raises:
      ValueError: where `data` does not divide over the slices, or there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    types = (AxisType.Auto,) * len(axes)
    return Mesh(arranged(axes, devices[: math.prod(axes.values())]), tuple(axes), axis_types=types)


def arranged(axes: dict[str, int], devices: Sequence[Any]) -> np.ndarray:
    """The devices in the shape of a mesh, near each other along its inner axes. Raises ValueError as `make_mesh`.

    (`jax.make_mesh` refuses several slices; hosts of GPUs, which count as such there, may share any axis.)"""
    sizes, slices = tuple(axes.values()), num_slices(devices)
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    if axes["data"] % slices:
        raise ValueError(
            f"config.mesh.data {axes['data']} must be divisible by {slices} slices: no other axis may cross the "
            "network between them"
        )
    between = tuple(slices if name == "data" else 1 for name in axes)
    within = tuple(size // parts for size, parts in zip(sizes, between, strict=True))
    return mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)


def num_slices(devices: Sequence[Any]) -> int:
    """How many slices of TPUs these belong to; 1 for other devices."""
    return len({getattr(device, "slice_index", None) for device in devices if device.platform == "tpu"}) or 1


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over data and fsdp."""
    return NamedSharding(mesh, P(BATCH_AXES))


def num_shards(mesh: Mesh) -> int:
    """Parts that a batch is split into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def fill_up(num_rows: int, mesh: Mesh) -> int:
    """The least batch size that holds so many rows and splits evenly."""
    return -(-num_rows // num_shards(mesh)) * num_shards(mesh)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def param_shardings(params, mesh: Mesh):
    """A sharding for each parameter, by the first rule whose pattern its path contains. An axis that does not divide
    a dimension is left out there, and logged.

    Raises:
      ValueError: if no rule fits.
    """

    def place(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next((spec for pattern, spec in RULES if re.search(pattern, name)), None)
        if spec is None:
            raise ValueError(f"no sharding rule fits parameter {name} {leaf.shape}; add one to sharding.RULES")
        dims = (None,) * (leaf.ndim - len(spec)) + tuple(spec)
        divides = [axis is None or size % mesh.shape[axis] == 0 for axis, size in zip(dims, leaf.shape, strict=True)]
        fits = tuple(axis if ok else None for axis, ok in zip(dims, divides, strict=True))
        if fits != dims:
            logging.info(
                "%s %s: %s does not divide evenly over %s, kept as %s", name, leaf.shape, dims, mesh.shape, fits
            )
        return NamedSharding(mesh, P(*fits))

    return jax.tree.map_with_path(place, params)


def gather(params, mesh: Mesh):
    """The parameters as a step uses them: whole over `fsdp`, which splits the rows there, still split over `tensor`.

    Without it XLA has to reconcile the two uses of `fsdp`, and on meshes of three axes it gets gradients wrong
    (jaxlib 0.10.2: tests/test_topology.py)."""

    def whole(place):
        return NamedSharding(mesh, P(*(None if axis == "fsdp" else axis for axis in place.spec)))

    return jax.lax.with_sharding_constraint(params, jax.tree.map(whole, param_shardings(params, mesh)))


def state_shardings(state, params, mesh: Mesh):
    """Shardings of a training state: subtrees shaped like the parameters live where the parameters live (EMA and
    optimizer moments), all else is replicated."""
    structure = jax.tree.structure(params)
    shardings = param_shardings(params, mesh)

    def like_params(subtree):
        return jax.tree.structure(subtree) == structure

    def place(subtree):
        return shardings if like_params(subtree) else replicated(mesh)

    return jax.tree.map(place, state, is_leaf=like_params)


def fetch(tree, mesh: Mesh):
    """Arrays of the rows of a batch as a whole, in numpy, on every process.

    They travel as bytes of one array: collectives that do not wait for each other may cross, and on CPUs hang.
    (`multihost_utils.process_allgather` has one for each array.)"""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    leaves, structure = jax.tree.flatten(tree)
    rows, arrays, start = np.asarray(jax.device_get(_rows_as_bytes(mesh)(leaves))), [], 0
    for leaf in leaves:
        width = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
        arrays.append(np.ascontiguousarray(rows[:, start : start + width]).view(leaf.dtype).reshape(leaf.shape))
        start += width
    return jax.tree.unflatten(structure, arrays)


@functools.cache
def _rows_as_bytes(mesh: Mesh):
    def as_bytes(x):
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool else jax.lax.bitcast_convert_type(x, jnp.uint8)
        return x.reshape(len(x), -1)

    return jax.jit(lambda leaves: jnp.concatenate([*map(as_bytes, leaves)], 1), out_shardings=replicated(mesh))


def put_batch(batch, mesh: Mesh, global_rows: int):
    """Global arrays from this process's rows of the batch (numpy, leading axis)."""
    sharding = batch_sharding(mesh)

    def put(local):
        local = np.asarray(local)
        return jax.make_array_from_process_local_data(sharding, local, (global_rows, *local.shape[1:]))

    return jax.tree.map(put, batch)
