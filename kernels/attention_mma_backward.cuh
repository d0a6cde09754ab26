// Gradients of attention on tensor cores (see attention_mma.cuh), by recomputation: P = 2^(score - lse), dP = do v, dS = P (dP - delta) with
// delta = rowsum(do * o); dv = P do, dk = dS q, dq = dS k. P and dS are rounded to SCALAR before their products. Nothing is added atomically:
// one block owns a piece of keys (and sums over the query heads that share them), or a piece of queries of one head.
#pragma once

#include "attention_mma.cuh"

constexpr int KEY_ROWS = QUERY_TILE;  // keys of a block of gradient_of_keys
constexpr int STEP = 32;              // queries, or keys, that are taken at once
constexpr int STEP_TILE = STEP * ROW_STRIDE;

template <int TILES>
__device__ __forceinline__ void clear(float (&x)[TILES][4]) {
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[j][e] = 0.f;
}

// dq of queries first ... first + QUERY_TILE - 1 of one head. Dynamic shared memory: STAGES x (keys, values) of STEP rows.
__device__ __forceinline__ void gradient_of_queries(const Sequence& sequence, int head, int first) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SCALAR* tiles = reinterpret_cast<SCALAR*>(shared_bytes);
    const int kv_head = head / (sequence.num_heads / sequence.num_kv_heads), length = sequence.length;
    const PackedRows q = sequence.head(head), o_gradient = sequence.head_do(head);
    const PackedRows keys = sequence.head(sequence.num_heads + kv_head), values = sequence.head(sequence.num_heads + sequence.num_kv_heads + kv_head);
    const int first_row = first + threadIdx.x / 32 * 16, block_end = min(first + QUERY_TILE, length), warp_end = min(first_row + 16, length);

    RowFragments queries, out_gradients;
    int rows[2];
    float lse[2], delta[2], factors[2] = {sequence.scale, sequence.scale};
    bool present[2];
    for (int r = 0; r < 2; ++r) {
        rows[r] = first_row + lane() / 4 + r * 8;
        present[r] = rows[r] < length;
        long long at = (long long)rows[r] * sequence.num_heads + head;
        lse[r] = present[r] ? __fmul_rn(sequence.lse[at], LOG2_E) : 0.f;
        delta[r] = present[r] ? sequence.delta[at] : 0.f;
    }
    queries.set(present[0] ? q.row(rows[0]) : nullptr, present[1] ? q.row(rows[1]) : nullptr);
    out_gradients.set(present[0] ? o_gradient.row(rows[0]) : nullptr, present[1] ? o_gradient.row(rows[1]) : nullptr);
    const float scale = __fmul_rn(sequence.scale, LOG2_E);

    float dq[OUT_TILES][4];
    clear(dq);
    clear_padding<ATTENTION_THREADS>(tiles, STAGES * 2 * STEP);
    auto fetch = [&](int tile) {
        SCALAR* stage = tiles + tile % STAGES * 2 * STEP_TILE;
        copy_rows<STEP, ATTENTION_THREADS>(stage, keys, tile * STEP, block_end);
        copy_rows<STEP, ATTENTION_THREADS>(stage + STEP_TILE, values, tile * STEP, block_end);
        copies_commit();
    };
    const int num_tiles = (block_end + STEP - 1) / STEP;
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
        const int first_key = tile * STEP;
        if (first_key < warp_end) {
            const SCALAR* stage = tiles + tile % STAGES * 2 * STEP_TILE;
            float p[STEP / 8][4], ds[STEP / 8][4];
            clear(p);
            clear(ds);
            multiply_transposed(p, queries, stage);
            multiply_transposed(ds, out_gradients, stage + STEP_TILE);
#pragma unroll
            for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    bool future = first_key + j * 8 + (lane() & 3) * 2 + (e & 1) > rows[e >> 1];
                    float weight = future ? 0.f : exp2_fast(__fmaf_rn(p[j][e], scale, -lse[e >> 1]));
                    ds[j][e] = __fmul_rn(weight, __fsub_rn(ds[j][e], delta[e >> 1]));
                }
            multiply(dq, ds, stage);
        }
        __syncthreads();
    }
    SCALAR* out_rows[2] = {sequence.gradient(head, rows[0]), sequence.gradient(head, rows[1])};
    write_rows(out_rows, factors, [&](int j, int e) { return dq[j][e]; });
}

// dk and dv of keys first ... first + KEY_ROWS - 1 of one kv head. A warp holds 16 keys as rows, queries are columns: scores transposed.
// Dynamic shared memory: keys, values (KEY_ROWS rows each), STAGES x (queries, do) of STEP rows, STAGES x (lse, delta) of STEP floats.
__device__ __forceinline__ void gradient_of_keys(const Sequence& sequence, int kv_head, int first) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SCALAR* key_tile = reinterpret_cast<SCALAR*>(shared_bytes);
    SCALAR *value_tile = key_tile + KEY_ROWS * ROW_STRIDE, *stages = value_tile + KEY_ROWS * ROW_STRIDE;
    float* statistics = reinterpret_cast<float*>(stages + STAGES * 2 * STEP_TILE);
    const int group = sequence.num_heads / sequence.num_kv_heads, length = sequence.length, warp_row = threadIdx.x / 32 * 16;
    const int key_head = sequence.num_heads + kv_head, value_head = key_head + sequence.num_kv_heads;

    clear_padding<ATTENTION_THREADS>(key_tile, 2 * KEY_ROWS + STAGES * 2 * STEP);
    copy_rows<KEY_ROWS, ATTENTION_THREADS>(key_tile, sequence.head(key_head), first, length);
    copy_rows<KEY_ROWS, ATTENTION_THREADS>(value_tile, sequence.head(value_head), first, length);

    const int steps = (length - first + STEP - 1) / STEP, num_tiles = steps * group;  // query tiles of one head, of all heads
    auto fetch = [&](int tile) {
        const int head = kv_head * group + tile / steps, first_query = first + tile % steps * STEP;
        SCALAR* stage = stages + tile % STAGES * 2 * STEP_TILE;
        copy_rows<STEP, ATTENTION_THREADS>(stage, sequence.head(head), first_query, length);
        copy_rows<STEP, ATTENTION_THREADS>(stage + STEP_TILE, sequence.head_do(head), first_query, length);
        for (int i = threadIdx.x; i < 2 * STEP; i += ATTENTION_THREADS) {
            const int query = first_query + i % STEP;
            const float* from = (i < STEP ? sequence.lse : sequence.delta) + (long long)query * sequence.num_heads + head;
            copy_async<4>(statistics + tile % STAGES * 2 * STEP + i, query < length ? from : sequence.lse, query < length);
        }
        copies_commit();
    };
    const SharedFragments keys{key_tile + warp_row * ROW_STRIDE}, values{value_tile + warp_row * ROW_STRIDE};
    const float scale = __fmul_rn(sequence.scale, LOG2_E);
    int rows[2] = {first + warp_row + lane() / 4, first + warp_row + lane() / 4 + 8};
    float dk[OUT_TILES][4], dv[OUT_TILES][4];
    clear(dk);
    clear(dv);
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
        const int first_query = first + tile % steps * STEP;
        if (first_query + STEP > first + warp_row) {  // else every query comes before every key of the warp
            const SCALAR* stage = stages + tile % STAGES * 2 * STEP_TILE;
            const float *lse = statistics + tile % STAGES * 2 * STEP, *delta = lse + STEP;
            float p[STEP / 8][4], ds[STEP / 8][4];
            clear(p);
            clear(ds);
            multiply_transposed(p, keys, stage);
            multiply_transposed(ds, values, stage + STEP_TILE);
            // A query beyond the end has q = do = lse = delta = 0, so it adds P * 0 and (0 - 0) * 0.
#pragma unroll
            for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int column = j * 8 + (lane() & 3) * 2 + (e & 1);
                    bool future = rows[e >> 1] > first_query + column;
                    p[j][e] = future ? 0.f : exp2_fast(__fmaf_rn(p[j][e], scale, __fmul_rn(lse[column], -LOG2_E)));
                    ds[j][e] = __fmul_rn(p[j][e], __fsub_rn(ds[j][e], delta[column]));
                }
            multiply(dv, p, stage + STEP_TILE);
            multiply(dk, ds, stage);
        }
        __syncthreads();
    }
    SCALAR* key_out[2] = {sequence.gradient(key_head, rows[0]), sequence.gradient(key_head, rows[1])};
    SCALAR* value_out[2] = {sequence.gradient(value_head, rows[0]), sequence.gradient(value_head, rows[1])};
    const float key_factors[2] = {sequence.scale, sequence.scale}, value_factors[2] = {1.f, 1.f};
    write_rows(key_out, key_factors, [&](int j, int e) { return dk[j][e]; });
    write_rows(value_out, value_factors, [&](int j, int e) { return dv[j][e]; });
}
