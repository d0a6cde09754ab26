"""Draw the next token of every sequence; the filters can also be called alone. Kernels: sampling.cu. The random words
are those of the NumPy shelf.
"""

from __future__ import annotations

import cupy as cp

from .constants import source_constant
from .device import empty
from .loader import load

THREADS = source_constant("sampling", "LOGITS_THREADS")
TOKEN_THREADS = 256


def sample(
    logits, temperature, top_k, top_p, min_p, seeds, positions, vocab_size,
    banned=None, repetition_penalty=None, seen=None,
):  # fmt: skip
    """Sample one token a row.

    logits (B, V) in the model's dtype; temperature (B) with 0 = greedy; top_k (B) with 0 = off; top_p (B) with 1 = off;
    min_p (B) with 0 = off; seeds (B) uint64; positions (B): where in its sequence the drawn token will stand. Ids from
    vocab_size on are neither drawn nor counted in the normaliser. banned (B, S) int32 or None: ids not to be drawn, -1
    = none. repetition_penalty (B) or None, with seen (B, V) bool: tokens that occurred. Returns tokens (B) int32 and
    logprobs (B) float32: log softmax(logits / temperature) of the token before penalty, bans and filters (temperature 1
    for greedy rows), the bits that token_logprobs_forward gives; NaN, with some id below vocab_size, for a row that
    holds NaN or +inf or no finite logit. Arrays of the kernel's own dtypes (float32, top_k int32, seeds uint64,
    positions int64) are read where they are: a CUDA graph can hold the call.
    """
    num_rows, stride = logits.shape
    tokens, logprobs = empty((num_rows,), cp.int32), empty((num_rows,), cp.float32)
    given = zip(
        (temperature, top_k, top_p, min_p, seeds, positions, banned, repetition_penalty, seen),
        (cp.float32, cp.int32, cp.float32, cp.float32, cp.uint64, cp.int64, cp.int32, cp.float32, cp.bool_),
        strict=True,
    )
    arrays = [None if x is None else cp.ascontiguousarray(x, dtype) for x, dtype in given]
    num_banned = 0 if banned is None else banned.shape[1]
    if repetition_penalty is not None and (seen is None or seen.shape != logits.shape):
        raise ValueError(
            f"repetition_penalty needs seen of the logits' shape {logits.shape}, got "
            f"{None if seen is None else seen.shape}"
        )
    load("sampling", logits.dtype).sample(
        num_rows, THREADS, tokens, logprobs, logits, *arrays, stride, vocab_size, num_banned
    )
    return tokens, logprobs


def newest_tokens(tokens, sources, drawn):
    """tokens[i] = drawn[sources[i]], in place, where sources[i] is not -1; all int32, tokens and sources (n)."""
    count = len(tokens)
    load("sampling").newest_tokens(-(-count // TOKEN_THREADS), TOKEN_THREADS, tokens, sources, drawn, count)


def filter_logits(scaled_logits, top_k, top_p, min_p):
    """Set filtered entries of scaled_logits (B, V) to -inf: top-k, then top-p of what is left, then min-p of what is
    left.

    top_k (B) int, 0 = off, ties with the k-th value are kept; top_p (B), 1 = off: a token stays while the probability
    of those above it is below top_p (so at least one does), tokens equal to the last one stay; min_p (B), 0 = off: a
    token stays if its probability is at least min_p times the largest. Scalars hold for every row. Returns a new array.
    """
    num_rows, num_ids = scaled_logits.shape
    kept = empty(scaled_logits.shape, scaled_logits.dtype)
    settings = [
        cp.ascontiguousarray(cp.broadcast_to(cp.asarray(value, dtype), (num_rows,)))
        for value, dtype in ((top_k, cp.int32), (top_p, cp.float32), (min_p, cp.float32))
    ]
    load("sampling", scaled_logits.dtype).filter_logits(num_rows, THREADS, kept, scaled_logits, *settings, num_ids)
    return kept
