// Attention on tensor cores (see attention.cuh): softmax, merge, and the loops over tiles. The layout of scores and
// results over threads is that of tiles_mma.cuh, whichever instructions multiply.
#pragma once

#include "attention_rows.cuh"
#include "tiles_mma.cuh"
#include "tiles_wgmma.cuh"

// The tiles of a block that owns a piece of queries or keys. Decoding uses WarpTiles always: it has few query rows.
#if __CUDA_ARCH_FEAT_SM90_ALL && (HEAD_DIM == 64 || HEAD_DIM == 128)
using BlockTiles = WarpgroupTiles;
#else
using BlockTiles = WarpTiles;
#endif

constexpr int KEY_TILE = WIDE ? 32 : 64;
constexpr int QUERY_WARPS = WIDE ? 2 : 4;
constexpr int QUERY_TILE = QUERY_WARPS * 16;
constexpr int STAGES = WIDE ? 1 : 2;
constexpr int ATTENTION_THREADS = QUERY_WARPS * WARP;
constexpr int BLOCKS_AN_SM = PADDED_DIM > 64 ? 2 : 3;  // what registers allow without a spill
constexpr int KEY_TILE_SIZE = BlockTiles::SIZE<KEY_TILE>, QUERY_TILE_SIZE = BlockTiles::SIZE<QUERY_TILE>;
constexpr int RUNNING_SIZE = WIDE ? QUERY_TILE * PADDED_DIM : 0;
constexpr int FORWARD_SHARED = (QUERY_TILE_SIZE + STAGES * 2 * KEY_TILE_SIZE) * sizeof(SCALAR) +
                               RUNNING_SIZE * sizeof(float) + 2 * KEY_TILE * sizeof(int);

template <int ROWS, class Source>
__device__ __forceinline__ void copy_block_rows(SCALAR* tile, const Source& source, int first, int end) {
    copy_rows<BlockTiles, ROWS, ATTENTION_THREADS, BlockTiles::UNROLL>(tile, source, first, end);
}

// Rows of two sources to two neighbouring tiles.
template <int ROWS, class Source>
__device__ __forceinline__ void copy_block_pair(SCALAR* tiles, const Source& first_source, const Source& second_source,
                                                int first, int end) {
    copy_block_rows<ROWS>(tiles, first_source, first, end);
    copy_block_rows<ROWS>(tiles + BlockTiles::SIZE<ROWS>, second_source, first, end);
}

// From here on tile number `tile` is there for the whole block, and every warp is done with the one before. With a
// single stage it is fetched only now.
template <class Fetch>
__device__ __forceinline__ void take_tile(Fetch& fetch, int tile) {
    if (STAGES == 1) {
        __syncthreads();
        fetch(tile);
    }
    copies_wait<0>();
    BlockTiles::share();
}

// ---- softmax over one chunk, and the merge ----

// Unnormalised attention of 16 rows over the part of a chunk seen so far, in 8 TILES columns; `total` is this thread's
// share of the row sum until close().
template <int TILES> struct ChunkColumns {
    float out[TILES][4];
    float maximum[2], total[2];

    __device__ __forceinline__ void clear() {
        ::clear(out);
        maximum[0] = maximum[1] = -INFINITY;
        total[0] = total[1] = 0.f;
    }

    __device__ __forceinline__ void close() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            total[r] = __fadd_rn(total[r], __shfl_xor_sync(FULL_MASK, total[r], 1));
            total[r] = __fadd_rn(total[r], __shfl_xor_sync(FULL_MASK, total[r], 2));
        }
    }
};

using Chunk = ChunkColumns<OUT_TILES>;
using Scores = float[KEY_TILE / 8][4];

// Turn products q k of the keys from first_key on into weights under the chunk's new maximum, nothing for those from
// limits[row] on, and rescale what the chunk holds already.
template <int TILES>
__device__ __forceinline__ void weigh_tile(ChunkColumns<TILES>& chunk, Scores& scores, int first_key,
                                           const int (&limits)[2], float scale) {
    if (first_key + KEY_TILE > min(limits[0], limits[1])) {
        for_each_value<KEY_TILE / 8>([&](int j, int e) {
            if (first_key + column_of(j, e) >= limits[e >> 1]) scores[j][e] = -INFINITY;
        });
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float highest = -INFINITY;
#pragma unroll
        for (int j = 0; j < KEY_TILE / 8; ++j)
            highest = fmaxf(highest, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 2));
        highest = fmaxf(__fmul_rn(highest, scale), chunk.maximum[r]);
        float base = finite_maximum(highest), factor = exp2_fast(__fsub_rn(chunk.maximum[r], base)), sum = 0.f;
        chunk.maximum[r] = highest;
        for_each_value_of_half<KEY_TILE / 8>(r, [&](int j, int e) {
            scores[j][e] = exp2_fast(__fmaf_rn(scores[j][e], scale, -base));
            sum = __fadd_rn(sum, scores[j][e]);
        });
        chunk.total[r] = __fmaf_rn(chunk.total[r], factor, sum);
        for_each_value_of_half<TILES>(r,
                                      [&](int j, int e) { chunk.out[j][e] = __fmul_rn(chunk.out[j][e], factor); });
    }
}

// The running result of 16 rows; where WIDE, out lies in shared memory (16 * PADDED_DIM floats a warp).
struct Running {
    float kept[WIDE ? 1 : OUT_TILES * 4];
    float* shared;
    float maximum[2], total[2];

    __device__ __forceinline__ float& at(int i) {
        if constexpr (WIDE) return shared[i * 32 + lane()];
        return kept[WIDE ? 0 : i];
    }

    __device__ __forceinline__ void clear(float* buffer) {
        shared = buffer;
#pragma unroll
        for (int i = 0; i < OUT_TILES * 4; ++i) at(i) = 0.f;
        maximum[0] = maximum[1] = -INFINITY;
        total[0] = total[1] = 0.f;
    }

    // Take in a finished chunk and clear it.
    __device__ __forceinline__ void merge(Chunk& chunk) {
        chunk.close();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float left, right;
            merge_totals(maximum[r], total[r], chunk.maximum[r], chunk.total[r], left, right);
            for_each_value_of_half<OUT_TILES>(r, [&](int j, int e) {
                at(j * 4 + e) = merge_value(at(j * 4 + e), chunk.out[j][e], left, right);
            });
        }
        chunk.clear();
    }
};

// ---- one block: QUERY_TILE queries of one head over all keys they see (training and prefill) ----

// Dynamic shared memory: a tile of queries, STAGES x (keys, values); where WIDE, the warps' running results; the slots
// of two tiles of paged keys. Query i (first <= i < count) of the sequence stands at position offset + i and sees the
// keys up to there. q.row(i), o + i * o_stride, lse + i * lse_stride (lse may be null).
template <class Keys>
__device__ __forceinline__ void attend_queries(SCALAR* o, int o_stride, float* lse, int lse_stride, const PackedRows& q,
                                               const Keys& keys, const Keys& values, int first, int count, int offset,
                                               float scale) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SCALAR *queries = reinterpret_cast<SCALAR*>(shared_bytes), *tiles = queries + QUERY_TILE_SIZE;
    const int first_row = first + warp_index() * 16;
    const int block_end = offset + min(first + QUERY_TILE, count);  // keys that any row of the block sees
    const int warp_end = BlockTiles::TOGETHER ? block_end : first_row < count ? offset + min(first_row + 16, count) : 0;

    int rows[2], limits[2];
    for (int r = 0; r < 2; ++r) {
        rows[r] = first_row + lane() / 4 + r * 8;
        limits[r] = rows[r] < count ? offset + rows[r] + 1 : 0;
    }

    float* running_tile = reinterpret_cast<float*>(tiles + STAGES * 2 * KEY_TILE_SIZE);
    int* slots = reinterpret_cast<int*>(running_tile + RUNNING_SIZE);
    Chunk chunk;
    Running running;
    chunk.clear();
    running.clear(running_tile + warp_index() * 16 * PADDED_DIM);
    BlockTiles::clear_padding<ATTENTION_THREADS>(queries, QUERY_TILE + STAGES * 2 * KEY_TILE);
    copy_block_rows<QUERY_TILE>(queries, q, first, count);

    const bool looks_up = Keys::PAGED && threadIdx.x < KEY_TILE;
    auto look_up = [&](int tile) {
        if constexpr (Keys::PAGED) {
            const int key = tile * KEY_TILE + threadIdx.x;
            return looks_up && key < block_end ? keys.slot(key) : 0;
        }
        return 0;
    };
    auto note = [&](int tile, int slot) {
        if (looks_up) slots[tile % 2 * KEY_TILE + threadIdx.x] = slot;
    };
    auto fetch = [&](int tile) {
        SCALAR* stage = tiles + tile % STAGES * 2 * KEY_TILE_SIZE;
        const int first_key = tile * KEY_TILE;
        if constexpr (Keys::PAGED) {
            const int* known = slots + tile % 2 * KEY_TILE;
            using Slots = SlotRows<typename Keys::Element>;
            copy_block_pair<KEY_TILE>(stage, Slots{keys.base, known, first_key, keys.stride},
                                      Slots{values.base, known, first_key, values.stride}, first_key, block_end);
        } else {
            copy_block_pair<KEY_TILE>(stage, keys, values, first_key, block_end);
        }
        copies_commit();
    };
    if (Keys::PAGED) {
        note(0, look_up(0));
        note(1, look_up(1));
        __syncthreads();
    }
    const int num_tiles = (block_end + KEY_TILE - 1) / KEY_TILE;
    if (STAGES == 2) fetch(0);
    for (int tile = 0; tile < num_tiles; ++tile) {
        take_tile(fetch, tile);
        const int first_key = tile * KEY_TILE;
        const SCALAR* stage = tiles + tile % STAGES * 2 * KEY_TILE_SIZE;
        Scores scores;
        const bool seen = BlockTiles::TOGETHER || first_key < warp_end;
        if (seen) BlockTiles::multiply_transposed(scores, queries, stage);
        if (STAGES == 2 && tile + 1 < num_tiles) fetch(tile + 1);  // the other stage: every warp is done with it
        const int next_slot = look_up(tile + 2);
        if (seen) {
            BlockTiles::finish<0>(scores);
            weigh_tile(chunk, scores, first_key, limits, scale);
            BlockTiles::multiply(chunk.out, scores, stage + KEY_TILE_SIZE);
            BlockTiles::finish<0>(chunk.out);
            if ((first_key + KEY_TILE) % CHUNK_KEYS == 0 || first_key + KEY_TILE >= warp_end) running.merge(chunk);
        }
        note(tile + 2, next_slot);
    }

    float factors[2];
    for (int r = 0; r < 2; ++r) {
        factors[r] = reciprocal_total(running.total[r]);
        if (lse != nullptr && rows[r] < count && (lane() & 3) == 0)
            lse[(long long)rows[r] * lse_stride] = natural_lse(running.maximum[r], running.total[r]);
    }
    __syncthreads();  // the tiles are free
    write_rows(queries, o + (long long)first_row * o_stride, o_stride, count - first_row, factors,
               [&](int j, int e) { return running.at(j * 4 + e); });
}
