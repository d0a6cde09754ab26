// The q/k norm (optional) and the rotary embedding over qkv (T, (H + 2K)·D): heads of q, then of k, then of v, which is
// copied.
//   forward:  q, k head -> RMSNorm with q_weight or k_weight (D,), rounded -> rotation of the pairs (i, i + D/2) by
//             positions[t]
//   turn:     the same without a norm, forwards or back
//   store:    forward, with keys and values to a paged cache
//   backward: the rotation turned back, rounded, then the norm's gradient; the weights' gradients in partial sums
//             (2, gridDim.x, D)
// cos, sin (P, D/2), weights and rstd (T, H + K) are float; null weights: no norm. LANES neighbouring lanes do a head
// (rope.cuh). Any even D up to HEAD_LIMIT.
// specialise: SCALAR=bf16,f16,f32 HEAD_LIMIT=64,128,256
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#ifndef HEAD_LIMIT
#define HEAD_LIMIT 128
#endif
#include "rope.cuh"

constexpr int THREADS = 128;
constexpr int GROUPS = THREADS / LANES;  // heads that a block does at a time

// One head of one token: of T · (H + 2K), that of this thread's group. The turned (or copied) values go to
// row_of(token, head), which may be null; rstd may be, too. vectorised is a constant here: after a branch for each
// load, every load would wait for the one before.
template <class RowOf>
__device__ __forceinline__ void turn_head(RowOf row_of, float* rstd, const SCALAR* qkv, const float* q_weight,
                                          const float* k_weight, const float* cos, const float* sin,
                                          const int* positions, int T, int H, int K, int D, float eps, float direction,
                                          bool vectorised) {
    const int lane = threadIdx.x % LANES, half = D / 2;
    const unsigned heads = H + 2 * K, index = blockIdx.x * GROUPS + threadIdx.x / LANES;
    const bool inside = index < T * heads;  // lanes outside stay for the shuffles
    const unsigned t = index / heads, head = index % heads;
    const bool turned = inside && head < H + K;
    const int position = positions[inside ? t : 0];  // of v as well: no branch, so that it comes along with x
    Slice x = {};
    if (inside) x.load(qkv + (long long)index * D, half, lane, vectorised);
    if (q_weight != nullptr) {
        const Wide inverse = x.inverse_rms(D, eps);
        if (turned) {
            if (lane == 0 && rstd != nullptr) rstd[(long long)t * (H + K) + head] = inverse;
            Slice w = {};
            w.load(head < H ? q_weight : k_weight, half, lane, vectorised);
            x.norm(inverse, w);
        }
    }
    if (turned) {
        const long long row = (long long)position * half;
        x.rotate(cos + row, sin + row, half, lane, vectorised, direction);
    }
    if (!inside) return;
    SCALAR* to = row_of(t, head);
    if (to != nullptr) x.store(to, half, lane, vectorised);
}

template <class RowOf>
__device__ __forceinline__ void turn_heads(RowOf row_of, bool rows_aligned, float* rstd, const SCALAR* qkv,
                                           const float* q_weight, const float* k_weight, const float* cos,
                                           const float* sin, const int* positions, int T, int H, int K, int D,
                                           float eps, float direction = 1.0f) {
    if (D / 2 % VECTOR == 0 && rows_aligned && aligned16(qkv) && aligned16(q_weight) && aligned16(k_weight) &&
        aligned16(cos) && aligned16(sin))
        turn_head(row_of, rstd, qkv, q_weight, k_weight, cos, sin, positions, T, H, K, D, eps, direction, true);
    else
        turn_head(row_of, rstd, qkv, q_weight, k_weight, cos, sin, positions, T, H, K, D, eps, direction, false);
}

// Grid: enough blocks for T · (H + 2K) heads, GROUPS a block. The 1 lets the compiler take registers enough: float32 on
// sm_100 spilled without it.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
qk_norm_rope_forward(SCALAR* out, float* rstd, const SCALAR* qkv, const float* q_weight, const float* k_weight,
                     const float* cos, const float* sin, const int* positions, int T, int H, int K, int D, float eps) {
    auto row_of = [&](unsigned t, unsigned head) { return out + ((long long)t * (H + 2 * K) + head) * D; };
    turn_heads(row_of, aligned16(out), rstd, qkv, q_weight, k_weight, cos, sin, positions, T, H, K, D, eps);
}

// The same grid, for heads without a norm: the backward pass is this with direction -1, and holds no sums.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
rope_turn(SCALAR* out, const SCALAR* qkv, const float* cos, const float* sin, const int* positions, int T, int H, int K,
          int D, float direction) {
    auto row_of = [&](unsigned t, unsigned head) { return out + ((long long)t * (H + 2 * K) + head) * D; };
    turn_heads(row_of, aligned16(out), nullptr, qkv, nullptr, nullptr, cos, sin, positions, T, H, K, D, 0.0f,
               direction);
}

// The same grid. Keys and values go to slots (T) int64 of the caches (slots, K, D), those of slot -1 nowhere.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
qk_norm_rope_store(SCALAR* out, SCALAR* k_cache, SCALAR* v_cache, const long long* slots, const SCALAR* qkv,
                   const float* q_weight, const float* k_weight, const float* cos, const float* sin,
                   const int* positions, int T, int H, int K, int D, float eps) {
    auto row_of = [&](unsigned t, unsigned head) -> SCALAR* {
        if (head < H) return out + ((long long)t * (H + 2 * K) + head) * D;
        const long long slot = slots[t];
        return slot < 0 ? nullptr : (head < H + K ? k_cache : v_cache) + (slot * K + (head - H) % K) * D;
    };
    turn_heads(row_of, aligned16(out) && aligned16(k_cache) && aligned16(v_cache), nullptr, qkv, q_weight, k_weight,
               cos, sin, positions, T, H, K, D, eps);
}

// Grid (blocks, 3): blockIdx.y = 0 does q, 1 k, 2 v; a block goes through heads of its kind and sums its share of the
// weight's gradient.
extern "C" __global__ void __launch_bounds__(THREADS)
qk_norm_rope_backward(SCALAR* dqkv, float* dw_partial, const SCALAR* dout, const SCALAR* qkv, const float* q_weight,
                      const float* k_weight, const float* rstd, const float* cos, const float* sin,
                      const int* positions, int T, int H, int K, int D) {
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, half = D / 2, kind = blockIdx.y;
    const int heads = kind == 0 ? H : K, offset = kind == 0 ? 0 : kind == 1 ? H : H + K;
    const bool vectorised = half % VECTOR == 0 && aligned16(dqkv) && aligned16(dout) && aligned16(qkv) &&
                            aligned16(q_weight) && aligned16(k_weight) && aligned16(cos) && aligned16(sin);
    const float* weight = kind == 2 ? nullptr : kind == 0 ? q_weight : k_weight;
    Slice w = {}, dw = {};
    if (weight != nullptr) w.load(weight, half, lane, vectorised);

    const unsigned rows = (unsigned)T * heads;
    for (unsigned base = blockIdx.x * GROUPS; base < rows; base += gridDim.x * GROUPS) {
        const unsigned row = base + group, t = row / heads, head = offset + row % heads;
        const bool inside = row < rows;
        const long long start = ((long long)t * (H + 2 * K) + head) * D;
        Slice d = {};
        if (inside) {
            d.load(dout + start, half, lane, vectorised);
            const long long angle = (long long)positions[t] * half;
            if (kind != 2) d.rotate(cos + angle, sin + angle, half, lane, vectorised, -1.0f);
        }
        if (weight != nullptr) {
            const float inverse = inside ? rstd[(long long)t * (H + K) + head] : 0.0f;
            Slice normed = {};
            if (inside) normed.load(qkv + start, half, lane, vectorised);
            float dot = 0.0f;
            for_each_pair([&](int j, int i) { normed.first[j][i] *= inverse, normed.second[j][i] *= inverse; });
            for_each_pair([&](int j, int i) {
                dw.first[j][i] += d.first[j][i] * normed.first[j][i];
                dw.second[j][i] += d.second[j][i] * normed.second[j][i];
            });
            for_each_pair([&](int j, int i) { d.first[j][i] *= w.first[j][i], d.second[j][i] *= w.second[j][i]; });
            for_each_pair([&](int j, int i) {
                dot = fmaf(d.first[j][i], normed.first[j][i], dot);
                dot = fmaf(d.second[j][i], normed.second[j][i], dot);
            });
            const float mean = warp_sum<LANES>(dot) / D;
            for_each_pair([&](int j, int i) {
                d.first[j][i] = norm_gradient(d.first[j][i], normed.first[j][i], mean, inverse);
                d.second[j][i] = norm_gradient(d.second[j][i], normed.second[j][i], mean, inverse);
            });
        }
        if (inside) d.store(dqkv + start, half, lane, vectorised);
    }

    if (dw_partial == nullptr || weight == nullptr) return;
    __shared__ float shares[GROUPS][HEAD_LIMIT];
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            const int c = (j * LANES + lane) * VECTOR + i;
            if (c < half) {
                shares[group][c] = dw.first[j][i];
                shares[group][half + c] = dw.second[j][i];
            }
        }
    __syncthreads();
    for (int c = threadIdx.x; c < D; c += THREADS) {
        float total = 0.0f;
        for (int g = 0; g < GROUPS; g++) total += shares[g][c];
        dw_partial[((long long)kind * gridDim.x + blockIdx.x) * D + c] = total;
    }
}
