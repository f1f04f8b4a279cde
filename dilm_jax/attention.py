"""Attention among the columns of a row, by the kernel of the hardware that the computation is compiled for.

softmax(q kᵀ / √H) v over the columns of one's own segment. XLA holds every logit, [B, N, S, S] of them; cuDNN (GPU)
and splash attention (TPU) hold none. Which of the three it is gets decided when a computation is lowered, not by the
devices of this process: a program that is compiled ahead of time for other hardware has the kernel of that hardware.

Pure functions on arrays. Parameters, canvases and positions may not be known here.

Shapes: B rows, S columns, T columns that ask (S, or 1 with a cache), N heads of width H.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from dilm_jax import sharding

MIN_COLUMNS = 128  # of a kernel, and of its blocks on a TPU: below, XLA's logits take little room
SPLASH_BLOCKS = (512, 384, 256)  # columns of a block where there are more; 512 × 512 float32 logits are 1 MiB of VMEM
OUTSIDE = -1  # segment of the columns that fill up a row

Columns = Float[Array, "B S N H"]


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N H"],
    segment: Int[Array, "B S"],
    *,
    causal: bool,
    packed: bool,
    mesh: Mesh | None = None,
    seen: Bool[Array, "B S"] | None = None,
) -> Float[Array, "B T N H"]:
    """What each column gathers from those of its segment, itself and those before it if `causal`.

    `segment` 0 is PAD; what PAD columns gather depends on the kernel, and is finite. Rows that are not `packed` hold
    one segment beside PAD, in their first columns. `mesh` is where rows and heads are split, if they are. With `seen`
    there is one column that asks in each row, and this is what it sees.
    """
    if seen is not None:
        return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None, None])
    by_xla = functools.partial(xla, causal=causal)
    if q.shape[1] < MIN_COLUMNS:
        return by_xla(q, k, v, segment)
    kernels = {}
    # A kernel's own rule of gradients is traced where those are taken, and would not know of a precision set here; nor
    # does Mosaic compile bfloat16 at any other.
    if jax.config.jax_default_matmul_precision in (None, "default"):  # pyright: ignore[reportAttributeAccessIssue]
        kernels["tpu"] = functools.partial(splash, causal=causal)
    # All of them are traced and differentiated, one is lowered. So what cuDNN does not take may not be among them.
    by_cudnn = functools.partial(cudnn, causal=causal, packed=packed)
    if q.dtype.itemsize == 2 and _is_taken(by_cudnn, q, k, v, segment):
        kernels["cuda"] = by_cudnn
    kernels = {platform: _by_shard(kernel, mesh, q.shape) for platform, kernel in kernels.items()}
    return jax.lax.platform_dependent(q, k, v, segment, default=by_xla, **kernels)


def xla(q: Columns, k: Columns, v: Columns, segment: Int[Array, "B S"], *, causal: bool) -> Columns:
    """By matrix multiplications. PAD sees PAD, so no row is without a key."""
    return jax.nn.dot_product_attention(q, k, v, mask=_same(segment), is_causal=causal)


def cudnn(q: Columns, k: Columns, v: Columns, segment: Int[Array, "B S"], *, causal: bool, packed: bool) -> Columns:
    """By cuDNN's flash attention: 16-bit numbers only.

    A row with one canvas needs its length alone. The segments of packed rows become a bias [B, 1, S, S] of 16 bits, and
    the backward pass holds a gradient of it, too, that nobody asked for: 2/N of what XLA holds for the logits. cuDNN's
    own layout of packed rows (`q_offsets`) is for Hopper and later, is reached by no public function, and has softmax
    statistics [B·M, N, S] for at most M segments a row: with M = S/2, as many as there are logits.

    Raises:
      RuntimeError: where there is no cuDNN, or (NotImplementedError) for a width of heads that it has not.
    """
    S = q.shape[1]
    q, k, v, segment = _fill_up(2, q, k, v, segment)  # gradients of odd lengths are not implemented
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    if packed:
        return attend(q, k, v, mask=_same(segment))[:, :S]
    # Keys beyond the length are skipped, and their gradients may be left unwritten: they end here.
    k, v = (jnp.where((segment > 0)[..., None, None], x, 0) for x in (k, v))
    length = jnp.maximum((segment > 0).sum(-1, dtype=jnp.int32), 1)
    return attend(q, k, v, key_value_seq_lengths=length)[:, :S]


def splash(
    q: Columns, k: Columns, v: Columns, segment: Int[Array, "B S"], *, causal: bool, interpret: bool = False
) -> Columns:
    """By JAX's Pallas kernel for TPUs, with float32 softmax statistics; `interpret` runs it anywhere, slowly."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    S, N, H = q.shape[1:]
    block = block_size(S)
    q, k, v, segment = _fill_up(block, q * (1 / math.sqrt(H)), k, v, segment)
    T = q.shape[1]
    mask = (masks.CausalMask if causal else masks.FullMask)((T, T))
    attend = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * N),
        block_sizes=kernels.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        interpret=interpret,
    )
    mixed: Any = jax.vmap(attend)(*(x.swapaxes(1, 2) for x in (q, k, v)), kernels.SegmentIds(q=segment, kv=segment))
    return mixed.swapaxes(1, 2)[:, :S]


def block_size(num_columns: int) -> int:
    """Columns of splash's blocks: what leaves the least to fill up, then the largest."""
    if num_columns <= MIN_COLUMNS:
        return MIN_COLUMNS
    return min(SPLASH_BLOCKS, key=lambda size: (-num_columns % size, -size))


def _same(segment: Int[Array, "B S"]) -> Bool[Array, "B 1 S S"]:
    """May a column (third axis) attend to another (fourth)?"""
    return (segment[:, :, None] == segment[:, None, :])[:, None]


def _fill_up(multiple: int, q, k, v, segment) -> tuple[Array, Array, Array, Array]:
    """The same with columns of a segment of their own behind, so that S is a multiple."""
    more = -segment.shape[1] % multiple
    fill = lambda x: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))  # noqa: E731
    return fill(q), fill(k), fill(v), jnp.pad(segment, ((0, 0), (0, more)), constant_values=OUTSIDE)


def _is_taken(kernel: Callable, *args: Array) -> bool:
    """Whether cuDNN is here and takes heads of this width: it says so when it is traced."""
    try:
        jax.eval_shape(kernel, *args)
    except RuntimeError:
        return False
    return True


def _by_shard(kernel: Callable, mesh: Mesh | None, shape: tuple[int, ...]) -> Callable:
    """The kernel on each device's own rows and heads, all of them where the mesh does not divide them. The compiler
    refuses to split a Pallas call; cuDNN's has a rule for that, but raises where k got another sharding than q."""
    if mesh is None:
        return kernel
    rows = sharding.BATCH_AXES if shape[0] % sharding.num_shards(mesh) == 0 else None
    heads = "tensor" if shape[2] % mesh.shape["tensor"] == 0 else None
    columns = P(rows, None, heads)
    # check_vma: a Pallas call does not say over which axes its results vary.
    specs = {"in_specs": (columns, columns, columns, P(rows)), "out_specs": columns, "check_vma": False}
    return jax.shard_map(kernel, mesh=mesh, **specs)
