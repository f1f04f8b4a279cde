"""Attention by backend: every kernel gathers what XLA's does, and each backend is compiled with its own.

Splash attention runs interpreted. cuDNN does not run here: what it is called with is tested, and that it is called.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import children
import tiny
from dilm_jax import attention, backbone, evals, packing, sharding
from dilm_jax.attention import cudnn, splash, xla
from dilm_jax.canvas import drop_tokens

B, N, H = 3, 2, 64
INTERPRETED = functools.partial(splash, interpret=True)


def columns(S, dtype=jnp.float32, num_rows=B, num_heads=N):
    """q, k, v, and a cotangent."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(num_rows, S, num_heads, H)), dtype) for _ in range(4)]


def packed_rows(S):
    """Segments of four columns; one of three, then PAD; PAD alone."""
    at = np.arange(S)
    return jnp.asarray([at // 4 + 1, at < 3, 0 * at], jnp.int32)


def single_rows(S):
    """One segment, then PAD: none, much, nothing but."""
    return jnp.asarray(np.arange(S) < np.array([[S], [3], [0]]), jnp.int32)


def value_and_gradients(kernel, qkv, segment, cotangent):
    @jax.jit
    def run(q, k, v):
        value, transpose = jax.vjp(lambda *qkv: kernel(*qkv, segment), q, k, v)
        return value, *transpose(cotangent)

    return [np.asarray(x, np.float32) for x in run(*qkv)]


def assert_close(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


# --- values and gradients


@pytest.mark.parametrize(
    ("S", "causal", "dtype", "block"),
    [
        (7, False, "float32", 128),
        (130, True, "bfloat16", 128),  # two blocks each way, and one of them without a key to see
        pytest.param(130, False, "bfloat16", 256, marks=pytest.mark.slow),
        pytest.param(130, True, "float32", 256, marks=pytest.mark.slow),
        pytest.param(130, False, "float32", 128, marks=pytest.mark.slow),
        pytest.param(7, True, "bfloat16", 128, marks=pytest.mark.slow),
    ],
)
def test_splash_gathers_what_xla_does(S, causal, dtype, block, monkeypatch):
    """Against float32: bfloat16 as closely as XLA's, which rounds the weights, too."""
    monkeypatch.setattr(attention, "block_size", lambda num_columns: block)
    *qkv, cotangent = columns(S, dtype)
    got = value_and_gradients(functools.partial(INTERPRETED, causal=causal), qkv, packed_rows(S), cotangent)
    exact = [x.astype(jnp.float32) for x in (*qkv, cotangent)]
    want = value_and_gradients(functools.partial(xla, causal=causal), exact[:3], packed_rows(S), exact[3])
    assert_close(got, want, 2**-7 if dtype == "bfloat16" else 2e-6)


@pytest.mark.parametrize(("packed", "causal"), [(False, False), (False, True), (True, False), (True, True)])
def test_cudnn_is_asked_for_what_xla_gathers(packed, causal, monkeypatch):
    """With an odd number of columns. Its worst: gradients of keys beyond a row's length that were never written, and
    NaN for a row without a key."""

    def in_its_place(q, k, v, *, implementation, key_value_seq_lengths=None, **kwargs):
        assert implementation == "cudnn"
        assert q.shape[1] % 2 == 0
        if key_value_seq_lengths is None:
            return plain(q, k, v, **kwargs)
        beyond = (jnp.arange(k.shape[1]) >= key_value_seq_lengths[:, None])[..., None, None]
        k, v = unwritten(k, beyond), unwritten(v, beyond)
        mixed = plain(q, k, v, key_value_seq_lengths=key_value_seq_lengths, **kwargs)
        return jnp.where(beyond[:, :1], jnp.nan, mixed)

    @jax.custom_vjp
    def unwritten(x, where):
        return x

    unwritten.defvjp(lambda x, where: (x, where), lambda where, g: (jnp.where(where, jnp.nan, g), None))
    plain = jax.nn.dot_product_attention
    S = 7
    *qkv, cotangent = columns(S)
    segment = packed_rows(S) if packed else single_rows(S)
    there = (segment > 0)[..., None, None]
    want = value_and_gradients(functools.partial(xla, causal=causal), qkv, segment, cotangent * there)
    monkeypatch.setattr(jax.nn, "dot_product_attention", in_its_place)
    got = value_and_gradients(functools.partial(cudnn, causal=causal, packed=packed), qkv, segment, cotangent * there)
    assert np.isfinite(got[0]).all()  # of PAD, too
    got[0], want[0] = got[0] * there, want[0] * there
    assert_close(got, want, 1e-6)


def test_one_column_sees_what_it_is_told():
    q, k, v, _ = columns(7)
    seen = np.arange(7) < np.array([[1], [4], [7]])
    ask = functools.partial(attention.attention, causal=True, packed=False)
    got = jax.jit(ask)(q[:, :1], k, v, jnp.ones((B, 7), jnp.int32), seen=jnp.asarray(seen))
    weights = np.exp(np.einsum("bnh,bsnh->bsn", q[:, 0], k) / np.sqrt(H)) * seen[..., None]
    want = np.einsum("bsn,bsnh->bnh", weights / weights.sum(1, keepdims=True), v)
    np.testing.assert_allclose(got[:, 0], want, rtol=0, atol=1e-6)


# --- which kernel


def loss(q, k, v, segment, cotangent, **options):
    """Through what a network does: a scan over layers that are computed again in the backward pass."""

    @jax.checkpoint
    def layer(x, _):
        return attention.attention(x, k, v, segment, **options), None

    return (jax.lax.scan(layer, q, None, 2)[0] * cotangent).astype(jnp.float32).sum()


def kernels(S=128, dtype="bfloat16", segment=packed_rows, **options):
    """Traced with gradients → backend → its program."""
    options = {"causal": False, "packed": True} | options
    *qkv, cotangent = columns(S, dtype)
    step = jax.grad(functools.partial(loss, **options), argnums=(0, 1, 2))
    traced = jax.jit(step).trace(*qkv, segment(S), cotangent)
    return lambda platform: traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def with_cudnn(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


def test_each_backend_has_its_kernel_and_no_other(with_cudnn):
    """Lowered on a host without them."""
    program = kernels()
    of = {platform: program(platform) for platform in ("tpu", "cuda", "cpu")}
    assert {p: "tpu_custom_call" in text for p, text in of.items()} == {"tpu": True, "cuda": False, "cpu": False}
    assert {p: "__cudnn$fmha" in text for p, text in of.items()} == {"tpu": False, "cuda": True, "cpu": False}
    assert {p: "exponential" in text for p, text in of.items()} == {"tpu": False, "cuda": False, "cpu": True}
    assert set(re.findall(r"__cudnn\$\w+", of["cuda"])) == {
        "__cudnn$fmhaScaleBiasSoftmax",
        "__cudnn$fmhaScaleBiasSoftmaxBackward",
    }


def test_rows_of_one_canvas_need_no_mask_on_a_gpu(with_cudnn):
    text = kernels(packed=False, causal=True)("cuda")
    assert set(re.findall(r"__cudnn\$\w+", text)) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert set(re.findall(r"PADDING\w*", text)) == {"PADDING_CAUSAL"}


@pytest.mark.parametrize(
    ("changed", "cudnn_version", "precision", "names"),
    [
        ({}, 91000, "default", {"splash", "cudnn"}),
        ({}, None, "default", {"splash"}),
        ({"dtype": "float32"}, 91000, "default", {"splash"}),
        ({}, 91000, "highest", {"cudnn"}),
        ({"S": 127}, 91000, "default", set()),
    ],
)
def test_what_a_kernel_does_not_take_is_left_to_xla(changed, cudnn_version, precision, names, monkeypatch):
    if cudnn_version:
        monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: cudnn_version)
    settings = {"S": 128, "dtype": "bfloat16"} | changed
    q, k, v, _ = columns(**settings)
    with jax.default_matmul_precision(precision):
        traced = jax.make_jaxpr(functools.partial(attention.attention, causal=False, packed=True))(
            q, k, v, packed_rows(settings["S"])
        )
    found = {"splash": "pallas_call", "cudnn": "dot_product_attention_fwd"}
    assert {name for name, primitive in found.items() if primitive in str(traced)} == names


@pytest.mark.parametrize(
    ("S", "block"), [(7, 128), (128, 128), (129, 256), (130, 256), (514, 384), (1024, 512), (1026, 384), (2050, 384)]
)
def test_blocks(S, block):
    assert attention.block_size(S) == block


# --- the network


@pytest.mark.parametrize("packed", [False, True])
def test_a_network_passes_on_what_it_knows(packed, monkeypatch):
    """Mesh, segments, whether rows are packed, causality."""
    calls = []

    def spy(q, k, v, segment, **options):
        calls.append({"segment": segment.shape} | options)
        return q

    monkeypatch.setattr(backbone, "attention", spy)
    for family, causal in (("joint", False), ("arm", True)):
        made, parts, mesh, _ = tiny.world(family)
        x0, vocabulary = tiny.batch(parts, made), parts.process.vocabulary
        canvas = jax.eval_shape(functools.partial(drop_tokens, vocabulary=vocabulary), x0, x0.free)[0]
        rows = NUM_ROWS if packed else len(canvas.length)
        t = jax.ShapeDtypeStruct(canvas.length.shape, jnp.float32)
        network = functools.partial(evals.network(parts, mesh), fused=packed)
        jax.eval_shape(network, evals.abstract_params(parts, mesh), canvas, t, None, fit(canvas) if packed else None)
        want = {"segment": (rows, canvas.num_columns), "causal": causal, "packed": packed, "mesh": mesh, "seen": None}
        assert calls
        assert all(call == want for call in calls)
        calls.clear()


NUM_ROWS = 2


def fit(canvas):
    of = lambda length: packing.first_fit(length, length > 0, canvas.num_columns, NUM_ROWS, 1)  # noqa: E731
    return jax.eval_shape(of, canvas.length)


# --- many devices


@pytest.mark.multidevice
@children.on_eight_devices
def test_rows_and_heads_may_be_split():
    """Values and gradients, with numbers of rows and heads that divide over the mesh and that do not."""
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    kernel = functools.partial(INTERPRETED, causal=True)
    for num_rows, num_heads in ((4, 2), (3, 2), (4, 3)):
        *qkv, cotangent = columns(7, num_rows=num_rows, num_heads=num_heads)
        segment = jnp.asarray(np.arange(7) // np.arange(1, num_rows + 1)[:, None], jnp.int32)
        split = attention._by_shard(kernel, mesh, qkv[0].shape)
        got, want = (value_and_gradients(k, qkv, segment, cotangent) for k in (split, kernel))
        assert_close(got, want, 1e-6)


@pytest.mark.slow
@children.needs_libtpu
def test_a_tpu_program_holds_no_logits_and_gathers_no_rows(monkeypatch):
    """Compiled for eight of them on a host that has none."""
    with children.compiling_for_tpus(monkeypatch) as other:
        text, temporaries = other.submit(tpu_program, 1026, 16, 4).result()
    assert "tpu_custom_call" in text
    assert "all-gather" not in text
    logits = 4 * (16 / 4) * (4 / 2) * 1026**2  # bytes on each device
    assert temporaries < logits / 4


def tpu_program(S: int, num_rows: int, num_heads: int) -> tuple[str, int]:
    """Text of the program, and bytes of its temporaries on each device."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    axis_types = (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), devices=devices, axis_types=axis_types)
    of = lambda *spec: NamedSharding(mesh, P(*spec))  # noqa: E731
    heads = of(sharding.BATCH_AXES, None, "tensor")
    x = jax.ShapeDtypeStruct((num_rows, S, num_heads, H), jnp.bfloat16, sharding=heads)
    segment = jax.ShapeDtypeStruct((num_rows, S), jnp.int32, sharding=of(sharding.BATCH_AXES))
    step = jax.grad(functools.partial(loss, causal=True, packed=True, mesh=mesh), argnums=(0, 1, 2))
    compiled = jax.jit(step).trace(x, x, x, segment, x).lower(lowering_platforms=("tpu",)).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    return text, memory.temp_size_in_bytes
