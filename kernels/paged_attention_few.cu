// Decoding over a paged KV cache where blocks of one warp would leave the card idle: several warps a block, the same
// bits.
// specialise: SCALAR=bf16,f16 HEAD_DIM=64,128,…
// specialise: SCALAR=bf16,f16 HEAD_DIM=128,… CACHE_E4M3=1
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "paged.cuh"

// What a launcher must know: threads a block, bytes of dynamic shared memory.
extern "C" __constant__ int sharing_geometry[2] = {SHARING_THREADS, SHARING_SHARED<Cached>};

// See decode_chunk in paged.cuh. A launcher uses it up to two blocks a multiprocessor, hence the 2: registers enough.
extern "C" __global__ void __launch_bounds__(SHARING_THREADS, 2)
paged_decode_chunks_few(SCALAR* o, float* partial_out, float* partial_stats, const SCALAR* qkv, void* k_cache,
                        void* v_cache, const int* block_tables, const int* context_lens, const float* q_weight,
                        const float* k_weight, const float* cos, const float* sin, const int* positions,
                        const long long* slots, int group, int num_kv_heads, int block_size, int max_blocks,
                        float scale, float eps) {
    const Turn turn{q_weight, k_weight, cos, sin, positions, slots, eps};
    decode_chunk<SHARING_THREADS>(o, partial_out, partial_stats, qkv, k_cache, v_cache, block_tables, context_lens,
                                  turn, group, num_kv_heads, block_size, max_blocks,
                                  [&](auto& result, auto& block) { attend_chunk_together(result, block, scale); });
}
