// What the products in order of half types share: linear.cu's, and linear_few.cu's for few rows.
#pragma once
#include "mma.cuh"

constexpr int THREADS = 128;
constexpr int STEP = 32;  // I is filled up with zeros to a multiple of it, in both
constexpr int PAD = 8;    // elements behind each row of a slice in shared memory: eight rows lie in different banks

#if !SCALAR_F32

// Rows first … of matrix (rows, size), columns start … start + WIDTH - PAD - 1; zeros outside. `vectorised`: aligned
// rows of whole pieces of 16 bytes.
template <int COUNT, int WIDTH>
__device__ __forceinline__ void load_slice(SCALAR (&slice)[COUNT][WIDTH], const SCALAR* matrix, long long first,
                                           long long rows, int start, int size, bool vectorised) {
    constexpr int PIECES = (WIDTH - PAD) / VECTOR;  // of a row
#pragma unroll
    for (int piece = threadIdx.x; piece < COUNT * PIECES; piece += THREADS) {
        const int row = piece / PIECES, column = piece % PIECES * VECTOR;
        const bool present = first + row < rows && start + column < size;
        const SCALAR* from = matrix + (present ? (first + row) * size + start + column : 0);
        if (vectorised)
            copy_async<16>(&slice[row][column], from, present);
        else
            for (int i = 0; i < VECTOR; i++)
                slice[row][column + i] = present && start + column + i < size ? from[i] : from_float<SCALAR>(0.0f);
    }
}

__device__ __forceinline__ void store_sum(SCALAR* to, const SCALAR* bias, int out, float sum) {
    *to = from_float<SCALAR>(bias == nullptr ? sum : sum + to_float(bias[out]));
}

#endif
