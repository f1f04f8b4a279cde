"""Collectives and arrays of compiled programs, read from their text."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dilm_jax import hlo

PROGRAM = """\
HloModule jit_step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (arg: (s32[], f32[4,9])) -> (s32[], f32[4,9]) {
  %arg = (s32[], f32[4,9]{1,0}) parameter(0)
  %x = f32[4,9]{1,0} get-tuple-element(%arg), index=1
  %reduced = f32[4,9]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add
}

%condition (arg.1: (s32[], f32[4,9])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%fused (p: bf16[2]) -> bf16[2,8] {
  %inside = f32[99,99]{1,0} broadcast(%p), dimensions={}
  %gathered = bf16[2,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=2, dimensions={1}
}

ENTRY %main (x: f32[4,9]) -> f32[] {
  %x = f32[4,9]{1,0} parameter(0), metadata={op_name="state.params[\\'head\\']"}
  %known = (s32[], f32[4,9]{1,0}) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %begin = bf16[2,8]{1,0} fusion(%p), kind=kCustom, calls=%fused, metadata={op_name="jit(step)/head/dot_general"}
  %end = bf16[2,8]{1,0} all-gather(%p), channel_id=2, dimensions={1}
  %near = f32[50]{0:T(128)S(1)} copy(%y)
  %order = token[] after-all()
  %moved = (f32[3]{0}, f32[3]{0}) collective-permute-start(%y), channel_id=3, source_target_pairs={{0,1}}
  %done = f32[3]{0} collective-permute-done(%moved)
  %combined = ((bf16[2]{0}, f32[2]{0}), (bf16[4]{0}, /*index=1*/f32[4]{0})) all-gather-start(%y, %z), channel_id=5
  ROOT %both = (f32[]{:T(128)}, pred[9]{0}) all-reduce(%s, %m), channel_id=4, to_apply=%add, \
metadata={op_name="jit(step)/all-gather("}
}
"""


def test_collectives_of_a_program():
    """In a loop as often as it runs, in pieces once, asynchronous and combined ones by their results."""
    found = hlo.summary(hlo.collectives(PROGRAM))
    assert found == {
        "all-gather": {"count": 2, "bytes": 32 + 8 + 16, "in_loops": False},
        "all-reduce": {"count": 6, "bytes": 5 * 144 + 13, "in_loops": False},
        "collective-permute": {"count": 1, "bytes": 12, "in_loops": False},
    }
    endless = hlo.summary(hlo.collectives(PROGRAM.replace("known_trip_count", "unknown")))
    assert endless["all-reduce"] == {"count": 2, "bytes": 144 + 13, "in_loops": True}
    assert hlo.described({}) == "none"
    assert "all-reduce × 2+ (" in hlo.described(endless)
    counted = PROGRAM.replace("known_trip_count", "unknown").replace(
        "ROOT %less", "%n = s32[] constant(7)\n  ROOT %less"
    )
    assert hlo.summary(hlo.collectives(counted))["all-reduce"]["count"] == 8


@pytest.mark.parametrize(
    "shape, are", [((4, 7, 30), True), ((28, 15), True), ((12, 30), False), ((24, 15), False), ((28, 8), False)]
)
def test_gathered_logits_are_told_from_kernels(shape, are):
    """Of 30 ids and a width of 12: whole, or shares of a tensor axis."""
    found = hlo.Collective("all-gather", (shape,), 4, 1, False)
    assert hlo.gathers_logits([found], 30, 12) == are
    assert not hlo.gathers_logits([dataclasses.replace(found, kind="all-reduce")], 30, 12)


def test_attention_is_known_by_its_kernel():
    assert hlo.attention(PROGRAM) == "XLA"
    call = "  %splash_mha_fwd.1 = bf16[2,8]{1,0} custom-call(%q)"
    assert hlo.attention(PROGRAM + call) == "splash"
    assert (
        hlo.attention(PROGRAM + call.replace("splash", "x") + ', custom_call_target="__cudnn$fmhaSoftmax"') == "cuDNN"
    )


def test_largest_arrays_of_a_program():
    """Arguments and what operations give, in loops too; not what is inside a fusion, on chip, or there already."""
    assert hlo.largest_arrays(PROGRAM, 3) == [
        hlo.Array("f32", (4, 9), 144, 2, "state.params['head']"),
        hlo.Array("bf16", (2, 8), 32, 2, "jit(step)/head/dot_general"),
        hlo.Array("f32", (3,), 12, 1, "collective-permute-done"),
    ]


def test_largest_arrays_of_a_compiled_function():
    def product(weights, x):
        return jnp.tanh(x @ weights["kernel"])

    of = jax.ShapeDtypeStruct
    compiled = jax.jit(product).lower({"kernel": of((64, 512), jnp.bfloat16)}, of((256, 64), jnp.float32)).compile()
    found = {(array.dtype, array.shape): array for array in hlo.largest_arrays(compiled.as_text(), 20)}
    assert found["bf16", (64, 512)] == hlo.Array("bf16", (64, 512), 2 * 64 * 512, 1, "weights['kernel']")
    result = next(iter(found.values()))
    assert (result.shape, result.num_bytes) == ((256, 512), 4 * 256 * 512)
    assert result.name.startswith("jit(product)/")
