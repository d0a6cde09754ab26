"""Attention over a paged KV cache: launches kernels/paged_attention.cu. Same functions as the NumPy shelf; the results
have the bits of the training forward pass.

A decode launch depends only on the shapes of its buffers, so it can be captured. Thread blocks beyond a sequence's
context exit at once.
"""

import math

import numpy as np

from .attention import LOG2_E, _head_dim, _kernels, _pieces
from .constants import source_constant
from .device import empty
from .exact import MULTIPROCESSORS
from .loader import load
from .rope import THREADS as ROPE_THREADS
from .rope import _kernels as _rope_kernels
from .rope import _sizes, qk_norm_rope_forward

__all__ = [
    "copy_blocks",
    "paged_decode_attention",
    "paged_prefill_attention",
    "qk_norm_rope_store",
    "rope_paged_decode_attention",
    "store_kv",
    "update_block_tables",
]

CHUNK_KEYS = source_constant("paged_attention", "CHUNK_KEYS")
TURNED_HEAD_DIM = source_constant("paged_attention", "TURNED_HEAD_DIM")
THREADS = 256
STAGING_BYTES = 32 << 20  # that copied blocks take on their way
FEW_BLOCKS = 2 * MULTIPROCESSORS  # up to which several warps share a block's work; only speed depends on it


def store_kv(k_cache, v_cache, qkv, slot_mapping, num_heads, num_kv_heads):
    """Write the keys and values of qkv (T, (H + 2K)·D) into the caches (num_blocks, block_size, K, D) at slot_mapping
    (T) int64, in place. Caches are of qkv's dtype, or uint8: E4M3 codes, to which the numbers are rounded.

    Slot = block · block_size + offset in the block; -1 = this row is not stored.
    """
    head_dim, total = _head_dim(qkv, num_heads, num_kv_heads), len(qkv)
    _check_caches(k_cache, v_cache, num_kv_heads, head_dim, qkv.dtype)
    vectors = total * 2 * num_kv_heads * head_dim * qkv.itemsize // 8
    load("paged_attention", qkv.dtype, HEAD_DIM=head_dim, **_variant(k_cache)).store_kv(
        -(-vectors // THREADS), THREADS, k_cache, v_cache, qkv, slot_mapping, total, num_heads, num_kv_heads
    )


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
    that has the queries; the rest of it is not written where the caches have qkv's dtype.
    """
    given = q_weight, k_weight, cos, sin, positions
    if k_cache.dtype != qkv.dtype:
        out, _ = qk_norm_rope_forward(qkv, *given, num_heads, num_kv_heads, eps)
        store_kv(k_cache, v_cache, out, slot_mapping, num_heads, num_kv_heads)
        return out
    tokens, head_dim = _sizes(qkv, cos, sin, positions, num_heads, num_kv_heads)
    _check_caches(k_cache, v_cache, num_kv_heads, head_dim, qkv.dtype)
    _check_slots(slot_mapping, tokens)
    kernels, groups = _rope_kernels(qkv.dtype, head_dim)
    out, to = empty(qkv.shape, qkv.dtype), (k_cache, v_cache, slot_mapping)
    blocks, sizes = -(-tokens * (num_heads + 2 * num_kv_heads) // groups), (tokens, num_heads, num_kv_heads, head_dim)
    kernels.qk_norm_rope_store(blocks, ROPE_THREADS, out, *to, qkv, *given, *sizes, eps)
    return out


def copy_blocks(caches, src, dst):
    """Copy whole blocks src (n) int64 to dst (n) in each of caches (2L, num_blocks, block_size, K, D); every source is
    read before any is written.
    """
    count = len(src)
    if count == 0:
        return
    if caches.dtype == np.uint8:  # codes are moved two at a time, as numbers of 16 bits
        caches = caches.view(np.float16)
    kernels = load("paged_attention", caches.dtype, HEAD_DIM=caches.shape[-1])
    cache_elements, elements = caches[0].size, caches[0, 0].size
    at_once = max(1, STAGING_BYTES // (count * elements * caches.itemsize))
    for start in range(0, len(caches), at_once):
        part = caches[start : start + at_once]
        staging = empty((len(part), count, elements), caches.dtype)
        grid = (-(-elements * caches.itemsize // (8 * THREADS)), count, len(part))
        kernels.gather_blocks(grid, THREADS, staging, part, src, elements, cache_elements)
        kernels.scatter_blocks(grid, THREADS, part, staging, dst, elements, cache_elements)


def update_block_tables(block_tables, rows, columns, blocks):
    """block_tables[rows[i], columns[i]] = blocks[i], in place; all int32, each entry at most once."""
    count = len(rows)
    load("paged_attention").update_block_tables(
        -(-count // THREADS), THREADS, block_tables, rows, columns, blocks, count, block_tables.shape[1]
    )


def paged_decode_attention(qkv, k_cache, v_cache, block_tables, context_lens, num_heads, max_context_len):
    """One query a sequence, over its context_lens (B) int32 keys (its own included, stored before). 0 = ghost row,
    its result is 0.

    qkv (B, (H + 2K)·D), of which only the queries are read; block_tables (B or more, M) int32, of which the blocks of
    the first max_context_len keys are read (no context may be longer). Returns (B, H·D).
    """
    return _decode(qkv, k_cache, v_cache, block_tables, context_lens, num_heads, max_context_len, (None,) * 6, 0.0)


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
    """qk_norm_rope_store and paged_decode_attention of what it returns, in one launch, with the same bits. A row's
    slot is that of its last key, or -1; a ghost row has -1.
    """
    turn, given = (q_weight, k_weight, cos, sin, positions), (block_tables, context_lens, num_heads, max_context_len)
    tokens, head_dim = _sizes(qkv, cos, sin, positions, num_heads, num_kv_heads)
    if qkv.itemsize != 2 or head_dim > TURNED_HEAD_DIM or not _aligned(qkv, q_weight, k_weight, cos, sin):
        queries = qk_norm_rope_store(k_cache, v_cache, slot_mapping, qkv, *turn, num_heads, num_kv_heads, eps)
        return paged_decode_attention(queries, k_cache, v_cache, *given)
    _check_slots(slot_mapping, tokens)
    return _decode(qkv, k_cache, v_cache, *given, (*turn, slot_mapping), eps)


def _decode(qkv, k_cache, v_cache, block_tables, context_lens, num_heads, max_context_len, turn, eps):
    """turn: q_weight, k_weight, cos, sin, positions and the slots of new keys; all None where those are stored."""
    batch, (block_size, num_kv_heads, head_dim) = len(qkv), k_cache.shape[1:]
    _check_queries(qkv, k_cache, v_cache, block_tables, context_lens, num_heads, batch)
    if max_context_len > block_tables.shape[1] * block_size:
        raise ValueError(
            f"paged attention: block_tables {block_tables.shape} of {block_size} tokens a block cannot list "
            f"max_context_len={max_context_len}"
        )
    out = empty((batch, num_heads * head_dim), qkv.dtype)
    if batch == 0:
        return out
    head_tiles, chunks = -(-num_heads // num_kv_heads // 16), max(1, -(-max_context_len // CHUNK_KEYS))
    partial_out = empty((batch, num_heads, chunks, head_dim), np.float32)
    partial_stats = empty((batch, num_heads, chunks, 2), np.float32)
    variant = {"HEAD_DIM": head_dim} | _variant(k_cache)
    kernels = load("paged_attention", qkv.dtype, **variant)
    grid = chunks, head_tiles * num_kv_heads, batch
    sizes = num_heads // num_kv_heads, num_kv_heads, block_size, block_tables.shape[1], LOG2_E * head_dim**-0.5
    given = out, partial_out, partial_stats, qkv, k_cache, v_cache, block_tables, context_lens, *turn, *sizes, eps
    if math.prod(grid) <= FEW_BLOCKS and qkv.itemsize == 2:
        few = load("paged_attention_few", qkv.dtype, **variant)
        threads, shared = few.constants("sharing_geometry", 2)
        few.paged_decode_chunks_few(grid, threads, *given, shared=shared)
    else:
        kernels.paged_decode_chunks(grid, 32, *given)
    if chunks > 1:
        block = -(-head_dim // 32) * 32
        kernels.paged_decode_merge(
            (num_heads, batch), block, out, partial_out, partial_stats, context_lens, num_heads, chunks
        )
    return out


def paged_prefill_attention(qkv, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, num_heads):
    """Causal attention of packed new queries over all keys of their sequences (those of the new tokens included, stored
    before).

    qkv (T, (H + 2K)·D); sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], which are the last ones of its
    context_lens[b] keys. Returns (T, H·D); rows beyond cu_seqlens_q[-1] are 0.
    """
    total, batch, (block_size, num_kv_heads, head_dim) = len(qkv), len(cu_seqlens_q) - 1, k_cache.shape[1:]
    _check_queries(qkv, k_cache, v_cache, block_tables, context_lens, num_heads, batch)
    out = empty((total, num_heads * head_dim), qkv.dtype)
    if total:
        kernels, geometry = _kernels("paged_attention", qkv.dtype, head_dim, **_variant(k_cache))
        kernels.paged_prefill(
            _pieces(total, batch, geometry.query_tile) * num_heads,
            geometry.threads,
            out,
            qkv,
            k_cache,
            v_cache,
            block_tables,
            cu_seqlens_q,
            context_lens,
            total,
            batch,
            num_heads,
            num_kv_heads,
            block_size,
            block_tables.shape[1],
            LOG2_E * head_dim**-0.5,
            shared=geometry.forward_shared,
        )
    return out


def _variant(cache) -> dict[str, int]:
    """The defines of kernels for a cache of E4M3 codes, or of numbers in the model's dtype."""
    return {"CACHE_E4M3": 1} if cache.dtype == np.uint8 else {}


def _aligned(*arrays) -> bool:
    """Whether 16 bytes can be read at once from the beginning of each array on."""
    return all(x is None or x.data.ptr % 16 == 0 for x in arrays)


def _check_slots(slot_mapping, tokens):
    if len(slot_mapping) != tokens:
        raise ValueError(f"{len(slot_mapping)} slots do not fit {tokens} tokens")


def _check_caches(k_cache, v_cache, num_kv_heads, head_dim, dtype):
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (dtype, np.uint8):
        raise TypeError(
            f"paged attention: caches of {k_cache.dtype} and {v_cache.dtype}: both must be {dtype}, or uint8 (E4M3)"
        )
    if k_cache.dtype == np.uint8 and head_dim % 8:
        raise ValueError(
            f"an fp8 cache needs a head_dim that is a multiple of 8, got {head_dim}: use kv_cache_dtype=auto"
        )
    if k_cache.shape != v_cache.shape or k_cache.shape[2:] != (num_kv_heads, head_dim):
        raise ValueError(
            f"paged attention: caches of shape {k_cache.shape} and {v_cache.shape}: "
            f"both must be (num_blocks, block_size, {num_kv_heads}, {head_dim})"
        )


def _check_queries(qkv, k_cache, v_cache, block_tables, context_lens, num_heads, batch):
    num_kv_heads, head_dim = k_cache.shape[2:]
    if _head_dim(qkv, num_heads, num_kv_heads) != head_dim:
        raise ValueError(
            f"paged attention: qkv of shape {qkv.shape} does not fit {num_heads} heads and caches of shape "
            f"{k_cache.shape}"
        )
    _check_caches(k_cache, v_cache, num_kv_heads, head_dim, qkv.dtype)
    if block_tables.ndim != 2 or len(block_tables) < batch or len(context_lens) != batch:
        raise ValueError(
            f"paged attention: block_tables {block_tables.shape} and context_lens {context_lens.shape} for "
            f"{batch} sequences"
        )
