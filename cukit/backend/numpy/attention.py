"""Causal attention over packed sequences, grouped queries (H query heads share K key heads), softmax scale D^-0.5.

qkv (T, (H + 2K)·D) holds heads of q, k, v; cu_seqlens (B + 1,) the sequences' borders. Sequences of equal length go
through one batched product; none is padded. The inner loop is attention_core's, the same that decoding uses.
"""

import numpy as np

from ..dtypes import accumulator
from .attention_core import chunked_attention


def attention_forward(qkv, cu_seqlens, num_heads, num_kv_heads):
    """Returns o (T, H·D) and lse (T, H), the base-e log-sum-exp of the scaled scores. Rows from cu_seqlens[-1] on are
    0.
    """
    heads = _heads(qkv, num_heads, num_kv_heads)
    o = np.empty((len(qkv), num_heads, heads.shape[2]), qkv.dtype)
    lse = np.empty((len(qkv), num_heads), accumulator(qkv.dtype))
    for rows in _groups(cu_seqlens):
        q, k, v = np.split(heads[rows], [num_heads, num_heads + num_kv_heads], axis=2)
        group_o, group_lse = chunked_attention(q, k, v)
        o[rows], lse[rows] = group_o, group_lse.transpose(0, 2, 1)
    o[cu_seqlens[-1] :], lse[cu_seqlens[-1] :] = 0, 0
    return o.reshape(len(qkv), num_heads * heads.shape[2]), lse


def attention_backward(do, qkv, o, lse, cu_seqlens, num_heads, num_kv_heads):
    """dqkv like qkv. P is rebuilt from lse; P and dS are rounded to the model's dtype before their products (Dao 2023,
    FlashAttention-2).
    """
    heads = _heads(qkv, num_heads, num_kv_heads)
    per_head = (len(qkv), num_heads, heads.shape[2])
    do, o = do.reshape(per_head), o.reshape(per_head)
    dqkv = np.empty_like(heads)
    for rows in _groups(cu_seqlens):
        dqkv[rows] = _group_backward(do[rows], heads[rows], o[rows], lse[rows], num_heads, num_kv_heads)
    dqkv[cu_seqlens[-1] :] = 0
    return dqkv.reshape(qkv.shape)


def _group_backward(do, heads, o, lse, num_heads, num_kv_heads):
    """One batch of G equal lengths L: do, o (G, L, H, D), heads (G, L, H + 2K, D), lse (G, L, H) -> like heads."""
    acc = accumulator(heads.dtype)
    group, length, _, dim = heads.shape
    shared, scale = num_heads // num_kv_heads, acc.type(dim**-0.5)

    def by_kv_head(x):  # (G, L, H, D) -> (G, K, H/K · L, D)
        return x.astype(acc).transpose(0, 2, 1, 3).reshape(group, num_kv_heads, shared * length, -1)

    def rounded(x):
        return x.astype(heads.dtype, copy=False).astype(acc, copy=False)

    q, k, v = (
        heads[:, :, a:b].astype(acc, copy=False)
        for a, b in ((0, num_heads), (num_heads, num_heads + num_kv_heads), (num_heads + num_kv_heads, None))
    )
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    q, do_rows = by_kv_head(q), by_kv_head(do)
    delta = by_kv_head(np.einsum("glhd,glhd->glh", do.astype(acc, copy=False), o.astype(acc, copy=False))[..., None])
    future = np.tile(np.triu(np.ones((length, length), bool), 1), (shared, 1))
    p = np.exp(np.where(future, -np.inf, q @ k.swapaxes(2, 3) * scale) - by_kv_head(lse[..., None]))
    dv = rounded(p).swapaxes(2, 3) @ do_rows
    ds = rounded(p * (do_rows @ v.swapaxes(2, 3) - delta))
    dq, dk = ds @ k * scale, ds.swapaxes(2, 3) @ q * scale
    dq = dq.reshape(group, num_heads, length, dim)
    return np.concatenate([dq, dk, dv], axis=1).transpose(0, 2, 1, 3)


def _heads(qkv, num_heads, num_kv_heads):
    """(T, H + 2K, D)."""
    num = num_heads + 2 * num_kv_heads
    return qkv.reshape(len(qkv), num, qkv.shape[1] // num)


def _groups(cu_seqlens):
    """Row indices (G, L) of the sequences of each length L > 0."""
    lengths = np.diff(cu_seqlens)
    for length in np.unique(lengths):
        if length:
            yield cu_seqlens[:-1][lengths == length][:, None] + np.arange(length)
