"""Transformer over a canvas: AdaLN-Zero on the noising time, RoPE, and the heads that a `NetSpec` asks for.

The network of the paper's Sec. 5 with a true DiT residual: x + gate * branch(modulate(LN(x))); the authors' code adds
the branch to the modulated LN(x) instead. It knows neither a family nor a schedule.

    graphdef, params = nnx.split(Transformer(vocab_size=V, spec=spec, ..., rngs=nnx.Rngs(0)), nnx.Param)
    scores = nnx.merge(graphdef, params)(canvas, t, dropout_keys)  # under plain jax.jit

`params` is the whole state. Blocks are stacked over layers (leading axis num_layers) whatever `scan` is, so that the
parameters of a scanned and of an unrolled network are the same tree.

Initialisation: kernels lecun_normal (truncated normal, variance 1/fan-in), embeddings normal with variance 1/width,
LayerNorm scales one. Zero: biases, modulations (so every block starts as the identity when the network sees the time),
and the last kernel of each head. So the first predictions are uniform, and independent of the time.

Precision: parameters, LayerNorm, modulation, softmax statistics, length and stop heads are float32. `dtype` is that of
the activations inside blocks and of both factors of the token head, whose sums and results are float32.

Shapes: B batch, S canvas columns, V vocabulary, K length classes 0..L, D width, N heads, H = D/N, C cond_width.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Key

from dilm_jax.attention import attention
from dilm_jax.canvas import CLS_COLUMN, Canvas
from dilm_jax.packing import Packing
from dilm_jax.scores import FusedScores, LastScores, OfAllGaps, Scores, TokenHead, fused_lse

TIME_FEATURES = 256  # cosines, then sines
MAX_PERIOD = 1e4  # of the time features, in units of 1/1000 of noising time
EPSILON = 1e-5  # of every LayerNorm
UNMODULATED = (0.0, 0.0, 1.0)  # shift, scale, gate
REMAT = {  # what of a block is held for the backward pass
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}

_lecun, _zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetSpec:
    """What a process asks of its network.

    Raises:
      ValueError: for an unknown length head, one without classes, or a vocabulary of which nothing is predictable.
    """

    causal: bool  # a column attends to itself and the columns before it
    uses_time: bool
    append_only: bool  # samplers only ever append tokens: a cache of keys and values stays valid (`extend`)
    length_head: str | None  # "cls": one length a row, read at CLS; "gap": one per gap
    num_lengths: int  # K, classes 0..L
    stop_head: bool  # a logit at CLS
    predictable: tuple[bool, ...]  # [V]; all other ids have logit −inf

    def __post_init__(self):
        if self.length_head not in (None, "cls", "gap"):
            raise ValueError(f"length_head is {self.length_head!r}, expected None, 'cls' or 'gap'")
        if self.length_head and self.num_lengths < 1:
            raise ValueError(f"num_lengths is {self.num_lengths}, but a length head needs at least one class")
        if self.append_only and not (self.causal and self.length_head is None and not self.stop_head):
            raise ValueError("append_only needs causal, and neither a length head nor a stop head: they read CLS")
        if not any(self.predictable):
            raise ValueError("no id is predictable: predictable must be True at one id at least")


class Transformer(nnx.Module):
    """Pre-LN transformer; see the file's docstring.

    `cond_width` is the width of the time embedding and is not used unless `spec.uses_time`; `dropout` is the rate on
    the output of both branches of a block; `remat` is what the backward pass computes anew: nothing, all of a block
    ("full"), or all but its products with weights ("dots"); `scan` compiles one block and loops over it. Neither
    changes values or parameters.

    Raises:
      ValueError: for an unknown remat, a width that is no multiple of 2 * num_heads (RoPE rotates pairs), a dropout
        rate outside [0, 1), no layers, no width for the time, or a `predictable` that is not as long as the vocabulary.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        spec: NetSpec,
        num_layers: int,
        width: int,
        num_heads: int,
        mlp_width: int,
        cond_width: int,
        dropout: float,
        rope_theta: float,
        dtype: DTypeLike,
        remat: str,
        scan: bool,
        rngs: nnx.Rngs,
    ):
        if width % (2 * num_heads):
            raise ValueError(f"width {width} must be divisible by 2 x num_heads = {2 * num_heads}")
        if remat not in REMAT:
            raise ValueError(f"remat is {remat!r}, expected one of {', '.join(REMAT)}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}, expected a rate in [0, 1)")
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}, expected at least 1")
        if spec.uses_time and cond_width < 1:
            raise ValueError(f"cond_width is {cond_width}, but a network that uses the time needs at least 1")
        if len(spec.predictable) != vocab_size:
            raise ValueError(f"predictable has {len(spec.predictable)} entries, but the vocabulary {vocab_size} ids")
        self.spec, self.num_layers, self.remat, self.scan = spec, num_layers, remat, scan
        self.head_width, self.rope_theta, self.dtype = width // num_heads, rope_theta, jnp.dtype(dtype)
        cond = cond_width if spec.uses_time else None

        def embedding(size):
            init = nnx.initializers.normal(1 / math.sqrt(width))
            return nnx.Embed(size, width, dtype=self.dtype, embedding_init=init, rngs=rngs)

        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap
        def stack(rngs):
            return Block(width, num_heads, mlp_width, cond, spec.causal, dropout, self.dtype, rngs=rngs)

        self.embed = nnx.Dict(token=embedding(vocab_size), flags=embedding(4))
        self.time = _mlp(TIME_FEATURES, cond, cond, jnp.float32, rngs) if cond else None
        self.blocks = stack(rngs)
        self.final_norm = AdaLayerNorm(width, cond, rngs=rngs)
        self.head = nnx.Linear(width, vocab_size, use_bias=False, kernel_init=_zeros, rngs=rngs)  # see scores.TokenHead
        self.length_head = ResidualHead(width, spec.num_lengths, cond, rngs=rngs) if spec.length_head else None
        self.stop_head = ResidualHead(width, 1, cond, rngs=rngs) if spec.stop_head else None

    def __call__(
        self,
        canvas: Canvas,
        time: Float[Array, " B"] | None,
        dropout_keys: Key[Array, " B"] | None = None,
        packing: Packing | None = None,
        num_chunks: int | None = None,
        mesh: Mesh | None = None,
    ) -> OfAllGaps:
        """Scores of every gap of a canvas at noising time `time` in [0, 1].

        `time` is not read unless `spec.uses_time`. Row b drops activations by `dropout_keys[b]` alone; None (or a
        rate of zero) drops nothing. Columns of segment 0 are PAD: whatever they hold, the others do not see it. Without
        a `packing` a row is one canvas: one segment, in its first columns (attention.cudnn counts on it).
        With `num_chunks` scores are not held but computed in so many parts when asked for; with a `packing`, too, the
        canvases are computed where they lie in its rows. Both give the same scores. `mesh` is where rows and heads are
        split, if they are.
        """
        if packing is not None and num_chunks is None:
            raise ValueError("a packing needs num_chunks: the scores of packed canvases are not held")
        chex.assert_equal_shape([canvas.tokens, canvas.frozen, canvas.open_gap, canvas.position, canvas.segment])
        spread = (lambda x: x[:, None]) if packing is None else packing.spread  # from canvases to columns
        first = operator.itemgetter((slice(None), CLS_COLUMN)) if packing is None else packing.first_of
        rows = canvas if packing is None else packing.pack(canvas)
        cond = self._embed_time(time) if self.spec.uses_time else None
        context = self._context(rows, cond, spread, dropout_keys, mesh, packed=packing is not None)
        x, _ = self._run_blocks(self._embed_canvas(rows), context)

        hidden = self.final_norm(x, cond, spread)
        length_logits = stop_logits = None
        if self.length_head is not None:
            if self.spec.length_head == "cls":
                length_logits = self.length_head(first(x), cond)
            else:
                length_logits = self.length_head(x, cond, spread)
                length_logits = length_logits if packing is None else packing.canvases_of(length_logits)
        if self.stop_head is not None:
            stop_logits = self.stop_head(first(x), cond)[..., 0]
        head, kernel = self._token_head(), self.head.kernel[...]
        if num_chunks is None:
            logits = head.scores(hidden, kernel)
            return Scores(logits=logits, length_logits=length_logits, stop_logits=stop_logits)
        log_sums = fused_lse(hidden, kernel, head, num_chunks)
        return FusedScores(
            hidden=hidden,
            kernel=kernel,
            log_sums=log_sums if packing is None else packing.canvases_of(log_sums),
            packing=packing,
            length_logits=length_logits,
            stop_logits=stop_logits,
            head=head,
        )

    def prefill(self, canvas: Canvas, time: Float[Array, " B"] | None, mesh: Mesh | None = None) -> "Kept":
        """Keys and values of every column, for `extend`."""
        cond = self._embed_time(time) if self.spec.uses_time else None
        context = self._context(canvas, cond, lambda x: x[:, None], None, mesh)
        kept: Any = self._run_blocks(self._embed_canvas(canvas), context, keep=True)[1]
        return kept

    def extend(self, canvas: Canvas, time: Float[Array, " B"] | None, kept: "Kept") -> tuple[LastScores, "Kept"]:
        """Scores of the gap after the last column, from it and what is kept of those before it; and what is then kept.

        Right where canvases only grow at their end, by a column from one call to the next: `spec.append_only`.
        """
        assert self.spec.append_only
        last = (canvas.length - 1)[:, None]
        take = functools.partial(jnp.take_along_axis, indices=last, axis=1)
        fields = ("tokens", "frozen", "open_gap", "position", "segment")
        column = dataclasses.replace(canvas, **{name: take(getattr(canvas, name)) for name in fields})
        cond = self._embed_time(time) if self.spec.uses_time else None
        seen = (jnp.arange(canvas.num_columns) <= last) & (canvas.segment == column.segment)
        context = self._context(column, cond, lambda x: x[:, None], None, None)
        context = dataclasses.replace(context, segment=canvas.segment, seen=seen, column=last[:, 0])
        x, after = self._run_blocks(self._embed_canvas(column), context, kept)
        hidden = self.final_norm(x, cond, context.spread)
        return LastScores(self._token_head().scores(hidden, self.head.kernel[...])[:, 0]), after

    def _token_head(self) -> TokenHead:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        return TokenHead(self.spec.predictable, self.dtype.name, precision)

    def _embed_time(self, time) -> Float[Array, "B C"]:
        assert self.time is not None
        hidden = nnx.silu(self.time["in"](time_features(time)))
        return nnx.silu(self.time["out"](hidden))

    def _embed_canvas(self, canvas: Canvas) -> Float[Array, "B S D"]:
        flags = 2 * canvas.frozen.astype(jnp.int32) + canvas.open_gap
        x = self.embed["token"](canvas.tokens) + self.embed["flags"](flags)
        return jnp.where((canvas.segment > 0)[..., None], x, 0)  # an id outside the vocabulary embeds as NaN

    def _context(self, canvas: Canvas, cond, spread, dropout_keys, mesh, packed: bool = False) -> "Context":
        cos, sin = rope(canvas.position, self.head_width, self.rope_theta)
        if dropout_keys is not None:
            impl = jax.random.key_impl(dropout_keys)
            keys = jax.random.wrap_key_data(spread(jax.random.key_data(dropout_keys)), impl=impl)
            keys = jnp.broadcast_to(keys, canvas.position.shape)
            dropout_keys = jax.vmap(jax.vmap(jax.random.fold_in))(keys, canvas.position)
        return Context(
            cond=cond,
            spread=spread,
            cos=cos,
            sin=sin,
            segment=canvas.segment,
            packed=packed,
            mesh=mesh,
            dropout_keys=dropout_keys,
        )

    def _run_blocks(self, x, context: "Context", kept: "Kept | None" = None, keep: bool = False) -> tuple[Array, Any]:
        """The last block's columns [B, S, D] and, of `kept` or to `keep`, each block's keys and values."""
        graphdef, params = nnx.split(self.blocks, nnx.Param)

        def apply(x, of_layer):
            layer, params, kept = of_layer
            x, kept = nnx.merge(graphdef, params)(x, context, layer, kept)
            return x, kept if keep or context.column is not None else None

        if self.remat != "none":
            # Inside a scan nothing can be shared anyway.
            apply = jax.checkpoint(apply, prevent_cse=not self.scan, policy=REMAT[self.remat])
        layers = (jnp.arange(self.num_layers), params, kept)
        if self.scan:
            return jax.lax.scan(apply, x, layers)
        all_kept = []
        for i in range(self.num_layers):
            x, of_layer = apply(x, jax.tree.map(operator.itemgetter(i), layers))
            all_kept.append(of_layer)
        return x, jax.tree.map(lambda *x: jnp.stack(x), *all_kept)


@dataclasses.dataclass(frozen=True)
class Context:
    """What all blocks share; R = H/2. B here counts rows, and canvases only where it says so: packed rows hold
    several."""

    cond: Float[Array, "B C"] | None  # of the canvases
    spread: Callable[[Array], Array]  # their values to columns [B, S, …]
    cos: Float[Array, "B S 1 R"]
    sin: Float[Array, "B S 1 R"]
    segment: Int[Array, "B S"]  # of all columns, whichever are computed
    packed: bool  # else a row holds one canvas
    mesh: Mesh | None  # where rows and heads are split
    dropout_keys: Key[Array, "B S"] | None
    column: Int[Array, " B"] | None = None  # the one of each row that is computed; None: all
    seen: Bool[Array, "B S"] | None = None  # the kept columns that it attends to


Kept = tuple[Array, Array]  # keys and values [layers, B, S, N, H]


class Block(nnx.Module):
    """x + gate * attention(modulate(LN(x))), then the same with an MLP. No modulation where `cond_width` is None."""

    def __init__(self, width, num_heads, mlp_width, cond_width, causal, dropout, dtype, *, rngs):
        self.num_heads, self.causal, self.dropout, self.dtype = num_heads, causal, dropout, dtype
        self.modulation = _modulation(cond_width, 6 * width, rngs) if cond_width else None
        self.attention_norm = AdaLayerNorm(width, None, rngs=rngs)
        self.attention = nnx.Dict(
            qkv=_linear(width, 3 * width, dtype, rngs, use_bias=False),
            out=_linear(width, width, dtype, rngs, use_bias=False),
        )
        self.mlp_norm = AdaLayerNorm(width, None, rngs=rngs)
        self.mlp = _mlp(width, mlp_width, width, dtype, rngs)

    def __call__(self, x, context: Context, layer, kept=None):
        """The columns [B, S, D], and keys and values: those `kept` with the ones of `context.column` put in."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self._modulate(context)
        branch, kept = self._attend(modulate(self.attention_norm(x), shift_a, scale_a), context, kept)
        x = self._add(x, gate_a, drop(branch, self.dropout, context.dropout_keys, 2 * layer))
        branch = self.mlp["out"](nnx.relu(self.mlp["in"](modulate(self.mlp_norm(x), shift_m, scale_m))))
        return self._add(x, gate_m, drop(branch, self.dropout, context.dropout_keys, 2 * layer + 1)), kept

    def _modulate(self, context: Context):
        """Shift, scale and gate of the attention, then of the MLP: six times [B, 1 or S, D]."""
        if self.modulation is None:
            return UNMODULATED * 2
        assert context.cond is not None
        return jnp.split(context.spread(self.modulation(context.cond)), 6, axis=-1)

    def _add(self, x, gate, branch):
        return (x + gate * branch.astype(jnp.float32)).astype(self.dtype)

    def _attend(self, x, context: Context, kept):
        B, S, D = x.shape
        qkv = self.attention["qkv"](x).reshape(B, S, 3, self.num_heads, D // self.num_heads)
        q = rotate(qkv[:, :, 0], context.cos, context.sin)
        k = rotate(qkv[:, :, 1], context.cos, context.sin)
        v = qkv[:, :, 2]
        if context.column is not None:
            at = jnp.arange(B), context.column
            k, v = (old.at[at].set(new[:, 0]) for old, new in zip(kept, (k, v), strict=True))
        mixed = attention(
            q,
            k,
            v,
            context.segment,
            causal=self.causal,
            packed=context.packed,
            mesh=context.mesh,
            seen=context.seen,
        )
        return self.attention["out"](mixed.reshape(B, S, D)), (k, v)


class AdaLayerNorm(nnx.Module):
    """float32 LayerNorm without bias; then, given `cond_width`, a shift and a scale that start at the identity."""

    def __init__(self, width: int, cond_width: int | None, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(width))
        self.modulation = _modulation(cond_width, 2 * width, rngs) if cond_width else None

    def __call__(self, x, cond=None, spread=None):
        """`spread`: from the condition of a canvas to those of columns, where x are columns [B, S, D]."""
        x = x.astype(jnp.float32)
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON) * self.scale
        if self.modulation is None:
            return x
        assert cond is not None
        shift_scale = self.modulation(cond)
        if spread is not None:
            shift_scale = spread(shift_scale)
        return modulate(x, *jnp.split(shift_scale, 2, axis=-1))


class ResidualHead(nnx.Module):
    """float32 logits of `num_classes` from hidden states: y = AdaLN(x), y + tanh MLP(y), linear."""

    def __init__(self, width: int, num_classes: int, cond_width: int | None, *, rngs: nnx.Rngs):
        self.norm = AdaLayerNorm(width, cond_width, rngs=rngs)
        self.mlp = _mlp(width, 2 * width, width, jnp.float32, rngs)
        self.linear = nnx.Linear(width, num_classes, kernel_init=_zeros, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x, cond, spread=None):
        x = self.norm(x, cond, spread)
        x = x + self.mlp["out"](jnp.tanh(self.mlp["in"](x)))
        return self.linear(x)


def time_features(time: Float[Array, " B"]) -> Float[Array, "B F"]:
    """cos and sin of 1000 t f, frequencies f from 1 down to 1/MAX_PERIOD (DiT)."""
    half = TIME_FEATURES // 2
    frequency = jnp.exp(-math.log(MAX_PERIOD) * jnp.arange(half) / half)
    angle = 1000 * time.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def rope(position: Int[Array, "B S"], head_width: int, theta: float):
    """cos and sin of position * theta^(-2i/H), i < H/2: two arrays [B, S, 1, H/2], float32."""
    frequency = theta ** (-jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)
    angle = position[..., None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "B S N H"], cos, sin) -> Float[Array, "B S N H"]:
    """Rotates the pairs (x_i, x_{i + H/2}) by their column's angles; computed in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def modulate(x, shift, scale):
    return x * (1 + scale) + shift


def drop(x: Float[Array, "B S D"], rate: float, keys: Key[Array, "B S"] | None, site: int | Int[Array, ""]):
    """Dropout whose mask in a column depends on its key and the site alone, not on what is beside it."""
    if keys is None or rate == 0:
        return x
    draw = lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x.shape[-1:])  # noqa: E731
    return jnp.where(jax.vmap(jax.vmap(draw))(keys), x / (1 - rate), 0)


def _linear(fan_in, fan_out, dtype, rngs, use_bias=True):
    return nnx.Linear(fan_in, fan_out, use_bias=use_bias, kernel_init=_lecun, dtype=dtype, rngs=rngs)


def _mlp(fan_in, hidden, fan_out, dtype, rngs):
    return nnx.Dict({"in": _linear(fan_in, hidden, dtype, rngs), "out": _linear(hidden, fan_out, dtype, rngs)})


def _modulation(cond_width, fan_out, rngs):
    return nnx.Linear(cond_width, fan_out, kernel_init=_zeros, dtype=jnp.float32, rngs=rngs)
