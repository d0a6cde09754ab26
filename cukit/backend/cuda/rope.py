"""The q/k norm of Qwen3 (optional) and the rotary embedding, in one pass over the fused projection. Kernels: rope.cu.

qkv (T, (H + 2K)·D) holds the heads of q, then of k, then of v. Positions index the tables cos, sin (P, D/2), float32.
"""

import functools

from .compile import specialisations
from .constants import source_constant
from .device import empty
from .loader import load
from .norm import _add_columns

THREADS = source_constant("rope", "THREADS")
HEAD_LIMITS = sorted({int(variant["HEAD_LIMIT"]) for variant in specialisations("rope")})
BACKWARD_BLOCKS = 528  # of each kind of head; four a multiprocessor on an H100


def qk_norm_rope_forward(qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, eps):
    """Returns (out like qkv, rstd (T, H + K, 1) or None). v is copied; q_weight, k_weight (D,) or None for no norm."""
    tokens, head_dim = _sizes(qkv, cos, sin, positions, num_heads, num_kv_heads)
    kernels, groups = _kernels(qkv.dtype, head_dim)
    out = empty(qkv.shape, qkv.dtype)
    blocks = -(-tokens * (num_heads + 2 * num_kv_heads) // groups)
    if q_weight is None:
        sizes = (tokens, num_heads, num_kv_heads, head_dim)
        kernels.rope_turn(blocks, THREADS, out, qkv, cos, sin, positions, *sizes, 1.0)
        return out, None
    rstd = empty((tokens, num_heads + num_kv_heads, 1), "float32")
    kernels.qk_norm_rope_forward(
        blocks,
        THREADS,
        out,
        rstd,
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        positions,
        tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        eps,
    )
    return out, rstd


def qk_norm_rope_backward(
    dq_weight, dk_weight, dout, qkv, q_weight, k_weight, rstd, cos, sin, positions, num_heads, num_kv_heads
):
    """dqkv like qkv; adds to dq_weight, dk_weight (unless None). Without a norm qkv's values are not read."""
    tokens, head_dim = _sizes(qkv, cos, sin, positions, num_heads, num_kv_heads)
    if dout.shape != qkv.shape:
        raise ValueError(f"dout of shape {dout.shape} does not fit qkv of shape {qkv.shape}")
    kernels, groups = _kernels(qkv.dtype, head_dim)
    if q_weight is None:
        dqkv, blocks = empty(qkv.shape, qkv.dtype), -(-tokens * (num_heads + 2 * num_kv_heads) // groups)
        sizes = (tokens, num_heads, num_kv_heads, head_dim)
        kernels.rope_turn(blocks, THREADS, dqkv, dout, cos, sin, positions, *sizes, -1.0)
        return dqkv
    blocks = min(-(-tokens * max(num_heads, num_kv_heads) // groups), BACKWARD_BLOCKS)
    dqkv, partial = empty(qkv.shape, qkv.dtype), None
    if dq_weight is not None:
        partial = empty((2, blocks, head_dim), "float32")
    kernels.qk_norm_rope_backward(
        (blocks, 3),
        THREADS,
        dqkv,
        partial,
        dout,
        qkv,
        q_weight,
        k_weight,
        rstd,
        cos,
        sin,
        positions,
        tokens,
        num_heads,
        num_kv_heads,
        head_dim,
    )
    if partial is not None:
        _add_columns(dq_weight, partial[0])
        _add_columns(dk_weight, partial[1])
    return dqkv


@functools.cache
def _kernels(dtype, head_dim):
    """The kernels for this head_dim, and the heads that one of their blocks does at a time."""
    kernels = load("rope", dtype, HEAD_LIMIT=next(limit for limit in HEAD_LIMITS if head_dim <= limit))
    return kernels, kernels.source_constant("GROUPS")


def _sizes(qkv, cos, sin, positions, num_heads, num_kv_heads):
    """T and D."""
    heads = num_heads + 2 * num_kv_heads
    tokens, head_dim = len(qkv), qkv.shape[1] // heads
    if head_dim * heads != qkv.shape[1] or head_dim % 2 or not 0 < head_dim <= HEAD_LIMITS[-1]:
        raise ValueError(
            f"qkv of shape {qkv.shape} with {heads} heads: want head_dim even and at most {HEAD_LIMITS[-1]}, "
            f"got {qkv.shape[1] / heads:g}"
        )
    if len(positions) != tokens or cos.shape[1:] != (head_dim // 2,) or cos.shape != sin.shape:
        raise ValueError(
            f"{len(positions)} positions, cos {cos.shape} and sin {sin.shape} do not fit {tokens} tokens and "
            f"head_dim {head_dim}"
        )
    if tokens * heads >= 2**31:
        raise ValueError(f"{tokens} tokens with {heads} heads are too many for one call: at most 2^31 heads together")
    return tokens, head_dim
