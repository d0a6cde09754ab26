"""The array functions of generation, as cases of `bench kernels`: attention over the paged cache, and sampling."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..models.decoder import rope_tables
from .workbench import BLOCK_SIZE, FLOAT, INT, Case, Workbench, visible_pairs


def paged_cache(b: Workbench, contexts):
    """(k_cache, v_cache, block_tables) that hold contexts keys, the blocks in random order."""
    counts = -(-np.asarray(contexts) // BLOCK_SIZE)
    order = b.generator.permutation(int(counts.sum())).astype(np.int32)
    tables = np.zeros((len(counts), counts.max()), np.int32)
    tables[np.arange(counts.max()) < counts[:, None]] = order
    caches = [b.random(len(order), BLOCK_SIZE, b.kv_heads, b.dim) for _ in range(2)]
    return *caches, b.backend.array(tables)


def paged_attention_cases(b: Workbench) -> Iterator[Case]:
    key, query = 2 * b.kv_heads * b.dim * b.size, b.heads * b.dim * b.size  # bytes a token
    product = 2 * b.heads * b.dim  # FLOPs a pair
    borders = np.concatenate([[0], np.cumsum(b.lengths)]).astype(np.int32)
    for cached in (0, b.context):
        contexts = b.lengths + np.int32(cached)

        def prefill(contexts=contexts):
            return (
                b.random(b.tokens, b.width),
                *paged_cache(b, contexts),
                b.backend.array(borders),
                b.backend.array(contexts),
                b.heads,
            )

        blocks = int((-(-contexts // BLOCK_SIZE)).sum())
        yield Case(
            "paged_prefill_attention",
            f"{b.sequences} sequences, {b.tokens} new tokens after {cached} cached; heads "
            f"{b.heads}/{b.kv_heads} x {b.dim}",
            prefill,
            2 * b.tokens * query + int(contexts.sum()) * key + INT * blocks,
            2 * product * visible_pairs(b.lengths, cached),
        )
    contexts = np.full(b.batch, b.context, np.int32)
    blocks = b.batch * -(-b.context // BLOCK_SIZE)
    yield Case(
        "paged_decode_attention",
        f"{b.batch} sequences x {b.context} keys; heads {b.heads}/{b.kv_heads} x {b.dim}",
        lambda: (
            b.random(b.batch, b.width),
            *paged_cache(b, contexts),
            b.backend.array(contexts),
            b.heads,
            b.context,
        ),
        b.batch * (2 * query + b.context * key + INT) + INT * blocks,
        2 * product * b.batch * b.context,
    )
    # all rows at one position; the newest key and value are read and written
    beside = FLOAT * b.dim * (1 + 2 * b.config.qk_norm) + b.batch * (key + INT + 8)
    yield Case(
        "rope_paged_decode_attention",
        f"{b.batch} sequences x {b.context} keys; heads {b.heads}/{b.kv_heads} x {b.dim}",
        lambda: _newest(b, contexts),
        b.batch * (2 * query + b.context * key + INT) + INT * blocks + beside,
        2 * product * b.batch * b.context,
    )
    for rows, together in (
        (b.tokens, BLOCK_SIZE),
        (b.batch, 1),
    ):  # a prompt fills whole blocks, a decode step one slot of each row's block
        yield Case(
            "store_kv",
            f"{rows} rows x {b.kv_heads} x {b.dim}",
            lambda rows=rows, together=together: _store(b, rows, together),
            rows * (2 * key + 8),
        )


def _newest(b: Workbench, contexts) -> tuple:
    *caches, tables = paged_cache(b, contexts)
    index, offset = divmod(b.context - 1, BLOCK_SIZE)
    slots = b.backend.to_numpy(tables)[:, index].astype(np.int64) * BLOCK_SIZE + offset
    angles = rope_tables(b.config, b.backend, b.dtype)
    position = min(b.context, len(angles[0])) - 1
    norms = [b.norm_weight(b.dim) if b.config.qk_norm else None for _ in range(2)]
    turn = *norms, *angles, b.backend.array(np.full(b.batch, position, np.int32))
    given = *caches, b.backend.array(slots), b.random(b.batch, b.width), *turn, tables, b.backend.array(contexts)
    return *given, b.heads, b.kv_heads, b.config.rms_norm_eps, b.context


def _store(b: Workbench, rows: int, together: int) -> tuple:
    blocks = b.generator.permutation(-(-rows // together))
    slots = (blocks[:, None] * BLOCK_SIZE + np.arange(together)).reshape(-1)[:rows].astype(np.int64)
    caches = [b.random(len(blocks), BLOCK_SIZE, b.kv_heads, b.dim) for _ in range(2)]
    return *caches, b.random(rows, b.width), b.backend.array(slots), b.heads, b.kv_heads


def sampling_cases(b: Workbench) -> Iterator[Case]:
    vocabulary = b.config.vocab_size
    for top_k, top_p, kind in ((0, 1.0, "plain"), (0, 0.9, "top-p 0.9"), (50, 0.9, "top-k 50, top-p 0.9")):

        def arguments(top_k=top_k, top_p=top_p):
            constant = ((1.0, np.float32), (top_k, np.int32), (top_p, np.float32), (0.0, np.float32))
            settings = [b.backend.array(np.full(b.batch, value, kind)) for value, kind in constant]
            seeds, positions = np.arange(b.batch, dtype=np.uint64), np.full(b.batch, b.context, np.int64)
            return (
                b.random(b.batch, vocabulary, scale=2.0),
                *settings,
                b.backend.array(seeds),
                b.backend.array(positions),
                vocabulary,
            )

        # temperature, top_k, top_p, min_p, seed, position in; token and log-prob out
        yield Case(
            "sample",
            f"{b.batch} x {vocabulary}, {kind}",
            arguments,
            b.batch * (vocabulary * b.size + 3 * FLOAT + INT + 16 + INT + FLOAT),
        )
