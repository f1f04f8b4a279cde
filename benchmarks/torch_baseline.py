"""The step that benchmarks/train.py compares with: our network in eager PyTorch, as one would write it first.

A canvas a row, all logits, targets as dense counts [B, S, V], float32. Its loss is the joint family's cross-entropy
with one gap for each token, and that of the length head; `plain_loss` is the same of our scores.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

from dilm_jax.backbone import EPSILON, MAX_PERIOD
from dilm_jax.losses import expand_targets


def plain_loss(scores, canvas, targets):
    """In JAX: nats summed over the texts."""
    logits = jnp.where(canvas.open_gap[..., None], scores.dense(), -jnp.inf)
    log_p = jax.nn.log_softmax(logits.reshape(len(canvas.length), -1)).reshape(logits.shape)
    counts = expand_targets(targets, *logits.shape[1:])
    length = jnp.take_along_axis(jax.nn.log_softmax(scores.length_logits), targets.num_dropped[:, None], axis=-1)
    return -jnp.where(counts > 0, counts * log_p, 0).sum() - length.sum()


def seconds_of_step(params: dict, model: dict, predictable, canvas, t, targets, repeats: int) -> tuple[float, float]:
    """(the loss, seconds of a forward and a backward pass) of DILM-S."""
    tensors = jax.tree.map(lambda x: torch.tensor(np.asarray(x), requires_grad=True), params)
    names = ("tokens", "frozen", "open_gap", "position", "occupied")
    rows = {name: torch.tensor(np.asarray(getattr(canvas, name))) for name in names}
    time_of = torch.tensor(np.asarray(t))
    gap, token, dropped = (torch.tensor(np.asarray(getattr(targets, name))) for name in ("gap", "tokens", "dropped"))
    predictable = torch.tensor(np.asarray(predictable))

    def step() -> float:
        for leaf in jax.tree.leaves(tensors):
            leaf.grad = None
        logits, lengths = forward(tensors, model, rows, time_of)
        logits = logits.masked_fill(~(predictable & rows["open_gap"][..., None]), -torch.inf)
        counts = torch.zeros_like(logits)
        row = torch.arange(len(gap))[:, None].expand_as(gap)
        counts.index_put_((row, gap, token), dropped.to(counts.dtype), accumulate=True)
        log_p = F.log_softmax(logits.flatten(1), dim=-1).view_as(logits)
        loss = -torch.where(counts > 0, counts * log_p, 0.0).sum()
        loss = loss + F.cross_entropy(lengths, dropped.sum(-1), reduction="sum")
        loss.backward()
        return loss.item()

    loss, each = step(), []
    for _ in range(repeats):
        started = time.monotonic()
        step()
        each.append(time.monotonic() - started)
    return loss, min(each)


def forward(params, model, rows, t):
    """Logits [B, S, V] and length logits [B, K]."""
    half = params["time"]["in"]["kernel"].shape[0] // 2
    frequency = torch.exp(-np.log(MAX_PERIOD) * torch.arange(half) / half)
    angle = 1000 * t[:, None] * frequency
    cond = F.silu(linear(torch.cat([angle.cos(), angle.sin()], -1), params["time"]["in"]))
    cond = F.silu(linear(cond, params["time"]["out"]))

    flags = 2 * rows["frozen"].long() + rows["open_gap"].long()
    x = params["embed"]["token"]["embedding"][rows["tokens"].long()] + params["embed"]["flags"]["embedding"][flags]
    x = x * rows["occupied"][..., None]
    heads = model["num_heads"]
    width = x.shape[-1] // heads
    angle = rows["position"][:, None, :, None] * model["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    cos, sin = angle.cos(), angle.sin()
    mask = rows["occupied"][:, None, :, None] == rows["occupied"][:, None, None, :]

    def rotate(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    for i in range(model["num_layers"]):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        changes = linear(cond, layer["modulation"])[:, None].chunk(6, dim=-1)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = changes
        qkv = linear(norm(x, layer["attention_norm"]["scale"]) * (1 + scale_a) + shift_a, layer["attention"]["qkv"])
        q, k, v = (part.unflatten(-1, (heads, width)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask=mask)
        x = x + gate_a * linear(mixed.transpose(1, 2).flatten(2), layer["attention"]["out"])
        hidden = F.relu(linear(norm(x, layer["mlp_norm"]["scale"]) * (1 + scale_m) + shift_m, layer["mlp"]["in"]))
        x = x + gate_m * linear(hidden, layer["mlp"]["out"])

    def adaptive(x, of, cond):
        shift, scale = linear(cond, of["modulation"]).chunk(2, dim=-1)
        return norm(x, of["scale"]) * (1 + scale) + shift

    logits = adaptive(x, params["final_norm"], cond[:, None]) @ params["head"]["kernel"]
    head = params["length_head"]
    at_cls = adaptive(x[:, 0], head["norm"], cond)
    at_cls = at_cls + linear(torch.tanh(linear(at_cls, head["mlp"]["in"])), head["mlp"]["out"])
    return logits, linear(at_cls, head["linear"])


def linear(x, of):
    y = x @ of["kernel"]
    return y + of["bias"] if "bias" in of else y


def norm(x, scale):
    return F.layer_norm(x, x.shape[-1:], eps=EPSILON) * scale
