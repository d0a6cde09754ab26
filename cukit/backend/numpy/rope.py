"""The q/k norm of Qwen3 (optional) and the rotary embedding, in one pass over the fused projection.

qkv (T, (H + 2K)·D) holds the heads of q, then of k, then of v. Positions index the tables cos, sin (P, D/2), float32 or
better. Rotation in the "half" layout of Hugging Face: pairs (i, i + D/2). Su et al. 2021, "RoFormer".
"""

import numpy as np

from ..dtypes import accumulator
from .norm import rms_norm_backward, rms_norm_forward


def qk_norm_rope_forward(qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, eps):
    """Returns (out like qkv, rstd (T, H + K, 1) or None). v is copied; q_weight, k_weight (D,) or None for no norm."""
    num = num_heads + 2 * num_kv_heads
    heads = qkv.reshape(len(qkv), num, qkv.shape[1] // num)
    out = heads.copy()
    rotated = out[:, : num_heads + num_kv_heads]
    rstd = None
    if q_weight is not None:
        weight = _per_head(q_weight, k_weight, num_heads, num_kv_heads)
        normed, rstd = rms_norm_forward(rotated, weight, eps)
    else:
        normed = rotated
    _rotate(rotated, normed, cos[positions][:, None], sin[positions][:, None])
    return out.reshape(qkv.shape), rstd


def qk_norm_rope_backward(
    dq_weight, dk_weight, dout, qkv, q_weight, k_weight, rstd, cos, sin, positions, num_heads, num_kv_heads
):
    """dqkv like qkv; adds to dq_weight, dk_weight (unless None). Without a norm qkv's values are not read."""
    num = num_heads + 2 * num_kv_heads
    shape = (len(qkv), num, qkv.shape[1] // num)
    turned = num_heads + num_kv_heads
    dqkv = dout.reshape(shape).copy()
    drotated = dqkv[:, :turned]
    _rotate(drotated, drotated, cos[positions][:, None], -sin[positions][:, None])
    if q_weight is not None:
        x, weight = qkv.reshape(shape)[:, :turned], _per_head(q_weight, k_weight, num_heads, num_kv_heads)
        if dq_weight is not None:
            per_head = np.einsum("thd,thd->hd", drotated.astype(rstd.dtype, copy=False), x * rstd)
            dq_weight += per_head[:num_heads].sum(0)
            dk_weight += per_head[num_heads:].sum(0)
        drotated[...] = rms_norm_backward(None, drotated, x, weight, rstd)
    return dqkv.reshape(qkv.shape)


def _per_head(q_weight, k_weight, num_heads, num_kv_heads):
    """(H + K, D): each head's norm weight."""
    return np.concatenate(
        [
            np.broadcast_to(q_weight, (num_heads, len(q_weight))),
            np.broadcast_to(k_weight, (num_kv_heads, len(k_weight))),
        ]
    )


def _rotate(out, x, cos, sin):
    """out = x rotated by the angles; out may be x (its halves are copied first)."""
    acc, half = accumulator(x.dtype), x.shape[-1] // 2
    first, second = x[..., :half].astype(acc), x[..., half:].astype(acc)
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
