// AdamW in place on n elements, the rounding of weights, and sums of squares.
//   adamw_step: master, m, v (float32) and param = master rounded to SCALAR (null: the master is the parameter).
//   store_weights: param = values rounded in the same way. Both: four elements a thread.
//   sums_of_squares: the float64 sum over each of the equal pieces of many arrays; a warp a piece.
//   add_rows: the sum of each row of a float64 matrix; one row is a total.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "common.cuh"

#define STEP_THREADS 256
#define STEP_VECTOR 4
#define SUM_THREADS 256

struct Settings {
    float keep, step_size, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, grad_scale;
};

// How a weight is stored. bfloat16: halves away from zero, so that the float is exactly the weight plus a signed 16-bit
// remainder; a finite float never becomes infinite (see the NumPy shelf). The others: to even.
__device__ __forceinline__ SCALAR stored_weight(float x) {
#if SCALAR_BF16
    const unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    unsigned high = (bits + 0x8000u) >> 16;
    if (magnitude >= 0x7f7f8000u && magnitude < 0x7f800000u) high = bits >> 16;
    if (magnitude > 0x7f800000u) high = bits >> 16 | 0x40u;
    return __ushort_as_bfloat16((unsigned short)high);
#else
    return from_float<SCALAR>(x);
#endif
}

// The order of the roundings is the NumPy shelf's.
__device__ __forceinline__ void update(float& master, float& m, float& v, float grad, const Settings& s) {
    const float g = grad * s.grad_scale;
    m += (g - m) * s.one_minus_beta1;
    v = v * s.beta2 + s.one_minus_beta2 * g * g;
    master = master * s.keep - s.step_size * m / (sqrtf(v) / s.root_correction + s.eps);
}

// keep = 1 - lr * weight_decay; step_size = lr / (1 - beta1^step); root_correction = sqrt(1 - beta2^step).
extern "C" __global__ void __launch_bounds__(STEP_THREADS)
adamw_step(float* master, float* m, float* v, SCALAR* param, const float* grad, long long n, float keep,
           float step_size, float one_minus_beta1, float beta2, float one_minus_beta2, float root_correction, float eps,
           float grad_scale) {
    const Settings settings = {keep, step_size, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps,
                               grad_scale};
    const long long first = (blockIdx.x * (long long)STEP_THREADS + threadIdx.x) * STEP_VECTOR;
    if (first >= n) return;
    const bool aligned = aligned16(master) && aligned16(m) && aligned16(v) && aligned16(grad) && aligned16(param);
    if (aligned && first + STEP_VECTOR <= n) {
        Vec<float, STEP_VECTOR> w = load_vec<STEP_VECTOR>(master + first), mean = load_vec<STEP_VECTOR>(m + first);
        Vec<float, STEP_VECTOR> square = load_vec<STEP_VECTOR>(v + first), g = load_vec<STEP_VECTOR>(grad + first);
        Vec<SCALAR, STEP_VECTOR> stored;
#pragma unroll
        for (int i = 0; i < STEP_VECTOR; i++) {
            update(w[i], mean[i], square[i], g[i], settings);
            stored[i] = stored_weight(w[i]);
        }
        store_vec(master + first, w);
        store_vec(m + first, mean);
        store_vec(v + first, square);
        if (param) store_vec(param + first, stored);
        return;
    }
    for (long long i = first; i < n && i < first + STEP_VECTOR; i++) {
        update(master[i], m[i], v[i], grad[i], settings);
        if (param) param[i] = stored_weight(master[i]);
    }
}

extern "C" __global__ void __launch_bounds__(STEP_THREADS)
store_weights(SCALAR* param, const float* values, long long n) {
    const long long first = (blockIdx.x * (long long)STEP_THREADS + threadIdx.x) * STEP_VECTOR;
    if (first >= n) return;
    if (aligned16(param) && aligned16(values) && first + STEP_VECTOR <= n) {
        const Vec<float, STEP_VECTOR> x = load_vec<STEP_VECTOR>(values + first);
        Vec<SCALAR, STEP_VECTOR> stored;
#pragma unroll
        for (int i = 0; i < STEP_VECTOR; i++) stored[i] = stored_weight(x[i]);
        store_vec(param + first, stored);
        return;
    }
    for (long long i = first; i < n && i < first + STEP_VECTOR; i++) param[i] = stored_weight(values[i]);
}

__device__ __forceinline__ double fma_square(SCALAR x, double sum) {
    return fma((double)to_float(x), (double)to_float(x), sum);
}

// addresses, sizes: where the arrays are and how many elements each has, a multiple of `pieces`. blockIdx.y is the
// array, the warp's number the piece. Element i of a piece belongs to the same lane whether or not the piece is
// aligned, so that a piece's bits depend on its elements alone.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
sums_of_squares(double* sums, const unsigned long long* addresses, const long long* sizes, int pieces) {
    const int piece = blockIdx.x * (SUM_THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (piece >= pieces) return;
    const long long size = sizes[blockIdx.y] / pieces;
    const SCALAR* x = reinterpret_cast<const SCALAR*>(addresses[blockIdx.y]) + piece * size;
    const bool aligned = aligned16(x);
    double sum = 0.0;
#pragma unroll 4
    for (long long first = lane * VECTOR; first < size; first += WARP * VECTOR) {
        if (aligned && first + VECTOR <= size) {
            const Vec<SCALAR, VECTOR> part = load_vec<VECTOR>(x + first);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) sum = fma_square(part[i], sum);
        } else {
            for (long long i = first; i < size && i < first + VECTOR; i++) sum = fma_square(x[i], sum);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[blockIdx.y * (long long)pieces + piece] = sum;
}

// totals[row] = the sum of row blockIdx.x of rows (gridDim.x, cols)
extern "C" __global__ void __launch_bounds__(SUM_THREADS) add_rows(double* totals, const double* rows, int cols) {
    __shared__ double scratch[WARP];
    const double* row = rows + blockIdx.x * (long long)cols;
    double sum = 0.0;
    for (int i = threadIdx.x; i < cols; i += SUM_THREADS) sum += row[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}
