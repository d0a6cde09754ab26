// The counter generator of draws: a random word depends on seed, position and id alone, so on no batch and no order.
#pragma once
#include "common.cuh"

using u64 = unsigned long long;

// Philox4x32-10 (Salmon et al. 2011): the words of the ids 4 block .. 4 block + 3.
__device__ __forceinline__ uint4 philox(u64 seed, unsigned position, unsigned block) {
    uint4 word = make_uint4(position, block, 0, 0);
    unsigned key_0 = (unsigned)seed, key_1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 product_0 = (u64)word.x * 0xD2511F53u, product_1 = (u64)word.z * 0xCD9E8D57u;
        word = make_uint4((unsigned)(product_1 >> 32) ^ word.y ^ key_0, (unsigned)product_1,
                          (unsigned)(product_0 >> 32) ^ word.w ^ key_1, (unsigned)product_0);
        key_0 += 0x9E3779B9u, key_1 += 0xBB67AE85u;
    }
    return word;
}

// In (0, 1): rounding may give 1, and its noise would be infinite.
__device__ __forceinline__ float uniform_of(unsigned word) {
    return fminf((__uint2float_rn(word) + 0.5f) * 2.3283064365386963e-10f, 0.99999994f);
}
