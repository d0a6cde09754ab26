// What matrix products need beside cuBLAS: y (T, O) = x (T, I) wᵀ + bias (O) with w (O, I) summed over I in one order,
// and row copies (a bias in every row, rows with zeros below). A row's bits depend on nothing but the row: see
// cukit/backend/cuda/exact.py.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "common.cuh"
#include "mma.cuh"

constexpr int TILE = 64, THREADS = 128;  // a block does TILE x TILE elements of y
constexpr int SMALL_SHARED = 96 * 1024;  // bytes of shared memory for smaller tiles; sm_89 and sm_120 have 99 KiB

#if !SCALAR_F32

// Half types: for each element of y one float accumulator, mma.m16n8k16 over I in ascending steps of 16, then the bias,
// then one rounding. Measured: mostly the bits of cuBLAS where that has no bias and does not split the sum. 4 warps of
// 32 x 32, with STAGES slices on their way through shared memory.
constexpr int SLICE = 32, STAGES = 4;
constexpr int PAD = 8;  // elements behind each row of a slice in shared memory: eight rows lie in different banks
constexpr int ROW = SLICE + PAD;

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

// Grid (ceil(outs / TILE), ceil(rows / TILE)). bias may be null.
extern "C" __global__ void __launch_bounds__(THREADS)
linear_in_order(SCALAR* y, const SCALAR* x, const SCALAR* w, const SCALAR* bias, long long rows, int ins, int outs) {
    __shared__ alignas(16) SCALAR x_slices[STAGES][TILE][ROW], w_slices[STAGES][TILE][ROW];
    const long long first_row = (long long)blockIdx.y * TILE;
    const int first_out = blockIdx.x * TILE, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int warp_row = warp / 2 * 32, warp_out = warp % 2 * 32, slices = (ins + SLICE - 1) / SLICE;
    const bool vectorised = ins % VECTOR == 0 && aligned16(x) && aligned16(w);
    auto load = [&](int slice) {
        if (slice < slices) {
            load_slice(x_slices[slice % STAGES], x, first_row, rows, slice * SLICE, ins, vectorised);
            load_slice(w_slices[slice % STAGES], w, first_out, outs, slice * SLICE, ins, vectorised);
        }
        copies_commit();  // also where there is nothing: copies_wait counts
    };
    float sums[2][4][4] = {};
    for (int slice = 0; slice < STAGES - 1; slice++) load(slice);
    for (int slice = 0; slice < slices; slice++) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // every thread sees the slice, and all are done with the one that the next load overwrites
        load(slice + STAGES - 1);
        const SCALAR(&xs)[TILE][ROW] = x_slices[slice % STAGES], (&ws)[TILE][ROW] = w_slices[slice % STAGES];
#pragma unroll
        for (int k = 0; k < SLICE; k += 16) {
            unsigned a[2][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                load_matrices(a[i], &xs[warp_row + i * 16 + lane % 16][k + lane / 16 * 8]);
                load_matrices(b[i], &ws[warp_out + i * 16 + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma_16x8x16(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], SCALAR());
        }
    }
    // By way of shared memory, so that rows are stored in pieces of 16 bytes: sums of few products are bound by this.
    auto tile = reinterpret_cast<SCALAR(*)[TILE + PAD]>(x_slices);
    const bool in_pieces = outs % VECTOR == 0 && aligned16(y);
    copies_wait<0>();
    __syncthreads();  // every thread is done with the slices
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int row = warp_row + i * 16 + lane / 4 + c / 2 * 8, out = warp_out + j * 8 + lane % 4 * 2 + c % 2;
                if (first_row + row >= rows || first_out + out >= outs) continue;
                SCALAR* to = in_pieces ? &tile[row][out] : y + (first_row + row) * outs + first_out + out;
                store_sum(to, bias, first_out + out, sums[i][j][c]);
            }
    if (!in_pieces) return;
    __syncthreads();
    for (int piece = threadIdx.x; piece < TILE * TILE / VECTOR; piece += THREADS) {
        const int row = piece / (TILE / VECTOR), out = piece % (TILE / VECTOR) * VECTOR;
        if (first_row + row < rows && first_out + out < outs)
            store_vec(y + (first_row + row) * outs + first_out + out, load_vec<VECTOR>(&tile[row][out]));
    }
}

// The same products in smaller tiles: the same instructions in the same order for each element of y, hence the same
// bits, but for few rows more blocks, and in each more bytes on their way.
constexpr int LONG_SLICE = 128, LONG_ROW = LONG_SLICE + PAD, STEP = 32, STEPS = LONG_SLICE / STEP;
static_assert(STEP == SLICE && STEPS % 2 == 0, "both kernels add as many zeros; a slice begins with the first buffer");

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

#else

// float32: sums of PART products, added up in ascending order: fewer digits are lost than in one chain. A thread does 8
// rows x 4 outs.
constexpr int SLICE = 16, PART = 8, ROW = TILE + 4, PIECES = TILE * SLICE / VECTOR / THREADS;

// A thread's pieces of rows first … of matrix (rows, size), columns start … start + SLICE - 1; zeros outside.
__device__ inline void load_pieces(float (&pieces)[PIECES][VECTOR], const float* matrix, long long first,
                                   long long rows, int start, int size, bool vectorised) {
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const int piece = threadIdx.x + p * THREADS, column = start + piece % (SLICE / VECTOR) * VECTOR;
        const long long row = first + piece / (SLICE / VECTOR);
        if (row < rows && column < size)
            load_floats(pieces[p], matrix + row * size, column, size, vectorised);
        else
            for (int i = 0; i < VECTOR; i++) pieces[p][i] = 0.0f;
    }
}

// They go to shared memory with rows side by side.
__device__ inline void store_pieces(float (&slice)[SLICE][ROW], const float (&pieces)[PIECES][VECTOR]) {
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const int piece = threadIdx.x + p * THREADS;
        for (int i = 0; i < VECTOR; i++)
            slice[piece % (SLICE / VECTOR) * VECTOR + i][piece / (SLICE / VECTOR)] = pieces[p][i];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
linear_in_order(SCALAR* y, const SCALAR* x, const SCALAR* w, const SCALAR* bias, long long rows, int ins, int outs) {
    __shared__ alignas(16) float xs[2][SLICE][ROW], ws[2][SLICE][ROW];
    const long long first_row = (long long)blockIdx.y * TILE;
    // A thread has four rows from `row` on, and the four that lie 32 further down.
    const int first_out = blockIdx.x * TILE, row = threadIdx.x / 16 * 4, out = threadIdx.x % 16 * 4;
    const bool vectorised = ins % VECTOR == 0 && aligned16(x) && aligned16(w);
    float x_pieces[PIECES][VECTOR], w_pieces[PIECES][VECTOR], sums[8][4] = {};
    auto load = [&](int start) {
        load_pieces(x_pieces, x, first_row, rows, start, ins, vectorised);
        load_pieces(w_pieces, w, first_out, outs, start, ins, vectorised);
    };
    load(0);
    for (int start = 0, buffer = 0; start < ins; start += SLICE, buffer ^= 1) {
        store_pieces(xs[buffer], x_pieces);
        store_pieces(ws[buffer], w_pieces);
        __syncthreads();  // two buffers: a thread that is a slice behind still reads the other one
        if (start + SLICE < ins) load(start + SLICE);
#pragma unroll
        for (int k = 0; k < SLICE; k += PART) {
            float part[8][4] = {};
#pragma unroll
            for (int n = k; n < k + PART; n++) {
                const Vec<float, 4> upper = load_vec<4>(&xs[buffer][n][row]);
                const Vec<float, 4> lower = load_vec<4>(&xs[buffer][n][row + 32]);
                const Vec<float, 4> right = load_vec<4>(&ws[buffer][n][out]);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        part[i][j] = fmaf(upper[i], right[j], part[i][j]);
                        part[i + 4][j] = fmaf(lower[i], right[j], part[i + 4][j]);
                    }
            }
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] += part[i][j];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const long long at = first_row + row + i % 4 + i / 4 * 32;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (at < rows && first_out + out + j < outs)
                y[at * outs + first_out + out + j] =
                    bias == nullptr ? sums[i][j] : sums[i][j] + bias[first_out + out + j];
    }
}

#endif

// y[t] = row; a block a row
extern "C" __global__ void broadcast_row(SCALAR* y, const SCALAR* row, int C) {
    copy_row(y + (long long)blockIdx.x * C, row, C, C % VECTOR == 0 && aligned16(y) && aligned16(row));
}

// out[0 … used - 1] = x, then zeros up to total; a thread does VECTOR elements
extern "C" __global__ void pad_rows(SCALAR* out, const SCALAR* x, long long used, long long total) {
    const long long first = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    if (used % VECTOR == 0 && total % VECTOR == 0 && aligned16(out) && aligned16(x)) {
        if (first < total) store_vec(out + first, first < used ? load_vec<VECTOR>(x + first) : Vec<SCALAR, VECTOR>{});
    } else {
        for (int i = 0; i < VECTOR; i++)
            if (first + i < total) out[first + i] = first + i < used ? x[first + i] : from_float<SCALAR>(0.0f);
    }
}
