// RMSNorm over the rows of x (R, C): y = x · rstd · w, rstd = 1 / sqrt(mean(x²) + eps); w (C,) and rstd (R,) are float.
// Forward: a block a row, alone, after the residual addition, or after that of a sum of parts (one code, one set of
// bits). Backward: dx like x, each block going through rows blockIdx.x, + gridDim.x, …; it sums its share of dw in
// shared memory and writes it to dw_partial (gridDim.x, C), which column_sum_add adds up in a fixed order: no atomics.
// Thread t owns the columns t·VECTOR … + VECTOR - 1, + blockDim.x·VECTOR, …; the block size comes from C alone
// (cukit/backend/cuda/norm.py), so a row's bits do not depend on how many rows there are, nor on alignment. The column
// sums also serve the gradients of biases.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "mma.cuh"

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

__device__ inline void store_normalised(SCALAR* y, float (&value)[VECTOR], const float (&weight)[VECTOR], Wide inverse,
                                        int c, int C, bool vectorised) {
#pragma unroll
    for (int i = 0; i < VECTOR; i++) value[i] = normalised(value[i], inverse, weight[i]);
    store_floats(y, value, c, C, vectorised);
}

// vectorised is a constant here: after a branch for each load, every load would wait for the one before.
template <Input INPUT>
__device__ __forceinline__ void norm_row(SCALAR* y, SCALAR* summed, float* rstd, const SCALAR* x, Parts parts,
                                         const SCALAR* residual, const float* w, int C, float eps, bool vectorised,
                                         Wide* scratch) {
    const long long start = (long long)blockIdx.x * C;
    const int first = threadIdx.x * VECTOR, step = blockDim.x * VECTOR;
    y += start, x += start;
    if (INPUT != ALONE) summed += start, residual += start;

    float kept[VECTOR], weight[VECTOR];  // the thread's first chunk stays here; of a wider row the rest is read again
    Wide squares = 0;
    if (first < C) {
        if (INPUT != PARTS) load_floats(weight, w, first, C, vectorised);  // early; with parts it would spill
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
    if (first < C) {
        if (INPUT == PARTS) load_floats(weight, w, first, C, vectorised);
        store_normalised(y, kept, weight, inverse, first, C, vectorised);
    }
    for (int c = first + step; c < C; c += step) {
        float value[VECTOR];
        load_floats(value, INPUT == ALONE ? x : summed, c, C, vectorised);
        load_floats(weight, w, c, C, vectorised);
        store_normalised(y, value, weight, inverse, c, C, vectorised);
    }
}

template <Input INPUT>
__device__ __forceinline__ void norm_rows(SCALAR* y, SCALAR* summed, float* rstd, const SCALAR* x, Parts parts,
                                          const SCALAR* residual, const float* w, int C, float eps) {
    __shared__ Wide scratch[WARP];
    if (C % VECTOR == 0 && aligned16(y) && aligned16(x) && aligned16(w) && aligned16(summed) && aligned16(residual))
        norm_row<INPUT>(y, summed, rstd, x, parts, residual, w, C, eps, true, scratch);
    else
        norm_row<INPUT>(y, summed, rstd, x, parts, residual, w, C, eps, false, scratch);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
rms_norm_forward(SCALAR* y, float* rstd, const SCALAR* x, const float* w, int C, float eps) {
    norm_rows<ALONE>(y, nullptr, rstd, x, {}, nullptr, w, C, eps);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
add_rms_norm_forward(SCALAR* y, SCALAR* summed, float* rstd, const SCALAR* x, const SCALAR* residual, const float* w,
                     int C, float eps) {
    norm_rows<ADDED>(y, summed, rstd, x, {}, residual, w, C, eps);
}

// x = the sum in order of the parts (count, R, C): the bits of add_rms_norm_forward after that sum was stored
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
sum_add_rms_norm_forward(SCALAR* y, SCALAR* summed, float* rstd, const SCALAR* parts, int count, const SCALAR* residual,
                         const float* w, int R, int C, float eps) {
    norm_rows<PARTS>(y, summed, rstd, parts, {count, (long long)R * C}, residual, w, C, eps);
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
            if (y != nullptr) store_normalised(y + start, value, weight, inverse, c, C, vectorised);
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

// The same, to the bit, for whole, aligned vectors of which a thread of rms_norm_backward has one a row at most. Here a
// thread does the work of threads t, t + blockDim.x, … of that block, FOLD times as large, and the block's next row is
// on its way to shared memory meanwhile. Shared memory: STAGES rows of dy, x and dsummed, then dw, of which float i of
// a vector lies at i / 4 · vectors · 4 + thread · 4 + i % 4. A thread reads there only what it has written or copied
// itself.
constexpr int FOLD = 4, STAGES = 2;

extern "C" __global__ void __launch_bounds__(MAX_THREADS / FOLD, 4)
rms_norm_backward_folded(SCALAR* dx, SCALAR* y, float* dw_partial, const SCALAR* dy, const SCALAR* dsummed,
                         const SCALAR* x, const float* w, const float* rstd, int R, int C) {
    using Chunk = Vec<SCALAR, VECTOR>;
    extern __shared__ Chunk stages[];  // (STAGES, 3, vectors)
    __shared__ float scratch[2][WARP];
    const int vectors = C / VECTOR, warps = blockDim.x / WARP;
    float* dw = reinterpret_cast<float*>(stages + STAGES * 3 * vectors);
    for (int thread = threadIdx.x; thread < vectors; thread += blockDim.x)
        for (int i = 0; i < VECTOR; i += 4) store_vec(dw + i * vectors + thread * 4, Vec<float, 4>{});

    const auto start_copies = [&](Chunk* stage, int row) {
        const long long start = (long long)row * C;
        if (row < R)
            for (int thread = threadIdx.x; thread < vectors; thread += blockDim.x) {
                const long long from = start + thread * VECTOR;
                copy_async<16>(stage + thread, dy + from, true);
                copy_async<16>(stage + vectors + thread, x + from, true);
                if (dsummed != nullptr) copy_async<16>(stage + 2 * vectors + thread, dsummed + from, true);
            }
        copies_commit();
    };
    for (int s = 0; s < STAGES; s++) start_copies(stages + s * 3 * vectors, blockIdx.x + s * gridDim.x);
    float next_inverse = rstd[blockIdx.x];

    for (int row = blockIdx.x, turn = 0; row < R; row += gridDim.x, turn++) {
        const long long start = (long long)row * C;
        const float inverse = next_inverse;
        if (row + gridDim.x < R) next_inverse = rstd[row + gridDim.x];
        Chunk* stage = stages + turn % STAGES * 3 * vectors;
        float dnormed[FOLD][VECTOR], normed[FOLD][VECTOR], dot[FOLD] = {};
        copies_wait<STAGES - 1>();
#pragma unroll
        for (int k = 0; k < FOLD; k++) {
            const int thread = k * blockDim.x + threadIdx.x, c = thread * VECTOR;
            if (c >= C) continue;
            float gradient[VECTOR], value[VECTOR], weight[VECTOR];
            load_floats(gradient, stage[thread].v, 0, VECTOR, true);
            load_floats(value, stage[vectors + thread].v, 0, VECTOR, true);
            load_floats(weight, w, c, C, true);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                normed[k][i] = value[i] * inverse, dnormed[k][i] = gradient[i] * weight[i];
                dot[k] = fmaf(dnormed[k][i], normed[k][i], dot[k]);
            }
            if (dw_partial != nullptr)
#pragma unroll
                for (int i = 0; i < VECTOR; i += 4) {
                    float* four = dw + i * vectors + thread * 4;
                    Vec<float, 4> sum = load_vec<4>(four);
#pragma unroll
                    for (int j = 0; j < 4; j++) sum[j] += gradient[i + j] * normed[k][i + j];
                    store_vec(four, sum);
                }
            if (y != nullptr) store_normalised(y + start, value, weight, inverse, c, C, true);
        }

#pragma unroll
        for (int k = 0; k < FOLD; k++) {
            dot[k] = warp_sum(dot[k]);
            if (lane() == 0) scratch[turn % 2][k * warps + warp_index()] = dot[k];
        }
        __syncthreads();  // one a row: the next row writes to the other half of scratch
        const float mean = warp_sum(lane() < FOLD * warps ? scratch[turn % 2][lane()] : 0.0f) / C;
#pragma unroll
        for (int k = 0; k < FOLD; k++) {
            const int thread = k * blockDim.x + threadIdx.x, c = thread * VECTOR;
            if (c >= C) continue;
            float out[VECTOR], other[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) out[i] = norm_gradient(dnormed[k][i], normed[k][i], mean, inverse);
            if (dsummed != nullptr) {
                load_floats(other, stage[2 * vectors + thread].v, 0, VECTOR, true);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) out[i] = rounded<SCALAR>(out[i]) + other[i];
            }
            store_floats(dx + start, out, c, C, true);
        }
        start_copies(stage, row + STAGES * gridDim.x);
    }
    if (dw_partial != nullptr)
        for (int thread = threadIdx.x; thread < vectors; thread += blockDim.x)
            for (int i = 0; i < VECTOR; i += 4)
                store_vec(dw_partial + (long long)blockIdx.x * C + thread * VECTOR + i,
                          load_vec<4>(dw + i * vectors + thread * 4));
}

// ---- sums of columns ----
// A block does COLUMNS columns: the WARP threads of a column take every WARP-th row, then one of them adds up their
// sums in order.

// AT_ONCE: rows of a thread on their way from memory.
template <int COLUMNS, int AT_ONCE, typename T>
__device__ inline float column_sum(const T* x, long long begin, long long end, int cols) {
    __shared__ float parts[WARP][COLUMNS + 1];
    const int col = blockIdx.x * COLUMNS + threadIdx.x;
    float sum = 0.0f;
    if (col < cols)
#pragma unroll AT_ONCE
        for (long long row = begin + threadIdx.y; row < end; row += WARP) sum += to_float(x[row * cols + col]);
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
    const float total = column_sum<WARP, 4>(x, begin, end, cols);
    const int col = blockIdx.x * WARP + threadIdx.x;
    if (threadIdx.y == 0 && col < cols) partial[(long long)blockIdx.y * cols + col] = total;
}

constexpr int ADD_COLUMNS = 8;  // 32 bytes of a row: narrow blocks, so that a few hundred columns fill the card

// out (cols,) += the sum of the rows of partial (rows, cols)
extern "C" __global__ void __launch_bounds__(ADD_COLUMNS * WARP)
column_sum_add(float* out, const float* partial, int rows, int cols) {
    const float total = column_sum<ADD_COLUMNS, 16>(partial, 0, rows, cols);
    const int col = blockIdx.x * ADD_COLUMNS + threadIdx.x;
    if (threadIdx.y == 0 && col < cols) out[col] += total;
}
