// Tiles of rows in shared memory and products with them on tensor cores, a warp at a time (mma.sync, see mma.cuh). A
// warp holds 16 rows of a result: thread t of a row's 4 threads has the columns 8 j + 2 t and 8 j + 2 t + 1, each
// thread has the rows lane / 4 and lane / 4 + 8.
#pragma once

#include "e4m3.cuh"
#include "mma.cuh"

constexpr int PADDED_DIM = (HEAD_DIM + 15) / 16 * 16;  // the columns from HEAD_DIM on are zeros
constexpr int OUT_TILES = PADDED_DIM / 8;
constexpr bool WIDE = PADDED_DIM > 128;              // registers and shared memory are short: small tiles, one buffer
constexpr int COPY_ELEMENTS = HEAD_DIM % 8 ? 4 : 8;  // elements of one copy

// What a thread holds of TILES tiles of 8 columns: value e of tile j lies in row half e / 2 (row lane() / 4, or 8 rows
// below), and in this column.
__device__ __forceinline__ int column_of(int j, int e) { return j * 8 + (lane() & 3) * 2 + (e & 1); }

// function(j, e) for each of them, in order.
template <int TILES, class Function>
__device__ __forceinline__ void for_each_value(Function function) {
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) function(j, e);
}

// The same for those of row half r.
template <int TILES, class Function>
__device__ __forceinline__ void for_each_value_of_half(int r, Function function) {
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) function(j, e);
}

template <int TILES>
__device__ __forceinline__ void clear(float (&x)[TILES][4]) {
    for_each_value<TILES>([&](int j, int e) { x[j][e] = 0.f; });
}

// A registers of mma (and wgmma) for columns 16 step … 16 step + 15 of weights, rounded to SCALAR.
template <int TILES>
__device__ __forceinline__ void pack_weights(unsigned (&a)[4], const float (&weights)[TILES][4], int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        a[i] = pack_pair(weights[2 * step + (i >> 1)][(i & 1) * 2], weights[2 * step + (i >> 1)][(i & 1) * 2 + 1],
                         SCALAR());
}

using UnitCodes = Vec<unsigned, COPY_ELEMENTS / 4>;

// One unit of a tile from E4m3 codes.
__device__ __forceinline__ void store_decoded(SCALAR* to, const UnitCodes& codes) {
    Vec<unsigned, COPY_ELEMENTS / 2> pairs;
#pragma unroll
    for (int j = 0; j < COPY_ELEMENTS / 4; ++j)
        pairs[2 * j] = e4m3_pair<0>(codes[j]), pairs[2 * j + 1] = e4m3_pair<1>(codes[j]);
    store_vec(reinterpret_cast<unsigned*>(to), pairs);
}

// ROWS rows of E4m3 codes from `first` on into a tile, as SCALAR; rows from `end` on become zeros and are not read. A
// thread reads CODES of them at once, which are two units of 16 bytes of its tile where they fit, and waits for them:
// UNROLL reads are under way.
template <class Tiles, int ROWS, int THREADS, int UNROLL, class Source>
__device__ __forceinline__ void decode_rows(SCALAR* tile, const Source& source, int first, int end) {
    constexpr int CODES = HEAD_DIM % 16 ? COPY_ELEMENTS : 16, COPIES = HEAD_DIM / CODES;
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < ROWS * COPIES; i += THREADS) {
        const int row = i / COPIES, column = i % COPIES * CODES;
        Vec<unsigned, CODES / 4> codes = {};
        if (first + row < end)
            codes = load_vec<CODES / 4>(reinterpret_cast<const unsigned*>(source.row(first + row) + column));
#pragma unroll
        for (int unit = 0; unit < CODES / COPY_ELEMENTS; ++unit) {
            UnitCodes part;
#pragma unroll
            for (int j = 0; j < COPY_ELEMENTS / 4; ++j) part[j] = codes[unit * (COPY_ELEMENTS / 4) + j];
            store_decoded(tile + Tiles::template offset<ROWS>(row, column + unit * COPY_ELEMENTS), part);
        }
    }
}

// Start copying ROWS rows of E4m3 codes from `first` on, as they are, to `codes` (ROWS, HEAD_DIM); rows from `end` on
// become zeros and are not read.
template <int ROWS, int THREADS, class Source>
__device__ __forceinline__ void copy_codes(unsigned char* codes, const Source& source, int first, int end) {
    constexpr int BYTES = HEAD_DIM % 16 ? COPY_ELEMENTS : 16, COPIES = HEAD_DIM / BYTES;
#pragma unroll 8
    for (int i = threadIdx.x; i < ROWS * COPIES; i += THREADS) {
        const int row = first + i / COPIES;
        copy_async<BYTES>(codes + i * BYTES, &source.row(row)->code + i % COPIES * BYTES, row < end);
    }
}

// A tile from such codes.
template <class Tiles, int ROWS, int THREADS>
__device__ __forceinline__ void decode_tile(SCALAR* tile, const unsigned char* codes) {
    constexpr int UNITS = HEAD_DIM / COPY_ELEMENTS;
#pragma unroll 8
    for (int i = threadIdx.x; i < ROWS * UNITS; i += THREADS)
        store_decoded(tile + Tiles::template offset<ROWS>(i / UNITS, i % UNITS * COPY_ELEMENTS),
                      load_vec<COPY_ELEMENTS / 4>(reinterpret_cast<const unsigned*>(codes + i * COPY_ELEMENTS)));
}

// Start copying ROWS rows from `first` on into a tile; rows from `end` on become zeros and are not read. UNROLL costs
// registers for addresses.
template <class Tiles, int ROWS, int THREADS, int UNROLL, class Source>
__device__ __forceinline__ void copy_rows(SCALAR* tile, const Source& source, int first, int end) {
    constexpr int COPIES = HEAD_DIM / COPY_ELEMENTS, BYTES = COPY_ELEMENTS * sizeof(SCALAR);
    constexpr int ROWS_AT_ONCE = THREADS / COPIES;
    if constexpr (sizeof(typename Source::Element) != sizeof(SCALAR)) {
        decode_rows<Tiles, ROWS, THREADS, UNROLL>(tile, source, first, end);
    } else if constexpr (THREADS % COPIES == 0 && ROWS_AT_ONCE % Tiles::PERIOD == 0) {  // a thread stays in its column
        const int row = threadIdx.x / COPIES, column = threadIdx.x % COPIES * COPY_ELEMENTS;
        const unsigned to = shared_address(tile + Tiles::template offset<ROWS>(row, column));
#pragma unroll UNROLL
        for (int down = 0; down < ROWS; down += ROWS_AT_ONCE)
            if (ROWS % ROWS_AT_ONCE == 0 || row + down < ROWS)
                copy_async<BYTES>(to + down * Tiles::ROW_STRIDE * (int)sizeof(SCALAR),
                                  source.row(first + row + down) + column, first + row + down < end);
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * COPIES; i += THREADS) {
            const int row = i / COPIES, column = i % COPIES * COPY_ELEMENTS;
            copy_async<BYTES>(shared_address(tile + Tiles::template offset<ROWS>(row, column)),
                              source.row(first + row) + column, first + row < end);
        }
    }
}

// Write a warp's 16 x D values times factors[row half] to the first `present` rows of out, by way of 16 x (PADDED_DIM +
// 8) elements of shared memory: so a thread writes 16 bytes.
template <class Value>
__device__ __forceinline__ void write_rows(SCALAR* buffer, SCALAR* out, long long stride, int present,
                                           const float (&factors)[2], Value value) {
    constexpr int COPIES = HEAD_DIM / COPY_ELEMENTS, BUFFER_STRIDE = PADDED_DIM + 8;
    buffer += warp_index() * 16 * BUFFER_STRIDE;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < OUT_TILES; ++j)
            *reinterpret_cast<unsigned*>(buffer + (lane() / 4 + r * 8) * BUFFER_STRIDE + j * 8 + (lane() & 3) * 2) =
                pack_pair(__fmul_rn(value(j, 2 * r), factors[r]), __fmul_rn(value(j, 2 * r + 1), factors[r]), SCALAR());
    __syncwarp();
#pragma unroll
    for (int i = lane(); i < 16 * COPIES; i += WARP) {
        const int row = i / COPIES, column = i % COPIES * COPY_ELEMENTS;
        if (row < present)
            store_vec(out + row * stride + column, load_vec<COPY_ELEMENTS>(buffer + row * BUFFER_STRIDE + column));
    }
}

// ---- tiles and products ----

struct WarpTiles {
    static constexpr bool TOGETHER = false;  // a warp may leave products out that others take
    static constexpr int STEP = 32;          // rows that a gradient takes at once
    static constexpr int UNROLL = 2;         // copies; a thread holds the addresses of all of them at once
    static constexpr int PERIOD = 1;         // PERIOD rows further in a tile lie PERIOD * ROW_STRIDE elements further
    // An odd number of 16-byte units: ldmatrix reads 8 rows without a bank conflict.
    static constexpr int ROW_STRIDE = PADDED_DIM + 8;

    template <int ROWS> static constexpr int SIZE = ROWS * ROW_STRIDE;  // elements of a tile
    template <int ROWS> __device__ static __forceinline__ int offset(int row, int column) {
        return row * ROW_STRIDE + column;
    }

    // Zero the columns HEAD_DIM to PADDED_DIM of `rows` rows, which no copy touches.
    template <int THREADS, int COLUMNS = PADDED_DIM - HEAD_DIM>
    __device__ static __forceinline__ void clear_padding(SCALAR* tile, int rows) {
        if constexpr (COLUMNS > 0)
            for (int i = threadIdx.x; i < rows * COLUMNS; i += THREADS)
                tile[i / COLUMNS * ROW_STRIDE + HEAD_DIM + i % COLUMNS] = from_float<SCALAR>(0.f);
    }

    // What the threads of a block have copied can be multiplied from here on.
    __device__ static __forceinline__ void share() { __syncthreads(); }

    // Address of this lane for load_matrices of a 16 x 16 block at (row, column), with the matrices in the order of
    // A's registers (for B's transposed read this is: two k halves, then the next n) ...
    __device__ static __forceinline__ const SCALAR* rows_first(const SCALAR* tile, int row, int column) {
        return tile + (row + (lane() & 15)) * ROW_STRIDE + column + (lane() >> 4) * 8;
    }

    // ... and in the order of B's registers for two neighbouring n tiles, with n along the tile's rows.
    __device__ static __forceinline__ const SCALAR* columns_first(const SCALAR* tile, int row, int column) {
        return tile + (row + (lane() & 7) + (lane() >> 4) * 8) * ROW_STRIDE + column + (lane() >> 3 & 1) * 8;
    }

    // 16 rows of a tile as the left operand.
    struct Fragments {
        const SCALAR* rows;
        __device__ __forceinline__ void get(int step, unsigned (&a)[4]) const {
            load_matrices(a, rows_first(rows, 0, step * 16));
        }
    };

    // products (16 x 8 TILES) = a (16 x D, by fragment) times the transpose of tile b (8 TILES x D); d ascending.
    template <int TILES, class Left>
    __device__ static __forceinline__ void multiply_rows(float (&products)[TILES][4], const Left& a_rows,
                                                         const SCALAR* b) {
        clear(products);
#pragma unroll
        for (int step = 0; step < PADDED_DIM / 16; ++step) {
            unsigned a[4];
            a_rows.get(step, a);
#pragma unroll
            for (int pair = 0; pair < TILES / 2; ++pair) {
                unsigned matrices[4];
                load_matrices(matrices, columns_first(b, pair * 16, step * 16));
                mma_16x8x16(products[2 * pair], a, matrices[0], matrices[1], SCALAR());
                mma_16x8x16(products[2 * pair + 1], a, matrices[2], matrices[3], SCALAR());
            }
        }
    }

    // The same for this warp's 16 rows of tile a. This product and the next may be used after finish() only.
    template <int TILES>
    __device__ static __forceinline__ void multiply_transposed(float (&products)[TILES][4], const SCALAR* a,
                                                               const SCALAR* b) {
        multiply_rows(products, Fragments{a + warp_index() * 16 * ROW_STRIDE}, b);
    }

    // out (16 x 8 OUT) += weights (16 x 8 TILES, rounded to SCALAR) times the first columns of tile b (8 TILES rows);
    // b's rows ascending.
    template <int TILES, int OUT>
    __device__ static __forceinline__ void multiply(float (&out)[OUT][4], const float (&weights)[TILES][4],
                                                    const SCALAR* b) {
#pragma unroll
        for (int step = 0; step < TILES / 2; ++step) {
            unsigned a[4];
            pack_weights(a, weights, step);
#pragma unroll
            for (int pair = 0; pair < OUT / 2; ++pair) {
                unsigned matrices[4];
                load_matrices_transposed(matrices, rows_first(b, step * 16, pair * 16));
                mma_16x8x16(out[2 * pair], a, matrices[0], matrices[1], SCALAR());
                mma_16x8x16(out[2 * pair + 1], a, matrices[2], matrices[3], SCALAR());
            }
        }
    }

    // `result` is there; up to PENDING products that were started after it may still be under way.
    template <int PENDING, int TILES>
    __device__ static __forceinline__ void finish(float (&)[TILES][4]) {}
};
