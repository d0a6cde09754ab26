// Numbers of 8 bits: a sign, 4 exponent bits (bias 7), 3 fraction bits; the largest is 448, there is no infinity. The
// same rounding as cukit/backend/e4m3.py. What is loaded is decoded by integer operations and one multiplication, which
// every card has.
#pragma once

#include "common.cuh"

struct E4m3 {
    unsigned char code;
};

constexpr float E4M3_LARGEST = 448.0f;

// The nearest E4m3, halves to even, beyond the largest that one; NaN becomes the largest, too.
template <> __device__ inline E4m3 from_float<E4m3>(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
    const unsigned size = bits & 0x7fffffff;
    unsigned code;
    if (size >= 0x43e00000u)  // 448
        code = 0x7e;
    else if (size < 0x3c800000u)  // 2^-6, the smallest with a whole fraction: below it are multiples of 2^-9
        code = (unsigned)rintf(__uint_as_float(size) * 512.0f);
    else
        code = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    return {(unsigned char)(sign | code)};
}

__device__ inline float to_float(E4m3 x) {
    const unsigned size = (x.code & 0x7fu) << 20;  // the exponent is 120 too low; the product also normalises
    const float value = size < 0x800000u ? (float)(x.code & 7) * 0x1p-9f : __uint_as_float(size + (120u << 23));
    return x.code & 0x80 ? -value : value;
}

// Bytes 2 * half and 2 * half + 1 of `bytes` in the upper halves of the two 16-bit lanes of a register.
template <int HALF> __device__ __forceinline__ unsigned bytes_up(unsigned bytes) {
    return __byte_perm(bytes, 0, HALF ? 0x3424 : 0x1404);
}

#if !SCALAR_F32

__device__ __forceinline__ unsigned times_pair(unsigned pair, unsigned factor, __nv_bfloat16) {
    const __nv_bfloat162 y =
        __hmul2(*reinterpret_cast<__nv_bfloat162*>(&pair), *reinterpret_cast<__nv_bfloat162*>(&factor));
    return *reinterpret_cast<const unsigned*>(&y);
}

__device__ __forceinline__ unsigned times_pair(unsigned pair, unsigned factor, __half) {
    const __half2 y = __hmul2(*reinterpret_cast<__half2*>(&pair), *reinterpret_cast<__half2*>(&factor));
    return *reinterpret_cast<const unsigned*>(&y);
}

// Codes 2 * HALF and 2 * HALF + 1 of four as a pair of SCALAR, exactly. The bits of a code are shifted to where SCALAR
// has its exponent and fraction; the biases differ by 120 (bfloat16) or 8 (float16).
template <int HALF> __device__ __forceinline__ unsigned e4m3_pair(unsigned codes) {
    const unsigned up = bytes_up<HALF>(codes), sign = up & 0x80008000u;
#if SCALAR_F16
    return times_pair((up >> 1 & 0x3f803f80u) | sign, 0x5c005c00u, SCALAR());  // 2^8
#else
    return times_pair((up >> 4 & 0x07f007f0u) | sign, 0x7b807b80u, SCALAR());  // 2^120
#endif
}

#endif
