"""The array functions that training and decoding call, each with its inputs, the bytes it must move at least and the
FLOPs it must do.

Bytes count every input that is read and every result once, and of a table only the rows that are used. FLOPs count
matrix products alone (of causal attention the visible half), not the work done on the way to memory. T tokens, B
sequences, C hidden, H query heads, K key heads, D head_dim, W = (H + 2K)·D, F intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..models.decoder import rope_tables
from .decoding_cases import paged_attention_cases, sampling_cases
from .weight_cases import linear_cases, optimizer_cases
from .workbench import BLOCK_SIZE, FLOAT, HEAD_ROWS, INT, Case, Workbench, visible_pairs

__all__ = ["Case", "Workbench", "all_cases", "visible_pairs"]


def all_cases(bench: Workbench) -> list[Case]:
    """Every case of a subject; none has made an array yet."""
    families = (
        embedding_cases,
        norm_cases,
        rope_cases,
        activation_cases,
        attention_cases,
        paged_attention_cases,
        loss_cases,
        sampling_cases,
        optimizer_cases,
        linear_cases,
    )
    return [case for family in families for case in family(bench)]


def embedding_cases(b: Workbench) -> Iterator[Case]:
    rows, columns, ids = b.config.vocab_size, b.config.hidden_size, b.ids(b.tokens)
    moved, shape = b.tokens * columns * b.size, f"{b.tokens} of {rows} x {columns}"
    used = len(np.unique(ids)) * columns
    yield Case(
        "embedding_forward",
        shape,
        lambda: (b.random(rows, columns), b.backend.array(ids)),
        moved + used * b.size + INT * b.tokens,
    )
    yield Case(
        "embedding_backward",
        shape,
        lambda: (b.zeros(rows, columns), b.random(b.tokens, columns), b.backend.array(ids)),
        moved + 2 * used * FLOAT + INT * b.tokens,
    )


def norm_cases(b: Workbench) -> Iterator[Case]:
    rows, columns, eps = b.tokens, b.config.hidden_size, b.config.rms_norm_eps
    whole, rstd, weight, shape = rows * columns * b.size, FLOAT * rows, FLOAT * columns, f"{rows} x {columns}"

    def forward(count):
        return *(b.random(rows, columns) for _ in range(count)), b.norm_weight(columns), eps

    def parts():
        return b.random(2, rows, columns), *forward(1)

    def backward(count):
        x, w = b.random(rows, columns), b.norm_weight(columns)
        return (
            b.zeros(columns),
            *(b.random(rows, columns) for _ in range(count)),
            x,
            w,
            b.backend.rms_norm_forward(x, w, eps)[1],
        )

    yield Case("rms_norm_forward", shape, lambda: forward(1), 2 * whole + rstd + weight)
    yield Case("rms_norm_backward", shape, lambda: backward(1), 3 * whole + rstd + 3 * weight)
    yield Case("add_rms_norm_forward", shape, lambda: forward(2), 4 * whole + rstd + weight)
    yield Case("sum_add_rms_norm_forward", f"2 of {shape}", parts, 5 * whole + rstd + weight)
    yield Case("add_rms_norm_backward", shape, lambda: backward(2), 4 * whole + rstd + 3 * weight)


def rope_cases(b: Workbench) -> Iterator[Case]:
    config, heads = b.config, (b.heads, b.kv_heads)
    longest = min(int(b.lengths.max()), config.max_position_embeddings)
    positions = np.concatenate([np.arange(length, dtype=np.int32) % longest for length in b.lengths])
    whole, normed = b.tokens * b.width * b.size, b.tokens * (b.heads + b.kv_heads) * config.qk_norm
    rstd, weights, tables = FLOAT * normed, 2 * FLOAT * b.dim * config.qk_norm, FLOAT * longest * b.dim
    shape = f"{b.tokens} x ({b.heads} + 2 x {b.kv_heads}) x {b.dim}" + ("" if config.qk_norm else ", no norm")

    def forward():
        cos, sin = (table[:longest] for table in rope_tables(config, b.backend, b.dtype))
        norms = [b.norm_weight(b.dim) if config.qk_norm else None for _ in range(2)]
        return b.random(b.tokens, b.width), *norms, cos, sin, b.backend.array(positions), *heads, config.rms_norm_eps

    def backward():
        qkv, q_weight, k_weight, cos, sin, places, *_ = given = forward()
        rstd = b.backend.qk_norm_rope_forward(*given)[1]
        gradients = [b.zeros(b.dim) if config.qk_norm else None for _ in range(2)]
        return *gradients, b.random(b.tokens, b.width), qkv, q_weight, k_weight, rstd, cos, sin, places, *heads

    def store():
        blocks = -(-b.tokens // BLOCK_SIZE)
        caches = [b.random(blocks, BLOCK_SIZE, b.kv_heads, b.dim) for _ in range(2)]
        return *caches, b.backend.array(np.arange(b.tokens, dtype=np.int64)), *forward()

    always = tables + INT * b.tokens + rstd
    yield Case("qk_norm_rope_forward", shape, forward, 2 * whole + always + weights)
    yield Case("qk_norm_rope_store", shape, store, 2 * whole + always - rstd + weights + 8 * b.tokens)
    # the norm's gradient reads q and k again
    yield Case("qk_norm_rope_backward", shape, backward, 2 * whole + normed * b.dim * b.size + always + 3 * weights)


def activation_cases(b: Workbench) -> Iterator[Case]:
    inner = b.config.intermediate_size
    whole, shape = b.tokens * inner * b.size, f"{b.tokens} x {inner}"
    yield Case("silu_mul_forward", shape, lambda: (b.random(b.tokens, 2 * inner),), 3 * whole)
    backward = lambda: (b.random(b.tokens, inner), b.random(b.tokens, 2 * inner))  # noqa: E731
    yield Case("silu_mul_backward", shape, backward, 5 * whole)
    yield Case("silu_mul_backward_remade", shape, backward, 6 * whole)


def attention_cases(b: Workbench) -> Iterator[Case]:
    whole, output = b.tokens * b.width * b.size, b.tokens * b.heads * b.dim * b.size
    lse, heads = FLOAT * b.tokens * b.heads, (b.heads, b.kv_heads)
    for lengths, kind in (
        (b.lengths, f"about {b.tokens // b.sequences} each"),
        (b.mixed_lengths, f"mixed, to {b.mixed_lengths.max()}"),
    ):
        borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        shape = f"{b.sequences} sequences, {b.tokens} tokens, {kind}; heads {b.heads}/{b.kv_heads} x {b.dim}"
        product = 2 * b.heads * b.dim * visible_pairs(lengths)

        def forward(borders=borders):
            return b.random(b.tokens, b.width), b.backend.array(borders), *heads

        def backward(borders=borders):
            qkv, cu_seqlens, *_ = given = forward(borders)
            return b.random(b.tokens, b.heads * b.dim), qkv, *b.backend.attention_forward(*given), cu_seqlens, *heads

        yield Case("attention_forward", shape, forward, whole + output + lse, 2 * product)
        # scores again, and the gradients of P, v, q and k
        yield Case("attention_backward", shape, backward, 2 * whole + 2 * output + lse, 5 * product)


def loss_cases(b: Workbench) -> Iterator[Case]:
    rows, vocabulary = min(b.tokens, HEAD_ROWS), b.config.vocab_size
    logits, shape = rows * vocabulary * b.size, f"{rows} x {vocabulary}"

    def forward():
        return b.random(rows, vocabulary, scale=2.0), b.backend.array(b.ids(rows)), 1.0, vocabulary

    def backward():
        logits, targets, *_ = given = forward()
        _, entropy, lse = b.backend.token_logprobs_forward(*given)
        return logits, targets, lse, entropy, b.random(rows, dtype=b.statistics), None, 1.0, vocabulary

    yield Case("token_logprobs_forward", shape, forward, logits + rows * (INT + 3 * FLOAT))
    yield Case("token_logprobs_backward", shape, backward, 2 * logits + rows * (INT + 2 * FLOAT))

    def columns(count):
        return [b.random(b.tokens, dtype=b.statistics, scale=0.1) for _ in range(count)]

    clip, ppo, shape = (None, "clip", 0.2, 0.2, None, 0.0, False), (0.2, 0.2, None, 0.1, 0.2), f"{b.tokens} tokens"
    yield Case("policy_loss_forward", shape, lambda: (*columns(2), None, *columns(2), *clip), 5 * FLOAT * b.tokens)
    yield Case("ppo_loss_forward", shape, lambda: (*columns(5), None, *columns(3), *ppo), 11 * FLOAT * b.tokens)
    tokens, hidden, weight = b.tokens, b.config.hidden_size, b.random(1, b.config.hidden_size, dtype=b.statistics)
    whole, shape = tokens * hidden * b.size, f"{tokens} x {hidden}"
    given = b.zeros(1, hidden), b.random(tokens, dtype=b.statistics)
    yield Case("score_forward", shape, lambda: (b.random(tokens, hidden), weight), whole)
    yield Case("score_backward", shape, lambda: (*given, b.random(tokens, hidden), weight), 2 * whole)
