// A head of q or k, normed and turned: what rope.cu and decoding share, so that both give the same bits. LANES
// neighbouring lanes do a head of up to HEAD_LIMIT elements: lane l owns the chunks l, l + LANES, … of VECTOR elements
// of the first half and the same of the second, so that both elements of a pair are its own.
#pragma once

#include "common.cuh"

#ifndef HEAD_LIMIT  // attention knows HEAD_DIM, and takes the least limit of rope.cu's that it fits
#define HEAD_LIMIT (HEAD_DIM <= 64 ? 64 : HEAD_DIM <= 128 ? 128 : 256)
#endif

constexpr int LANES = HEAD_LIMIT / 2 / VECTOR < 8 ? HEAD_LIMIT / 2 / VECTOR : 8;
constexpr int CHUNKS = HEAD_LIMIT / 2 / VECTOR / LANES;

// function(j, i) for element i of each chunk j, in order; it does the element of the first half, then its partner's.
template <class Function> __device__ __forceinline__ void for_each_pair(Function function) {
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
        for (int i = 0; i < VECTOR; i++) function(j, i);
}

// What one lane holds of a row of D values: chunks of its first and of its second half. Zeros past the end.
struct Slice {
    float first[CHUNKS][VECTOR], second[CHUNKS][VECTOR];

    template <typename T> __device__ void load(const T* row, int half, int lane, bool vectorised) {
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            const int c = (j * LANES + lane) * VECTOR;
            if (c < half) {
                load_floats(first[j], row, c, half, vectorised);
                load_floats(second[j], row + half, c, half, vectorised);
            }
        }
    }

    template <typename T> __device__ void store(T* row, int half, int lane, bool vectorised) const {
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            const int c = (j * LANES + lane) * VECTOR;
            if (c < half) {
                store_floats(row, first[j], c, half, vectorised);
                store_floats(row + half, second[j], c, half, vectorised);
            }
        }
    }

    // The norm's factor of this head. Every lane of the warp must call it.
    __device__ Wide inverse_rms(int D, float eps) const {
        Wide squares = 0;
        for_each_pair([&](int j, int i) {
            squares = fma(Wide(first[j][i]), Wide(first[j][i]), squares);
            squares = fma(Wide(second[j][i]), Wide(second[j][i]), squares);
        });
        return ::inverse_rms(warp_sum<LANES>(squares), D, eps);
    }

    __device__ void norm(Wide inverse, const Slice& weight) {
        for_each_pair([&](int j, int i) {
            first[j][i] = rounded<SCALAR>(normalised(first[j][i], inverse, weight.first[j][i]));
            second[j][i] = rounded<SCALAR>(normalised(second[j][i], inverse, weight.second[j][i]));
        });
    }

    // Chunk j: (a, b) -> (a·cos - b·sin, b·cos + a·sin); direction -1 turns back
    __device__ void rotate(int j, const float (&cosine)[VECTOR], const float (&sine)[VECTOR], float direction) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            const Wide a = first[j][i], b = second[j][i], s = sine[i] * direction;
            first[j][i] = rounded<SCALAR>(a * cosine[i] - b * s);
            second[j][i] = rounded<SCALAR>(b * cosine[i] + a * s);
        }
    }

    __device__ void rotate(const float* cos_row, const float* sin_row, int half, int lane, bool vectorised,
                           float direction) {
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            const int c = (j * LANES + lane) * VECTOR;
            if (c < half) {
                float cosine[VECTOR], sine[VECTOR];
                load_floats(cosine, cos_row, c, half, vectorised);
                load_floats(sine, sin_row, c, half, vectorised);
                rotate(j, cosine, sine, direction);
            }
        }
    }
};
