// What the kernels over a paged KV cache share: where its rows are, and a step of decoding.
#pragma once

#include "attention.cuh"
#include "e4m3.cuh"

#ifdef CACHE_E4M3
using Cached = E4m3;
#else
using Cached = SCALAR;
#endif

using CachedRows = PagedRows<Cached>;

__device__ __forceinline__ CachedRows paged_rows(const void* cache, const int* block_tables, int sequence,
                                                 int max_blocks, int block_size, int kv_head, int num_kv_heads) {
    return {reinterpret_cast<const Cached*>(cache) + kv_head * HEAD_DIM,
            block_tables + (long long)sequence * max_blocks, (unsigned)block_size, num_kv_heads * HEAD_DIM};
}

// Element d of a row of o: its chunks merged from left to right; context 0 gives 0. row = sequence * H + head.
__device__ __forceinline__ SCALAR merged_element(const float* partial_out, const float* partial_stats, long long row,
                                                 int d, int context, int chunks) {
    const float2* stats = reinterpret_cast<const float2*>(partial_stats) + row * chunks;
    float out = 0.f, maximum = -INFINITY, total = 0.f;
    for (int chunk = 0; chunk * CHUNK_KEYS < context; ++chunk) {
        float left, right;
        merge_totals(maximum, total, stats[chunk].x, stats[chunk].y, left, right);
        out = merge_value(out, partial_out[(row * chunks + chunk) * HEAD_DIM + d], left, right);
    }
    return from_float<SCALAR>(__fmul_rn(out, reciprocal_total(total)));
}

// One query a sequence over one chunk of 256 keys: partial_out (B, H, chunks, D), partial_stats (B, H, chunks, 2) =
// maximum and sum. Grid (chunks, K * head_tiles, B): a block has up to 16 query heads of one kv head, which
// attend(result, q, heads, keys, values, first, end) reduces. Chunks beyond the context are left unwritten. Where there
// is one chunk at the most, this writes o (B, H * D) instead; context 0 gives 0 there.
template <class Attend>
__device__ __forceinline__ void decode_chunk(SCALAR* o, float* partial_out, float* partial_stats, const SCALAR* qkv,
                                             const void* k_cache, const void* v_cache, const int* block_tables,
                                             const int* context_lens, int num_heads, int num_kv_heads, int block_size,
                                             int max_blocks, Attend attend) {
    const int chunk = blockIdx.x, chunks = gridDim.x, sequence = blockIdx.z, context = context_lens[sequence];
    if (chunk * CHUNK_KEYS >= context && chunks > 1) return;
    const int group = num_heads / num_kv_heads, head_tiles = (group + 15) / 16;
    const int kv_head = blockIdx.y / head_tiles, first_head = blockIdx.y % head_tiles * 16;
    const int head = kv_head * group + first_head;
    const CachedRows keys =
        paged_rows(k_cache, block_tables, sequence, max_blocks, block_size, kv_head, num_kv_heads);
    const CachedRows values =
        paged_rows(v_cache, block_tables, sequence, max_blocks, block_size, kv_head, num_kv_heads);
    const int heads = min(16, group - first_head);
    const long long row = (long long)sequence * num_heads + head, at = row * chunks + chunk;
    if (context == 0) {  // then there is one chunk
        zero_rows(o + row * HEAD_DIM, HEAD_DIM, 0, heads, heads);
        return;
    }
    const ChunkResult result{partial_out + at * HEAD_DIM, reinterpret_cast<float2*>(partial_stats) + at, chunks,
                             chunks > 1 ? nullptr : o + row * HEAD_DIM};
    attend(result, qkv + ((long long)sequence * (num_heads + 2 * num_kv_heads) + head) * HEAD_DIM, heads, keys, values,
           chunk * CHUNK_KEYS, min(context, (chunk + 1) * CHUNK_KEYS));
}
