"""Causal attention of packed sequences, for training and log-probabilities."""

from ..autograd import Tensor, record


def attention(qkv: Tensor, cu_seqlens, num_heads: int, num_kv_heads: int) -> Tensor:
    """o = softmax(q kᵀ / √D, causal) v within each sequence; query head h uses key head h·K/H.

    qkv (T, (H + 2K)·D), cu_seqlens (B + 1,) int32 from 0 to T -> (T, H·D). Saves qkv, o and the log-sum-exp (T, H).
    """
    be, saved = qkv.backend, qkv.saved
    o, lse = be.attention_forward(qkv.data, cu_seqlens, num_heads, num_kv_heads)

    def rule(do):
        return (be.attention_backward(do, saved.array(), o, lse, cu_seqlens, num_heads, num_kv_heads),)

    return record(o, (qkv,), rule)
