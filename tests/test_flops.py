"""FLOPs of a step: against a count by hand, and against what XLA counts of the network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import test_backbone as tb
import tiny
from dilm_jax import evals, flops


@pytest.mark.parametrize("family", ["joint", "independent", "arm", "ilm"])
def test_flops_by_hand(family):
    made, parts, mesh, _ = tiny.world(family)
    m, columns = made.model, np.array([2, 5, 14])
    V, K, D, C = parts.process.vocabulary.size, parts.task.max_length + 1, m.width, m.cond_width
    each = {"blocks": m.num_layers * (4 * D * D + 2 * D * m.mlp_width), "head": D * V}
    pairs = sum(c * c for c in columns)
    once = {}
    if family in ("joint", "independent"):
        once = {"time": 256 * C + C * C, "modulation": C * D * (6 * m.num_layers + 2)}
        once["modulation of the length head"] = 2 * C * D
        (once if family == "joint" else each)["length head"] = 4 * D * D + D * K
    if family == "ilm":
        once["stop head"] = 4 * D * D + D
    if family == "arm":
        pairs = sum(c * (c + 1) / 2 for c in columns)
    products = columns.sum() * sum(each.values()) + len(columns) * sum(once.values())
    expected = 3 * (2 * products + 4 * pairs * D * m.num_layers)
    params = evals.abstract_params(parts, mesh)
    assert float(flops.of_step(params, parts.process.spec, jnp.asarray(columns))) == pytest.approx(expected, rel=1e-6)


def test_flops_are_most_of_what_xla_counts():
    """A forward pass without scan; what else it counts is element by element."""
    size = {"width": 128, "num_heads": 4, "mlp_width": 512, "cond_width": 64, "scan": False, "dropout": 0.0}
    size |= {"length_head": None, "stop_head": False}
    graphdef, abstract = tb.make(**size)
    params = tb.randomised(abstract)
    network = jax.jit(lambda params, canvas, time: nnx.merge(graphdef, params)(canvas, time).lse())
    counted = network.lower(params, tb.canvas(), tb.TIME).compile().cost_analysis()["flops"]
    B, S = tb.canvas().tokens.shape
    named = nnx.to_pure_dict(params)
    spec = nnx.merge(graphdef, params).spec
    formula = float(flops.of_step(named, spec, jnp.full(B, S))) / 3
    assert formula < counted < 1.2 * formula


def test_peaks():
    class Device:
        device_kind = "NVIDIA H100 80GB HBM3"

    assert flops.peak(Device()) == (989e12, "by its maker")
    Device.device_kind = "TPU v5 lite"
    assert flops.peak(Device())[0] == 197e12
    value, said = flops.peak(jax.devices()[0])
    assert value > 1e8 and said.startswith("measured")
