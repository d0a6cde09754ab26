// Attention over a paged KV cache, by the functions that training uses (attention.cuh), so with the same bits.
// Caches (num_blocks, block_size, K, D); block_tables (B or more, M) int32 lists a sequence's blocks in order, and M
// may be more than it has; context_lens (B) int32 counts its keys, those of the new tokens included.
// specialise: SCALAR=bf16,f16,f32 HEAD_DIM=64,128,…
// With CACHE_E4M3 the caches hold E4m3 codes (e4m3.cuh), rounded when they are stored; attention computes with them in
// SCALAR, which has each exactly.
// specialise: SCALAR=bf16,f16,f32 HEAD_DIM=128,… CACHE_E4M3=1
// The block tables' own kernel needs neither:
// specialise:
// arch: sm_80 sm_89 sm_90a sm_100 sm_120

// block_tables (rows, width): [rows[i], columns[i]] = blocks[i] for count entries, each at most once. One thread an
// entry.
extern "C" __global__ void __launch_bounds__(256)
update_block_tables(int* block_tables, const int* rows, const int* columns, const int* blocks, int count, int width) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < count) block_tables[(long long)rows[i] * width + columns[i]] = blocks[i];
}

#ifdef HEAD_DIM
#include "paged.cuh"

__device__ __forceinline__ void store_cached(SCALAR* to, const Vec<SCALAR, 8 / sizeof(SCALAR)>& x) { store_vec(to, x); }

__device__ __forceinline__ void store_cached(E4m3* to, const Vec<SCALAR, 8 / sizeof(SCALAR)>& x) {
    Vec<E4m3, 8 / sizeof(SCALAR)> codes;
#pragma unroll
    for (int i = 0; i < 8 / (int)sizeof(SCALAR); ++i) codes[i] = from_float<E4m3>(to_float(x[i]));
    store_vec(to, codes);
}

// Keys and values of qkv (T, (H + 2K) * D) to the slots (T) int64 of the caches; slot -1 is skipped. One thread an
// 8-byte vector.
extern "C" __global__ void __launch_bounds__(256)
store_kv(void* k_cache, void* v_cache, const SCALAR* qkv, const long long* slot_mapping, int total_tokens,
         int num_heads, int num_kv_heads) {
    constexpr int WIDTH = 8 / sizeof(SCALAR);
    const int per_tensor = num_kv_heads * HEAD_DIM / WIDTH;
    const long long index = blockIdx.x * 256ll + threadIdx.x;
    const long long token = index / (2 * per_tensor);
    if (token >= total_tokens) return;
    const long long slot = slot_mapping[token];
    if (slot < 0) return;
    const int within = (int)(index - token * (2 * per_tensor));
    const int tensor = within / per_tensor, column = within % per_tensor * WIDTH;
    const SCALAR* from = qkv + token * (num_heads + 2 * num_kv_heads) * HEAD_DIM +
                         (num_heads + tensor * num_kv_heads) * HEAD_DIM + column;
    Cached* to = reinterpret_cast<Cached*>(tensor ? v_cache : k_cache) + slot * num_kv_heads * HEAD_DIM + column;
    store_cached(to, load_vec<WIDTH>(from));
}

// staging (caches, n, block_elements) = the blocks `blocks` (n) int64 of caches of cache_elements each, or the reverse.
// Grid (vectors / 256, n, caches), one thread an 8-byte vector.
extern "C" __global__ void __launch_bounds__(256)
gather_blocks(SCALAR* staging, const SCALAR* caches, const long long* blocks, long long block_elements,
              long long cache_elements) {
    constexpr int WIDTH = 8 / sizeof(SCALAR);
    const long long at = (blockIdx.x * 256ll + threadIdx.x) * WIDTH;
    if (at >= block_elements) return;
    store_vec(staging + ((long long)blockIdx.z * gridDim.y + blockIdx.y) * block_elements + at,
              load_vec<WIDTH>(caches + blockIdx.z * cache_elements + blocks[blockIdx.y] * block_elements + at));
}

extern "C" __global__ void __launch_bounds__(256)
scatter_blocks(SCALAR* caches, const SCALAR* staging, const long long* blocks, long long block_elements,
               long long cache_elements) {
    constexpr int WIDTH = 8 / sizeof(SCALAR);
    const long long at = (blockIdx.x * 256ll + threadIdx.x) * WIDTH;
    if (at >= block_elements) return;
    store_vec(caches + blockIdx.z * cache_elements + blocks[blockIdx.y] * block_elements + at,
              load_vec<WIDTH>(staging + ((long long)blockIdx.z * gridDim.y + blockIdx.y) * block_elements + at));
}

// o (T, H * D) of new tokens packed by cu_seqlens (B + 1), the last ones of their sequences. Block = QUERY_TILE queries
// of one head. Rows beyond cu_seqlens[B] give zeros.
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, BLOCKS_AN_SM)
paged_prefill(SCALAR* o, const SCALAR* qkv, const void* k_cache, const void* v_cache, const int* block_tables,
              const int* cu_seqlens, const int* context_lens, int total_tokens, int num_seqs, int num_heads,
              int num_kv_heads, int block_size, int max_blocks, float scale) {
    const int head = blockIdx.x % num_heads, kv_head = head / (num_heads / num_kv_heads);
    const Piece piece = find_piece(cu_seqlens, num_seqs, total_tokens, (gridDim.x - 1 - blockIdx.x) / num_heads,
                                   QUERY_TILE);
    if (piece.first >= piece.length) return;
    const int o_stride = num_heads * HEAD_DIM, qkv_stride = (num_heads + 2 * num_kv_heads) * HEAD_DIM;
    o += (long long)piece.start * o_stride + head * HEAD_DIM;
    if (piece.ghost) {
        zero_rows(o, o_stride, piece.first, QUERY_TILE, piece.length);
        return;
    }
    const CachedRows keys =
        paged_rows(k_cache, block_tables, piece.sequence, max_blocks, block_size, kv_head, num_kv_heads);
    const CachedRows values =
        paged_rows(v_cache, block_tables, piece.sequence, max_blocks, block_size, kv_head, num_kv_heads);
    const PackedRows q{qkv + (long long)piece.start * qkv_stride + head * HEAD_DIM, qkv_stride};
    attend_queries(o, o_stride, (float*)nullptr, 0, q, keys, values, piece.first, piece.length,
                   context_lens[piece.sequence] - piece.length, scale);
}

// One query a sequence over one chunk of 256 keys: see decode_chunk in paged.cuh. One warp a block.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
paged_decode_chunks(SCALAR* o, float* partial_out, float* partial_stats, const SCALAR* qkv, void* k_cache,
                    void* v_cache, const int* block_tables, const int* context_lens, const float* q_weight,
                    const float* k_weight, const float* cos, const float* sin, const int* positions,
                    const long long* slots, int group, int num_kv_heads, int block_size, int max_blocks,
                    float scale, float eps) {
    const Turn turn{q_weight, k_weight, cos, sin, positions, slots, eps};
    decode_chunk<CHUNK_THREADS>(o, partial_out, partial_stats, qkv, k_cache, v_cache, block_tables, context_lens, turn,
                                group, num_kv_heads, block_size, max_blocks,
                                [&](auto& result, auto& block) { attend_chunk(result, block, scale); });
}

// o (B, H * D) from several chunks. Grid (H, B), one thread an element of the row.
extern "C" __global__ void __launch_bounds__(256)
paged_decode_merge(SCALAR* o, const float* partial_out, const float* partial_stats, const int* context_lens,
                   int num_heads, int chunks) {
    if (threadIdx.x >= HEAD_DIM) return;
    const long long row = (long long)blockIdx.y * num_heads + blockIdx.x;
    o[row * HEAD_DIM + threadIdx.x] =
        merged_element(partial_out, partial_stats, row, threadIdx.x, context_lens[blockIdx.y], chunks);
}
#endif
