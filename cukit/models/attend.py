"""Three ways to attend, one for each use of the forward pass. Each is called attend(layer_index, qkv, num_heads,
num_kv_heads) -> (T, H·D).
"""

from dataclasses import dataclass
from typing import Any

from ..autograd import Tensor
from ..ops import attention


@dataclass(slots=True)
class PackedCausal:
    """Whole sequences side by side, no cache: training and log-probabilities. cu_seqlens (B + 1,) int32."""

    cu_seqlens: Any

    def __call__(self, layer_index, qkv, num_heads, num_kv_heads):
        return attention(qkv, self.cu_seqlens, num_heads, num_kv_heads)


@dataclass(slots=True)
class PagedPrefill:
    """New tokens of several sequences, after what the cache already holds of each.

    kv: (k_cache, v_cache) a layer, each (num_blocks, block_size, K, D); block_tables (B, M) int32; cu_seqlens_q (B +
    1,) borders of the new tokens; context_lens (B,) keys of each sequence, the new ones included; slot_mapping (T,)
    int64 where to store them.
    """

    kv: list
    block_tables: Any
    cu_seqlens_q: Any
    context_lens: Any
    slot_mapping: Any

    def __call__(self, layer_index, qkv, num_heads, num_kv_heads):
        be, (k_cache, v_cache) = qkv.backend, self.kv[layer_index]
        be.store_kv(k_cache, v_cache, qkv.data, self.slot_mapping, num_heads, num_kv_heads)
        return Tensor(
            be.paged_prefill_attention(
                qkv.data, k_cache, v_cache, self.block_tables, self.cu_seqlens_q, self.context_lens, num_heads
            )
        )


@dataclass(slots=True)
class PagedDecode:
    """One new token a sequence. As PagedPrefill, with B = T, of contexts up to max_context_len."""

    kv: list
    block_tables: Any
    context_lens: Any
    slot_mapping: Any
    max_context_len: int

    def __call__(self, layer_index, qkv, num_heads, num_kv_heads):
        be, (k_cache, v_cache) = qkv.backend, self.kv[layer_index]
        be.store_kv(k_cache, v_cache, qkv.data, self.slot_mapping, num_heads, num_kv_heads)
        tables, lengths, longest = self.block_tables, self.context_lens, self.max_context_len
        return Tensor(be.paged_decode_attention(qkv.data, k_cache, v_cache, tables, lengths, num_heads, longest))
