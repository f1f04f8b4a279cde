"""Where devices come to lie on a mesh, those of several TPU slices above all."""

import dataclasses
import itertools
import math

import pytest
from jax.experimental import topologies

import children
from dilm_jax import sharding


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh is arranged by."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    core_on_chip: int = 0


def devices_of(num_slices: int, **kind) -> list[Device]:
    """Slices of 2 × 2 × 2 chips, in no order."""
    places = itertools.product(range(2), range(2), range(2), range(num_slices))
    return [Device(i, slice_index, (x, y, z), **kind) for i, (x, y, z, slice_index) in enumerate(places)]


def axes(*sizes: int) -> dict[str, int]:
    return dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))


@pytest.mark.parametrize("num_slices, sizes", [(2, (2, 4, 2)), (2, (4, 4, 1)), (2, (16, 1, 1)), (4, (4, 8, 1))])
def test_slices_are_the_outermost_part_of_data(num_slices, sizes):
    mesh = sharding.arranged(axes(*sizes), devices_of(num_slices))
    assert mesh.shape == sizes and len(set(mesh.flat)) == math.prod(sizes)
    of_rows = [{device.slice_index for device in row.flat} for row in mesh]
    assert of_rows == [{i * num_slices // sizes[0]} for i in range(sizes[0])]


@pytest.mark.parametrize("sizes", [(1, 16, 1), (3, 1, 5)])
def test_no_other_axis_crosses_slices(sizes):
    with pytest.raises(ValueError, match=f"config.mesh.data {sizes[0]} must be divisible by 2 slices: no other axis"):
        sharding.make_mesh(axes(*sizes), devices_of(2))


def test_an_axis_may_take_part_of_a_physical_one():
    """Of eight chips in a cube, on every kind of TPU."""
    mesh = sharding.arranged(axes(4, 2, 1), [Device(i, 0, (i, 0, 0)) for i in range(8)])
    assert mesh.shape == (4, 2, 1)


def test_hosts_of_gpus_may_share_any_axis():
    """A slice of theirs is but a host; `jax.make_mesh` would refuse them."""
    gpus = devices_of(2, platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    assert sharding.num_slices(gpus) == 1 and sharding.num_slices(devices_of(2)) == 2
    mesh = sharding.arranged(axes(1, 16, 1), gpus[::-1])
    assert [device.id for device in mesh.flat] == [*range(16)]


@pytest.mark.slow
@children.needs_libtpu
def test_slices_that_libtpu_describes(monkeypatch):
    with children.compiling_for_tpus(monkeypatch) as other:
        assert other.submit(slices_of_rows, 2).result() == [[0], [0], [1], [1]]
        assert other.submit(slices_of_rows, 1).result() == [[None]] * 4


def slices_of_rows(num_slices: int) -> list[list]:
    """Of `data` 4 on slices of v5e:2x4."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4", num_slices=num_slices).devices
    mesh = sharding.make_mesh(axes(4, len(devices) // 4, 1), devices)
    return [sorted({getattr(device, "slice_index", None) for device in row.flat}) for row in mesh.devices]
