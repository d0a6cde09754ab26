"""The one attention of the NumPy shelf: training, prefill and decode all call `chunked_attention`.

The reduction over keys is the one every kernel follows: chunks of 256 keys at absolute positions, each chunk with its
own maximum and base-2 exponentials, P rounded to the model's dtype before the product with V, chunks merged from left
to right. A masked key adds an exact zero, so a query's result depends only on the keys before it and not on what it was
batched with.
"""

from __future__ import annotations

import numpy as np

from ..dtypes import accumulator

CHUNK_KEYS = 256
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def chunked_attention(q, k, v, key_lengths=None):
    """Causal attention of G sequences that have equal query counts: o = softmax(q k^T / sqrt(D)) v.

    q (G, Tq, H, D); k, v (G, Tk, K, D) with K dividing H. key_lengths (G,) says how many of a sequence's Tk keys exist
    (all by default); query i of a sequence with L keys stands at absolute position L - Tq + i and sees the keys up to
    there. A query that sees no key gives 0. Returns o (G, Tq, H, D) in q's dtype and lse (G, H, Tq), the natural
    log-sum-exp of the scaled scores in the accumulation type (float32, or float64 for float64 inputs).
    """
    groups, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1], k.shape[2]
    repeats = num_heads // num_kv_heads
    model_dtype = q.dtype
    accumulate = accumulator(model_dtype)
    rows = q.reshape(groups, num_queries, num_kv_heads, repeats, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(groups, num_kv_heads, repeats * num_queries, head_dim).astype(accumulate, copy=False)
    keys = k.transpose(0, 2, 3, 1).astype(accumulate, copy=False)
    values = v.transpose(0, 2, 1, 3).astype(accumulate, copy=False)

    limits = _visible_keys(groups, num_queries, num_keys, key_lengths)
    if num_keys <= CHUNK_KEYS:
        out, maximum, total = _one_chunk(rows, keys, values, limits, 0, repeats, model_dtype)
    else:
        out, maximum, total = _merge_chunks(rows, keys, values, limits, repeats, model_dtype)
    if limits is not None and limits.min() <= 0:  # a query without keys: 0 / 1, not 0 / 0
        np.maximum(total, np.finfo(total.dtype).tiny, out=total)
    out /= total
    lse = (maximum * LN_2 + np.log(total)).reshape(groups, num_heads, num_queries)
    out = out.reshape(groups, num_kv_heads, repeats, num_queries, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(groups, num_queries, num_heads, head_dim).astype(model_dtype, copy=False), lse


def _visible_keys(groups, num_queries, num_keys, key_lengths):
    """How many keys each query sees, (G or 1, Tq); None where every query sees every key (no mask is needed)."""
    if key_lengths is None:
        if num_queries == 1:
            return None
        return np.arange(num_keys - num_queries + 1, num_keys + 1)[None]
    key_lengths = np.asarray(key_lengths).reshape(groups, 1)
    if num_queries == 1:
        return None if (key_lengths == num_keys).all() else key_lengths
    return key_lengths - num_queries + np.arange(1, num_queries + 1)[None]


def _one_chunk(rows, keys, values, limits, start, repeats, model_dtype):
    """Unnormalised attention over keys that begin at absolute position `start`.

    Returns out (G, K, R*Tq, D), and maximum and total (G, K, R*Tq, 1) of the scores in base 2.
    """
    scores = rows @ keys
    scores *= scores.dtype.type(rows.shape[-1] ** -0.5 * LOG2_E)
    if limits is not None:
        groups, num_kv_heads, num_rows, num_keys = scores.shape
        hidden = np.arange(start, start + num_keys) >= limits[:, :, None]
        mask = np.where(hidden, scores.dtype.type(-np.inf), scores.dtype.type(0))
        by_head = scores.reshape(groups, num_kv_heads * repeats, num_rows // repeats, num_keys)
        by_head += mask[:, None]
    maximum = scores.max(axis=-1, keepdims=True)
    if limits is not None and limits.min() <= start:  # rows with no key here: exp2(-inf - 0) is the exact zero wanted
        maximum[np.isneginf(maximum)] = 0
    scores -= maximum
    weights = np.exp2(scores, out=scores)
    total = weights @ np.ones((weights.shape[-1], 1), weights.dtype)  # quicker than sum() along a short axis
    if model_dtype != weights.dtype:
        weights = weights.astype(model_dtype).astype(weights.dtype)
    return weights @ values, maximum, total


def _merge_chunks(rows, keys, values, limits, repeats, model_dtype):
    """`_one_chunk` over every 256 keys, merged left to right; a chunk without a visible key changes no bit of a row."""
    out = maximum = total = None
    num_keys = keys.shape[-1]
    for start in range(0, num_keys, CHUNK_KEYS):
        stop = min(start + CHUNK_KEYS, num_keys)
        masked = limits if limits is not None and limits.min() < stop else None
        new_out, new_maximum, new_total = _one_chunk(
            rows, keys[..., start:stop], values[:, :, start:stop], masked, start, repeats, model_dtype
        )
        if out is None:
            out, maximum, total = new_out, new_maximum, new_total
            continue
        empty = new_total == 0
        new_maximum = np.where(empty, maximum, new_maximum)
        merged = np.maximum(maximum, new_maximum)
        left, right = np.exp2(maximum - merged), np.exp2(new_maximum - merged)
        out = out * left + new_out * right
        total = total * left + new_total * right
        maximum = merged
    return out, maximum, total
