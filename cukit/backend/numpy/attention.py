"""Causal attention over packed sequences, grouped queries (H query heads share K key heads), softmax scale D^-0.5.

qkv (T, (H + 2K)·D) holds heads of q, k, v; cu_seqlens (B + 1,) the sequences' borders. Sequences of equal length go
through one batched product; none is padded. The inner loop is attention_core's, the same that decoding uses.
"""

import numpy as np

from ..dtypes import accumulator
from .attention_core import chunked_attention


def attention_forward(qkv, cu_seqlens, num_heads, num_kv_heads, prefixes=None):
    """Returns o (T, H·D) and lse (T, H), the base-e log-sum-exp of the scaled scores. Rows from cu_seqlens[-1] on are
    0.

    prefixes (B, 3) int32: see ops.attention.
    """
    heads = _heads(qkv, num_heads, num_kv_heads)
    o = np.empty((len(qkv), num_heads, heads.shape[2]), qkv.dtype)
    lse = np.empty((len(qkv), num_heads), accumulator(qkv.dtype))
    for rows, seen in _groups(cu_seqlens, prefixes):
        k, v = np.split(heads[seen, num_heads:], 2, axis=2)
        group_o, group_lse = chunked_attention(heads[rows, :num_heads], k, v)
        o[rows], lse[rows] = group_o, group_lse.transpose(0, 2, 1)
    o[cu_seqlens[-1] :], lse[cu_seqlens[-1] :] = 0, 0
    return o.reshape(len(qkv), num_heads * heads.shape[2]), lse


def attention_backward(do, qkv, o, lse, cu_seqlens, num_heads, num_kv_heads, prefixes=None):
    """dqkv like qkv. P is rebuilt from lse; P and dS are rounded to the model's dtype before their products (Dao 2023,
    FlashAttention-2).
    """
    heads = _heads(qkv, num_heads, num_kv_heads)
    per_head = (len(qkv), num_heads, heads.shape[2])
    do, o = do.reshape(per_head), o.reshape(per_head)
    dqkv = np.zeros(heads.shape, accumulator(qkv.dtype))
    for rows, seen in _groups(cu_seqlens, prefixes):
        dq, dkv = _group_backward(do[rows], heads[rows, :num_heads], heads[seen, num_heads:], o[rows], lse[rows])
        dqkv[rows, :num_heads] = dq
        for keys, part in zip(seen, dkv, strict=True):  # one sequence at a time: they may share keys
            dqkv[keys, num_heads:] += part
    return dqkv.astype(qkv.dtype, copy=False).reshape(qkv.shape)


def _group_backward(do, q, kv, o, lse):
    """One batch of G sequences with L queries and S keys each: do, q, o (G, L, H, D), kv (G, S, 2K, D), lse (G, L, H)
    -> the gradients of q and of kv.
    """
    acc = accumulator(q.dtype)
    (group, length, num_heads, dim), (_, num_keys, both, _) = q.shape, kv.shape
    num_kv_heads = both // 2
    shared, scale = num_heads // num_kv_heads, acc.type(dim**-0.5)

    def by_kv_head(x):  # (G, L, H, D) -> (G, K, H/K · L, D)
        return x.astype(acc).transpose(0, 2, 1, 3).reshape(group, num_kv_heads, shared * length, -1)

    def rounded(x):
        return x.astype(q.dtype, copy=False).astype(acc, copy=False)

    k, v = np.split(kv.astype(acc, copy=False).transpose(0, 2, 1, 3), 2, axis=1)
    q_rows, do_rows = by_kv_head(q), by_kv_head(do)
    delta = by_kv_head(np.einsum("glhd,glhd->glh", do.astype(acc, copy=False), o.astype(acc, copy=False))[..., None])
    future = np.tile(np.triu(np.ones((length, num_keys), bool), num_keys - length + 1), (shared, 1))
    p = np.exp(np.where(future, -np.inf, q_rows @ k.swapaxes(2, 3) * scale) - by_kv_head(lse[..., None]))
    dv = rounded(p).swapaxes(2, 3) @ do_rows
    ds = rounded(p * (do_rows @ v.swapaxes(2, 3) - delta))
    dq, dk = ds @ k * scale, ds.swapaxes(2, 3) @ q_rows * scale
    dq = dq.reshape(group, num_heads, length, dim)
    return dq.transpose(0, 2, 1, 3), np.concatenate([dk, dv], axis=1).transpose(0, 2, 1, 3)


def _heads(qkv, num_heads, num_kv_heads):
    """(T, H + 2K, D)."""
    num = num_heads + 2 * num_kv_heads
    return qkv.reshape(len(qkv), num, qkv.shape[1] // num)


def _groups(cu_seqlens, prefixes):
    """For the sequences of each length L > 0 and prefix of P rows: their rows (G, L) and the rows of the keys that they
    see (G, P + L).
    """
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    first, before = (np.zeros_like(starts),) * 2 if prefixes is None else (prefixes[:, 0], prefixes[:, 1])
    for length, count in np.unique(np.stack([lengths, before], axis=1), axis=0):
        if length:
            chosen = (lengths == length) & (before == count)
            rows = starts[chosen][:, None] + np.arange(length)
            yield rows, np.concatenate([first[chosen][:, None] + np.arange(count), rows], axis=1)
