// A linear map to one number a row: scores[n] = sum of hidden[n, c] · weight[c]. hidden (N, C) of SCALAR, weight (C,)
// and scores (N,) of float.
//   forward:  a warp a row. Lane l owns the columns l·VECTOR … + VECTOR - 1, + WARP·VECTOR, …, so that a row's bits
//             depend on C alone, not on how many rows there are, nor on alignment.
//   backward: dhidden[n, c] = dscores[n] · weight[c]. Block (part of the columns, run of rows) also sums its share of
//             dweight[c] = sum of dscores[n] · hidden[n, c] into dweight_partial (gridDim.y, C), which
//             score_add_partial adds up in a fixed order: no atomics.
// Products of two floats are exact in double, and sums are taken there: a score is rounded once.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "common.cuh"

constexpr int ROWS_A_BLOCK = 8;  // warps: rows of the forward pass, and rows at a time of the backward pass
constexpr int ADD_THREADS = 128;

extern "C" __global__ void __launch_bounds__(WARP* ROWS_A_BLOCK)
score_forward(float* scores, const SCALAR* hidden, const float* weight, long long rows, int C) {
    const long long row = (long long)blockIdx.x * ROWS_A_BLOCK + warp_index();
    if (row >= rows) return;
    const bool vectorised = C % VECTOR == 0 && aligned16(hidden) && aligned16(weight);
    hidden += row * C;
    double sum = 0.0;
    for (int c = lane() * VECTOR; c < C; c += WARP * VECTOR) {
        float value[VECTOR], factor[VECTOR];
        load_floats(value, hidden, c, C, vectorised);
        load_floats(factor, weight, c, C, vectorised);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum = fma(double(value[i]), double(factor[i]), sum);
    }
    sum = warp_sum(sum);
    if (lane() == 0) scores[row] = float(sum);
}

// Block (WARP, ROWS_A_BLOCK); dweight_partial may be null: then hidden is not read.
extern "C" __global__ void __launch_bounds__(WARP* ROWS_A_BLOCK)
score_backward(SCALAR* dhidden, float* dweight_partial, const float* dscores, const SCALAR* hidden,
               const float* weight, long long rows, int C, int rows_per_block) {
    __shared__ double parts[ROWS_A_BLOCK][WARP * VECTOR];
    const bool vectorised = C % VECTOR == 0 && aligned16(dhidden) && aligned16(hidden) && aligned16(weight);
    const int c = (blockIdx.x * WARP + threadIdx.x) * VECTOR;
    const long long begin = (long long)blockIdx.y * rows_per_block, end = min(begin + rows_per_block, rows);
    double sum[VECTOR] = {};
    if (c < C) {
        float factor[VECTOR];
        load_floats(factor, weight, c, C, vectorised);
        for (long long row = begin + threadIdx.y; row < end; row += ROWS_A_BLOCK) {
            const float upstream = dscores[row];
            float out[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) out[i] = upstream * factor[i];
            store_floats(dhidden + row * C, out, c, C, vectorised);
            if (dweight_partial == nullptr) continue;
            float value[VECTOR];
            load_floats(value, hidden + row * C, c, C, vectorised);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) sum[i] = fma(double(upstream), double(value[i]), sum[i]);
        }
    }
    if (dweight_partial == nullptr) return;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) parts[threadIdx.y][i * WARP + threadIdx.x] = sum[i];
    __syncthreads();
    if (threadIdx.y != 0) return;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        double total = 0.0;
        for (int part = 0; part < ROWS_A_BLOCK; part++) total += parts[part][i * WARP + threadIdx.x];
        if (c + i < C) dweight_partial[(long long)blockIdx.y * C + c + i] = float(total);
    }
}

// dweight (C,) += the sum of the rows of partial (count, C), in order
extern "C" __global__ void __launch_bounds__(ADD_THREADS)
score_add_partial(float* dweight, const float* partial, int count, int C) {
    const int c = blockIdx.x * ADD_THREADS + threadIdx.x;
    if (c >= C) return;
    double total = 0.0;
    for (int row = 0; row < count; row++) total += partial[(long long)row * C + c];
    dweight[c] += float(total);
}
