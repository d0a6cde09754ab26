// What every kernel file shares: the scalar type, 16-byte vectors, conversions, reductions with a fixed order, and the
// RMS norm's arithmetic.
//
// SCALAR, the type that activations and weights are stored in, comes from -D (cukit/backend/cuda/compile.py);
// SCALAR_BF16, SCALAR_F16 or SCALAR_F32 is 1 beside it. Everything is compiled with -fmad=false: a * b + c rounds
// twice, as NumPy does; fmaf is one rounding.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef SCALAR  // so that an editor can parse a file alone
#define SCALAR __nv_bfloat16
#define SCALAR_BF16 1
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define NAN_FLOAT __int_as_float(0x7fc00000)

constexpr int WARP = 32;
constexpr unsigned FULL_MASK = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

__device__ __forceinline__ int lane() { return threadIdx.x % WARP; }
__device__ __forceinline__ int warp_index() { return threadIdx.x / WARP; }

// ---- conversions: float is what sums are taken in; storing rounds to nearest even ----

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

template <typename T> __device__ inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }

// x as it is after being stored as T: the rounding point of a value that a fused kernel keeps in a register
template <typename T> __device__ inline float rounded(float x) { return to_float(from_float<T>(x)); }
template <> __device__ inline float rounded<__nv_bfloat16>(float x) {  // its upper half, in one instruction
    const __nv_bfloat162 pair = __floats2bfloat162_rn(0.0f, x);
    return __uint_as_float(*reinterpret_cast<const unsigned*>(&pair));
}

// ---- vectors: N elements that move in loads and stores of up to 16 bytes ----

template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
    T v[N];
    __device__ T& operator[](int i) { return v[i]; }
    __device__ const T& operator[](int i) const { return v[i]; }
};

constexpr int VECTOR = 16 / sizeof(SCALAR);  // elements of SCALAR in 16 bytes: 8, or 4 for float

__device__ inline bool aligned16(const void* p) { return (reinterpret_cast<unsigned long long>(p) & 15) == 0; }

template <int N, typename T> __device__ inline Vec<T, N> load_vec(const T* p) {
    return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <typename T, int N> __device__ inline void store_vec(T* p, const Vec<T, N>& x) {
    *reinterpret_cast<Vec<T, N>*>(p) = x;
}

// Elements first … first + N - 1 of a row of `size` as floats, zeros past its end. `vectorised` (the same for the whole
// launch) says that the row is aligned and a multiple of N; both ways give the same values to the same thread, hence
// the same bits.
template <int N, typename T>
__device__ inline void load_floats(float (&out)[N], const T* row, int first, int size, bool vectorised) {
    if (vectorised) {
        Vec<T, N> x = load_vec<N>(row + first);
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = to_float(x[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = first + i < size ? to_float(row[first + i]) : 0.0f;
    }
}

template <int N, typename T>
__device__ inline void store_floats(T* row, const float (&x)[N], int first, int size, bool vectorised) {
    if (vectorised) {
        Vec<T, N> packed;
#pragma unroll
        for (int i = 0; i < N; i++) packed[i] = from_float<T>(x[i]);
        store_vec(row + first, packed);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (first + i < size) row[first + i] = from_float<T>(x[i]);
    }
}

// to (C) = from (C), by the whole block; `vectorised`: whole, aligned vectors
__device__ inline void copy_row(SCALAR* to, const SCALAR* from, int C, bool vectorised) {
    if (vectorised)
        for (int c = threadIdx.x * VECTOR; c < C; c += blockDim.x * VECTOR)
            store_vec(to + c, load_vec<VECTOR>(from + c));
    else
        for (int c = threadIdx.x; c < C; c += blockDim.x) to[c] = from[c];
}

// ---- reductions. The tree depends on the number of threads only, and every thread gets the same bits ----

// Over groups of LANES neighbouring lanes (a power of two); every lane of the warp must call it.
template <int LANES = WARP, typename T> __device__ inline T warp_sum(T x) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL_MASK, x, offset);
    return x;
}

template <int LANES = WARP> __device__ inline float warp_max(float x) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, offset));
    return x;
}

// Over a one-dimensional block of whole warps. scratch: 32 numbers in shared memory, free again after the next
// __syncthreads().
template <typename T> __device__ inline T block_sum(T x, T* scratch) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    if (warps == 1) return x;
    __syncthreads();  // some threads may still read the last result
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : T(0));
}

__device__ inline float block_max(float x, float* scratch) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_max(x);
    if (warps == 1) return x;
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? scratch[lane] : -INFINITY);
}

// ---- the RMS norm's arithmetic, for norm.cu and rope.cu: the rounding points are NumPy's ----

// Wide: what a value is computed in before it is stored. Float is enough for 16 bits; float32 is then rounded once, not
// once an operation.
#if SCALAR_F32
using Wide = double;
#else
using Wide = float;
#endif

__device__ inline Wide inverse_rms(Wide sum_of_squares, int size, float eps) {
    return Wide(1) / sqrt(sum_of_squares / size + eps);
}
__device__ inline float normalised(float x, Wide rstd, float weight) { return x * rstd * weight; }
// dx of one element, given dy · w, x̂ = x · rstd and mean(dy · w · x̂)
__device__ inline float norm_gradient(float dnormed, float normed, float mean, float rstd) {
    return rstd * (dnormed - normed * mean);
}
