// A low-rank adapter of a weight W (rows, cols): the weight with the adapter added, and the sum of two products.
//   merge_adapter: out = W + scale · B A in float, rounded once; A (rank, cols), B (rows, rank) of float. A thread does
//                  ROWS x COLUMNS elements, each summed over the rank in ascending order. out may be W.
//   add_in_place:  y += change, rounded once; VECTOR elements a thread.
//   change_rows:   the same for the rows of y (rows, cols) that belong to `owner`, or those rows become change's. The
//                  others keep their bits, whatever change holds there.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "common.cuh"

constexpr int THREADS = 128, COLUMNS = 4, ROWS = 8;
constexpr int RANKS = 32;  // of B's columns in shared memory at a time

// Grid (ceil(cols / (COLUMNS * THREADS)), ceil(rows / ROWS)).
extern "C" __global__ void __launch_bounds__(THREADS)
merge_adapter(SCALAR* out, const SCALAR* w, const float* a, const float* b, float scale, int rows, int cols, int rank) {
    __shared__ float factors[ROWS][RANKS];
    const int column = (blockIdx.x * THREADS + threadIdx.x) * COLUMNS, first = blockIdx.y * ROWS;
    const bool vectorised = cols % COLUMNS == 0 && aligned16(a) && aligned16(w) && aligned16(out);
    float sums[ROWS][COLUMNS] = {};
    for (int start = 0; start < rank; start += RANKS) {
        const int count = min(RANKS, rank - start);
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * RANKS; i += THREADS) {
            const int row = first + i / RANKS, k = i % RANKS;
            factors[i / RANKS][k] = row < rows && k < count ? b[(long long)row * rank + start + k] : 0.0f;
        }
        __syncthreads();
        if (column >= cols) continue;
        for (int k = 0; k < count; k++) {
            float right[COLUMNS];
            load_floats(right, a + (long long)(start + k) * cols, column, cols, vectorised);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) sums[i][j] = fmaf(factors[i][k], right[j], sums[i][j]);
        }
    }
    if (column >= cols) return;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if (first + i >= rows) return;
        const long long row = (long long)(first + i) * cols;
        float weight[COLUMNS];
        load_floats(weight, w + row, column, cols, vectorised);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) weight[j] += scale * sums[i][j];
        store_floats(out + row, weight, column, cols, vectorised);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) add_in_place(SCALAR* y, const SCALAR* change, long long size) {
    const long long first = ((long long)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
    if (first >= size) return;
    if (aligned16(y) && aligned16(change) && first + VECTOR <= size) {
        Vec<SCALAR, VECTOR> sum = load_vec<VECTOR>(y + first);
        const Vec<SCALAR, VECTOR> other = load_vec<VECTOR>(change + first);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum[i] = from_float<SCALAR>(to_float(sum[i]) + to_float(other[i]));
        store_vec(y + first, sum);
        return;
    }
    for (long long i = first; i < first + VECTOR && i < size; i++)
        y[i] = from_float<SCALAR>(to_float(y[i]) + to_float(change[i]));
}

// Grid (rows): a block a row. owners (rows).
extern "C" __global__ void __launch_bounds__(THREADS)
change_rows(SCALAR* y, const SCALAR* change, const int* owners, int owner, int instead, int cols) {
    if (owners[blockIdx.x] != owner) return;
    const long long row = (long long)blockIdx.x * cols;
    const bool vectorised = cols % VECTOR == 0 && aligned16(y) && aligned16(change);
    if (instead) return copy_row(y + row, change + row, cols, vectorised);
    for (int i = threadIdx.x * VECTOR; i < cols; i += THREADS * VECTOR) {
        float sum[VECTOR], other[VECTOR];
        load_floats(sum, y + row, i, cols, vectorised);
        load_floats(other, change + row, i, cols, vectorised);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) sum[j] += other[j];
        store_floats(y + row, sum, i, cols, vectorised);
    }
}
