// What matrix products need beside cuBLAS: y (T, O) = x (T, I) wᵀ + bias (O) with w (O, I) summed over I in one order,
// and row copies (a bias in every row, rows with zeros below). A row's bits depend on nothing but the row: see
// cukit/backend/cuda/exact.py.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "linear.cuh"

constexpr int TILE = 64;  // a block does TILE x TILE elements of y

#if !SCALAR_F32

// Half types: for each element of y one float accumulator, mma.m16n8k16 over I in ascending steps of 16, then the bias,
// then one rounding. Measured: mostly the bits of cuBLAS where that has no bias and does not split the sum. 4 warps of
// 32 x 32, with STAGES slices on their way through shared memory. Few rows have linear_few.cu.
constexpr int SLICE = STEP, STAGES = 4, ROW = SLICE + PAD;

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
