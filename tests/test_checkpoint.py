import functools
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dilm_jax.checkpoint import Checkpointer


class _Net(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(4, 3, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(32, 32, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)])  # 4 KiB: not inlined


def _params():
    return nnx.to_pure_dict(nnx.state(_Net(nnx.Rngs(0))))


def _state():
    """Params, and an optimizer state with EmptyState, MaskedState and MaskedNode in it."""
    params = _params()
    matrices = jax.tree.map(lambda x: x.ndim > 1, params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=matrices), optax.masked(optax.trace(0.9), matrices)
    )
    _, opt_state = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
    ema = jax.tree.map(lambda x: x + 1, params)
    return {"params": params, "ema": ema, "opt_state": opt_state}


def _abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _saved(directory, steps=(1, 2), keep=3):
    state = _state()
    checkpointer = Checkpointer(directory, keep=keep)
    for step in steps:
        checkpointer.save(step, **state, progress={"step": step, "loss": 0.1})
    checkpointer.close()
    return state


def _assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_round_trip(tmp_path):
    state = _saved(tmp_path / "checkpoints")
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=3)
    assert checkpointer.latest_step() == 2
    restored = checkpointer.restore(2, **_abstract(state))
    assert restored.pop("progress") == {"step": 2, "loss": 0.1}
    _assert_equal(restored, state)


def test_an_abstract_tree_of_concrete_arrays_is_as_good(tmp_path):
    state = _saved(tmp_path)
    _assert_equal(Checkpointer(tmp_path).restore_item(None, "opt_state", state["opt_state"]), state["opt_state"])


def test_one_item_needs_no_other(tmp_path):
    state = _saved(tmp_path)
    for other in ("params", "opt_state"):
        shutil.rmtree(tmp_path / "2" / other)
    _assert_equal(Checkpointer(tmp_path).restore_item(2, "ema", _abstract(state["ema"])), state["ema"])


def test_retention_keeps_the_latest(tmp_path):
    _saved(tmp_path, steps=(10, 20, 30, 40), keep=2)
    assert Checkpointer(tmp_path).all_steps() == [30, 40]


def test_saving_survives_donation_of_what_is_saved(tmp_path):
    step = functools.partial(jax.jit, donate_argnums=0)(lambda x: x + 1)
    x = step(jnp.zeros(1_000_000))
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, params={"x": x}, progress={})
    for _ in range(5):
        x = step(x)
    checkpointer.wait()
    got = checkpointer.restore_item(1, "params", {"x": jax.ShapeDtypeStruct((1_000_000,), jnp.float32)})
    np.testing.assert_array_equal(got["x"], 1.0)


@pytest.mark.parametrize("step", [5, 7])
def test_later_or_equal_steps_are_refused(tmp_path, step):
    state = _saved(tmp_path, steps=(7,))
    with pytest.raises(ValueError, match=rf"cannot save step {step}: .* already holds step 7"):
        Checkpointer(tmp_path, keep=2).save(step, **state, progress={})


def test_missing_directory_and_no_checkpoint_are_named(tmp_path):
    with pytest.raises(ValueError, match="no checkpoints at .*nowhere: the directory is missing"):
        Checkpointer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no complete step yet"):
        Checkpointer(tmp_path)
    _saved(tmp_path)
    with pytest.raises(ValueError, match=r"no step 9 in .*: it holds \[1, 2\]"):
        Checkpointer(tmp_path).restore(9)


def test_reading_changes_nothing(tmp_path):
    _saved(tmp_path)
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()  # a training that is writing step 3
    before = sorted(tmp_path.rglob("*"))
    assert Checkpointer(tmp_path).latest_step() == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    state = _saved(tmp_path)
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    checkpointer = Checkpointer(tmp_path, keep=3)
    assert checkpointer.latest_step() == 2
    checkpointer.save(3, **state, progress={"step": 3})
    checkpointer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "3"]


@pytest.mark.parametrize("damage", ["cut in half", "deleted"])
@pytest.mark.parametrize(
    "files", ["*/_METADATA", "*/manifest.ocdbt", "*/d/*", "*/ocdbt.process_0/d/*", "progress/metadata"]
)
def test_a_damaged_checkpoint_is_one_line(tmp_path, capfd, files, damage):
    state = _saved(tmp_path)
    damaged = list((tmp_path / "2").glob(files))
    assert damaged
    for path in damaged:
        content = path.read_bytes()
        path.unlink()
        if damage == "cut in half":
            path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError) as error:
        Checkpointer(tmp_path, keep=3).restore(2, **_abstract(state))
    message = str(error.value)
    assert str(tmp_path / "2") in message
    assert "delete that directory to fall back to the step before it (1)" in message
    assert "\n" not in message and len(message) < 700
    assert capfd.readouterr() == ("", "")


def test_another_model_is_told_from_a_damaged_checkpoint(tmp_path):
    _saved(tmp_path)
    checkpointer = Checkpointer(tmp_path)
    wider = _abstract(_params())
    wider["head"]["kernel"] = jax.ShapeDtypeStruct((4, 5), jnp.float32)
    with pytest.raises(ValueError, match=r"another model: params/head.kernel is float32\[4, 3\] there and .*\[4, 5\]"):
        checkpointer.restore(1, params=wider)
    narrower = _abstract(_params())
    del narrower["head"]
    with pytest.raises(ValueError, match=r"params/head.bias is float32\[3\] there and absent in this config"):
        checkpointer.restore(1, params=narrower)
    halved = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), _params())
    with pytest.raises(ValueError, match=r"is float32\[32\] there and bfloat16\[32\] in this config"):
        checkpointer.restore(1, ema=halved)


def test_the_console_stays_clean():
    """Orbax's chatter is dropped also where the program itself logs at INFO."""
    printed = _run("""
        import sys, tempfile
        from absl import logging
        import jax.numpy as jnp
        from dilm_jax.checkpoint import Checkpointer
        logging.set_verbosity(logging.INFO)
        logging.info("ours")
        with tempfile.TemporaryDirectory() as directory:
            checkpointer = Checkpointer(directory, keep=1)
            for step in (1, 2):
                checkpointer.save(step, params={"x": jnp.ones(3)}, progress={})
            checkpointer.wait()
            checkpointer.restore(2, params={"x": jnp.ones(3)})
            checkpointer.close()
    """)
    assert printed.count("\n") == 1 and printed.endswith("ours\n")


@pytest.mark.multidevice
def test_saved_on_eight_devices_restored_on_one_and_on_two_by_four(tmp_path):
    prologue = """
        import sys
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from dilm_jax.checkpoint import Checkpointer
        def mesh(*shape):
            return jax.make_mesh(shape, ("data", "fsdp")[:len(shape)], axis_types=(AxisType.Auto,) * len(shape))
        x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    """
    _run(prologue + """
        assert jax.device_count() == 8
        x = jax.device_put(x, NamedSharding(mesh(8), P("data")))
        checkpointer = Checkpointer(sys.argv[1], keep=2)
        checkpointer.save(1, params={"x": x}, progress={"step": 1})
        checkpointer.close()
    """, tmp_path, devices=8)  # fmt: skip
    read = """
        sharding = {}
        leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
        got = Checkpointer(sys.argv[1]).restore(1, params={{"x": leaf}})["params"]["x"]
        np.testing.assert_array_equal(got, x)
        assert len(got.sharding.device_set) == {}
    """
    _run(prologue + read.format("None", 1), tmp_path, devices=1)
    _run(prologue + read.format("NamedSharding(mesh(2, 4), P('data', 'fsdp'))", 8), tmp_path, devices=8)


@pytest.mark.slow
def test_killed_at_random_moments_a_complete_step_is_found(tmp_path):
    """Twenty kills while steps are being written; each restart must find a step whose items agree."""
    script = textwrap.dedent("""
        import sys
        import jax, jax.numpy as jnp
        from dilm_jax.checkpoint import Checkpointer
        leaf = {"x": jax.ShapeDtypeStruct((100_000,), jnp.float32)}
        checkpointer = Checkpointer(sys.argv[1], keep=2)
        step = checkpointer.latest_step() or 0
        if step:
            restored = checkpointer.restore(step, params=leaf, ema=leaf)
            assert restored["progress"] == {"step": step}
            assert (restored["params"]["x"] == step).all() and (restored["ema"]["x"] == step).all()
        print("restored", step, flush=True)
        while True:
            step += 1
            tree = {"x": jnp.full((100_000,), step, jnp.float32)}
            checkpointer.save(step, params=tree, ema=tree, progress={"step": step})
    """)
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("restored "), line
            steps.append(int(line.split()[1]))
            try:
                process.wait(timeout=float(rng.uniform(0, 0.6)))
            except subprocess.TimeoutExpired:
                process.kill()
    assert steps == sorted(steps) and steps[-1] > 0


def _run(script: str, *args, devices: int = 1) -> str:
    """Runs Python with that many fake devices; returns what it printed."""
    prologue = f"import jax; jax.config.update('jax_num_cpu_devices', {devices})\n"
    command = [sys.executable, "-c", prologue + textwrap.dedent(script), *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr
