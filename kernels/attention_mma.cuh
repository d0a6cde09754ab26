// Attention on tensor cores (see attention.cuh). A warp holds 16 query rows. Of a row's 4 threads, thread t holds the columns 8 j + 2 t and
// 8 j + 2 t + 1 of scores and results (see mma.cuh); each thread holds the rows lane / 4 and lane / 4 + 8.
#pragma once

#include "attention.cuh"

constexpr int PADDED_DIM = (HEAD_DIM + 15) / 16 * 16;  // the columns from HEAD_DIM on are zeros
constexpr bool WIDE = PADDED_DIM > 128;                // then registers and shared memory are short: small tiles, no second buffer
constexpr int KEY_TILE = WIDE ? 32 : 64;
constexpr int QUERY_WARPS = WIDE ? 2 : 4;
constexpr int QUERY_TILE = QUERY_WARPS * 16;
constexpr int STAGES = WIDE ? 1 : 2;
constexpr int ATTENTION_THREADS = QUERY_WARPS * 32;
constexpr int BLOCKS_AN_SM = PADDED_DIM > 64 ? 2 : 3;  // what registers allow without a spill
constexpr int ROW_STRIDE = PADDED_DIM + 8;             // an odd number of 16-byte units: ldmatrix reads 8 rows without a bank conflict
constexpr int COPY_ELEMENTS = HEAD_DIM % 8 ? 4 : 8;    // elements of one copy
constexpr int OUT_TILES = PADDED_DIM / 8;

// ---- copies to shared memory ------------------------------------------------------------------------------------------

// Start copying ROWS rows from `first` on to shared memory; rows from `end` on become zeros and are not read. UNROLL costs registers for addresses.
template <int ROWS, int THREADS, int UNROLL = 2, class Source>
__device__ __forceinline__ void copy_rows(SCALAR* tile, const Source& source, int first, int end) {
    constexpr int COPIES = HEAD_DIM / COPY_ELEMENTS;
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < ROWS * COPIES; i += THREADS) {
        int row = i / COPIES, column = i % COPIES * COPY_ELEMENTS;
        bool present = first + row < end;
        const SCALAR* from = present ? source.row(first + row) + column : source.base;
        copy_async<COPY_ELEMENTS * sizeof(SCALAR)>(tile + row * ROW_STRIDE + column, from, present);
    }
}

// Zero the columns HEAD_DIM to PADDED_DIM of `rows` rows, which no copy touches.
template <int THREADS, int COLUMNS = PADDED_DIM - HEAD_DIM>
__device__ __forceinline__ void clear_padding(SCALAR* tile, int rows) {
    if constexpr (COLUMNS > 0)
        for (int i = threadIdx.x; i < rows * COLUMNS; i += THREADS)
            tile[i / COLUMNS * ROW_STRIDE + HEAD_DIM + i % COLUMNS] = from_float<SCALAR>(0.f);
}

// ---- fragments -----------------------------------------------------------------------------------------------------

// A fragments of 16 rows in global memory, kept in registers, or read again at each use where WIDE. A null row is zeros.
struct RowFragments {
    const SCALAR* rows[2];
    unsigned kept[WIDE ? 1 : PADDED_DIM / 16][4];

    __device__ __forceinline__ void read(int step, unsigned (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int column = step * 16 + (lane() & 3) * 2 + (i >> 1) * 8;
            bool present = rows[i & 1] != nullptr && column < HEAD_DIM;
            a[i] = present ? *reinterpret_cast<const unsigned*>(rows[i & 1] + column) : 0u;
        }
    }

    __device__ __forceinline__ void set(const SCALAR* first, const SCALAR* second) {
        rows[0] = first, rows[1] = second;
        if constexpr (!WIDE) {
#pragma unroll
            for (int step = 0; step < PADDED_DIM / 16; ++step) read(step, kept[step]);
        }
    }

    __device__ __forceinline__ void get(int step, unsigned (&a)[4]) const {
        if constexpr (WIDE) {
            read(step, a);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = kept[step][i];
        }
    }
};

// Address of this lane for load_matrices of a 16 x 16 block at (row, column) whose matrices come in the order of A's registers (for B's
// transposed read this is: two k halves, then the next n) ...
__device__ __forceinline__ const SCALAR* block_rows_first(const SCALAR* tile, int row, int column) {
    return tile + (row + (lane() & 15)) * ROW_STRIDE + column + (lane() >> 4) * 8;
}

// ... and in the order of B's registers for two neighbouring n tiles, with n along the tile's rows.
__device__ __forceinline__ const SCALAR* block_columns_first(const SCALAR* tile, int row, int column) {
    return tile + (row + (lane() & 7) + (lane() >> 4) * 8) * ROW_STRIDE + column + (lane() >> 3 & 1) * 8;
}

// A fragments of 16 rows of a shared tile.
struct SharedFragments {
    const SCALAR* rows;
    __device__ __forceinline__ void get(int step, unsigned (&a)[4]) const { load_matrices(a, block_rows_first(rows, 0, step * 16)); }
};

// products (16 x 8 TILES) += a (16 x D, by fragment) times the transpose of rows (8 TILES x D) of a shared tile; d ascending.
template <int TILES, class Fragments>
__device__ __forceinline__ void multiply_transposed(float (&products)[TILES][4], const Fragments& a_rows, const SCALAR* rows) {
#pragma unroll
    for (int step = 0; step < PADDED_DIM / 16; ++step) {
        unsigned a[4];
        a_rows.get(step, a);
#pragma unroll
        for (int pair = 0; pair < TILES / 2; ++pair) {
            unsigned b[4];
            load_matrices(b, block_columns_first(rows, pair * 16, step * 16));
            mma_16x8x16(products[2 * pair], a, b[0], b[1], SCALAR());
            mma_16x8x16(products[2 * pair + 1], a, b[2], b[3], SCALAR());
        }
    }
}

// out (16 x D) += weights (16 x 8 TILES, rounded to SCALAR) times rows (8 TILES x D) of a shared tile; rows ascending.
template <int TILES>
__device__ __forceinline__ void multiply(float (&out)[OUT_TILES][4], const float (&weights)[TILES][4], const SCALAR* rows) {
#pragma unroll
    for (int step = 0; step < TILES / 2; ++step) {
        unsigned a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = pack_pair(weights[2 * step + (i >> 1)][(i & 1) * 2], weights[2 * step + (i >> 1)][(i & 1) * 2 + 1], SCALAR());
#pragma unroll
        for (int pair = 0; pair < OUT_TILES / 2; ++pair) {
            unsigned b[4];
            load_matrices_transposed(b, block_rows_first(rows, step * 16, pair * 16));
            mma_16x8x16(out[2 * pair], a, b[0], b[1], SCALAR());
            mma_16x8x16(out[2 * pair + 1], a, b[2], b[3], SCALAR());
        }
    }
}

// ---- softmax over one chunk, and the merge --------------------------------------------------------------------------

// Unnormalised attention of 16 rows over the part of a chunk seen so far; `total` is this thread's share of the row sum until close().
struct Chunk {
    float out[OUT_TILES][4];
    float maximum[2], total[2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < OUT_TILES; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[j][e] = 0.f;
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

using Scores = float[KEY_TILE / 8][4];

template <class Fragments>
__device__ __forceinline__ void score_tile(Scores& scores, const Fragments& queries, const SCALAR* keys) {
#pragma unroll
    for (int j = 0; j < KEY_TILE / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[j][e] = 0.f;
    multiply_transposed(scores, queries, keys);
}

// Scale the scores of the keys from first_key on, hide those from limits[row] on, and turn them into weights under the chunk's new maximum,
// rescaling what the chunk holds already.
__device__ __forceinline__ void weigh_tile(Chunk& chunk, Scores& scores, int first_key, const int (&limits)[2], float scale) {
#pragma unroll
    for (int j = 0; j < KEY_TILE / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[j][e] = __fmul_rn(scores[j][e], scale);
    if (first_key + KEY_TILE > min(limits[0], limits[1])) {
#pragma unroll
        for (int j = 0; j < KEY_TILE / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (first_key + j * 8 + (lane() & 3) * 2 + (e & 1) >= limits[e >> 1]) scores[j][e] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float highest = -INFINITY;
#pragma unroll
        for (int j = 0; j < KEY_TILE / 8; ++j) highest = fmaxf(highest, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 2));
        highest = fmaxf(highest, chunk.maximum[r]);
        float base = finite_maximum(highest), factor = exp2_fast(__fsub_rn(chunk.maximum[r], base)), sum = 0.f;
        chunk.maximum[r] = highest;
#pragma unroll
        for (int j = 0; j < KEY_TILE / 8; ++j)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                scores[j][e] = exp2_fast(__fsub_rn(scores[j][e], base));
                sum = __fadd_rn(sum, scores[j][e]);
            }
        chunk.total[r] = __fmaf_rn(chunk.total[r], factor, sum);
#pragma unroll
        for (int j = 0; j < OUT_TILES; ++j)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) chunk.out[j][e] = __fmul_rn(chunk.out[j][e], factor);
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
#pragma unroll
            for (int j = 0; j < OUT_TILES; ++j)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) at(j * 4 + e) = merge_value(at(j * 4 + e), chunk.out[j][e], left, right);
        }
        chunk.clear();
    }
};

// Write 16 rows of D values times factor[row half]; a null row is skipped.
template <class Value>
__device__ __forceinline__ void write_rows(SCALAR* const (&rows)[2], const float (&factors)[2], Value value) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (rows[r] == nullptr) continue;
#pragma unroll
        for (int j = 0; j < OUT_TILES; ++j) {
            int column = j * 8 + (lane() & 3) * 2;
            if (column < HEAD_DIM)
                *reinterpret_cast<unsigned*>(rows[r] + column) = pack_pair(
                    __fmul_rn(value(j, 2 * r), factors[r]), __fmul_rn(value(j, 2 * r + 1), factors[r]), SCALAR());
        }
    }
}

// ---- one block: QUERY_TILE queries of one head over all keys they see (training and prefill) -------------------------

// Dynamic shared memory: QUERY_TILE rows of queries, STAGES x (keys, values) of KEY_TILE rows; where WIDE, the warps' running results.
// Query i (first <= i < count) of the sequence stands at position offset + i and sees the keys up to there. q.row(i), o + i * o_stride,
// lse + i * lse_stride (lse may be null).
template <class Keys>
__device__ __forceinline__ void attend_queries(SCALAR* o, int o_stride, float* lse, int lse_stride, const PackedRows& q,
                                               const Keys& keys, const Keys& values, int first, int count, int offset, float scale) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SCALAR *query_tile = reinterpret_cast<SCALAR*>(shared_bytes), *tiles = query_tile + QUERY_TILE * ROW_STRIDE;
    constexpr int TILE = KEY_TILE * ROW_STRIDE;
    const int warp = threadIdx.x / 32, first_row = first + warp * 16;
    const int block_end = offset + min(first + QUERY_TILE, count);  // keys that any row of the block sees
    const int warp_end = first_row < count ? offset + min(first_row + 16, count) : 0;

    const SharedFragments queries{query_tile + warp * 16 * ROW_STRIDE};
    int rows[2], limits[2];
    for (int r = 0; r < 2; ++r) {
        rows[r] = first_row + lane() / 4 + r * 8;
        limits[r] = rows[r] < count ? offset + rows[r] + 1 : 0;
    }

    Chunk chunk;
    Running running;
    chunk.clear();
    running.clear(reinterpret_cast<float*>(tiles + STAGES * 2 * TILE) + warp * 16 * PADDED_DIM);
    clear_padding<ATTENTION_THREADS>(query_tile, QUERY_TILE + STAGES * 2 * KEY_TILE);
    copy_rows<QUERY_TILE, ATTENTION_THREADS>(query_tile, q, first, count);

    auto fetch = [&](int tile) {
        SCALAR* stage = tiles + tile % STAGES * 2 * TILE;
        copy_rows<KEY_TILE, ATTENTION_THREADS, 1>(stage, keys, tile * KEY_TILE, block_end);
        copy_rows<KEY_TILE, ATTENTION_THREADS, 1>(stage + TILE, values, tile * KEY_TILE, block_end);
        copies_commit();
    };
    const int num_tiles = (block_end + KEY_TILE - 1) / KEY_TILE;
    if (STAGES == 2) fetch(0);
    for (int tile = 0; tile < num_tiles; ++tile) {
        if (STAGES == 2 && tile + 1 < num_tiles) {
            fetch(tile + 1);
            copies_wait<1>();
        } else {
            if (STAGES == 1) fetch(tile);
            copies_wait<0>();
        }
        __syncthreads();
        const int first_key = tile * KEY_TILE;
        if (first_key < warp_end) {
            const SCALAR* stage = tiles + tile % STAGES * 2 * TILE;
            Scores scores;
            score_tile(scores, queries, stage);
            weigh_tile(chunk, scores, first_key, limits, scale);
            multiply(chunk.out, scores, stage + TILE);
            if ((first_key + KEY_TILE) % CHUNK_KEYS == 0 || first_key + KEY_TILE >= warp_end) running.merge(chunk);
        }
        __syncthreads();
    }

    SCALAR* out_rows[2];
    float factors[2];
    for (int r = 0; r < 2; ++r) {
        out_rows[r] = rows[r] < count ? o + (long long)rows[r] * o_stride : nullptr;
        factors[r] = reciprocal_total(running.total[r]);
        if (lse != nullptr && rows[r] < count && (lane() & 3) == 0)
            lse[(long long)rows[r] * lse_stride] = natural_lse(running.maximum[r], running.total[r]);
    }
    write_rows(out_rows, factors, [&](int j, int e) { return running.at(j * 4 + e); });
}

// ---- one warp: up to 16 query rows (the heads that share a kv head) over one chunk (decoding) ---------------------------

constexpr int CHUNK_THREADS = 32;

// Rows of a paged cache whose slots have been looked up: slots[i] belongs to key first + i.
struct SlotRows {
    const SCALAR* base;
    const int* slots;
    int first, stride;
    __device__ __forceinline__ const SCALAR* row(int i) const { return base + (long long)slots[i - first] * stride; }
};

// The query rows q + r * HEAD_DIM, r < count <= 16, over keys first ... end - 1 of one chunk. Unnormalised results in float32 to out + r * HEAD_DIM * stride,
// maximum and sum to stats + r * stride.
__device__ __forceinline__ void attend_chunk(float* out, float2* stats, long long stride, const SCALAR* q, int count, const PagedRows& key_rows,
                                             const PagedRows& value_rows, int first, int end, float scale) {
    __shared__ __align__(16) SCALAR key_tile[KEY_TILE * ROW_STRIDE], value_tile[KEY_TILE * ROW_STRIDE];
    __shared__ int slots[CHUNK_KEYS];
    for (int i = lane(); first + i < end; i += CHUNK_THREADS) slots[i] = key_rows.slot(first + i);
    clear_padding<CHUNK_THREADS>(key_tile, KEY_TILE);
    clear_padding<CHUNK_THREADS>(value_tile, KEY_TILE);
    __syncwarp();
    const SlotRows keys{key_rows.base, slots, first, key_rows.stride}, values{value_rows.base, slots, first, value_rows.stride};

    RowFragments queries;
    int rows[2] = {lane() / 4, lane() / 4 + 8};
    queries.set(rows[0] < count ? q + rows[0] * HEAD_DIM : nullptr, rows[1] < count ? q + rows[1] * HEAD_DIM : nullptr);
    const int limits[2] = {end, end};
    Chunk chunk;
    chunk.clear();

    auto fetch = [&](SCALAR* tile, const SlotRows& source, int first_key) {
        if (first_key < end) copy_rows<KEY_TILE, CHUNK_THREADS, 8>(tile, source, first_key, end);
        copies_commit();
    };
    fetch(key_tile, keys, first);
    fetch(value_tile, values, first);
    for (int first_key = first; first_key < end; first_key += KEY_TILE) {
        Scores scores;
        copies_wait<1>();  // the keys are there, the values perhaps not
        __syncwarp();
        score_tile(scores, queries, key_tile);
        __syncwarp();
        fetch(key_tile, keys, first_key + KEY_TILE);
        weigh_tile(chunk, scores, first_key, limits, scale);
        copies_wait<1>();  // the values are there, the next keys perhaps not
        __syncwarp();
        multiply(chunk.out, scores, value_tile);
        __syncwarp();
        fetch(value_tile, values, first_key + KEY_TILE);
    }
    chunk.close();

#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (rows[r] >= count) continue;
        float* out_row = out + rows[r] * stride * HEAD_DIM;
#pragma unroll
        for (int j = 0; j < OUT_TILES; ++j) {
            int column = j * 8 + (lane() & 3) * 2;
            if (column < HEAD_DIM) *reinterpret_cast<float2*>(out_row + column) = make_float2(chunk.out[j][2 * r], chunk.out[j][2 * r + 1]);
        }
        if ((lane() & 3) == 0) stats[rows[r] * stride] = make_float2(chunk.maximum[r], chunk.total[r]);
    }
}
