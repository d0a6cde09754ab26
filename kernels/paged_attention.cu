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
#include "attention.cuh"
#include "e4m3.cuh"

#ifdef CACHE_E4M3
using Cached = E4m3;
#else
using Cached = SCALAR;
#endif

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

// staging (2, n, block_elements) = the blocks `blocks` (n) int64 of both caches, or the reverse. Grid (vectors / 256,
// n, 2), one thread an 8-byte vector.
extern "C" __global__ void __launch_bounds__(256)
gather_blocks(SCALAR* staging, const SCALAR* k_cache, const SCALAR* v_cache, const long long* blocks,
              long long block_elements) {
    constexpr int WIDTH = 8 / sizeof(SCALAR);
    const long long at = (blockIdx.x * 256ll + threadIdx.x) * WIDTH;
    if (at >= block_elements) return;
    const SCALAR* cache = blockIdx.z ? v_cache : k_cache;
    store_vec(staging + ((long long)blockIdx.z * gridDim.y + blockIdx.y) * block_elements + at,
              load_vec<WIDTH>(cache + blocks[blockIdx.y] * block_elements + at));
}

extern "C" __global__ void __launch_bounds__(256)
scatter_blocks(SCALAR* k_cache, SCALAR* v_cache, const SCALAR* staging, const long long* blocks,
               long long block_elements) {
    constexpr int WIDTH = 8 / sizeof(SCALAR);
    const long long at = (blockIdx.x * 256ll + threadIdx.x) * WIDTH;
    if (at >= block_elements) return;
    SCALAR* cache = blockIdx.z ? v_cache : k_cache;
    store_vec(cache + blocks[blockIdx.y] * block_elements + at,
              load_vec<WIDTH>(staging + ((long long)blockIdx.z * gridDim.y + blockIdx.y) * block_elements + at));
}

using CachedRows = PagedRows<Cached>;

__device__ __forceinline__ CachedRows paged_rows(const void* cache, const int* block_tables, int sequence,
                                                 int max_blocks, int block_size, int kv_head, int num_kv_heads) {
    return {reinterpret_cast<const Cached*>(cache) + kv_head * HEAD_DIM,
            block_tables + (long long)sequence * max_blocks, (unsigned)block_size, num_kv_heads * HEAD_DIM};
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
// maximum and sum. Grid (chunks, K * head_tiles, B), one warp a block: up to 16 query heads of one kv head. Chunks
// beyond the context are left unwritten. Where there is one chunk at the most, this writes o (B, H * D) as well, and
// paged_decode_merge is not needed.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
paged_decode_chunks(SCALAR* o, float* partial_out, float* partial_stats, const SCALAR* qkv, const void* k_cache,
                    const void* v_cache, const int* block_tables, const int* context_lens, int num_heads,
                    int num_kv_heads, int block_size, int max_blocks, float scale) {
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
    if (context > 0)
        attend_chunk(partial_out + at * HEAD_DIM, reinterpret_cast<float2*>(partial_stats) + at, chunks,
                     qkv + ((long long)sequence * (num_heads + 2 * num_kv_heads) + head) * HEAD_DIM, heads, keys,
                     values, chunk * CHUNK_KEYS, min(context, (chunk + 1) * CHUNK_KEYS), scale);
    if (chunks > 1) return;
    __syncwarp();  // the warp reads what its other threads have written
    for (int i = threadIdx.x; i < heads * HEAD_DIM; i += CHUNK_THREADS)
        o[row * HEAD_DIM + i] =
            merged_element(partial_out, partial_stats, row + i / HEAD_DIM, i % HEAD_DIM, context, chunks);
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
