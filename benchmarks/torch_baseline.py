"""What benchmarks/train.py and sampling.py compare with: our network in eager PyTorch, as one would write it first.

A step: a canvas a row, all logits, targets as dense counts [B, S, V], float32. Its loss is the joint family's
cross-entropy with one gap for each token, and that of the length head; `plain_loss` is the same of our scores.
Sampling: `GrowingLoop`.
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


class GrowingLoop:
    """Algorithm 2 (DILM-S, `euler`) as a loop in Python over steps: the buffer of tokens grows by a column a step, as
    if every text got a token in each (or, `cut`, is as long as the longest text), and the host waits for each step.

    Attributes:
      rates: [N, 2, K] of insertions, a unit of time, at each step by whether the canvas is empty and how many tokens
        are missing.
      times: [N + 1] from 1 to 0.
      network_times: [N] at which the network is asked.
    """

    def __init__(self, params: dict, model: dict, predictable, special: dict[str, int], rates, times, network_times):
        self.params = jax.tree.map(lambda x: torch.tensor(np.asarray(x)), params)
        self.model, self.special = model, special
        self.predictable = torch.tensor(np.asarray(predictable))
        self.rates, self.times, self.network_times = (
            torch.tensor(np.asarray(x)) for x in (rates, times, network_times)
        )

    @torch.no_grad()
    def __call__(self, batch_size: int, seed: int, cut: bool) -> list[list[int]]:
        """Texts, from nothing."""
        torch.manual_seed(seed)
        tokens = torch.tensor([[self.special["cls"], self.special["bos"]]] * batch_size)
        length = torch.full((batch_size,), 2)
        for i in range(len(self.network_times)):
            logits, lengths = self._network(tokens, length, self.network_times[i])
            fire = torch.rand(batch_size) < self._rate(i, lengths, length) * (self.times[i] - self.times[i + 1])
            column = torch.arange(tokens.shape[1])
            is_open = (column >= 1) & (column < length[:, None])
            logits = logits.masked_fill(~(self.predictable & is_open[..., None]), -torch.inf)
            gap = torch.multinomial(torch.softmax(logits.logsumexp(-1), -1), 1)[:, 0]
            token = torch.multinomial(torch.softmax(logits[torch.arange(batch_size), gap], -1), 1)[:, 0]
            tokens = torch.stack([
                torch.cat([row[: g + 1], new[None], row[g + 1 :]])
                if fires
                else torch.cat([row, torch.tensor([self.special["pad"]])])
                for row, g, new, fires in zip(tokens, gap.tolist(), token, fire.tolist(), strict=True)
            ])  # fmt: skip
            length = length + fire
            if cut:
                tokens = tokens[:, : int(length.max())]
        return [row[2:n].tolist() for row, n in zip(tokens, length.tolist(), strict=True)]

    def _network(self, tokens, length, time_of):
        column = torch.arange(tokens.shape[1]).expand(tokens.shape)
        occupied = column < length[:, None]
        rows = {
            "tokens": tokens,
            "frozen": (column < 2) & occupied,
            "open_gap": (column >= 1) & occupied,
            "position": column,
            "occupied": occupied,
        }
        return forward(self.params, self.model, rows, time_of.expand(len(tokens)))

    def _rate(self, i: int, lengths, length):
        number = torch.arange(lengths.shape[-1])
        room = lengths.shape[-1] - 1 - (length - 2)
        p = torch.softmax(lengths.masked_fill(number > room[:, None], -torch.inf), -1)
        return (p * self.rates[i, (length == 2).long()]).sum(-1)
