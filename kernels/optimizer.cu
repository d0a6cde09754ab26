// AdamW in place on n elements, and the sum of squares of many arrays.
//   adamw_step: master, m, v (float32) and param = master rounded to SCALAR (null: the master is the parameter). Four elements a thread.
//   sum_of_squares: grid (SUM_BLOCKS, arrays); block (i, a) writes the float64 sum over its share of array a to partials[a][i].
//   sum_partials: one block adds the partial sums up, in the same order every time.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "common.cuh"

#define STEP_THREADS 256
#define STEP_VECTOR 4
#define SUM_THREADS 256

struct Settings {
    float keep, step_size, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, grad_scale;
};

// The order of the roundings is the NumPy shelf's.
__device__ __forceinline__ void update(float& master, float& m, float& v, float grad, const Settings& s) {
    const float g = grad * s.grad_scale;
    m += (g - m) * s.one_minus_beta1;
    v = v * s.beta2 + s.one_minus_beta2 * g * g;
    master = master * s.keep - s.step_size * m / (sqrtf(v) / s.root_correction + s.eps);
}

// keep = 1 - lr * weight_decay; step_size = lr / (1 - beta1^step); root_correction = sqrt(1 - beta2^step).
extern "C" __global__ void __launch_bounds__(STEP_THREADS)
adamw_step(float* master, float* m, float* v, SCALAR* param, const float* grad, long long n, float keep, float step_size,
           float one_minus_beta1, float beta2, float one_minus_beta2, float root_correction, float eps, float grad_scale) {
    const Settings settings = {keep, step_size, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, grad_scale};
    const long long first = (blockIdx.x * (long long)STEP_THREADS + threadIdx.x) * STEP_VECTOR;
    if (first >= n) return;
    const bool aligned = aligned16(master) && aligned16(m) && aligned16(v) && aligned16(grad) && aligned16(param);
    if (aligned && first + STEP_VECTOR <= n) {
        Vec<float, STEP_VECTOR> w = load_vec<STEP_VECTOR>(master + first), mean = load_vec<STEP_VECTOR>(m + first),
                                square = load_vec<STEP_VECTOR>(v + first), g = load_vec<STEP_VECTOR>(grad + first);
        Vec<SCALAR, STEP_VECTOR> stored;
#pragma unroll
        for (int i = 0; i < STEP_VECTOR; i++) {
            update(w[i], mean[i], square[i], g[i], settings);
            stored[i] = from_float<SCALAR>(w[i]);
        }
        store_vec(master + first, w);
        store_vec(m + first, mean);
        store_vec(v + first, square);
        if (param) store_vec(param + first, stored);
        return;
    }
    for (long long i = first; i < n && i < first + STEP_VECTOR; i++) {
        update(master[i], m[i], v[i], grad[i], settings);
        if (param) param[i] = from_float<SCALAR>(master[i]);
    }
}

// The block's sum, in thread 0; float64 has no tree in common.cuh.
__device__ __forceinline__ double sum_over_block(double value, double* scratch) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(FULL_MASK, value, offset);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    double total = 0.0;
    if (threadIdx.x == 0)
        for (int w = 0; w < SUM_THREADS / WARP; w++) total += scratch[w];
    return total;
}

// addresses, sizes: where the arrays are and how many elements they have. An array's share of a block depends on its size alone.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
sum_of_squares(double* partials, const unsigned long long* addresses, const long long* sizes) {
    __shared__ double scratch[SUM_THREADS / WARP];
    const SCALAR* x = reinterpret_cast<const SCALAR*>(addresses[blockIdx.y]);
    const long long size = sizes[blockIdx.y], step = (long long)gridDim.x * SUM_THREADS * VECTOR;
    const bool aligned = aligned16(x);
    double sum = 0.0;
    for (long long first = (blockIdx.x * (long long)SUM_THREADS + threadIdx.x) * VECTOR; first < size; first += step) {
        if (aligned && first + VECTOR <= size) {
            const Vec<SCALAR, VECTOR> part = load_vec<VECTOR>(x + first);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) sum = fma((double)to_float(part[i]), (double)to_float(part[i]), sum);
        } else {
            for (long long i = first; i < size && i < first + VECTOR; i++) sum = fma((double)to_float(x[i]), (double)to_float(x[i]), sum);
        }
    }
    sum = sum_over_block(sum, scratch);
    if (threadIdx.x == 0) partials[blockIdx.y * (long long)gridDim.x + blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) sum_partials(double* total, const double* partials, int count) {
    __shared__ double scratch[SUM_THREADS / WARP];
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += SUM_THREADS) sum += partials[i];
    sum = sum_over_block(sum, scratch);
    if (threadIdx.x == 0) *total = sum;
}
