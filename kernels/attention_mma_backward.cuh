// Gradients of attention on tensor cores (see attention_mma.cuh), by recomputation:
//   P = 2^(score - lse), dP = do v, dS = P (dP - delta) with delta = rowsum(do * o);
//   dv = P do, dk = dS q, dq = dS k.
// P and dS are rounded to SCALAR before their products. Nothing is added atomically: one block owns a piece of keys and
// sums over the query heads that share them, or it owns a piece of queries of one head.
#pragma once

#include "attention_mma.cuh"

constexpr int KEY_ROWS = QUERY_TILE;    // keys of a block of gradient_of_keys
constexpr int STEP = BlockTiles::STEP;  // queries, or keys, that are taken at once
constexpr int STEP_SIZE = BlockTiles::SIZE<STEP>, KEY_ROWS_SIZE = BlockTiles::SIZE<KEY_ROWS>;
constexpr int KEY_BLOCKS_AN_SM = STEP > 32 ? 2 : BLOCKS_AN_SM;
constexpr int QUERY_GRADIENT_SHARED = (2 * QUERY_TILE_SIZE + STAGES * 2 * STEP_SIZE) * sizeof(SCALAR);
constexpr int KEY_GRADIENT_SHARED =
    (2 * KEY_ROWS_SIZE + STAGES * 2 * STEP_SIZE) * sizeof(SCALAR) + STAGES * 2 * STEP * sizeof(float);

static_assert(2 * STEP <= ATTENTION_THREADS, "a thread copies one of the statistics");

using StepProducts = float[STEP / 8][4];

// The statistic of the column of value (j, e); a thread's two columns of a tile are one load.
__device__ __forceinline__ float of_column(const float* statistics, int j, int e) {
    const float2 pair = reinterpret_cast<const float2*>(statistics)[j * 4 + (lane() & 3)];
    return e & 1 ? pair.y : pair.x;
}

// dq of queries first ... first + QUERY_TILE - 1 of one head. Dynamic shared memory: queries, do (QUERY_TILE rows
// each), STAGES x (keys, values). Here and below: Sequence or PrefixedSequence.
template <class Of> __device__ __forceinline__ void gradient_of_queries(const Of& sequence, int head, int first) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SCALAR* queries = reinterpret_cast<SCALAR*>(shared_bytes);
    SCALAR *out_gradients = queries + QUERY_TILE_SIZE, *stages = out_gradients + QUERY_TILE_SIZE;
    const int kv_head = head / (sequence.num_heads / sequence.num_kv_heads), length = sequence.length;
    const auto keys = sequence.seen(sequence.num_heads + kv_head);
    const auto values = sequence.seen(sequence.num_heads + sequence.num_kv_heads + kv_head);
    const int first_row = first + warp_index() * 16, before = sequence.before();
    const int block_end = before + min(first + QUERY_TILE, length);  // keys that any row of the block sees
    const int warp_end = BlockTiles::TOGETHER ? block_end : before + min(first_row + 16, length);

    BlockTiles::clear_padding<ATTENTION_THREADS>(queries, 2 * QUERY_TILE + STAGES * 2 * STEP);
    copy_block_pair<QUERY_TILE>(queries, sequence.head(head), sequence.head_do(head), first, length);

    int rows[2];
    float lse[2], delta[2], factors[2] = {sequence.scale, sequence.scale};
    for (int r = 0; r < 2; ++r) {
        rows[r] = first_row + lane() / 4 + r * 8;
        bool present = rows[r] < length;
        long long at = (long long)rows[r] * sequence.num_heads + head;
        lse[r] = present ? __fmul_rn(sequence.lse[at], LOG2_E) : 0.f;
        delta[r] = present ? sequence.delta[at] : 0.f;
    }
    const float scale = __fmul_rn(sequence.scale, LOG2_E);

    float dq[OUT_TILES][4];
    clear(dq);
    auto fetch = [&](int tile) {
        SCALAR* stage = stages + tile % STAGES * 2 * STEP_SIZE;
        copy_block_pair<STEP>(stage, keys, values, tile * STEP, block_end);
        copies_commit();
    };
    const int num_tiles = (block_end + STEP - 1) / STEP;
    if (STAGES == 2) fetch(0);
    for (int tile = 0; tile < num_tiles; ++tile) {
        take_tile(fetch, tile);
        const int first_key = tile * STEP;
        const bool seen = BlockTiles::TOGETHER || first_key < warp_end;
        const SCALAR* stage = stages + tile % STAGES * 2 * STEP_SIZE;
        StepProducts p, ds;
        if (seen) {
            BlockTiles::multiply_transposed(p, queries, stage);
            BlockTiles::multiply_transposed(ds, out_gradients, stage + STEP_SIZE);
        }
        if (STAGES == 2 && tile + 1 < num_tiles) fetch(tile + 1);
        if (seen) {
            BlockTiles::finish<1>(p);
            for_each_value<STEP / 8>(
                [&](int j, int e) { p[j][e] = exp2_fast(__fmaf_rn(p[j][e], scale, -lse[e >> 1])); });
            if (first_key + STEP > before + first_row)
                for_each_value<STEP / 8>([&](int j, int e) {
                    if (first_key + column_of(j, e) > before + rows[e >> 1]) p[j][e] = 0.f;
                });
            BlockTiles::finish<0>(ds);
            for_each_value<STEP / 8>(
                [&](int j, int e) { ds[j][e] = __fmul_rn(p[j][e], __fsub_rn(ds[j][e], delta[e >> 1])); });
            BlockTiles::multiply(dq, ds, stage);
            BlockTiles::finish<0>(dq);
        }
    }
    __syncthreads();  // the tiles are free
    write_rows(queries, sequence.gradient(head, first_row), sequence.row_stride(), length - first_row, factors,
               [&](int j, int e) { return dq[j][e]; });
}

// dk and dv of keys first ... first + KEY_ROWS - 1 of one kv head. Keys are rows, queries are columns: scores
// transposed. Dynamic shared memory: keys, values (KEY_ROWS rows each), STAGES x (queries, do), STAGES x (lse, delta)
// of STEP floats.
template <class Of> __device__ __forceinline__ void gradient_of_keys(const Of& sequence, int kv_head, int first) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SCALAR* keys = reinterpret_cast<SCALAR*>(shared_bytes);
    SCALAR *values = keys + KEY_ROWS_SIZE, *stages = values + KEY_ROWS_SIZE;
    float* statistics = reinterpret_cast<float*>(stages + STAGES * 2 * STEP_SIZE);
    const int group = sequence.num_heads / sequence.num_kv_heads, query_end = sequence.query_end();
    const int first_row = first + warp_index() * 16;
    const int key_head = sequence.num_heads + kv_head, value_head = key_head + sequence.num_kv_heads;

    BlockTiles::clear_padding<ATTENTION_THREADS>(keys, 2 * KEY_ROWS + STAGES * 2 * STEP);
    copy_block_pair<KEY_ROWS>(keys, sequence.head(key_head), sequence.head(value_head), first,
                              sequence.length);

    // The query tiles: of one head from the keys' own rows on, then of the next head.
    const int num_tiles = (query_end - first + STEP - 1) / STEP * group;
    int next_head = kv_head * group, next_query = first, first_query = first;
    auto fetch = [&](int tile) {
        SCALAR* stage = stages + tile % STAGES * 2 * STEP_SIZE;
        copy_block_pair<STEP>(stage, sequence.head(next_head), sequence.head_do(next_head), next_query, query_end);
        if (threadIdx.x < 2 * STEP) {
            const int query = next_query + threadIdx.x % STEP;
            const float* from = threadIdx.x < STEP ? sequence.lse : sequence.delta;
            copy_async<4>(statistics + tile % STAGES * 2 * STEP + threadIdx.x,
                          from + (long long)query * sequence.num_heads + next_head, query < query_end);
        }
        copies_commit();
        next_query += STEP;
        if (next_query >= query_end) next_query = first, ++next_head;
    };
    const float scale = __fmul_rn(sequence.scale, LOG2_E);
    int rows[2] = {first_row + lane() / 4, first_row + lane() / 4 + 8};
    float dk[OUT_TILES][4], dv[OUT_TILES][4];
    clear(dk);
    clear(dv);
    if (STAGES == 2) fetch(0);
    for (int tile = 0; tile < num_tiles; ++tile) {
        take_tile(fetch, tile);
        // Where not seen, every query comes before every key of the warp.
        const bool seen = BlockTiles::TOGETHER || first_query + STEP > first_row;
        const SCALAR* stage = stages + tile % STAGES * 2 * STEP_SIZE;
        const float *lse = statistics + tile % STAGES * 2 * STEP, *delta = lse + STEP;
        StepProducts p, ds;
        if (seen) {
            BlockTiles::multiply_transposed(p, keys, stage);
            BlockTiles::multiply_transposed(ds, values, stage + STEP_SIZE);
        }
        if (STAGES == 2 && tile + 1 < num_tiles) fetch(tile + 1);
        if (seen) {
            BlockTiles::finish<1>(p);
            // A query beyond the end has q = do = lse = delta = 0, so it adds P * 0 and (0 - 0) * 0.
            for_each_value<STEP / 8>([&](int j, int e) {
                p[j][e] = exp2_fast(__fmaf_rn(p[j][e], scale, __fmul_rn(of_column(lse, j, e), -LOG2_E)));
            });
            if (first_query < first_row + 16) {
                const int first_column = first_query;
                for_each_value<STEP / 8>([&](int j, int e) {
                    if (rows[e >> 1] > first_column + column_of(j, e)) p[j][e] = 0.f;
                });
            }
            BlockTiles::multiply(dv, p, stage + STEP_SIZE);
            BlockTiles::finish<1>(ds);
            for_each_value<STEP / 8>([&](int j, int e) {
                ds[j][e] = __fmul_rn(p[j][e], __fsub_rn(ds[j][e], of_column(delta, j, e)));
            });
            BlockTiles::multiply(dk, ds, stage);
            BlockTiles::finish<0>(dv);
            BlockTiles::finish<0>(dk);
        }
        first_query += STEP;
        if (first_query >= query_end) first_query = first;
    }
    __syncthreads();  // the tiles are free
    const float key_factors[2] = {sequence.scale, sequence.scale}, value_factors[2] = {1.f, 1.f};
    const int present = sequence.length - first_row;
    write_rows(keys, sequence.gradient(key_head, first_row), sequence.row_stride(), present, key_factors,
               [&](int j, int e) { return dk[j][e]; });
    write_rows(keys, sequence.gradient(value_head, first_row), sequence.row_stride(), present, value_factors,
               [&](int j, int e) { return dv[j][e]; });
}
