"""The train step and the loop: goldens, invariances, noise, optimizer, and an effect for every key of the config."""

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dilm_jax
import tiny
from dilm_jax import checkpoint, evals, flops, likelihood, metrics, optim, sampling, sharding, train
from dilm_jax import config as config_lib
from dilm_jax import workdir as workdir_lib
from dilm_jax.canvas import InsertionTargets
from dilm_jax.processes.registry import PROCESSES

# --- The numbers of every run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.BASE)
def test_numbers_are_those_of_the_golden(family):
    """Three training steps. A change means that the numbers of every run have changed: the data, the noise, the loss,
    the network or the optimizer. If that was the intention, write them anew and add a line to CHANGELOG.md."""
    file = pathlib.Path(__file__).parent / "goldens" / f"{family}.json"
    steps = [
        {key: value for key, value in row.items() if "loss" in key or key == "train/grad_norm"}
        for row in tiny.run(*tiny.BASE[family]).metrics[:3]
    ]
    if os.environ.get("REGENERATE_GOLDENS"):
        file.write_text(json.dumps(steps, indent=2) + "\n")
    for step, (got, want) in enumerate(zip(steps, json.loads(file.read_text()), strict=True)):
        assert got == pytest.approx(want, rel=1e-5), (
            f"step {step} of {family}: the numbers of training have changed. If they should, run\n"
            "    REGENERATE_GOLDENS=1 python -m pytest tests/test_train.py -k golden\nand add a line to CHANGELOG.md"
        )


# --- One gradient, however it is computed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, changed",
    [
        ("joint", [("train.micro_batches", 4), ("model.remat", "full"), ("model.scan", False)]),
        pytest.param("joint", [("train.micro_batches", 2)], marks=pytest.mark.slow),
        pytest.param("independent", [("train.micro_batches", 4), ("model.remat", "full")], marks=pytest.mark.slow),
        pytest.param("independent", [("model.scan", False)], marks=pytest.mark.slow),
        ("joint", [("train.packing", True)]),
        pytest.param("independent", [("train.packing", True), ("train.micro_batches", 2)], marks=pytest.mark.slow),
        pytest.param("joint", [("train.packing", True), ("loss.targets", "dense")], marks=pytest.mark.slow),
    ],
)
def test_micro_batches_remat_and_unrolling_change_no_number(family, changed):
    """First gradient to 1e-6, twenty steps to 1e-5; joint has dropout, whose keys belong to the examples."""
    want, got = tiny.run(*tiny.BASE[family]), tiny.run(*tiny.BASE[family], *changed)
    tiny.assert_close(got.gradient, want.gradient, 1e-6)
    np.testing.assert_allclose(tiny.losses(got), tiny.losses(want), rtol=1e-5)
    tiny.assert_close(got.state.params, want.state.params, 1e-5)


def test_all_steps_share_one_program(monkeypatch):
    traced, of_step = [], flops.of_step
    monkeypatch.setattr(flops, "of_step", lambda *args: traced.append(1) or of_step(*args))
    tiny.run("joint", ("seed", 99), steps=3)
    assert len(traced) == 1


@pytest.mark.parametrize("family", tiny.BASE)
def test_passes_over_what_finds_no_room_change_no_number(family):
    """Two rows at a time for eight canvases of which no two fit into one."""
    want = tiny.run(*tiny.BASE[family])
    made, parts, mesh, _ = tiny.world(*tiny.BASE[family])
    step = train.make_train_step(made, parts, mesh, 2)
    with jax.default_matmul_precision(made.train.matmul_precision):
        state, metrics = step(tiny.random_state(made, parts, mesh), tiny.batch(parts, made))
    assert metrics["train/passes"] == 4
    tiny.assert_close(tiny.first_gradient(state, made), want.gradient, 1e-6)
    assert float(metrics["train/loss"]) == pytest.approx(want.metrics[0]["train/loss"], rel=1e-5)


# --- Noise -----------------------------------------------------------------------------------------------------------


NOISED = [family for family in PROCESSES if family != "arm"]


@functools.cache
def noise(family):
    """(step, examples) → what `corrupt_batch` draws, jitted; and some examples."""
    made, parts, mesh, _ = tiny.world(family, ("batch_size", 16))
    draw = functools.partial(train.corrupt_batch, parts.process, mesh, made.seed)
    return jax.jit(lambda step, x0: jax.tree.map(_plain, draw(step, x0))), tiny.batch(parts, made)


def _plain(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize("family", PROCESSES)
def test_times_of_a_step_differ_and_are_stratified(family):
    draw, x0 = noise(family)
    eps = float(tiny.world(family, ("batch_size", 16))[1].process.times(jnp.zeros(1))[0][0])
    for step in range(5):
        t = np.asarray(draw(step, x0)[0])
        assert len(set(t.tolist())) == len(t)
        cells = np.floor((t - eps) / (1 - eps) * len(t)).astype(int)
        assert sorted(cells) == list(range(len(t)))
        halves = cells.reshape(2, -1) // (len(t) // 2)  # each shard has small and large times
        assert (abs(halves.mean(-1) - 0.5) < 0.2).all()


@pytest.mark.parametrize("family", NOISED)
def test_noise_depends_on_the_step(family):
    draw, x0 = noise(family)
    first, other = draw(0, x0), draw(1, x0)
    assert (first[0] != other[0]).all()
    assert (first[2].tokens != other[2].tokens).any()
    assert (first[4] != other[4]).any(-1).all()  # the keys of dropout
    jax.tree.map(np.testing.assert_array_equal, first, draw(0, x0))


@pytest.mark.parametrize("family", PROCESSES)
def test_noise_of_a_row_does_not_depend_on_its_neighbours(family):
    draw, x0 = noise(family)
    swapped = jax.tree.map(np.copy, x0)
    for array in jax.tree.leaves(swapped):
        array[1:] = array[:0:-1]
    before, after = draw(3, x0), draw(3, swapped)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), before, after)
    assert (np.asarray(before[2].tokens)[1:] != np.asarray(after[2].tokens)[1:]).any()
    np.testing.assert_array_equal(before[0], after[0])  # nor do the times depend on the text


@pytest.mark.parametrize("family", NOISED)
def test_rows_with_equal_texts_get_different_noise(family):
    draw, x0 = noise(family)
    same = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), x0)
    left = np.concatenate([draw(step, same)[2].tokens for step in range(4)])
    num_free = int(np.asarray(same.free)[0].sum())
    assert len(np.unique(left, axis=0)) > 2**num_free / 2  # most of what there is


# --- Optimizer -------------------------------------------------------------------------------------------------------


def rate(step, **changed):
    defaults = dict(learning_rate=2.0, schedule="constant", warmup_steps=4, cosine_cycles=0.5, floor=0.5, num_steps=104)
    return float(optim.learning_rate(**defaults | changed)(jnp.int32(step)))


def test_learning_rates():
    assert [rate(step) for step in (0, 1, 2, 4, 5, 104, 999)] == [0.0, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert rate(0, warmup_steps=0) == 2.0
    decay = [rate(step, schedule="cosine") for step in (0, 2, 4, 29, 54, 79, 104, 999)]
    half = 0.75 * math.sqrt(0.5)
    np.testing.assert_allclose(decay, [0, 1, 2, 1.25 + half, 1.25, 1.25 - half, 0.5, 0.5], rtol=1e-6)
    cycles = [rate(step, schedule="cosine", cosine_cycles=2.0) for step in (4, 29, 54, 79, 104)]
    np.testing.assert_allclose(cycles, [2, 0.5, 2, 0.5, 2], rtol=1e-6)
    assert rate(0, schedule="cosine", warmup_steps=0) == 2.0


def test_the_reported_learning_rate_is_the_one_used():
    run = tiny.run(*tiny.BASE["joint"])
    assert [row["train/learning_rate"] for row in run.metrics] == [np.float32(1e-3)] * 20


def test_kernels_decay_and_nothing_else():
    params = evals.abstract_params(*tiny.world("joint")[1:3])
    decays = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(optim.decay_mask(params))}
    assert {name for name, leaf in decays.items() if leaf} == {name for name in decays if name.endswith("['kernel']")}
    assert sum(decays.values()) >= 10 and not all(decays.values())


def test_decay_shrinks_kernels_by_rate_times_decay():
    optimizer = optim.adamw(lambda step: 0.5, weight_decay=0.1, beta1=0.9, beta2=0.999, adam_eps=1e-8, clip_norm=1.0)
    params = {name: jnp.ones(3) for name in ("kernel", "bias", "scale", "embedding")}
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    for name, update in updates.items():
        np.testing.assert_allclose(update, -0.05 if name == "kernel" else 0.0, rtol=1e-6)


def test_clipping_is_by_the_global_norm():
    optimizer = optim.adamw(lambda step: 1.0, weight_decay=0.0, beta1=0.0, beta2=0.0, adam_eps=1.0, clip_norm=1.0)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    updates, _ = optimizer.update({"a": jnp.array([30.0]), "b": jnp.array([40.0])}, optimizer.init(params), params)
    np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-0.6 / 1.6, -0.8 / 1.8], rtol=1e-6)  # g/(|g| + 1)


def test_ema_is_float32_and_moves_whatever_the_parameters_are():
    params = {"x": jnp.ones(3, jnp.bfloat16)}
    ema = {"x": jnp.zeros(3, jnp.float32)}
    for step in range(1000, 1010):
        ema = optim.update_ema(ema, params, 0.9999, jnp.int32(step))
        assert ema["x"].dtype == jnp.float32
    want = 1 - np.prod([min(0.9999, (1 + step) / (10 + step)) for step in range(1000, 1010)])
    np.testing.assert_allclose(ema["x"], want, rtol=1e-5)  # in bfloat16 such an average would not


def test_ema_of_a_run_follows_the_parameters():
    """After the first step it holds a tenth of the first parameters."""
    made, parts, mesh, _ = tiny.world(*tiny.BASE["joint"])
    before = jax.device_get(tiny.random_state(made, parts, mesh)).params
    after = tiny.run(*tiny.BASE["joint"], steps=1).state
    tiny.assert_close(after.ema, jax.tree.map(lambda p, q: 0.1 * p + 0.9 * q, before, after.params), 1e-6)


def test_state_is_float32_also_where_activations_are_not():
    made = tiny.config("joint", ("model.dtype", "bfloat16"))
    parts, mesh = config_lib.build(made), tiny.world("joint")[2]
    optimizer, _ = train.make_optimizer(made)
    abstract = jax.eval_shape(lambda: train.init_state(made, parts, optimizer, mesh))
    floats = [x.dtype for x in jax.tree.leaves(abstract) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert len(floats) > 50 and set(floats) == {jnp.dtype("float32")}


# --- The loop, with the network taken out ----------------------------------------------------------------------------


class Loop:
    """Runs `train.train` with a step that learns nothing, and keeps what it did."""

    def __init__(self, monkeypatch, loss=lambda step: 1.0, grad_norm=lambda step: 1.0):
        self.did, self._loss, self._grad_norm = {}, loss, grad_norm
        state = train.TrainState(step=jnp.int32(0), params={}, ema={}, opt_state={}, finite=jnp.bool(True))
        monkeypatch.setattr(train, "init_state", lambda *args: state)
        monkeypatch.setattr(train, "make_train_step", self._make_step)
        monkeypatch.setattr(train, "Checkpointer", self._checkpointer())
        monkeypatch.setattr(train, "plot", lambda directory: None)
        monkeypatch.setattr(metrics, "_wandb_run", lambda project, directory: self.did.update(wandb=project))
        monkeypatch.setattr(evals, "Evaluator", self._evaluator())

    def __call__(self, made, workdir):
        """What the loop did, and the steps at which metrics.jsonl has train/loss."""
        self.did = {"batches": [], "saved": [], "evaluated": []}
        try:
            train.train(made, str(workdir))
        finally:
            rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
            self.did["logged"] = [row["step"] for row in rows if "train/loss" in row]
        return self.did

    def _make_step(self, config, parts, mesh, packed_rows):
        self.did["packed_rows"] = packed_rows
        return self._step

    def _step(self, state, x0):
        self.did["batches"].append(hashlib.sha256(np.asarray(x0.tokens).tobytes()).hexdigest())
        step = int(state.step)
        metrics = {"train/loss": self._loss(step + 1), "train/grad_norm": self._grad_norm(step + 1)}
        finite = bool(state.finite) and all(map(math.isfinite, metrics.values()))
        metrics |= {train.FINITE: finite, train.FLOPS: 1e9}
        return state.replace(step=jnp.int32(step + finite), finite=jnp.bool(finite)), metrics

    def _checkpointer(loop):
        class Recorder(checkpoint.Checkpointer):
            def __init__(self, directory, **keep):
                loop.did["keep"] = keep

            def latest_step(self):
                return loop.did["saved"][-1] if loop.did["saved"] else None

            def save(self, step, **items):
                loop.did["saved"].append(step)

            def wait(self): ...

            def close(self): ...

        return Recorder

    def _evaluator(loop):
        class Recorder:
            def __init__(self, parts, mesh, *sizes):
                self.sizes = sizes

            def __call__(self, params, split, num, seed, between):
                between()
                loop.did["evaluated"].append((len(loop.did["batches"]), split, num, seed, *self.sizes))
                return {"eval/exact_match": 0.0}, []

        return Recorder


LOOP = (
    ("num_steps", 12),
    ("train.log_every", 2),
    ("train.eval_every", 3),
    ("train.checkpoint_every", 4),
    ("eval.num_valid", 16),
    ("eval.num_test", 24),
)


def test_the_loop_logs_evaluates_and_saves_when_it_should(monkeypatch, tmp_path):
    did = Loop(monkeypatch)(tiny.config("joint", *LOOP, ("num_steps", 13)), tmp_path)
    assert did["logged"] == [2, 4, 6, 8, 10, 12, 13]
    assert did["saved"] == [4, 8, 12, 13] and did["keep"] == {"keep": 2, "every": None, "best": None}
    at = [(step, split, num) for step, split, num, *_ in did["evaluated"]]
    assert at == [(3, "valid", 16), (6, "valid", 16), (9, "valid", 16), (12, "valid", 16), (13, "test", 24)]
    assert len(set(did["batches"])) == 13


@pytest.mark.parametrize("what", ["loss", "grad_norm"])
@pytest.mark.parametrize("step", [1, 4, 7, 9, 13])
def test_what_is_not_finite_ends_in_one_line_with_what_repeats_it(monkeypatch, tmp_path, what, step):
    """Wherever it happens, the state before it is saved, with the batch and the key of the step."""
    loop = Loop(monkeypatch, **{what: lambda at: math.nan if at == step else 1.0})
    made = tiny.config("joint", *LOOP, ("train.log_every", 2), ("num_steps", 13))
    with pytest.raises(ValueError, match=f"^step {step} is not finite .*{what} nan.* lower config.optim") as error:
        loop(made, tmp_path)
    assert "\n" not in str(error.value)
    whole = [4, 8, 12]
    assert loop.did["saved"] == [s for s in whole if s < step] + [step - 1] * (step - 1 not in whole)
    assert loop.did["logged"] == list(range(2, step, 2))
    evidence = np.load(tmp_path / "not_finite" / f"step_{step - 1:08d}.npz")
    assert hashlib.sha256(evidence["tokens"].tobytes()).hexdigest() == loop.did["batches"][step - 1]
    key = jax.random.wrap_key_data(jnp.asarray(evidence["key"]))
    assert key == jax.random.fold_in(jax.random.key(made.seed), step - 1)
    said = json.loads((tmp_path / "not_finite" / f"step_{step - 1:08d}.json").read_text())
    assert said["step"] == step - 1 and math.isnan(said[f"train/{what}"])


# --- Every key of the config has an effect ---------------------------------------------------------------------------


def text(jaxpr) -> str:
    """A jaxpr without addresses."""
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))


@functools.cache
def abstract_network_input(family):
    made, parts, mesh, _ = tiny.world(family)
    x0 = tiny.abstract_like(tiny.batch(parts, made))
    t, _, canvas, targets, keys = jax.eval_shape(lambda x: train.corrupt_batch(parts.process, mesh, 0, 0, x), x0)
    return canvas, t, targets, keys


@functools.cache
def abstract_scores(family):
    _, parts, mesh, _ = tiny.world(family)
    canvas, t, _, _ = abstract_network_input(family)
    return jax.eval_shape(evals.network(parts, mesh), evals.abstract_params(parts, mesh), canvas, t)


def probe_noise(made, parts, mesh):
    x0 = tiny.abstract_like(tiny.batch(parts, made))
    fraction = made.data.infill_fraction
    return text(jax.make_jaxpr(lambda x: train.corrupt_batch(parts.process, mesh, made.seed, 0, x, fraction))(x0))


def probe_network(made, parts, mesh):
    canvas, t, _, keys = abstract_network_input(made.process.family)
    params = evals.abstract_params(parts, mesh)
    return text(jax.make_jaxpr(evals.network(parts, mesh))(params, canvas, t, keys))


def probe_loss(made, parts, mesh):
    canvas, _, targets, _ = abstract_network_input(made.process.family)
    return text(jax.make_jaxpr(parts.process.loss)(abstract_scores(made.process.family), canvas, targets))


def probe_sampler(made, parts, mesh):
    canvas, _, _, keys = abstract_network_input("joint")
    sampler = parts.process.samplers(parts.sampling)[parts.sampler]

    def run(scores, keys, canvas):
        network = lambda *_: scores  # noqa: E731
        return sampling.generate(network, sampler, keys, canvas, parts.filters, corrector=parts.corrector)

    return text(jax.make_jaxpr(run)(abstract_scores(made.process.family), keys, canvas))


def probe_optimizer(made, parts, mesh):
    """Ten updates of two parameters."""
    optimizer, _ = train.make_optimizer(made)
    params = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}

    def update(carry, step):
        params, state = carry
        gradients = jax.tree.map(lambda p: jnp.cos(3 * p + step), params)
        updates, state = optimizer.update(gradients, state, params)
        return (jax.tree.map(jnp.add, params, updates), state), updates

    (params, _), _ = jax.jit(lambda carry: jax.lax.scan(update, carry, jnp.arange(10.0)))(
        (params, optimizer.init(params))
    )
    return [leaf.tolist() for leaf in jax.tree.leaves(params)]


class Sum:
    """In place of a process: the loss is t times the sum of all parameters."""

    spec = None

    def loss(self, scores, canvas, targets):
        return {"loss": scores}


def probe_step(made, parts, mesh):
    """Without network and process."""

    def corrupt(process, mesh, seed, step, x0, infill_fraction):
        t, key = x0.length / x0.max_length, jax.vmap(jax.random.key)(x0.length)
        targets = InsertionTargets(tokens=x0.tokens, gap=x0.tokens, dropped=x0.frozen, x0=x0, t=t)
        return t, t, x0, targets, key

    def network(parts, mesh):
        return lambda params, canvas, time, *args, **kwargs: time * sum(leaf.sum() for leaf in jax.tree.leaves(params))

    parts = dataclasses.replace(parts, process=Sum())
    params = {"kernel": jnp.ones((2, 2))}
    optimizer, _ = train.make_optimizer(made)
    state = train.TrainState(
        step=jnp.int32(0), params=params, ema=params, opt_state=optimizer.init(params), finite=jnp.bool(True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "corrupt_batch", corrupt)
        patch.setattr(train, "init_state", lambda *args: state)
        patch.setattr(evals, "network", network)
        patch.setattr(flops, "of_step", lambda params, spec, columns: jnp.float32(0))
        patch.setattr(sharding, "param_shardings", lambda params, mesh: {"kernel": sharding.replicated(mesh)})
        return text(train.make_train_step(made, parts, mesh, None).trace(state, tiny.batch(parts, made)).jaxpr)


def probe_init(made, parts, mesh):
    optimizer, _ = train.make_optimizer(made)
    return text(jax.make_jaxpr(lambda: train.init_state(made, parts, optimizer, mesh))())


def probe_mesh(made, parts, mesh):
    return config_lib.mesh_shape(made, 8)


def probe_data(made, parts, mesh):
    return {name: value.tolist() for name, value in parts.task.source("test")[0].items()}


PROBES = {name.removeprefix("probe_"): probe for name, probe in list(globals().items()) if name.startswith("probe_")}
WARM = (("sampling.temperature", 1.0), ("sampling.gap_temperature", 1.0))
COSINE = (("optim.schedule", "cosine"), ("num_steps", 8))
NOTES = pathlib.Path(__file__).parent / "data" / "notes"
TEXT = (
    ("data.source", "text"),
    ("data.difficulty", "easy"),
    ("data.path", f"{NOTES}/*.txt"),
    ("data.max_length", 200),
)
ROWS = (*TEXT, ("data.path", f"{NOTES}/*.jsonl"))

MDM, ILM = ((("process.family", family), *tiny.OF_FAMILY[family].items()) for family in ("mdm", "ilm"))

# Key: another value, the probes that must see it, and what else must be set for it to matter.
EFFECTS = {
    "seed": (1, "init noise loop", ()),
    "batch_size": (16, "loop", ()),
    "num_steps": (13, "loop", ()),
    "data.difficulty": ("hard", "data loop", ()),
    "data.seed": (1, "data loop", ()),
    "data.source": ("text", "data", (("data.path", f"{NOTES}/*.txt"),)),
    "data.path": (f"{NOTES.parent}/sotu.txt", "data", TEXT),
    "data.tokenizer": ("chars", "data", TEXT),
    "data.max_length": (20, "data", TEXT),
    "data.unit": ("block", "data", TEXT),
    "data.field": ("body", "data", ROWS),
    "data.overlong": ("drop", "data", (*TEXT, ("data.max_length", 20))),
    "data.infill_fraction": (0.5, "noise", ()),
    "model.num_layers": (3, "network", ()),
    "model.width": (32, "network", ()),
    "model.num_heads": (4, "network", ()),
    "model.mlp_width": (16, "network", ()),
    "model.cond_width": (16, "network", ()),
    "model.dropout": (0.1, "network", ()),
    "model.rope_theta": (100.0, "network", ()),
    "model.dtype": ("bfloat16", "network", ()),
    "model.remat": ("full", "network", ()),
    "model.scan": (False, "network", ()),
    "process.family": ("independent", "noise", ()),
    "process.eps": (0.01, "noise", ()),
    "process.schedule.name": ("geometric", "noise", ()),
    "process.schedule.sigma_min": (1.0, "noise", ()),
    "process.schedule.sigma_max": (50.0, "noise", ()),
    "process.masking": ("cosine", "noise", MDM),
    "process.time_conditioning": (True, "network", MDM),
    "loss.kernel": ("paper", "loss", ()),
    "loss.alignment": ("marginal", "loss", ()),
    "loss.length": ("poisson_mean", "loss", (("sampling.sampler", "euler"),)),
    "loss.weighting": ("normalized", "loss", ()),
    "loss.max_weight": (10.0, "loss", (("loss.weighting", "elbo"),)),
    "loss.targets": ("dense", "loss", ()),
    "loss.time_sampling": ("importance", "noise", ()),
    "optim.learning_rate": (1e-2, "optimizer", ()),
    "optim.schedule": ("cosine", "optimizer", ()),
    "optim.warmup_steps": (5, "optimizer", ()),
    "optim.cosine_cycles": (2.0, "optimizer", COSINE),
    "optim.floor": (1e-4, "optimizer", COSINE),
    "optim.weight_decay": (0.1, "optimizer", ()),
    "optim.beta1": (0.5, "optimizer", ()),
    "optim.beta2": (0.5, "optimizer", ()),
    "optim.adam_eps": (1e-2, "optimizer", ()),
    "optim.clip_norm": (0.1, "optimizer", (("optim.adam_eps", 1.0),)),
    "optim.ema_decay": (0.5, "step", ()),
    "train.micro_batches": (2, "step", ()),
    "train.packing": (True, "loop", ()),
    "train.log_every": (1, "loop", ()),
    "train.eval_every": (4, "loop", ()),
    "train.checkpoint_every": (3, "loop", ()),
    "train.keep_checkpoints": (3, "loop", ()),
    "train.keep_every": (8, "loop", ()),
    "train.keep_best": ("eval/exact_match", "loop", (("train.checkpoint_every", 6),)),
    "train.wandb": ("a_project", "loop", ()),
    "train.matmul_precision": ("default", "network", ()),
    "mesh.data": (2, "mesh", (("mesh.data", 1), ("mesh.fsdp", -1))),
    "mesh.fsdp": (4, "mesh", ()),
    "mesh.tensor": (2, "mesh", ()),
    "sampling.sampler": ("euler", "sampler", ()),
    "sampling.num_steps": (9, "sampler", (("sampling.sampler", "leap"),)),
    "sampling.calls": (1, "sampler", ()),
    "sampling.events_per_call": (2, "sampler", ()),
    "sampling.corrector_steps": (2, "sampler", (("sampling.corrector_strength", 0.5),)),
    "sampling.corrector_strength": (0.9, "sampler", (("sampling.corrector_steps", 1),)),
    "sampling.rate_scale": (2.0, "sampler", (("sampling.sampler", "euler"),)),
    "sampling.stop_threshold": (0.0, "sampler", ILM),
    "sampling.temperature": (1.0, "sampler", ()),
    "sampling.top_k": (2, "sampler", WARM),
    "sampling.top_p": (0.5, "sampler", WARM),
    "sampling.gap_temperature": (1.0, "sampler", ()),
    "sampling.gap_top_k": (2, "sampler", WARM),
    "sampling.gap_top_p": (0.5, "sampler", WARM),
    "eval.num_valid": (17, "loop", ()),
    "eval.num_test": (25, "loop", ()),
    "eval.batch_size": (16, "loop", ()),
    "eval.num_times": (2, "loop", ()),
    "eval.num_samples": (2, "loop", TEXT),
}


@functools.cache
def probed(name, *overrides, family="joint"):
    made, mesh = tiny.config(family, *overrides), tiny.world("joint")[2]
    return PROBES[name](made, config_lib.build(made), mesh)


def test_the_origin_of_data_is_said_where_they_are_not():
    made = tiny.config("joint", *TEXT, ("data.path", f"{NOTES}/absent"), ("data.origin", "hf:there"))
    with pytest.raises(ValueError, match="these data come from hf:there: python -m dilm_jax.prepare --source=hf:there"):
        config_lib.build(made)


@pytest.mark.parametrize("key", sorted(config_lib.flatten(config_lib.default_config()).keys() - {"data.origin"}))
def test_every_key_of_the_config_has_an_effect(key, monkeypatch, tmp_path):
    value, probes, needed = EFFECTS[key]
    for name in probes.split():
        if name == "loop":
            base, changed = LOOP + needed, LOOP + needed + ((key, value),)
            runs = [
                Loop(monkeypatch)(tiny.config("joint", *o), tmp_path / str(i)) for i, o in enumerate((base, changed))
            ]
            assert runs[0] != runs[1]
        else:
            assert probed(name, *needed) != probed(name, *needed, (key, value))


READ = [
    (family, key)
    for key in config_lib.flatten(config_lib.default_config())
    if key.startswith(("process.", "loss.")) and key != "process.family"
    for family in config_lib.needs(key)[0]["process.family"]
]


@pytest.mark.parametrize("family, key", READ)
def test_every_key_that_a_family_reads_changes_its_noise_its_loss_or_its_network(family, key):
    value, _, needed = EFFECTS[key]
    names = ("noise", "loss", "network")
    before, after = ([probed(name, *needed, *o, family=family) for name in names] for o in ((), ((key, value),)))
    assert before != after


@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(sampling.SamplingOptions)])
def test_an_option_has_an_effect_where_the_sampler_of_that_family_reads_it(option):
    for family, process in PROCESSES.items():
        for name, options in process.TRAITS.samplers.items():
            made = tiny.config(family, ("sampling.sampler", name))
            assert config_lib.has_effect(made, f"sampling.{option}") == (option in options), (family, name)


@pytest.mark.parametrize(
    "key", [key for key in config_lib.flatten(config_lib.default_config()) if config_lib.needs(key) != ({},)]
)
def test_a_key_that_would_have_no_effect_is_refused(key):
    """Wherever what it needs does not hold: in each family that does not read it, and beside each value that is not
    the one needed."""
    needed = {name: values for alternative in config_lib.needs(key) for name, values in alternative.items()}
    other = {
        "process.family": [tiny.config(family) for family in PROCESSES],
        "sampling.sampler": [tiny.config("joint", ("sampling.sampler", name)) for name in ("event", "leap", "euler")],
        "sampling.corrector_steps": [tiny.config()],
        "sampling.events_per_call": [tiny.config("joint", ("sampling.events_per_call", 2))],
        "data.source": [tiny.config(), tiny.config("joint", *TEXT)],
    }
    others = [
        made
        for name in needed
        for made in other.get(name) or [tiny.config("joint", (name, value)) for value in config_lib.CHOICES[name]]
        if not config_lib.has_effect(made, key)
    ]
    assert others
    for made in others:
        config_lib.validate(made, 1)
        made.update_from_flattened_dict({key: "x" if key == "data.origin" else EFFECTS[key][0]})
        with pytest.raises(ValueError, match=rf"config.{key} = .* has no effect without .* = "):
            config_lib.validate(made, 1)


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_gives_the_same_twice(name):
    """Or it could not tell whether a key has an effect."""
    assert probed(name) == probed.__wrapped__(name)


def test_the_loop_does_the_same_twice(monkeypatch, tmp_path):
    runs = [Loop(monkeypatch)(tiny.config("joint", *LOOP), tmp_path / name) for name in "ab"]
    assert runs[0] == runs[1]


# --- Resuming and starting from another run --------------------------------------------------------------------------


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / workdir_lib.CONFIG).write_text(tiny.config().to_json())
    (tmp_path / workdir_lib.CHECKPOINTS / "3").mkdir(parents=True)
    return tmp_path


def test_a_workdir_without_a_checkpoint_is_anyones(workdir, capsys):
    (workdir / workdir_lib.CHECKPOINTS / "3").rmdir()
    workdir_lib.check_resume(tiny.config("joint", ("seed", 1)), workdir_lib.Workdir(workdir))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "key, value",
    [
        ("model.width", 32),
        ("process.schedule.sigma_max", 40.0),
        ("data.difficulty", "easy"),
        ("seed", 1),
        ("batch_size", 16),
    ],
)
def test_a_workdir_of_another_run_is_refused(workdir, key, value):
    old = config_lib.flatten(tiny.config())[key]
    with pytest.raises(ValueError, match=rf"{key} = {old}, now {value}: that is another run; .* --init_from") as error:
        train.train(tiny.config("joint", (key, value)), str(workdir))
    assert "\n" not in str(error.value)


def test_other_differences_are_printed(workdir, capsys):
    workdir_lib.check_resume(tiny.config("joint", ("num_steps", 7), ("optim.floor", 0.5)), workdir_lib.Workdir(workdir))
    assert capsys.readouterr().out == (
        "resuming with num_steps = 7 (was 4)\nresuming with optim.floor = 0.5 (was 0.0)\n"
    )
    workdir_lib.check_resume(tiny.config(), workdir_lib.Workdir(workdir))
    assert capsys.readouterr().out == ""


def test_init_from_takes_the_averaged_parameters_and_nothing_else(smoke_runs, tmp_path):
    """A checkpoint of the run itself comes before it."""
    run = dilm_jax.load(str(smoke_runs["joint"]))
    made, parts, mesh = run.config, run.parts, run.mesh
    optimizer, _ = train.make_optimizer(made)
    abstract = jax.eval_shape(lambda: train.init_state(made, parts, optimizer, mesh))
    zeros = jax.device_put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract))
    checkpointer = checkpoint.Checkpointer(tmp_path, keep=1)

    state, _ = train.restore(checkpointer, zeros, workdir_lib.Workdir(smoke_runs["joint"]))
    jax.tree.map(np.testing.assert_array_equal, state, zeros.replace(params=run.params, ema=run.params))
    assert train.restore(checkpointer, zeros, None) == (zeros, False)

    train.save(checkpointer, zeros.replace(step=jnp.int32(5)))
    checkpointer.wait()
    restored, evaluation_due = train.restore(checkpointer, zeros, workdir_lib.Workdir(smoke_runs["joint"]))
    assert int(restored.step) == 5 and not evaluation_due


@pytest.mark.parametrize("rate", [1e38, math.inf])
def test_a_step_that_is_not_finite_changes_nothing_nor_do_those_after_it(rate):
    """Neither a gradient that is not, nor parameters that an update from a finite one makes so."""
    made, parts, mesh, step = tiny.world("joint")
    x0, optimizer = tiny.batch(parts, made), train.make_optimizer(made)[0]
    good = train.init_state(made, parts, optimizer, mesh)
    copies = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731 — what a step is given is gone after it
    before = jax.device_get(good)
    spoilt = copies(good).replace(params=jax.tree.map(lambda x: x * rate, good.params))
    for state in (spoilt, copies(good).replace(finite=jnp.bool(False))):
        kept = jax.device_get(state.replace(finite=jnp.bool(False)))
        for _ in range(2):
            state, metrics = step(state, x0)
            assert not metrics[train.FINITE]
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), kept)
    after, metrics = step(copies(good), x0)
    assert metrics[train.FINITE] and after.finite and int(after.step) == int(before.step) + 1


def test_a_workdir_has_one_writer(tmp_path):
    with (
        workdir_lib.sole_writer(tmp_path / "run"),
        pytest.raises(ValueError, match="another process trains in .*run"),
        workdir_lib.sole_writer(tmp_path / "run"),
    ):
        pass
    with workdir_lib.sole_writer(tmp_path / "run"):
        pass


def test_float64_is_refused():
    train.check_float32()
    with jax.enable_x64(True), pytest.raises(ValueError, match="unset JAX_ENABLE_X64"):
        train.check_float32()


def test_a_card_is_json_whatever_the_numbers(tmp_path):
    card = {"split": "test", "eval/nelbo_perplexity": math.inf, "eval/exact_match": math.nan}
    evals.write_card(tmp_path / "eval.json", card)
    card = json.loads((tmp_path / "eval.json").read_text(), parse_constant=pytest.fail)
    assert card == {"split": "test", "eval/nelbo_perplexity": None, "eval/exact_match": None}


# --- What a run writes -----------------------------------------------------------------------------------------------

LOSS_PARTS = {
    "joint": ("token", "length"),
    "independent": ("token", "length"),
    "ilm": ("token", "stop"),
    "flexmdm": ("token", "length"),
}


@pytest.mark.parametrize("family", PROCESSES)
def test_metrics_have_the_documented_keys(smoke_runs, family):
    rows = [json.loads(line) for line in (smoke_runs[family] / "metrics.jsonl").read_text().splitlines()]
    trained, evaluated = ([row for row in rows if key in row] for key in ("train/loss", "eval/exact_match"))
    assert [row["step"] for row in trained] == list(range(1, 31)) and len(rows) == len(trained) + len(evaluated)
    assert [row["step"] for row in evaluated] == [15, 30]
    parts = {f"train/loss_{part}" for part in LOSS_PARTS.get(family, ("token",))}
    of_training = {"train/loss", "train/grad_norm", "train/param_norm", "train/learning_rate"} | parts
    speed = {f"perf/{name}" for name in ("examples_per_s", "tokens_per_s", "mfu", "mfu_padded")}
    speed |= {f"perf/step_s_p{q}" for q in (50, 95, 100)} | {"perf/host_s", "perf/host_s_max", "perf/slowest_host"}
    for row in trained:
        assert row.keys() - speed == {"step", "time"} | of_training
        assert row.keys() & speed in (set(), speed)
        assert all(0 < row["perf/mfu"] <= row["perf/mfu_padded"] for _ in row.keys() & {"perf/mfu"})
        assert math.isclose(row["train/loss"], sum(row[part] for part in parts), rel_tol=1e-5)
    timed = [row["step"] for row in trained if speed <= row.keys()]
    assert timed == [s for s in range(2, 30) if s not in (10, 11, 15, 16, 20, 21)]  # evaluations and saves are pauses
    names = ["exact_match", "token_accuracy", "length_match", "nfe", "saturated", "truncated"]
    names += ["nelbo_nats_per_token", "nelbo_low", "nelbo_high", "nelbo_perplexity", "nelbo_stderr"]
    names += ["p_start_nonempty"] * isinstance(tiny.world(family)[1].process, likelihood.Bounded)
    for row in evaluated:
        assert row.keys() == {"step", "time"} | {f"eval/{name}" for name in names}


@pytest.mark.parametrize("family", PROCESSES)
def test_a_workdir_holds_what_the_readme_says(smoke_runs, family):
    there = {str(path.relative_to(smoke_runs[family])) for path in smoke_runs[family].rglob("*")}
    assert {"config.json", "metrics.jsonl", "curves.png", "tensorboard", "eval.json"} <= there
    assert any(name.startswith("profile/") and name.endswith(".xplane.pb") for name in there)
    assert {"checkpoints/20", "checkpoints/30", "samples/step_00000030.jsonl", "samples/test.jsonl", "lock"} <= there
    card = json.loads((smoke_runs[family] / "eval.json").read_text())
    assert {"split", "n", "protocol", "sampler", "checkpoint", "commit"} == {
        k for k in card if not k.startswith("eval/")
    }
    assert card["split"] == "test" and card["n"] == 8 and card["checkpoint"] == 30
