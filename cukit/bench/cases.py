"""The array functions that training and decoding call, each with its inputs, the bytes it must move at least and the
FLOPs it must do.

Bytes count every input that is read and every result once, and of a table only the rows that are used. FLOPs count
matrix products alone (of causal attention the visible half), not the work done on the way to memory. T tokens, B
sequences, C hidden, H query heads, K key heads, D head_dim, W = (H + 2K)·D, F intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..backend.states import BLOCK
from ..models.decoder import rope_tables
from ..models.store import PIECES, padded_size
from .measure import random_array
from .subject import Subject

BLOCK_SIZE = 16  # EngineConfig.block_size
DECODE_ROWS = (1, 8, 64, 256)
HEAD_ROWS = 4096  # rows of logits that training holds at once: chunk_rows of ops.lm_head_logprobs
INT, FLOAT = 4, 4  # bytes of int32 and of float32 statistics


@dataclass(frozen=True)
class Case:
    """One array function of the backend at one shape."""

    name: str
    shape: str
    arguments: Callable[[], tuple]  # of a call; new arrays each time
    bytes: int
    flops: int = 0
    note: str = ""


class Workbench:
    """The sizes of a subject at one token count, and arrays for it."""

    def __init__(self, subject: Subject, tokens: int, sequences: int, context: int, batch: int, seed: int):
        self.backend, self.config, self.dtype = subject.backend, subject.config, subject.dtype
        self.statistics = self.backend.accumulator(self.dtype)
        self.size = self.dtype.itemsize
        self.tokens, self.sequences, self.context, self.batch = tokens, sequences, context, batch
        self.heads, self.kv_heads, self.dim = (
            self.config.num_attention_heads,
            self.config.num_key_value_heads,
            self.config.head_dim,
        )
        self.width = (self.heads + 2 * self.kv_heads) * self.dim
        self.generator = np.random.default_rng(seed)
        self.lengths = np.diff(np.arange(sequences + 1) * tokens // sequences).astype(np.int32)
        cuts = 1 + self.generator.choice(tokens - 1, sequences - 1, replace=False) if sequences > 1 else []
        self.mixed_lengths = np.diff(np.concatenate([[0], np.sort(cuts), [tokens]])).astype(np.int32)

    def random(self, *shape: int, scale: float = 1.0, dtype=None):
        return random_array(self.backend, self.generator, shape, self.dtype if dtype is None else dtype, scale)

    def zeros(self, *shape: int):
        """A buffer for gradients or moments."""
        return self.backend.zeros(shape, self.statistics)

    def weight(self, out_features: int, in_features: int):
        return self.random(out_features, in_features, scale=in_features**-0.5)

    def norm_weight(self, columns: int):
        return self.random(columns, dtype=self.statistics)

    def ids(self, count: int) -> np.ndarray:
        return self.generator.integers(0, self.config.vocab_size, count).astype(np.int32)

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """Weight -> (out, in), as models/decoder.py fuses them."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return {
            "qkv_proj": (self.width, hidden),
            "o_proj": (hidden, self.heads * self.dim),
            "gate_up_proj": (2 * inner, hidden),
            "down_proj": (hidden, inner),
            "lm_head": (self.config.vocab_size, hidden),
        }


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

    always = tables + INT * b.tokens + rstd
    yield Case("qk_norm_rope_forward", shape, forward, 2 * whole + always + weights)
    # the norm's gradient reads q and k again
    yield Case("qk_norm_rope_backward", shape, backward, 2 * whole + normed * b.dim * b.size + always + 3 * weights)


def activation_cases(b: Workbench) -> Iterator[Case]:
    inner = b.config.intermediate_size
    whole, shape = b.tokens * inner * b.size, f"{b.tokens} x {inner}"
    yield Case("silu_mul_forward", shape, lambda: (b.random(b.tokens, 2 * inner),), 3 * whole)
    yield Case(
        "silu_mul_backward", shape, lambda: (b.random(b.tokens, inner), b.random(b.tokens, 2 * inner)), 5 * whole
    )


def visible_pairs(lengths, cached: int = 0) -> int:
    """(query, key) pairs that causal attention reads: query i of a sequence sees the cached keys and i + 1 new ones."""
    lengths = np.asarray(lengths, np.int64)
    return int((lengths * cached + lengths * (lengths + 1) // 2).sum())


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


def _store(b: Workbench, rows: int, together: int) -> tuple:
    blocks = b.generator.permutation(-(-rows // together))
    slots = (blocks[:, None] * BLOCK_SIZE + np.arange(together)).reshape(-1)[:rows].astype(np.int64)
    caches = [b.random(len(blocks), BLOCK_SIZE, b.kv_heads, b.dim) for _ in range(2)]
    return *caches, b.random(rows, b.width), b.backend.array(slots), b.heads, b.kv_heads


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


def optimizer_cases(b: Workbench) -> Iterator[Case]:
    weights, layers = b.weights, b.config.num_hidden_layers
    # bytes an element of a parameter and its master: both read and written if the master is a remainder
    own = {"bfloat16": 8, "float16": 10}.get(b.dtype.name, 2 * FLOAT)
    for name in ("gate_up_proj", "lm_head"):
        outs, ins = weights[name]

        def arguments(outs=outs, ins=ins, moments=None):
            param, kind = b.random(outs, ins), {"bfloat16": "int16"}.get(b.dtype.name, b.statistics)
            master = param if b.dtype == b.statistics else b.backend.zeros((outs, ins), kind)
            moments = [b.zeros(outs, ins) for _ in range(2)] if moments is None else moments(outs * ins)
            grad = b.random(outs, ins, dtype=b.statistics)
            return (master, *moments, grad, param, 1e-6, 0.9, 0.999, 1e-8, 0.0, 1, 1.0)

        def lean(dtype, *sizes):
            return lambda count: [b.backend.zeros((-(-count // size),), dtype) for size in sizes]

        shape, rest = f"{name} {outs} x {ins}", FLOAT + own  # the gradient is read
        yield Case("adamw_step", shape, arguments, outs * ins * (4 * FLOAT + rest))
        half, codes = lean("bfloat16", 1, 1), lean("uint8", 1, 1, BLOCK, BLOCK)
        half, codes = (partial(arguments, moments=moments) for moments in (half, codes))
        yield Case("adamw_step", f"{shape}, moments in bfloat16", half, outs * ins * (8 + rest))
        yield Case("adamw_step_blocks", shape, codes, outs * ins * (4 + rest))
    sizes = {name: outs * ins for name, (outs, ins) in weights.items()}
    head = sizes.pop("lm_head")
    buckets = [padded_size(sum(sizes.values()))] * layers + [padded_size(head)] * (2 - b.config.tie_word_embeddings)
    yield Case(
        "sums_of_squares",
        f"{sum(buckets) / 1e6:.1f} M in {len(buckets)} buckets",
        lambda: ([b.random(size, dtype=b.statistics) for size in buckets], PIECES),
        FLOAT * sum(buckets),
    )


def linear_cases(b: Workbench) -> Iterator[Case]:
    for name, (outs, ins) in b.weights.items():
        rows = min(b.tokens, HEAD_ROWS) if name == "lm_head" else b.tokens
        biased = b.config.attention_bias and name == "qkv_proj"

        def forward(rows, outs=outs, ins=ins, biased=biased):
            return b.random(rows, ins), b.weight(outs, ins), b.random(outs) if biased else None

        def moved(rows, outs=outs, ins=ins):
            return b.size * (rows * ins + outs * ins + rows * outs)

        for count in dict.fromkeys([rows, *DECODE_ROWS]):
            yield Case(
                "linear_forward",
                f"{name} {count} x {ins} -> {outs}",
                lambda count=count, forward=forward: forward(count),
                moved(count) + biased * outs * b.size,
                2 * count * ins * outs,
            )
        shape = f"{name} {rows} x {ins} -> {outs}"
        yield Case(
            "linear_backward_input",
            shape,
            lambda rows=rows, outs=outs, ins=ins: (b.random(rows, outs), b.weight(outs, ins)),
            moved(rows),
            2 * rows * ins * outs,
        )
        # dw, in float32, is read and written
        yield Case(
            "linear_backward_weight",
            shape,
            lambda rows=rows, outs=outs, ins=ins: (b.zeros(outs, ins), b.random(rows, outs), b.random(rows, ins)),
            b.size * rows * (ins + outs) + 2 * FLOAT * ins * outs,
            2 * rows * ins * outs,
        )
