// Products in order of half types, y (T, O) = x (T, I) wᵀ + bias (O) with w (O, I), in smaller tiles than linear.cu's:
// the same instructions in the same order for each element of y, hence the same bits, but for few rows more blocks, and
// in each more bytes on their way.
// specialise: SCALAR=bf16,f16
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "linear.cuh"

constexpr int SMALL_SHARED = 96 * 1024;  // bytes of shared memory of a block; sm_89 and sm_120 have 99 KiB
constexpr int LONG_SLICE = 128, LONG_ROW = LONG_SLICE + PAD, STEPS = LONG_SLICE / STEP;
static_assert(STEPS % 2 == 0, "a slice begins with the first buffer");

// A warp has 16 rows and 8 * EACH outs; with the smallest tiles some warps only copy. While a step of I is multiplied,
// the operands of the next one come from shared memory: a chain of mma should wait for nothing but itself.
template <int ROWS, int OUTS>
__device__ __forceinline__ void small_tile(SCALAR* y, const SCALAR* x, const SCALAR* w, const SCALAR* bias,
                                           long long rows, int ins, int outs) {
    constexpr int WARPS = THREADS / WARP, ROW_TILES = ROWS / 16, OUT_TILES = OUTS / 8;
    constexpr int EACH = ROW_TILES * OUT_TILES > WARPS ? ROW_TILES * OUT_TILES / WARPS : 1;
    constexpr int DEPTH = SMALL_SHARED / ((ROWS + OUTS) * LONG_ROW * (int)sizeof(SCALAR));  // slices in shared memory
    static_assert(DEPTH >= 3, "two slices are on their way while one is multiplied");
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto x_slices = reinterpret_cast<SCALAR(*)[ROWS][LONG_ROW]>(shared_bytes);
    auto w_slices = reinterpret_cast<SCALAR(*)[OUTS][LONG_ROW]>(x_slices + DEPTH);
    const long long first_row = (long long)blockIdx.y * ROWS;
    const int first_out = blockIdx.x * OUTS, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int warp_row = warp % ROW_TILES * 16, warp_out = warp / ROW_TILES * EACH * 8;
    const bool multiplies = warp_out < OUTS;
    const int slices = (ins + LONG_SLICE - 1) / LONG_SLICE, steps = (ins + STEP - 1) / STEP;
    const bool vectorised = ins % VECTOR == 0 && aligned16(x) && aligned16(w);
    unsigned a[2][2][4], b[2][EACH][4];  // buffer, 16 or 8 x 32 of x and of w
    float sums[EACH][4] = {};
    // A thread copies pieces of every ROWS_APART-th row, all in one column: little is to be reckoned for each.
    constexpr int PIECES = LONG_SLICE / VECTOR, ROWS_APART = THREADS / PIECES;
    const int piece_row = threadIdx.x / PIECES, column = threadIdx.x % PIECES * VECTOR;
    const long long apart = (long long)ROWS_APART * ins;
    const SCALAR* x_from = x + (first_row + piece_row) * ins + column;
    const SCALAR* w_from = w + (long long)(first_out + piece_row) * ins + column;
    const int x_rows = (int)min((long long)ROWS, rows - first_row) - piece_row, w_rows = outs - first_out - piece_row;
    auto load = [&](int slice, int stage) {  // slices in their order
        if (slice < slices && vectorised) {
            const bool inside = slice * LONG_SLICE + column < ins;
#pragma unroll
            for (int n = 0; n < ROWS / ROWS_APART; n++) {
                const bool present = inside && n * ROWS_APART < x_rows;
                const SCALAR* from = present ? x_from + n * apart : x;
                copy_async<16>(&x_slices[stage][piece_row + n * ROWS_APART][column], from, present);
            }
#pragma unroll
            for (int n = 0; n < OUTS / ROWS_APART; n++) {
                const bool present = inside && n * ROWS_APART < w_rows;
                const SCALAR* from = present ? w_from + n * apart : w;
                copy_async<16>(&w_slices[stage][piece_row + n * ROWS_APART][column], from, present);
            }
            x_from += LONG_SLICE, w_from += LONG_SLICE;
        } else if (slice < slices) {
            load_slice(x_slices[stage], x, first_row, rows, slice * LONG_SLICE, ins, false);
            load_slice(w_slices[stage], w, first_out, outs, slice * LONG_SLICE, ins, false);
        }
        copies_commit();  // also where there is nothing: copies_wait counts
    };
    auto fetch = [&](int buffer, int stage, int k) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            load_matrices(a[buffer][half], &x_slices[stage][warp_row + lane % 16][k + half * 16 + lane / 16 * 8]);
#pragma unroll
        for (int j = 0; j < EACH; j++)
            load_matrices(b[buffer][j], &w_slices[stage][warp_out + j * 8 + lane % 8][k + lane / 8 * 8]);
    };
#pragma unroll 1
    for (int slice = 0; slice < DEPTH; slice++) load(slice, slice);
    copies_wait<DEPTH - 1>();
    __syncthreads();
    if (multiplies) fetch(0, 0, 0);
    for (int slice = 0, stage = 0; slice < slices; slice++) {
        const int next = stage + 1 == DEPTH ? 0 : stage + 1;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const bool last = step == STEPS - 1;
            if (last) {
                copies_wait<DEPTH - 2>();
                __syncthreads();  // every thread sees the next slice, and has fetched all of this one
            }
            if (multiplies) {
                fetch((step + 1) % 2, last ? next : stage, last ? 0 : (step + 1) * STEP);
                if (slice * STEPS + step < steps)
#pragma unroll
                    for (int half = 0; half < 2; half++)
#pragma unroll
                        for (int j = 0; j < EACH; j++)
                            mma_16x8x16(sums[j], a[step % 2][half], b[step % 2][j][2 * half],
                                        b[step % 2][j][2 * half + 1], SCALAR());
            }
            if (last) load(slice + DEPTH, stage);
        }
        stage = next;
    }
    if (!multiplies) return;
#pragma unroll
    for (int j = 0; j < EACH; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const long long row = first_row + warp_row + lane / 4 + c / 2 * 8;
            const int out = first_out + warp_out + j * 8 + lane % 4 * 2 + c % 2;
            if (row < rows && out < outs) store_sum(y + row * outs + out, bias, out, sums[j][c]);
        }
}

// Tiles of 16 x 8, 16 x 16, 16 x 32, 16 x 64, 32 x 32 or 32 x 64 elements of y. Grid (ceil(outs / tile_outs),
// ceil(rows / tile_rows)), SMALL_SHARED bytes of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(THREADS)
linear_in_order_small(SCALAR* y, const SCALAR* x, const SCALAR* w, const SCALAR* bias, long long rows, int ins,
                      int outs, int tile_rows, int tile_outs) {
    if (tile_rows == 32 && tile_outs == 64)
        small_tile<32, 64>(y, x, w, bias, rows, ins, outs);
    else if (tile_rows == 32)
        small_tile<32, 32>(y, x, w, bias, rows, ins, outs);
    else if (tile_outs == 64)
        small_tile<16, 64>(y, x, w, bias, rows, ins, outs);
    else if (tile_outs == 32)
        small_tile<16, 32>(y, x, w, bias, rows, ins, outs);
    else if (tile_outs == 16)
        small_tile<16, 16>(y, x, w, bias, rows, ins, outs);
    else
        small_tile<16, 8>(y, x, w, bias, rows, ins, outs);
}
