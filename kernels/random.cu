// Normal noise from a counter: number i depends on the seed and on i alone.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "common.cuh"
#include "philox.cuh"

#define FILL_THREADS 256
#define FILL_VECTOR 4  // the words of one counter

__device__ __forceinline__ float uniform(unsigned word) { return (__uint2float_rn(word) + 0.5f) * 2.3283064365386963e-10f; }

// Box and Muller: two normal numbers from two words
__device__ __forceinline__ void normal_pair(float& a, float& b, unsigned first, unsigned second, float scale) {
    const float radius = sqrtf(-2.0f * logf(uniform(first))) * scale;
    float sine, cosine;
    sincospif(2.0f * uniform(second), &sine, &cosine);
    a = radius * cosine, b = radius * sine;
}

// out (n) = scale · noise; thread t makes the numbers 4t … 4t + 3.
extern "C" __global__ void __launch_bounds__(FILL_THREADS)
fill_normal(SCALAR* out, long long n, unsigned long long seed, float scale) {
    const long long block = blockIdx.x * (long long)FILL_THREADS + threadIdx.x, first = block * FILL_VECTOR;
    if (first >= n) return;
    const uint4 words = philox(seed, (unsigned)(block >> 32), (unsigned)block);
    float number[FILL_VECTOR];
    normal_pair(number[0], number[1], words.x, words.y, scale);
    normal_pair(number[2], number[3], words.z, words.w, scale);
    Vec<SCALAR, FILL_VECTOR> stored;
#pragma unroll
    for (int i = 0; i < FILL_VECTOR; i++) stored[i] = from_float<SCALAR>(number[i]);
    if (aligned16(out) && first + FILL_VECTOR <= n) {
        store_vec(out + first, stored);
        return;
    }
    for (int i = 0; i < FILL_VECTOR && first + i < n; i++) out[first + i] = stored[i];
}
