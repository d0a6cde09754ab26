"""Three ways to attend, one for each use of the forward pass. Each is called attend(layer_index, qkv, turn) -> (T, H·D)
with qkv (T, (H + 2K)·D) as the projection gives it.
"""

from dataclasses import dataclass
from typing import Any

from ..autograd import Parameter, Tensor
from ..ops import attention, qk_norm_rope


@dataclass(slots=True)
class Turn:
    """What happens to a layer's q and k before attention: see ops.qk_norm_rope."""

    q_weight: Parameter | None
    k_weight: Parameter | None
    cos: Any
    sin: Any
    positions: Any
    num_heads: int
    num_kv_heads: int
    eps: float

    def __call__(self, qkv: Tensor) -> Tensor:
        given = self.q_weight, self.k_weight, self.cos, self.sin, self.positions
        return qk_norm_rope(qkv, *given, self.num_heads, self.num_kv_heads, self.eps)

    @property
    def arrays(self) -> tuple:
        """What a backend function takes after qkv."""
        weights = [None if weight is None else weight.data for weight in (self.q_weight, self.k_weight)]
        return *weights, self.cos, self.sin, self.positions

    def into(self, k_cache, v_cache, slot_mapping, qkv: Tensor):
        """Keys and values go to their slots of the caches. Returns an array like qkv that has the queries."""
        given, sizes = (k_cache, v_cache, slot_mapping, qkv.data), (self.num_heads, self.num_kv_heads, self.eps)
        return qkv.backend.qk_norm_rope_store(*given, *self.arrays, *sizes)


@dataclass(slots=True)
class PackedCausal:
    """Whole sequences side by side, no cache: training and log-probabilities. cu_seqlens (B + 1,) int32; prefixes
    (B, 3) int32 where sequences share the rows of a prefix: see ops.attention.
    """

    cu_seqlens: Any
    prefixes: Any = None

    def __call__(self, layer_index, qkv, turn):
        return attention(turn(qkv), self.cu_seqlens, turn.num_heads, turn.num_kv_heads, self.prefixes)


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

    def __call__(self, layer_index, qkv, turn):
        caches = self.kv[layer_index]
        q, given = turn.into(*caches, self.slot_mapping, qkv), (self.block_tables, self.cu_seqlens_q, self.context_lens)
        return Tensor(qkv.backend.paged_prefill_attention(q, *caches, *given, turn.num_heads))


@dataclass(slots=True)
class PagedDecode:
    """One new token a sequence. As PagedPrefill, with B = T, of contexts up to max_context_len."""

    kv: list
    block_tables: Any
    context_lens: Any
    slot_mapping: Any
    max_context_len: int

    def __call__(self, layer_index, qkv, turn):
        given = *self.kv[layer_index], self.slot_mapping, qkv.data, *turn.arrays, self.block_tables, self.context_lens
        sizes = turn.num_heads, turn.num_kv_heads, turn.eps, self.max_context_len
        return Tensor(qkv.backend.rope_paged_decode_attention(*given, *sizes))
