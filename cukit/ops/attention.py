"""Causal attention of packed sequences, for training and log-probabilities."""

from ..autograd import Tensor, record


def attention(qkv: Tensor, cu_seqlens, num_heads: int, num_kv_heads: int, prefixes=None) -> Tensor:
    """o = softmax(q kᵀ / √D, causal) v within each sequence; query head h uses key head h·K/H.

    qkv (T, (H + 2K)·D), cu_seqlens (B + 1,) int32 from 0 to T -> (T, H·D). Saves qkv, o and the log-sum-exp (T, H).

    prefixes (B, 3) int32: sequences share the rows of a prefix, whose keys they see before their own. A row for each
    sequence: the first row of its prefix, the number of the prefix's rows (0: it has none), and one past the last row
    whose queries see the sequence's keys. A prefix is a sequence without a prefix; those that see it follow it at once,
    and its third number is the end of the last of them. For every other sequence that is its own end.
    """
    be, saved = qkv.backend, qkv.saved
    o, lse = be.attention_forward(qkv.data, cu_seqlens, num_heads, num_kv_heads, prefixes)

    def rule(do):
        return (be.attention_backward(do, saved.array(), o, lse, cu_seqlens, num_heads, num_kv_heads, prefixes),)

    return record(o, (qkv,), rule)
