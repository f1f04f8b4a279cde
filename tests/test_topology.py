"""One device equals many: gradients, steps, noise, samples and checkpoints on meshes of eight fake devices.

Every test runs in a process of its own.
"""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import children
import dilm_jax
import tiny
from dilm_jax import config as config_lib
from dilm_jax import evals, sampling, sharding, train
from dilm_jax.canvas import Example
from dilm_jax.checkpoint import Checkpointer
from dilm_jax.data import loader

pytestmark = pytest.mark.multidevice

BATCH = ("batch_size", 16)
# Name: devices and overrides.
TOPOLOGIES = {
    "1 device, 4 micro-batches": (1, [("train.micro_batches", 4)]),
    "data 8": (8, []),
    "data 2 × fsdp 4": (8, [("mesh.fsdp", 4)]),
    "data 2 × fsdp 2 × tensor 2": (8, [("mesh.fsdp", 2), ("mesh.tensor", 2)]),
    "packed, data 2 × fsdp 2 × tensor 2, 2 micro-batches": (
        8,
        [("mesh.fsdp", 2), ("mesh.tensor", 2), ("train.micro_batches", 2), ("train.packing", True)],
    ),
    "data 2 × fsdp 2 × tensor 2, 4 micro-batches": (
        8,
        [("mesh.fsdp", 2), ("mesh.tensor", 2), ("train.micro_batches", 4)],
    ),
}


@pytest.mark.parametrize("family", tiny.BASE)
@children.on_eight_devices
def test_training_is_the_same_on_every_mesh(family):
    """First gradient to 1e-6, twenty steps to 1e-5."""
    # Adam divides by a gradient's own size: where that is rounding, so is the step.
    batch = (BATCH,) if family in ("joint", "independent") else (BATCH, ("optim.adam_eps", 1e-4))
    want = tiny.run(family, *batch)
    for name, (num_devices, overrides) in TOPOLOGIES.items():
        if family not in ("joint", "independent") and not name.startswith("packed"):
            continue  # what the meshes have in common is not the family's
        got = tiny.run(family, *batch, *overrides, num_devices=num_devices)
        tiny.assert_close(got.gradient, want.gradient, 1e-6)
        np.testing.assert_allclose(tiny.losses(got), tiny.losses(want), rtol=1e-5, err_msg=name)
        tiny.assert_close(got.state.params, want.state.params, 1e-5)
        tiny.assert_close(got.state.ema, want.state.ema, 1e-5)


@children.on_eight_devices
def test_training_with_dropout_is_the_same_on_eight_devices():
    """Its keys belong to the examples."""
    want, got = (tiny.run(*tiny.BASE["joint"], num_devices=n) for n in (1, 8))
    tiny.assert_close(got.gradient, want.gradient, 1e-6)
    np.testing.assert_allclose(tiny.losses(got), tiny.losses(want), rtol=1e-5)


def corrupt(family, num_devices):
    """(jitted (step, examples) → what corrupt_batch draws, examples on the mesh)."""
    made, parts, mesh, _ = tiny.world(family, BATCH, num_devices=num_devices)

    def draw(step, x0):
        drawn = train.corrupt_batch(parts.process, mesh, 0, step, x0)
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
        return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, drawn)

    rows = sharding.batch_sharding(mesh)
    x0 = sharding.put_batch(tiny.batch(parts, made), mesh, made.batch_size)
    return jax.jit(draw, in_shardings=(sharding.replicated(mesh), rows), out_shardings=rows), x0


@pytest.mark.parametrize("family", tiny.BASE)
@children.on_eight_devices
def test_times_and_masks_are_bitwise_the_same_on_1_2_4_8_devices(family):
    draws = {n: corrupt(family, n) for n in (1, 2, 4, 8)}
    for step in range(3):
        want = jax.device_get(draws[1][0](jnp.int32(step), draws[1][1]))
        for n in (2, 4, 8):
            got = jax.device_get(draws[n][0](jnp.int32(step), draws[n][1]))
            jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("family", tiny.BASE)
@children.on_eight_devices
def test_noising_needs_no_other_device(family):
    """No collective, in a rejection loop least of all."""
    draw, x0 = corrupt(family, 8)
    program = draw.lower(jnp.int32(0), x0).compile().as_text()
    assert "num_partitions=8" in program
    assert "while" in program or family not in ("joint", "independent")  # whose counts are drawn by rejection
    assert not re.findall("all-reduce|all-gather|all-to-all|reduce-scatter|collective", program)


@children.on_eight_devices
def test_packed_rows_of_a_mesh_that_is_not_there_are_those_of_one_that_is():
    """Of texts of which noise leaves little, so that a shard's last row is not full."""
    path = str(pathlib.Path(__file__).parent / "data" / "sotu.txt")
    data = {"data.source": "text", "data.difficulty": "easy", "data.path": path, "data.max_length": 100}
    data |= {"process.schedule.sigma_min": 30.0, "process.schedule.sigma_max": 600.0}
    rows = {}
    for num_devices, num_shards in ((8, None), (1, 8), (1, None)):
        made = tiny.config("joint", *data.items(), ("batch_size", 256), ("train.packing", True))
        parts = config_lib.build(made)
        mesh = sharding.make_mesh(config_lib.mesh_shape(made, num_devices), jax.devices()[:num_devices])
        batches = loader.train_batches(parts.task.source("train"), made.batch_size, made.seed)
        rows[num_devices, num_shards] = train.num_packed_rows(made, parts, mesh, batches.batch, num_shards)
    assert rows[8, None] == rows[1, 8] and rows[1, 8] % 8 == 0
    assert rows[1, None] < rows[1, 8] < 256


@children.on_eight_devices
def test_every_parameter_follows_a_rule_and_the_big_ones_are_split():
    for overrides in ([("mesh.fsdp", 4)], [("mesh.fsdp", 2), ("mesh.tensor", 2)]):
        made, parts, mesh, _ = tiny.world("joint", BATCH, *overrides, num_devices=8)
        optimizer, _ = train.make_optimizer(made)
        state = train.init_state(made, parts, optimizer, mesh)
        share = mesh.shape["fsdp"] * mesh.shape["tensor"]
        for path, leaf in jax.tree.leaves_with_path((state.params, state.ema, state.opt_state)):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            held = leaf.addressable_shards[0].data.size
            if re.search(r"(attention|mlp|time).*kernel$", name):
                assert held * share == leaf.size, f"{name} {leaf.shape} is held as {held} of {leaf.size} numbers"
            assert held * share >= leaf.size
        held = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state.params))
        assert held < (1 / mesh.shape["fsdp"] + 0.1) * sum(leaf.size for leaf in jax.tree.leaves(state.params))


def test_a_parameter_without_a_rule_is_refused():
    mesh = sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1})
    with pytest.raises(ValueError, match=r"no sharding rule fits parameter new/weight \(2,\); add one"):
        sharding.param_shardings({"new": {"weight": jnp.zeros(2)}}, mesh)


@pytest.mark.parametrize("family", tiny.BASE)
@children.on_eight_devices
def test_samples_are_the_same_on_eight_devices(family):
    """At temperature 1, at one global shape, packed and not: equal texts in at least 99% of the rows."""
    texts = []
    for num_devices, least_columns in ((1, 10**6), (8, 10**6), (8, 30)):
        sampling.LEAST_COLUMNS = least_columns
        warm = [("sampling.temperature", 1.0), ("sampling.gap_temperature", 1.0)]
        warm = [pair for pair in warm if config_lib.has_effect(tiny.config(family), pair[0])]
        _, parts, mesh, _ = tiny.world(family, BATCH, *warm, num_devices=num_devices)
        params = tiny.random_params(evals.abstract_params(parts, mesh))
        params = jax.device_put(params, sharding.param_shardings(params, mesh))
        x0 = Example(**loader.stack([parts.task.source("test")[i] for i in range(256)]))
        inputs = (x0, np.full(256, 7, np.uint32), np.arange(256))
        drawn = evals.make_sampler(parts, mesh)(params, *sharding.put_batch(inputs, mesh, 256), None)
        texts.append(jax.device_get(drawn))
    one, *others = texts
    for eight in others:
        same = (one.tokens == eight.tokens).all(-1)
        assert same.mean() >= 0.99 and (one.nfe == eight.nfe).mean() >= 0.99
    assert len(np.unique(one.tokens, axis=0)) > 200


@children.on_eight_devices
def generate_rows(workdir, num_rows, out):
    run = dilm_jax.load(workdir, temperature=1.0)
    source = run.parts.task.source("test")
    prompts = [source[i]["tokens"][: int(source[i]["frozen"].sum())].tolist() for i in range(num_rows)]
    out.write_text(json.dumps(run.generate([{"prompt": prompt, "seed": 5} for prompt in prompts])))


def test_an_evaluation_fills_up_the_devices(smoke_runs):
    evaluate_in_batches(str(smoke_runs["joint"]))


@children.on_eight_devices
def evaluate_in_batches(workdir):
    run, results = dilm_jax.load(workdir), []
    for batch_size in (3, 8):
        config = run.config.copy_and_resolve_references()
        config.eval.batch_size = batch_size
        results.append(dataclasses.replace(run, config=config).evaluate(num=6))
    assert results[0] == results[1]


def test_rows_that_fill_up_the_devices_change_nothing(smoke_runs, tmp_path):
    """A run is loaded on other devices than it was trained on; five rows are padded to eight."""
    for num_rows in (5, 8):
        generate_rows(str(smoke_runs["independent"]), num_rows, tmp_path / str(num_rows))
    five, eight = (json.loads((tmp_path / str(num_rows)).read_text()) for num_rows in (5, 8))
    assert len(five) == 5 and len(eight) == 8 and five == eight[:5]


@pytest.mark.parametrize("there, here", [(8, 1), (1, 8)])
@children.on_eight_devices
def test_a_checkpoint_goes_on_on_another_number_of_devices(tmp_path, there, here):
    """Ten steps there and ten here are twenty steps."""
    overrides = {8: (BATCH, ("mesh.fsdp", 4)), 1: (BATCH,)}
    want = tiny.run("joint", *overrides[there], num_devices=there)
    made, parts, mesh, _ = tiny.world("joint", *overrides[there], num_devices=there)
    state = tiny.random_state(made, parts, mesh)
    half = tiny.continued(state, range(10), "joint", *overrides[there], num_devices=there)
    optimizer, _ = train.make_optimizer(made)
    abstract = jax.eval_shape(lambda: train.init_state(made, parts, optimizer, mesh))
    checkpointer = Checkpointer(tmp_path, keep=1)
    train.save(checkpointer, jax.device_put(half.state, sharding.state_shardings(abstract, abstract.params, mesh)))
    checkpointer.wait()

    made, parts, mesh, _ = tiny.world("joint", *overrides[here], num_devices=here)
    state, _ = train.restore(checkpointer, tiny.random_state(made, parts, mesh), None)
    assert int(state.step) == 10 and len(jax.tree.leaves(state.params)[0].sharding.device_set) == here
    rest = tiny.continued(state, range(10, 20), "joint", *overrides[here], num_devices=here)
    np.testing.assert_allclose(tiny.losses(rest), tiny.losses(want)[10:], rtol=1e-5)
    tiny.assert_close(rest.state.params, want.state.params, 1e-5)
