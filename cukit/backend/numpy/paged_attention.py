"""Attention over a paged KV cache: blocks of equal size hold keys and values, a block table lists a sequence's blocks.

Decoding and prefill gather the blocks and call the same `chunked_attention` as training. What is gathered beyond a
sequence's length is masked and adds an exact zero.
"""

from __future__ import annotations

import numpy as np

from ..e4m3 import decode, encode
from .attention_core import CHUNK_KEYS, chunked_attention
from .rope import qk_norm_rope_forward

__all__ = [
    "copy_blocks",
    "paged_decode_attention",
    "paged_prefill_attention",
    "qk_norm_rope_store",
    "rope_paged_decode_attention",
    "store_kv",
    "update_block_tables",
]

_GATHER_ELEMENTS = 1 << 24  # keys of at most about this many elements are gathered at once


def store_kv(k_cache, v_cache, qkv, slot_mapping, num_heads, num_kv_heads):
    """Write the keys and values of qkv (T, (H + 2K) * D) into the caches (num_blocks, block_size, K, D), in place.
    Caches are of qkv's dtype, or uint8: E4M3 codes (../e4m3.py), to which the numbers are rounded.

    slot_mapping (T) int64: where each row goes. Slot = block * block_size + offset in the block; -1 = not stored.
    """
    num_blocks, block_size, _, head_dim = k_cache.shape
    rows = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    slots = np.asarray(slot_mapping)
    if len(slots) and slots.min() < 0:
        stored = slots >= 0
        rows, slots = rows[stored], slots[stored]
    shape, values_start = (num_blocks * block_size, num_kv_heads, head_dim), num_heads + num_kv_heads
    keys, values = rows[:, num_heads:values_start], rows[:, values_start:]
    if k_cache.dtype == np.uint8:
        keys, values = encode(keys), encode(values)
    k_cache.reshape(shape)[slots] = keys
    v_cache.reshape(shape)[slots] = values


def qk_norm_rope_store(
    k_cache,
    v_cache,
    slot_mapping,
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    num_heads,
    num_kv_heads,
    eps,
):
    """qk_norm_rope_forward, of which keys and values go to the caches as by store_kv. Returns an array like qkv
    that has the queries.
    """
    out, _ = qk_norm_rope_forward(qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, eps)
    store_kv(k_cache, v_cache, out, slot_mapping, num_heads, num_kv_heads)
    return out


def copy_blocks(caches, src, dst):
    """Copy whole blocks src (n) int64 to dst (n) in each of caches (2L, num_blocks, block_size, K, D); a block may be
    source and target, and every source is read before any is written.
    """
    for cache in caches if len(src) else ():
        cache[dst] = cache[src]


def update_block_tables(block_tables, rows, columns, blocks):
    """block_tables[rows[i], columns[i]] = blocks[i], in place; all int32, each entry at most once."""
    block_tables[rows, columns] = blocks


def paged_decode_attention(qkv, k_cache, v_cache, block_tables, context_lens, num_heads, max_context_len):
    """One query a sequence, over its context_lens (B) keys: its own is included and stored. 0 = ghost row, result 0.

    qkv (B, (H + 2K) * D), of which only the queries are read; block_tables (B or more, M) int32, of which the blocks of
    the first max_context_len keys are read. Returns (B, H * D).
    """
    batch, head_dim = len(qkv), k_cache.shape[3]
    queries = qkv.reshape(batch, qkv.shape[1] // head_dim, head_dim)[:, :num_heads]
    out = np.empty((batch, num_heads, head_dim), qkv.dtype)
    lengths = np.asarray(context_lens)
    if len(lengths) and lengths.max() > max_context_len:
        raise ValueError(f"paged attention: {lengths.max()} keys, more than max_context_len={max_context_len}")
    for rows in _decode_groups(lengths, k_cache):
        keys, values = _gather(k_cache, v_cache, block_tables, lengths, rows, qkv.dtype)
        out[rows] = chunked_attention(queries[rows][:, None], keys, values, lengths[rows])[0][:, 0]
    return out.reshape(batch, num_heads * head_dim)


def rope_paged_decode_attention(
    k_cache,
    v_cache,
    slot_mapping,
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    block_tables,
    context_lens,
    num_heads,
    num_kv_heads,
    eps,
    max_context_len,
):
    """qk_norm_rope_store and paged_decode_attention of what it returns. A row's slot is that of its last key, or -1; a
    ghost row has -1.
    """
    turn = q_weight, k_weight, cos, sin, positions
    queries = qk_norm_rope_store(k_cache, v_cache, slot_mapping, qkv, *turn, num_heads, num_kv_heads, eps)
    return paged_decode_attention(queries, k_cache, v_cache, block_tables, context_lens, num_heads, max_context_len)


def paged_prefill_attention(qkv, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, num_heads):
    """Causal attention of packed new queries over all keys of their sequences, those of the new tokens included.

    qkv (T, (H + 2K) * D); sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], which are the last ones of
    its context_lens[b] keys. Returns (T, H * D); rows beyond cu_seqlens_q[-1] are 0.
    """
    head_dim = k_cache.shape[3]
    queries = qkv.reshape(len(qkv), qkv.shape[1] // head_dim, head_dim)[:, :num_heads]
    out = np.zeros((len(qkv), num_heads, head_dim), qkv.dtype)
    starts, lengths = np.asarray(cu_seqlens_q), np.asarray(context_lens)
    counts = np.diff(starts)
    groups: dict[tuple[int, int], list[int]] = {}
    for row, shape in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True)):
        if shape[0]:
            groups.setdefault(shape, []).append(row)
    for (count, length), members in groups.items():
        at_once = max(1, _GATHER_ELEMENTS // (length * k_cache[0, 0].size))
        for start in range(0, len(members), at_once):
            rows = np.array(members[start : start + at_once])
            keys, values = _gather(k_cache, v_cache, block_tables, lengths, rows, qkv.dtype)
            tokens = starts[rows][:, None] + np.arange(count)
            out[tokens] = chunked_attention(queries[tokens], keys, values, lengths[rows])[0]
    return out.reshape(len(qkv), num_heads * head_dim)


def _decode_groups(lengths, k_cache):
    """Rows to gather at once: those of about equal length together, so that few masked keys are read."""
    block_size = k_cache.shape[1]
    if len(lengths) and lengths.max() <= max(CHUNK_KEYS // 2, 2 * block_size):
        return [np.arange(len(lengths))]
    order = np.argsort(lengths, kind="stable")
    groups, start = [], 0
    while start < len(order):
        shortest = max(int(lengths[order[start]]), block_size)
        # A group ends where a row is a quarter (at least a block) longer than its shortest, or where it grows too big.
        stop = start + int(np.searchsorted(lengths[order[start:]], shortest + max(shortest // 4, block_size), "right"))
        longest = max(1, int(lengths[order[stop - 1]]))
        stop = min(stop, start + max(1, _GATHER_ELEMENTS // (longest * k_cache[0, 0].size)))
        groups.append(order[start:stop])
        start = stop
    return groups


def _gather(k_cache, v_cache, block_tables, lengths, rows, dtype):
    """Keys and values (G, longest, K, D) of the sequences `rows` in dtype; entries beyond a sequence's length are 0."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    row_lengths = lengths[rows]
    longest = max(1, int(row_lengths.max()))  # a group of ghost rows reads one block, all masked
    width = -(-longest // block_size)
    blocks = block_tables[rows, :width]
    unused = np.arange(width) * block_size >= row_lengths[:, None]
    blocks = np.where(unused, 0, blocks)
    shape = (len(rows), width * block_size, num_kv_heads, head_dim)
    keys = k_cache[blocks].reshape(shape)[:, :longest]
    values = v_cache[blocks].reshape(shape)[:, :longest]
    if k_cache.dtype == np.uint8:
        keys, values = decode(keys, dtype), decode(values, dtype)
    if (row_lengths != longest).any():  # a stale NaN times a weight of 0 would be NaN, so clear what is masked
        beyond = np.arange(longest) >= row_lengths[:, None]
        keys[beyond] = 0
        values[beyond] = 0
    return keys, values
