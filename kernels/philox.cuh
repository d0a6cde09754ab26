// The counter generator that every draw comes from.
#pragma once

// Philox4x32-10 (Salmon et al. 2011): four words for the key `seed` and the counter (position, block, 0, 0).
__device__ __forceinline__ uint4 philox(unsigned long long seed, unsigned position, unsigned block) {
    uint4 word = make_uint4(position, block, 0, 0);
    unsigned key_0 = (unsigned)seed, key_1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const unsigned long long product_0 = (unsigned long long)word.x * 0xD2511F53u;
        const unsigned long long product_1 = (unsigned long long)word.z * 0xCD9E8D57u;
        word = make_uint4((unsigned)(product_1 >> 32) ^ word.y ^ key_0, (unsigned)product_1,
                          (unsigned)(product_0 >> 32) ^ word.w ^ key_1, (unsigned)product_0);
        key_0 += 0x9E3779B9u, key_1 += 0xBB67AE85u;
    }
    return word;
}
