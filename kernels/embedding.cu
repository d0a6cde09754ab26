// Rows of a table (V, C) by ids (T,), and the sum of gradients back into the table's float gradient. No atomics: equal
// ids are added in the order of t. The table's rows are those of ids first .. first + V - 1. Of another id the gradient
// goes nowhere, and nothing outside the table is touched; its row is zeros if the table is a part of one. Else such an
// id is the caller's mistake, and its row is NaN.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "common.cuh"

constexpr int THREADS = 128;

// y[t] = table[ids[t] - first]; a block a row
extern "C" __global__ void embedding_forward(SCALAR* y, const SCALAR* table, const int* ids, int first, bool is_part,
                                             int V, int C) {
    const long long row = (long long)ids[blockIdx.x] - first;
    y += (long long)blockIdx.x * C;
    if (row >= 0 && row < V)
        copy_row(y, table + row * C, C, C % VECTOR == 0 && aligned16(y) && aligned16(table));
    else
        for (int c = threadIdx.x; c < C; c += blockDim.x) y[c] = from_float<SCALAR>(is_part ? 0.0f : NAN_FLOAT);
}

// dtable[id - first] += the sum of dy[t] over the t with ids[t] == id. Block (t, part of the columns), THREADS · VECTOR
// columns a part: the block of an id's first t does the id, the others leave. Every block reads ids (T), which is cheap
// (64 KB at T = 16,384, from L1) next to a sort and needs neither memory nor a wait for the host.
extern "C" __global__ void __launch_bounds__(THREADS)
embedding_backward(float* dtable, const SCALAR* __restrict__ dy, const int* __restrict__ ids, int first, int T, int V,
                   int C) {
    constexpr int EACH = 4, TILE = THREADS * EACH, WARPS = THREADS / WARP;
    __shared__ int matches[TILE];
    __shared__ int warp_counts[WARPS];
    const int leader = blockIdx.x, id = ids[leader], thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const long long table_row = (long long)id - first;
    if (table_row < 0 || table_row >= V) return;
    for (int base = 0; base < leader; base += TILE) {
        bool earlier = false;
        for (int k = 0; k < EACH; k++) {
            const int t = base + k * THREADS + thread;
            earlier |= t < leader && ids[t] == id;
        }
        if (__syncthreads_or(earlier)) return;
    }

    const bool vectorised = C % VECTOR == 0 && aligned16(dy);
    const int col = (blockIdx.y * THREADS + thread) * VECTOR;
    // Kahan: `lost` is what rounding took from sum; a frequent id adds thousands of rows. A zero adds nothing, not even
    // what was lost, so that rows without a gradient (the filling of a packed batch) change no bit.
    float sum[VECTOR] = {}, lost[VECTOR] = {};
    for (int base = leader / TILE * TILE; base < T; base += TILE) {
        const int t = base + thread * EACH;  // EACH neighbours a thread, so that threads in order are ids in order
        int count = 0;
        bool match[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            match[k] = t + k < T && ids[t + k] == id;
            count += match[k];
        }
        if (!__syncthreads_or(count)) continue;
        int place = count;  // inclusive prefix sum over the warp
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            const int below = __shfl_up_sync(FULL_MASK, place, offset);
            if (lane >= offset) place += below;
        }
        if (lane == WARP - 1) warp_counts[warp] = place;
        __syncthreads();
        place -= count;
        int total = 0;
#pragma unroll
        for (int other = 0; other < WARPS; other++) {
            if (other < warp) place += warp_counts[other];
            total += warp_counts[other];
        }
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (match[k]) matches[place++] = t + k;
        __syncthreads();
        if (col < C)
#pragma unroll 4
            for (int m = 0; m < total; m++) {
                float row[VECTOR];
                load_floats(row, dy + (long long)matches[m] * C, col, C, vectorised);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) {
                    const float term = __fsub_rn(row[i], lost[i]), next = __fadd_rn(sum[i], term);
                    if (row[i] == 0.0f) continue;
                    lost[i] = __fsub_rn(__fsub_rn(next, sum[i]), term);
                    sum[i] = next;
                }
            }
        // the next tile writes warp_counts and matches only behind its __syncthreads_or
    }
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
        if (col + i < C) dtable[table_row * C + col + i] += sum[i];
}
