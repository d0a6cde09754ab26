// Decoding over a paged KV cache where blocks of one warp would leave the card idle: several warps a block, the same
// bits.
// specialise: SCALAR=bf16,f16 HEAD_DIM=64,128,…
// specialise: SCALAR=bf16,f16 HEAD_DIM=128,… CACHE_E4M3=1
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "paged.cuh"

// What a launcher must know: threads a block, bytes of dynamic shared memory.
extern "C" __constant__ int sharing_geometry[2] = {SHARING_THREADS, SHARING_SHARED<Cached>};

// See decode_chunk in paged.cuh.
extern "C" __global__ void __launch_bounds__(SHARING_THREADS)
paged_decode_chunks_few(SCALAR* o, float* partial_out, float* partial_stats, const SCALAR* qkv, const void* k_cache,
                        const void* v_cache, const int* block_tables, const int* context_lens, int num_heads,
                        int num_kv_heads, int block_size, int max_blocks, float scale) {
    decode_chunk(o, partial_out, partial_stats, qkv, k_cache, v_cache, block_tables, context_lens, num_heads,
                 num_kv_heads, block_size, max_blocks, [&](auto... given) { attend_chunk_together(given..., scale); });
}
