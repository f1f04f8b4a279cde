"""The network: padding, segments, causality, time, dropout, precision, and one parameter tree for every way to run it.

Weights are drawn with numpy at every leaf, the ones that start at zero included, so that nothing is tested at the
identity. `reference` is plain numpy in float64.
"""

import functools
import operator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dilm_jax import backbone
from dilm_jax.backbone import NetSpec, Transformer
from dilm_jax.canvas import Canvas, Example, Vocabulary, drop_tokens, to_canvas

B, L, V, S = 4, 6, 9, 8
VOCABULARY = Vocabulary(size=V, pad=0, cls=1, bos=2, eos=3, mask=4)
TIME = jnp.linspace(0.1, 0.9, B)
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


SPEC = {
    "causal": False,
    "uses_time": True,
    "append_only": False,
    "length_head": "gap",
    "num_lengths": L + 1,
    "stop_head": True,
    "predictable": tuple(VOCABULARY.ordinary.tolist()),
}
CONFIG = {
    "vocab_size": V,
    "num_layers": 2,
    "width": 16,
    "num_heads": 2,
    "mlp_width": 24,
    "cond_width": 8,
    "dropout": 0.25,
    "rope_theta": 100.0,
    "dtype": "float32",
    "remat": "none",
    "scan": True,
}


def build(seed=0, **changed):
    spec = NetSpec(**SPEC | {k: v for k, v in changed.items() if k in SPEC})
    config = CONFIG | {k: v for k, v in changed.items() if k not in SPEC}
    return Transformer(spec=spec, **config, rngs=nnx.Rngs(seed))


def make(**changed):
    """(graphdef, shapes of the params); nothing is drawn."""
    return nnx.split(nnx.eval_shape(lambda: build(**changed)), nnx.Param)


def randomised(abstract, seed=0):
    """Params with every leaf random: 0.3 normal, around one for LayerNorm scales."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        value = 0.3 * rng.normal(size=leaf.shape) + ("scale" in jax.tree_util.keystr(path))
        return jnp.asarray(value, leaf.dtype)

    return jax.tree.map_with_path(draw, abstract)


def jit_apply(graphdef):
    return jax.jit(lambda p, c, t, keys: nnx.merge(graphdef, p)(c, t, keys), compiler_options=FAST_COMPILE)


@functools.cache
def network(**changed):
    """(params -> scores, compiled once a shape) of a network with random weights."""
    graphdef, abstract = make(**changed)
    return functools.partial(jit_apply(graphdef), randomised(abstract))


def examples(seed=0, length=(0, 3, 5, 6)):
    rng = np.random.default_rng(seed)
    tokens = np.where(np.arange(L) < np.array(length)[:, None], rng.integers(5, V, (len(length), L)), 0)
    return Example(
        tokens=jnp.array(tokens, jnp.int32),
        length=jnp.array(length, jnp.int32),
        frozen=jnp.zeros((len(length), L), bool),
        open_gap=jnp.ones((len(length), L + 1), bool),
        num_bytes=jnp.zeros(len(length), jnp.int32),
    )


def edit(made: Canvas, rows=lambda array: array, **changed) -> Canvas:
    """A canvas with `rows` done to each of its arrays and some of them exchanged, all in numpy."""
    arrays = {name: rows(np.asarray(array)) for name, array in vars(made).items()} | changed
    return Canvas(**{name: jnp.asarray(array) for name, array in arrays.items()})


@functools.cache
def full_canvas(seed, length) -> Canvas:
    """Four rows of `length` tokens each."""
    return jax.jit(to_canvas, static_argnums=1)(examples(seed, (length,) * B), VOCABULARY)


@functools.cache
def canvas() -> Canvas:
    """Rows of 2, 5, 7 and 8 occupied columns, made by dropping tokens. Most of the tests read it."""
    x0 = examples(length=(2, 4, 6, 6))
    dropped = np.zeros((B, L), bool)
    dropped[0, :2] = dropped[1, 1] = dropped[2, 4] = True
    made, _ = jax.jit(drop_tokens, static_argnums=2)(x0, jnp.array(dropped), VOCABULARY)
    np.testing.assert_array_equal(made.length, [2, 5, 7, 8])
    return made


def leaves(scores):
    """The arrays of some scores by name."""
    return {k: np.asarray(v) for k, v in vars(scores).items() if v is not None}


def change(a, b):
    """|a - b|, zero where both are −inf."""
    both = np.isneginf(a) & np.isneginf(b)
    return np.abs(np.where(both, 0, a) - np.where(both, 0, b))


def assert_close(actual, expected, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), actual, expected)


def select(made: Canvas, rows, num_columns) -> Canvas:
    return edit(made, lambda a: a[rows] if a.ndim == 1 else a[rows, :num_columns])


def garbage(made: Canvas, seed=1) -> Canvas:
    """The same canvas with anything at all in its PAD columns, ids outside the vocabulary included."""
    rng, pad = np.random.default_rng(seed), ~np.asarray(made.occupied)
    return edit(
        made,
        tokens=np.where(pad, rng.integers(-3 * V, 3 * V, pad.shape), made.tokens),
        frozen=np.where(pad, rng.random(pad.shape) < 0.5, made.frozen),
        open_gap=np.where(pad, rng.random(pad.shape) < 0.5, made.open_gap),
        position=np.where(pad, rng.integers(0, 99, pad.shape), made.position),
    )


def reference(params, row: Canvas, time):
    """Token and length logits, [S, V] and [S, K], of one unpadded row: numpy float64, written from the equations."""
    columns = SimpleNamespace(**{name: np.asarray(array)[0] for name, array in vars(row).items()})
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(params))

    def dense(w, x):
        return x @ w["kernel"] + w.get("bias", 0)

    def norm(scale, x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale

    def silu(x):
        return x / (1 + np.exp(-x))

    num, width = len(columns.tokens), p["head"]["kernel"].shape[0]
    half, heads = width // 4, 2
    angle = columns.position[:, None] * 100.0 ** (-np.arange(half) / half)

    def rotate(x):  # [S, H]
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    frequency = 1e4 ** (-np.arange(128) / 128)
    features = np.concatenate([np.cos(1000 * time * frequency), np.sin(1000 * time * frequency)])
    cond = silu(dense(p["time"]["out"], silu(dense(p["time"]["in"], features))))
    x = (
        p["embed"]["token"]["embedding"][columns.tokens]
        + p["embed"]["flags"]["embedding"][2 * columns.frozen + columns.open_gap]
    )
    for layer in range(2):
        w = jax.tree.map(operator.itemgetter(layer), p["blocks"])
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = np.split(dense(w["modulation"], cond), 6)
        y = norm(w["attention_norm"]["scale"], x) * (1 + scale_a) + shift_a
        q, k, v = np.split(dense(w["attention"]["qkv"], y), 3, -1)
        mixed = []
        for qh, kh, vh in zip(*(np.split(a, heads, -1) for a in (q, k, v)), strict=True):
            a = np.exp(rotate(qh) @ rotate(kh).T / np.sqrt(2 * half))
            mixed.append(a / a.sum(-1, keepdims=True) @ vh)
        x = x + gate_a * dense(w["attention"]["out"], np.concatenate(mixed, -1))
        y = norm(w["mlp_norm"]["scale"], x) * (1 + scale_m) + shift_m
        x = x + gate_m * dense(w["mlp"]["out"], np.maximum(dense(w["mlp"]["in"], y), 0))

    def final(w, x):
        shift, scale = np.split(dense(w["modulation"], cond), 2)
        return norm(w["scale"], x) * (1 + scale) + shift

    y = final(p["length_head"]["norm"], x)
    y = y + dense(p["length_head"]["mlp"]["out"], np.tanh(dense(p["length_head"]["mlp"]["in"], y)))
    assert x.shape == (num, width)
    return dense(p["head"], final(p["final_norm"], x)), dense(p["length_head"]["linear"], y)


def test_equals_a_numpy_reference():
    apply = network()
    scores, made = apply(canvas(), TIME, None), canvas()
    for b in range(B):
        n = made.length[b]
        logits, length_logits = reference(apply.args[0], select(made, slice(b, b + 1), n), TIME[b])
        ordinary = VOCABULARY.ordinary
        np.testing.assert_allclose(scores.logits[b, :n][:, ordinary], logits[:, ordinary], rtol=3e-4, atol=3e-4)
        np.testing.assert_allclose(scores.length_logits[b, :n], length_logits, rtol=3e-4, atol=3e-4)


# --- padding, neighbours, segments, causality


def test_padding_and_neighbours_do_not_matter():
    """A row alone, without padding, equals the same row in a batch of others and with garbage in its PAD columns."""
    apply, made = network(), canvas()
    b, n = 1, int(made.length[1])
    expected = leaves(apply(select(made, slice(b, b + 1), n), TIME[b : b + 1], None))
    for other in (made, garbage(made), garbage(made, seed=2)):
        scores = leaves(apply(other, TIME, None))
        assert all(not np.isnan(a).any() for a in scores.values())
        assert_close(scores["logits"][b, :n], expected["logits"][0])
        assert_close(scores["length_logits"][b, :n], expected["length_logits"][0])
        assert_close(scores["stop_logits"][b], expected["stop_logits"][0])

    others = edit(made, lambda a: a[np.array([3, b, 0, b])])
    scores = leaves(apply(others, jnp.where(jnp.arange(B) == b, TIME, 0.5), None))
    assert_close(scores["logits"][b, :n], expected["logits"][0])


def pack(seed=0) -> Canvas:
    """Four rows of two documents each, of one and two tokens: columns 0..2 and 3..6, then one PAD."""
    first, second = full_canvas(seed, 1), full_canvas(seed + 9, 2)

    def join(a, b):
        return jnp.concatenate([a[:, :3], b[:, :4], a[:, -1:]], axis=1)

    return Canvas(
        tokens=join(first.tokens, second.tokens),
        frozen=join(first.frozen, second.frozen),
        open_gap=join(first.open_gap, second.open_gap),
        position=join(first.position, second.position),
        segment=join(first.segment, 2 * second.segment),
        length=jnp.full(B, 7),
    )


def test_segments_are_isolated_exactly():
    apply, packed = network(), pack()
    before = leaves(apply(packed, TIME, None))
    tokens, position, frozen = (np.array(a) for a in (packed.tokens, packed.position, packed.frozen))
    tokens[:, 1:3] = VOCABULARY.mask
    position[:, :3] += 5 * np.arange(3)
    frozen[:, 2] ^= True
    for changed in ({"tokens": tokens}, {"position": position}, {"frozen": frozen}):
        after = leaves(apply(edit(packed, **changed), TIME, None))
        for name in ("logits", "length_logits"):
            np.testing.assert_array_equal(after[name][:, 3:7], before[name][:, 3:7])
            assert change(after[name], before[name])[:, :3].max() > 1e-3


def test_a_packed_document_equals_itself_alone():
    """Positions restart in a segment; only their differences matter."""
    apply = network()
    packed = pack()
    alone = leaves(apply(full_canvas(9, 2), TIME, None))
    for shift in (0, 7):
        moved = edit(packed, position=packed.position + shift * (packed.segment == 2))
        together = leaves(apply(moved, TIME, None))
        assert_close(together["logits"][:, 3:7], alone["logits"][:, :4], 2e-5)
        assert_close(together["length_logits"][:, 3:7], alone["length_logits"][:, :4], 2e-5)


def test_position_matters():
    apply, made = network(), canvas()
    stretched = edit(made, position=2 * made.position)
    a, b = leaves(apply(made, TIME, None)), leaves(apply(stretched, TIME, None))
    assert np.abs(a["length_logits"] - b["length_logits"]).max() > 1e-3


PLAIN = {"causal": True, "uses_time": False, "length_head": "cls", "stop_head": False}


def test_causal_columns_do_not_see_later_ones():
    made, full = canvas(), B - 1
    for apply, causal in ((network(**PLAIN), True), (network(), False)):
        before = leaves(apply(made, TIME, None))["logits"][full]
        for column in (2, 4, 7):
            tokens = np.array(made.tokens)
            tokens[full, column] = VOCABULARY.mask
            after = leaves(apply(edit(made, tokens=tokens), TIME, None))["logits"][full]
            moved = change(after, before).max(-1)
            assert (moved[column:] > 1e-4).all()
            assert (moved[:column] == 0).all() if causal else (moved[:column] > 1e-4).all()


# --- what the network sees


def test_time_matters_only_where_it_is_used():
    made = canvas()
    a, b = (leaves(network()(made, t, None)) for t in (TIME, TIME + 0.05))
    assert all(change(a[name], b[name]).max() > 1e-3 for name in a)
    a, b = (leaves(network(**PLAIN)(made, t, None)) for t in (TIME, TIME + 0.05))
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("flag", ["frozen", "open_gap"])
def test_flags_are_seen(flag):
    made = canvas()
    flipped = np.array(getattr(made, flag))
    flipped[3, 4] ^= True
    a, b = (leaves(network()(c, TIME, None))["length_logits"] for c in (made, edit(made, **{flag: flipped})))
    assert (np.abs(a - b)[3].max(-1) > 1e-4).all()
    np.testing.assert_array_equal(a[:3], b[:3])


# --- scores


def test_scores_index_the_dense_logits():
    scores = network()(canvas(), TIME, None)
    logits = np.asarray(scores.dense())
    assert (np.isneginf(logits) == ~VOCABULARY.ordinary).all()
    rng = np.random.default_rng(0)
    gap, token = jnp.array(rng.integers(0, S, (B, 5))), jnp.array(rng.integers(5, V, (B, 5)))
    rows = np.arange(B)[:, None]
    np.testing.assert_array_equal(scores.at(gap, token), logits[rows, gap, token])
    expected = np.stack([logits[b][:, token[b]] for b in range(B)])
    np.testing.assert_array_equal(scores.outer(token), expected)
    np.testing.assert_allclose(scores.lse(), np.log(np.exp(logits.astype(np.float64)).sum(-1)), rtol=1e-5)
    assert np.isneginf(scores.at(gap, jnp.full_like(token, VOCABULARY.pad))).all()
    assert np.isnan(scores.at(jnp.full_like(gap, S), token)).all()
    assert np.isnan(scores.outer(jnp.full_like(token, V))).all()


@pytest.mark.parametrize(("head", "shape"), [("cls", (B, 11)), ("gap", (B, S, 11)), (None, None)])
def test_shapes_of_the_heads(head, shape):
    graphdef, abstract = make(length_head=head, num_lengths=11, stop_head=head == "cls")
    made = canvas()
    scores = jax.eval_shape(lambda p: vars(nnx.merge(graphdef, p)(made, TIME)), abstract)
    shapes = {name: leaf and leaf.shape for name, leaf in scores.items()}
    assert shapes == {"logits": (B, S, V), "length_logits": shape, "stop_logits": (B,) if head == "cls" else None}


# --- one tree, several ways to run it

TREE = {
    "embed.token.embedding", "embed.flags.embedding",
    "blocks.attention_norm.scale", "blocks.attention.qkv.kernel", "blocks.attention.out.kernel",
    "blocks.mlp_norm.scale", "blocks.mlp.in.kernel", "blocks.mlp.in.bias", "blocks.mlp.out.kernel",
    "blocks.mlp.out.bias", "final_norm.scale", "head.kernel",
}  # fmt: skip
TIMED = {
    "time.in.kernel", "time.in.bias", "time.out.kernel", "time.out.bias", "blocks.modulation.kernel",
    "blocks.modulation.bias", "final_norm.modulation.kernel", "final_norm.modulation.bias",
}  # fmt: skip
HEAD = {"norm.scale", "mlp.in.kernel", "mlp.in.bias", "mlp.out.kernel", "mlp.out.bias", "linear.kernel", "linear.bias"}
TIMED_HEAD = {"norm.modulation.kernel", "norm.modulation.bias"}


def flat(state):
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def test_names_of_the_parameters():
    """Checkpoints, sharding rules and exporters rely on these: changing one is a change of the checkpoint layout."""
    plain = TREE | {f"length_head.{name}" for name in HEAD}
    assert set(flat(make(**PLAIN)[1])) == plain
    heads = {f"{head}.{name}" for head in ("length_head", "stop_head") for name in HEAD | TIMED_HEAD}
    params = flat(make(dtype="bfloat16")[1])
    assert set(params) == TREE | TIMED | heads
    assert set(flat(make(length_head=None, stop_head=False)[1])) == TREE | TIMED
    assert all(leaf.dtype == jnp.float32 for leaf in params.values())
    assert all(leaf.shape[0] == 2 for name, leaf in params.items() if name.startswith("blocks."))
    for changed in ({"scan": False}, {"remat": "full"}, {"dropout": 0.0}):
        other = flat(make(**changed)[1])
        assert {k: v.shape for k, v in other.items()} == {k: v.shape for k, v in params.items()}


def value_and_grad(**changed):
    """Scores and the gradient of a loss that uses lse, at and the heads, with dropout."""
    graphdef, abstract = make(**changed)
    keys = jax.random.split(jax.random.key(3), B)
    gap, token = jnp.array([[1, 2, 7]] * B), jnp.array([[5, 6, 8]] * B)
    made = canvas()

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    @functools.partial(jax.grad, has_aux=True)
    def run(params):
        scores = nnx.merge(graphdef, params)(made, TIME, keys)
        return scores.lse().mean() - scores.at(gap, token).mean() + scores.outer(token).mean(), scores

    grads, scores = run(randomised(abstract))
    return leaves(scores), flat(grads)


@functools.cache
def scanned():
    return value_and_grad(scan=True, remat="none", length_head=None, stop_head=False)


@pytest.mark.parametrize(
    ("scan", "remat"),
    [
        pytest.param(True, "full", marks=pytest.mark.slow),
        pytest.param(True, "dots", marks=pytest.mark.slow),
        (False, "none"),
        pytest.param(False, "full", marks=pytest.mark.slow),
    ],
)
def test_scan_and_remat_change_nothing(scan, remat):
    scores, grads = value_and_grad(scan=scan, remat=remat, length_head=None, stop_head=False)
    expected, expected_grads = scanned()
    largest = np.abs(expected["logits"][..., VOCABULARY.ordinary]).max()
    np.testing.assert_allclose(scores["logits"], expected["logits"], rtol=0, atol=1e-6 * largest)
    largest = max(np.abs(g).max() for g in expected_grads.values())
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected_grads[name], rtol=0, atol=1e-6 * largest, err_msg=name)


def test_gradients_are_finite_and_reach_every_parameter():
    _, grads = scanned()
    for name, grad in grads.items():
        assert np.isfinite(grad).all(), name
        assert np.abs(grad).max() > 0, name
    np.testing.assert_array_equal(np.asarray(grads["head.kernel"])[:, ~VOCABULARY.ordinary], 0)


def test_bfloat16_is_close_and_scores_are_float32():
    made = canvas()
    low, full = leaves(network(dtype="bfloat16")(made, TIME, None)), leaves(network()(made, TIME, None))
    for name, expected in full.items():
        assert low[name].dtype == np.float32
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(low[name]), finite)
        error = change(low[name], expected)[finite]
        assert 1e-5 < error.max() < 0.1 * expected[finite].std(), name
    graphdef, abstract = make(dtype="bfloat16")
    grads = jax.eval_shape(jax.grad(lambda p: nnx.merge(graphdef, p)(made, TIME).lse().sum()), abstract)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))


def test_first_predictions_are_uniform():
    """Heads and modulations start at zero, all else does not."""
    params = jax.jit(lambda: nnx.state(build(), nnx.Param), compiler_options=FAST_COMPILE)()
    names = flat(params)
    zero = {name for name, leaf in names.items() if not np.any(leaf[...])}
    modulations = {n for n in names if "modulation" in n}
    assert zero == modulations | {n for n in names if n.endswith("bias") or "linear" in n} | {"head.kernel"}
    kernel = np.asarray(names["blocks.mlp.in.kernel"])
    assert not np.array_equal(kernel[0], kernel[1])  # layers are drawn apart
    np.testing.assert_allclose(kernel.std((1, 2)), 1 / 4, rtol=0.2)  # 384 values: 4 standard errors are 0.14
    scores = leaves(network().func(params, canvas(), TIME, None))
    assert (scores["logits"][..., VOCABULARY.ordinary] == 0).all()
    assert (scores["length_logits"] == 0).all()
    assert (scores["stop_logits"] == 0).all()


# --- dropout


def test_dropout_of_a_row_depends_on_its_key_alone():
    apply, made = network(), canvas()
    keys = jax.random.split(jax.random.key(0), B)
    first, none = leaves(apply(made, TIME, keys)), leaves(apply(made, TIME, None))
    order = np.array([2, 0, 3, 1])
    permuted = leaves(apply(edit(made, lambda a: a[order]), TIME[order], keys[order]))
    assert_close(permuted, {k: v[order] for k, v in first.items()})
    fresh = leaves(apply(made, TIME, keys.at[0].set(jax.random.key(9))))
    assert np.abs(fresh["length_logits"] - first["length_logits"])[0].max() > 1e-3
    np.testing.assert_array_equal(fresh["length_logits"][1:], first["length_logits"][1:])
    assert (np.abs(first["length_logits"] - none["length_logits"]).max((1, 2)) > 1e-3).all()


def test_dropout_masks():
    """Same mask in a smaller batch and on a shorter canvas; another one at another site; mean one."""
    keys, ones = jax.random.split(jax.random.key(0), (B, S)), jnp.ones((B, S, 512))
    drop = jax.jit(backbone.drop, static_argnums=1, compiler_options=FAST_COMPILE)
    mask = np.asarray(drop(ones, 0.25, keys, 3))
    np.testing.assert_array_equal(drop(ones[2:3, :5], 0.25, keys[2:3, :5], 3), mask[2:3, :5])
    assert set(np.unique(mask)) == {0, np.float32(1 / 0.75)}
    assert abs((mask > 0).mean() - 0.75) < 4 * np.sqrt(0.25 * 0.75 / mask.size)
    assert len({column.tobytes() for column in mask.reshape(B * S, -1)}) == B * S
    assert (np.asarray(drop(ones, 0.25, keys, 4)) != mask).mean() > 0.3
    assert backbone.drop(ones, 0.0, keys, 3) is ones
    assert backbone.drop(ones, 0.25, None, 3) is ones


# --- wrong arguments


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"width": 18, "num_heads": 6}, "width 18 must be divisible by 2 x num_heads = 12"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"cond_width": 0}, "cond_width is 0"),
        ({"vocab_size": 10}, "predictable has 9 entries, but the vocabulary 10 ids"),
        ({"length_head": "bos"}, "length_head is 'bos'"),
        ({"num_lengths": 0}, "num_lengths is 0"),
        ({"predictable": (False,) * V}, "no id is predictable"),
    ],
)
def test_wrong_arguments_name_the_value(changed, message):
    with pytest.raises(ValueError, match=message):
        make(**changed)
