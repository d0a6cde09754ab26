// The same as WarpTiles of tiles_mma.cuh, 4 warps at a time on Hopper's tensor cores (wgmma.m64n64k16): 64 rows of a
// result, 16 a warp, laid out over the threads as there. The sums are the same chain over k in steps of 16, and on one
// card the bits are the same (measured on H100 and H200).
//
// A tile is panels of 64 columns. A panel's row is 128 bytes; its 16-byte units are permuted by the row's number
// modulo 8 ("128-byte swizzle"). A product names a tile by a descriptor (PTX ISA, "Matrix Descriptor Format"):
// address / 16, bytes / 16 from one group of 8 rows to the next in bits 32 to 45 (and in 16 to 29, which mean nothing
// at these sizes), swizzle mode 1 in bits 62 and 63.
#pragma once

#include "tiles_mma.cuh"

#if SCALAR_F16
#define WGMMA_64X64X16 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
#else
#define WGMMA_64X64X16 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
#endif
#define ACCUMULATORS_4(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define ACCUMULATORS_32(c)                                                                         \
    ACCUMULATORS_4(c, 0), ACCUMULATORS_4(c, 1), ACCUMULATORS_4(c, 2), ACCUMULATORS_4(c, 3),        \
        ACCUMULATORS_4(c, 4), ACCUMULATORS_4(c, 5), ACCUMULATORS_4(c, 6), ACCUMULATORS_4(c, 7)
#define ACCUMULATOR_NAMES                                                                          \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                      \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"

// c (64 x 64) = a bᵀ, or += where `add`; both operands by descriptor, k along the rows of 128 bytes.
__device__ __forceinline__ void wgmma_shared(float (*c)[4], unsigned long long a, unsigned long long b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %34, 0; " WGMMA_64X64X16 ACCUMULATOR_NAMES
                 ", %32, %33, add, 1, 1, 0, 0;}"
                 : ACCUMULATORS_32(c) : "l"(a), "l"(b), "r"((int)add) : "memory");
}

// c (64 x 64) += a b; a in registers, b by descriptor with k from row to row.
__device__ __forceinline__ void wgmma_registers(float (*c)[4], const unsigned (&a)[4], unsigned long long b) {
    asm volatile(WGMMA_64X64X16 ACCUMULATOR_NAMES ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : ACCUMULATORS_32(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}

struct WarpgroupTiles {
    static constexpr bool TOGETHER = true;
    static constexpr int STEP = 64, UNROLL = 8, PANEL = 64, PERIOD = 8, ROW_STRIDE = PANEL;

    template <int ROWS> static constexpr int SIZE = ROWS * HEAD_DIM;

    template <int ROWS> __device__ static __forceinline__ int offset(int row, int column) {
        // column is a multiple of 8
        return column / PANEL * (ROWS * PANEL) + row * PANEL + ((column % PANEL / 8) ^ (row & 7)) * 8;
    }

    template <int THREADS> __device__ static __forceinline__ void clear_padding(SCALAR*, int) {}

    __device__ static __forceinline__ void share() {
        // Copies are ordinary writes; products read by another path.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
    }

    __device__ static __forceinline__ unsigned long long descriptor(const SCALAR* tile) {
        constexpr unsigned long long GROUP = 8 * PANEL * sizeof(SCALAR) >> 4;
        return (shared_address(tile) >> 4) | GROUP << 16 | GROUP << 32 | 1ull << 62;
    }

    // Registers that products read or add to are as the program has left them.
    __device__ static __forceinline__ void start() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
    __device__ static __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

    // The compiler must not move uses of x over this point.
    template <int TILES>
    __device__ static __forceinline__ void pin(float (&x)[TILES][4]) {
        for_each_value<TILES>([&](int j, int e) { asm volatile("" : "+f"(x[j][e])::"memory"); });
    }

    __device__ static __forceinline__ void multiply_transposed(float (&products)[8][4], const SCALAR* a,
                                                               const SCALAR* b) {
        const unsigned long long left = descriptor(a), right = descriptor(b);
        start();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) {  // 16 columns are 32 bytes, a panel of 64 rows is 8 KiB
            const int at = (step / 4 * 64 * PANEL + step % 4 * 16) * (int)sizeof(SCALAR) >> 4;
            wgmma_shared(products, left + at, right + at, step > 0);
        }
        commit();
    }

    __device__ static __forceinline__ void multiply(float (&out)[OUT_TILES][4], const float (&weights)[8][4],
                                                    const SCALAR* b) {
        const unsigned long long right = descriptor(b);
        unsigned a[4][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) pack_weights(a[step], weights, step);
        pin(out);
        start();
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int panel = 0; panel < HEAD_DIM / PANEL; ++panel)
                wgmma_registers(out + panel * 8, a[step],
                                right + ((panel * 64 + step * 16) * PANEL * sizeof(SCALAR) >> 4));
        commit();
    }

    template <int PENDING, int TILES>
    __device__ static __forceinline__ void finish(float (&result)[TILES][4]) {
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
        pin(result);
    }
};
