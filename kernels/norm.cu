// RMSNorm over the rows of x (R, C): y = x · rstd · w, rstd = 1 / sqrt(mean(x²) + eps); w (C,) and rstd (R,) are float.
// Forward: a block a row, alone, after the residual addition, or after that of a sum of parts (one code, one set of
// bits). Backward: dx like x, each block going through rows blockIdx.x, + gridDim.x, …; it sums its share of dw in
// shared memory and writes it to dw_partial (gridDim.x, C), which column_sum_add adds up in a fixed order: no atomics.
// Thread t owns the columns t·VECTOR … + VECTOR - 1, + blockDim.x·VECTOR, …; the block size comes from C alone
// (cukit/backend/cuda/norm.py), so a row's bits do not depend on how many rows there are, nor on alignment. The column
// sums also serve the gradients of biases.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "common.cuh"

constexpr int MAX_THREADS = 512;

// What is normalised: x; x + residual; or the latter where x is a sum of parts (count, R, C), rounded as it is stored
enum Input { ALONE, ADDED, PARTS };

// Where the parts of a row lie: part i is x + i · stride
struct Parts {
    int count;
    long long stride;
};

// a + b as NCCL, CuPy and NumPy add: subnormal numbers count, whatever -ftz says
__device__ inline float add_subnormal(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

// x (+ residual, the sum rounded and stored) of one chunk
template <Input INPUT>
__device__ inline void load_summed(float (&value)[VECTOR], SCALAR* summed, const SCALAR* x, Parts parts,
                                   const SCALAR* residual, int c, int C, bool vectorised) {
    load_floats(value, x, c, C, vectorised);
    if (INPUT != ALONE) {
        float other[VECTOR], next[VECTOR];
        load_floats(other, residual, c, C, vectorised);
        if (INPUT == PARTS) {
#pragma unroll 2  // 4 would spill
            for (int part = 1; part < parts.count; part++) {
                load_floats(next, x + part * parts.stride, c, C, vectorised);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) value[i] = add_subnormal(value[i], next[i]);
            }
#pragma unroll
            for (int i = 0; i < VECTOR; i++) value[i] = rounded<SCALAR>(value[i]);
        }
#pragma unroll
        for (int i = 0; i < VECTOR; i++) value[i] = rounded<SCALAR>(value[i] + other[i]);
        store_floats(summed, value, c, C, vectorised);
    }
}

__device__ inline void store_normalised(SCALAR* y, float (&value)[VECTOR], const float* w, Wide inverse, int c, int C,
                                        bool vectorised) {
    float weight[VECTOR];
    load_floats(weight, w, c, C, vectorised);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) value[i] = normalised(value[i], inverse, weight[i]);
    store_floats(y, value, c, C, vectorised);
}

template <Input INPUT>
__device__ inline void norm_row(SCALAR* y, SCALAR* summed, float* rstd, const SCALAR* x, Parts parts,
                                const SCALAR* residual, const float* w, int C, float eps) {
    __shared__ Wide scratch[WARP];
    const bool vectorised = C % VECTOR == 0 && aligned16(y) && aligned16(x) && aligned16(w) && aligned16(summed) &&
                            aligned16(residual);
    const long long start = (long long)blockIdx.x * C;
    const int first = threadIdx.x * VECTOR, step = blockDim.x * VECTOR;
    y += start, x += start;
    if (INPUT != ALONE) summed += start, residual += start;

    float kept[VECTOR];  // the thread's first chunk stays in registers; of a wider row the rest is read again
    Wide squares = 0;
    if (first < C) {
        load_summed<INPUT>(kept, summed, x, parts, residual, first, C, vectorised);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) squares = fma(Wide(kept[i]), Wide(kept[i]), squares);
    }
    for (int c = first + step; c < C; c += step) {
        float value[VECTOR];
        load_summed<INPUT>(value, summed, x, parts, residual, c, C, vectorised);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) squares = fma(Wide(value[i]), Wide(value[i]), squares);
    }
    const Wide inverse = inverse_rms(block_sum(squares, scratch), C, eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = inverse;
    if (first < C) store_normalised(y, kept, w, inverse, first, C, vectorised);
    for (int c = first + step; c < C; c += step) {
        float value[VECTOR];
        load_floats(value, INPUT == ALONE ? x : summed, c, C, vectorised);
        store_normalised(y, value, w, inverse, c, C, vectorised);
    }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
rms_norm_forward(SCALAR* y, float* rstd, const SCALAR* x, const float* w, int C, float eps) {
    norm_row<ALONE>(y, nullptr, rstd, x, {}, nullptr, w, C, eps);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
add_rms_norm_forward(SCALAR* y, SCALAR* summed, float* rstd, const SCALAR* x, const SCALAR* residual, const float* w,
                     int C, float eps) {
    norm_row<ADDED>(y, summed, rstd, x, {}, residual, w, C, eps);
}

// x = the sum in order of the parts (count, R, C): the bits of add_rms_norm_forward after that sum was stored
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
sum_add_rms_norm_forward(SCALAR* y, SCALAR* summed, float* rstd, const SCALAR* parts, int count, const SCALAR* residual,
                         const float* w, int R, int C, float eps) {
    norm_row<PARTS>(y, summed, rstd, parts, {count, (long long)R * C}, residual, w, C, eps);
}

// dsummed (R, C) or null is added to dx after dx was rounded, as NumPy does. dw_partial may be null. y (R, C) or null:
// the forward pass's output again, to the bit where Wide is float. Shared memory: C floats, rounded up to whole
// vectors; element i of chunk k lies at i · chunks + k, so that a warp's accesses fall into different banks.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
rms_norm_backward(SCALAR* dx, SCALAR* y, float* dw_partial, const SCALAR* dy, const SCALAR* dsummed, const SCALAR* x,
                  const float* w, const float* rstd, int R, int C) {
    extern __shared__ float dw[];
    __shared__ float scratch[WARP];
    const bool vectorised = C % VECTOR == 0 && aligned16(dx) && aligned16(y) && aligned16(dy) && aligned16(dsummed) &&
                            aligned16(x) && aligned16(w);
    const int first = threadIdx.x * VECTOR, step = blockDim.x * VECTOR, chunks = (C + VECTOR - 1) / VECTOR;
    if (dw_partial != nullptr)
        for (int c = first; c < C; c += step)
#pragma unroll
            for (int i = 0; i < VECTOR; i++) dw[i * chunks + c / VECTOR] = 0.0f;

    for (int row = blockIdx.x; row < R; row += gridDim.x) {
        const long long start = (long long)row * C;
        const float inverse = rstd[row];
        float kept_dnormed[VECTOR] = {}, kept_normed[VECTOR] = {};
        float dot = 0.0f;
        for (int c = first; c < C; c += step) {
            float gradient[VECTOR], value[VECTOR], weight[VECTOR];
            load_floats(gradient, dy + start, c, C, vectorised);
            load_floats(value, x + start, c, C, vectorised);
            load_floats(weight, w, c, C, vectorised);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const float normed = value[i] * inverse, dnormed = gradient[i] * weight[i];
                dot = fmaf(dnormed, normed, dot);
                if (dw_partial != nullptr) dw[i * chunks + c / VECTOR] += gradient[i] * normed;
                if (c == first) kept_dnormed[i] = dnormed, kept_normed[i] = normed;
            }
            if (y != nullptr) store_normalised(y + start, value, w, inverse, c, C, vectorised);
        }
        const float mean = block_sum(dot, scratch) / C;
        for (int c = first; c < C; c += step) {
            float out[VECTOR];
            if (c == first) {
#pragma unroll
                for (int i = 0; i < VECTOR; i++) out[i] = norm_gradient(kept_dnormed[i], kept_normed[i], mean, inverse);
            } else {
                float gradient[VECTOR], value[VECTOR], weight[VECTOR];
                load_floats(gradient, dy + start, c, C, vectorised);
                load_floats(value, x + start, c, C, vectorised);
                load_floats(weight, w, c, C, vectorised);
#pragma unroll
                for (int i = 0; i < VECTOR; i++)
                    out[i] = norm_gradient(gradient[i] * weight[i], value[i] * inverse, mean, inverse);
            }
            if (dsummed != nullptr) {
                float other[VECTOR];
                load_floats(other, dsummed + start, c, C, vectorised);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) out[i] = rounded<SCALAR>(out[i]) + other[i];
            }
            store_floats(dx + start, out, c, C, vectorised);
        }
    }
    if (dw_partial != nullptr)  // every thread reads back only what it wrote
        for (int c = first; c < C; c += step)
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                if (c + i < C) dw_partial[(long long)blockIdx.x * C + c + i] = dw[i * chunks + c / VECTOR];
}

// ---- sums of columns ----
// A block does WARP columns: the blockDim.y threads of a column take every blockDim.y-th row, then one of them adds up
// their sums in order.

template <typename T> __device__ inline float column_sum(const T* x, long long begin, long long end, int cols) {
    __shared__ float parts[WARP][WARP + 1];
    const int col = blockIdx.x * WARP + threadIdx.x;
    float sum = 0.0f;
    if (col < cols)
#pragma unroll 4
        for (long long row = begin + threadIdx.y; row < end; row += blockDim.y) sum += to_float(x[row * cols + col]);
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    float total = 0.0f;
    if (threadIdx.y == 0)
        for (int part = 0; part < blockDim.y; part++) total += parts[part][threadIdx.x];
    return total;  // of threadIdx.y == 0
}

// partial (gridDim.y, cols): the sums of rows blockIdx.y · rows_per_block … of x (rows, cols)
extern "C" __global__ void __launch_bounds__(WARP * WARP)
column_sum_partial(float* partial, const SCALAR* x, long long rows, int cols, int rows_per_block) {
    const long long begin = (long long)blockIdx.y * rows_per_block, end = min(begin + rows_per_block, rows);
    const float total = column_sum(x, begin, end, cols);
    const int col = blockIdx.x * WARP + threadIdx.x;
    if (threadIdx.y == 0 && col < cols) partial[(long long)blockIdx.y * cols + col] = total;
}

// out (cols,) += the sum of the rows of partial (rows, cols)
extern "C" __global__ void __launch_bounds__(WARP * WARP)
column_sum_add(float* out, const float* partial, int rows, int cols) {
    const float total = column_sum(partial, 0, rows, cols);
    const int col = blockIdx.x * WARP + threadIdx.x;
    if (threadIdx.y == 0 && col < cols) out[col] += total;
}
