// Attention in float32 without tensor cores (see attention.cuh): right for every head_dim, not tuned. One warp a query
// row (or, for dk and dv, a key row); lane i holds the elements i, i + 32, … of a row of D values. In a chunk of keys a
// tile is 32 keys, one a lane.
#pragma once

#include "attention_rows.cuh"

constexpr int ATTENTION_THREADS = 128;
constexpr int BLOCKS_AN_SM = 4, KEY_BLOCKS_AN_SM = 4;  // left alone, the compiler saves registers by spilling
constexpr int QUERY_TILE = ATTENTION_THREADS / WARP;  // one row a warp
constexpr int KEY_ROWS = QUERY_TILE;
constexpr int CHUNK_THREADS = 32;
constexpr int FORWARD_SHARED = 0, QUERY_GRADIENT_SHARED = 0, KEY_GRADIENT_SHARED = 0;
constexpr int SHARE = (HEAD_DIM + WARP - 1) / WARP;

// This lane's share of a row, zeros past its end (or where the row is null).
template <class T> __device__ __forceinline__ void load_share(float (&x)[SHARE], const T* row) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i)
        x[i] = row != nullptr && lane() + i * WARP < HEAD_DIM ? to_float(row[lane() + i * WARP]) : 0.f;
}

__device__ __forceinline__ void store_share(float* row, const float (&x)[SHARE], float factor) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i)
        if (lane() + i * WARP < HEAD_DIM) row[lane() + i * WARP] = __fmul_rn(x[i], factor);
}

__device__ __forceinline__ void clear_share(float (&x)[SHARE]) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) x[i] = 0.f;
}

// sum += part. Long sums go over parts of 32 terms: a single chain of thousands of terms loses digits that NumPy's
// keeps.
__device__ __forceinline__ void add_share(float (&sum)[SHARE], const float (&part)[SHARE]) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) sum[i] = __fadd_rn(sum[i], part[i]);
}

__device__ __forceinline__ float dot_share(const float (&x)[SHARE], const float (&y)[SHARE]) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < SHARE; ++i) sum = __fmaf_rn(x[i], y[i], sum);
    return warp_sum(sum);
}

// Unnormalised attention of one query over keys first ... end - 1, which lie in one chunk.
template <class Rows>
__device__ __forceinline__ void attend_row(float (&out)[SHARE], float& maximum, float& total, const float* q,
                                           const Rows& keys, const Rows& values, int first, int end, float scale) {
    clear_share(out);
    maximum = -INFINITY;
    total = 0.f;
    for (int tile = first; tile < end; tile += WARP) {
        const int key = tile + lane();
        float score = -INFINITY;
        if (key < end) {
            const auto* k = keys.row(key);
            float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
            for (int d = 0; d < HEAD_DIM; d += 4) {
                const Vec<float, 4> x = load_vec<4>(q + d);
                const auto y = load_vec<4>(k + d);
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] = __fmaf_rn(x[i], to_float(y[i]), sums[i]);
            }
            score = __fmul_rn((sums[0] + sums[1]) + (sums[2] + sums[3]), scale);
        }
        const float highest = fmaxf(maximum, warp_max(score));
        // A tile has a visible key, so `highest` is finite.
        const float weight = exp2f(__fsub_rn(score, highest)), factor = exp2f(__fsub_rn(maximum, highest));
        maximum = highest;
        total = __fmaf_rn(total, factor, warp_sum(weight));
        float part[SHARE];
        clear_share(part);
#pragma unroll 1
        for (int j = 0; j < min(WARP, end - tile); ++j) {
            const float shared_weight = __shfl_sync(FULL_MASK, weight, j);
            float v[SHARE];
            load_share(v, values.row(tile + j));
#pragma unroll
            for (int i = 0; i < SHARE; ++i) part[i] = __fmaf_rn(shared_weight, v[i], part[i]);
        }
#pragma unroll
        for (int i = 0; i < SHARE; ++i) out[i] = __fmaf_rn(out[i], factor, part[i]);
    }
}

// As in attention_mma.cuh: query i of the sequence stands at position offset + i. This warp takes query first + warp.
template <class Rows>
__device__ __forceinline__ void attend_queries(float* o, int o_stride, float* lse, int lse_stride, const PackedRows& q,
                                               const Rows& keys, const Rows& values, int first, int count, int offset,
                                               float scale) {
    const int row = first + threadIdx.x / WARP;
    if (row >= count) return;
    float running[SHARE], maximum = -INFINITY, total = 0.f;
    clear_share(running);
    for (int chunk = 0; chunk <= offset + row; chunk += CHUNK_KEYS) {
        float out[SHARE], chunk_maximum, chunk_total, left, right;
        attend_row(out, chunk_maximum, chunk_total, q.row(row), keys, values, chunk,
                   min(chunk + CHUNK_KEYS, offset + row + 1), scale);
        merge_totals(maximum, total, chunk_maximum, chunk_total, left, right);
#pragma unroll
        for (int i = 0; i < SHARE; ++i) running[i] = merge_value(running[i], out[i], left, right);
    }
    store_share(o + (long long)row * o_stride, running, reciprocal_total(total));
    if (lse != nullptr && lane() == 0) lse[(long long)row * lse_stride] = natural_lse(maximum, total);
}

// As in attention_mma_decode.cuh: the block's query rows over its keys.
template <class Block>
__device__ __forceinline__ void attend_chunk(const ChunkResult& result, const Block& block, float scale) {
    for (int r = 0; r < block.heads; ++r) {
        float row[SHARE], maximum, total;
        attend_row(row, maximum, total, block.q + r * HEAD_DIM, block.keys, block.values, block.first, block.end,
                   scale);
        if (result.o != nullptr) {
            const OnlyChunk only(maximum, total);
#pragma unroll
            for (int i = 0; i < SHARE; ++i) row[i] = only.finish(row[i]);
            store_share(result.o + r * HEAD_DIM, row, 1.f);
            continue;
        }
        store_share(result.out + r * result.stride * HEAD_DIM, row, 1.f);
        if (lane() == 0) result.stats[r * result.stride] = make_float2(maximum, total);
    }
}

// P and dS of one query and one key, by natural exponentials as in NumPy.
__device__ __forceinline__ void weigh(float& p, float& ds, const float (&q)[SHARE], const float (&k)[SHARE],
                                      const float (&do_row)[SHARE], const float (&v)[SHARE], float scale, float lse,
                                      float delta) {
    p = expf(__fsub_rn(__fmul_rn(dot_share(q, k), scale), lse));
    ds = __fmul_rn(p, __fsub_rn(dot_share(do_row, v), delta));
}

// dq of query first + warp of one head. Here and below: Sequence or PrefixedSequence.
template <class Of> __device__ __forceinline__ void gradient_of_queries(const Of& sequence, int head, int first) {
    const int kv_head = head / (sequence.num_heads / sequence.num_kv_heads), row = first + threadIdx.x / WARP;
    if (row >= sequence.length) return;
    const auto keys = sequence.seen(sequence.num_heads + kv_head);
    const auto values = sequence.seen(sequence.num_heads + sequence.num_kv_heads + kv_head);
    const int end = sequence.before() + row + 1;
    const long long at = (long long)row * sequence.num_heads + head;
    float q[SHARE], do_row[SHARE], k[SHARE], v[SHARE], dq[SHARE], part[SHARE];
    load_share(q, sequence.head(head).row(row));
    load_share(do_row, sequence.head_do(head).row(row));
    clear_share(dq);
    for (int tile = 0; tile < end; tile += WARP) {
        clear_share(part);
#pragma unroll 1
        for (int key = tile; key < min(tile + WARP, end); ++key) {
            float p, ds;
            load_share(k, keys.row(key));
            load_share(v, values.row(key));
            weigh(p, ds, q, k, do_row, v, sequence.scale, sequence.lse[at], sequence.delta[at]);
#pragma unroll
            for (int i = 0; i < SHARE; ++i) part[i] = __fmaf_rn(ds, k[i], part[i]);
        }
        add_share(dq, part);
    }
    store_share(sequence.gradient(head, row), dq, sequence.scale);
}

// dk and dv of key first + warp of one kv head.
template <class Of> __device__ __forceinline__ void gradient_of_keys(const Of& sequence, int kv_head, int first) {
    const int group = sequence.num_heads / sequence.num_kv_heads, key = first + threadIdx.x / WARP;
    const int key_head = sequence.num_heads + kv_head, value_head = key_head + sequence.num_kv_heads;
    if (key >= sequence.length) return;
    float q[SHARE], do_row[SHARE], k[SHARE], v[SHARE], dk[SHARE], dv[SHARE], dk_part[SHARE], dv_part[SHARE];
    load_share(k, sequence.head(key_head).row(key));
    load_share(v, sequence.head(value_head).row(key));
    clear_share(dk);
    clear_share(dv);
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
        for (int tile = key; tile < sequence.query_end(); tile += WARP) {
            clear_share(dk_part);
            clear_share(dv_part);
#pragma unroll 1
            for (int row = tile; row < min(tile + WARP, sequence.query_end()); ++row) {
                const long long at = (long long)row * sequence.num_heads + head;
                float p, ds;
                load_share(q, sequence.head(head).row(row));
                load_share(do_row, sequence.head_do(head).row(row));
                weigh(p, ds, q, k, do_row, v, sequence.scale, sequence.lse[at], sequence.delta[at]);
#pragma unroll
                for (int i = 0; i < SHARE; ++i) {
                    dv_part[i] = __fmaf_rn(p, do_row[i], dv_part[i]);
                    dk_part[i] = __fmaf_rn(ds, q[i], dk_part[i]);
                }
            }
            add_share(dk, dk_part);
            add_share(dv, dv_part);
        }
    store_share(sequence.gradient(key_head, key), dk, sequence.scale);
    store_share(sequence.gradient(value_head, key), dv, 1.f);
}
