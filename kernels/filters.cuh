// Which ids of a row of logits may be drawn: penalty, bans, temperature, then top-k, top-p and min-p. By one block of
// LOGITS_THREADS threads a row.
//
// Filters without a sort: every filter keeps the values from a threshold on. The threshold's bits are found digit by
// digit (11 + 11 + 10 bits of a key that orders like the value) from a histogram of counts (top-k) or of probability
// mass (top-p). Mass is counted in units of 2^-40 of the largest probability: integer sums are the same in every order.
// As soon as few values are left, they are gathered in shared memory and the rest is done there.
#pragma once
#include "logits.cuh"

using u64 = unsigned long long;

constexpr int LOGITS_WARPS = LOGITS_THREADS / WARP;
constexpr int NUM_BINS = 2048;
constexpr int BINS_PER_THREAD = NUM_BINS / LOGITS_THREADS;
constexpr int LIST_SIZE = 1024;
constexpr float MASS_UNITS = 1099511627776.0f;

struct Row {
    const SCALAR* logits;
    const bool* seen;   // null: no repetition penalty
    const int* banned;  // null: no bans
    int num_banned, vocab_size;
    float temperature, penalty;
    bool aligned;
};

struct Workspace {
    unsigned count[NUM_BINS], mass_low[NUM_BINS], mass_high[NUM_BINS];
    float list_value[LIST_SIZE];
    int list_id[LIST_SIZE];
    unsigned list_size, found_bin;
    u64 found_before, found_count, warp_sum[LOGITS_WARPS];
    RowStatistics statistics;
    float scratch[WARP], best_score[LOGITS_WARPS];
    int best_id[LOGITS_WARPS];
};

// What the filters keep: values with a key of at least `key` and a probability of at least min_p times the largest.
struct Filter {
    unsigned key = 0;
    float maximum = 0.0f, min_p = 0.0f;
    bool in_list = false;  // all candidates are in the workspace's list
};

// An unsigned integer that orders as the value does; -0 and 0 are equal.
__device__ __forceinline__ unsigned order_key(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// ---- values ----

// x = logits / temperature of the ids first .. first + 7.
__device__ __forceinline__ void load_scaled(float (&x)[LOGITS_VECTOR], const Row& row, int first) {
    load_logits(x, row.logits, first, row.vocab_size, row.aligned);
    scale_logits(x, row.temperature);
}

// The same after penalty and bans; x holds what load_scaled gave.
__device__ __forceinline__ void adjust(float (&x)[LOGITS_VECTOR], const Row& row, int first) {
    if (row.seen) {
#pragma unroll
        for (int i = 0; i < LOGITS_VECTOR; i++) {
            if (first + i >= row.vocab_size || !row.seen[first + i]) continue;
            const float logit = to_float(row.logits[first + i]);
            x[i] = scale_logit(logit > 0.0f ? logit / row.penalty : logit * row.penalty, row.temperature);
        }
    }
    if (row.banned) {
        for (int s = 0; s < row.num_banned; s++) {
            const int offset = row.banned[s] - first;
#pragma unroll
            for (int i = 0; i < LOGITS_VECTOR; i++)
                if (offset == i) x[i] = -INFINITY;
        }
    }
}

// ---- thresholds ----

// Sum of `mine` over the threads before this one; `total` over all. Safe to call again at once.
__device__ __forceinline__ u64 exclusive_sum(u64 mine, u64& total, Workspace& work) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u64 inclusive = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        const u64 before = __shfl_up_sync(FULL_MASK, inclusive, offset);
        if (lane >= offset) inclusive += before;
    }
    if (lane == 31) work.warp_sum[warp] = inclusive;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (int w = 0; w < LOGITS_WARPS; w++) {
        if (w < warp) before += work.warp_sum[w];
        total += work.warp_sum[w];
    }
    __syncthreads();
    return before + inclusive - mine;
}

__device__ __forceinline__ u64 bin_weight(const Workspace& work, int bin, bool by_mass) {
    return by_mass ? (u64)work.mass_high[bin] << 32 | work.mass_low[bin] : work.count[bin];
}

// From the highest bin down, find the first with which the sum of the weights reaches the target, and write it to
// found_bin, with the sum before it and the number of values down to it. make_target(sum of all) gives the target, at
// least 1.
template <typename MakeTarget>
__device__ __forceinline__ u64 find_bin(Workspace& work, bool by_mass, MakeTarget make_target) {
    u64 weight = 0, count = 0, total, total_count;
    const int highest = NUM_BINS - 1 - (int)threadIdx.x * BINS_PER_THREAD;
    for (int i = 0; i < BINS_PER_THREAD; i++) {
        weight += bin_weight(work, highest - i, by_mass);
        count += work.count[highest - i];
    }
    if (threadIdx.x == 0) work.found_bin = 0, work.found_before = 0, work.found_count = ~0ull;
    u64 before = exclusive_sum(weight, total, work), count_through = exclusive_sum(count, total_count, work);
    const u64 target = make_target(total);
    for (int i = 0; i < BINS_PER_THREAD; i++) {
        const u64 through = before + bin_weight(work, highest - i, by_mass);
        count_through += work.count[highest - i];
        if (before < target && through >= target)
            work.found_bin = highest - i, work.found_before = before, work.found_count = count_through;
        before = through;
    }
    __syncthreads();
    return target;
}

__device__ __forceinline__ void add_to_bin(Workspace& work, unsigned bin, bool by_mass, float value, float maximum) {
    atomicAdd(&work.count[bin], 1u);
    if (!by_mass) return;
    const u64 mass = __float2ull_rn(expf(fminf(value - maximum, 0.0f)) * MASS_UNITS);
    const unsigned low = (unsigned)mass;
    if (mass == 0) return;
    const unsigned carry = atomicAdd(&work.mass_low[bin], low) + low < low;
    if (const unsigned high = (unsigned)(mass >> 32) + carry) atomicAdd(&work.mass_high[bin], high);
}

// Digit `level` of a key: 11, 11 and 10 bits from the top.
__device__ __forceinline__ int digit_shift(int level) { return level == 0 ? 21 : level == 1 ? 10 : 0; }
__device__ __forceinline__ int digit_bits(int level) { return level == 2 ? 10 : 11; }

// What a scan does with the values that the filter keeps: put them into the bins of digit `level` if their higher
// digits are `prefix`, or append them to the list if their first digit is at least `prefix`.
struct Scan {
    unsigned prefix;
    int level;
    bool by_mass, gather;

    __device__ __forceinline__ void visit(Workspace& work, const Filter& filter, float value, int id) const {
        const unsigned key = order_key(value);
        if (key < filter.key) return;
        const int shift = digit_shift(level), bits = digit_bits(level);
        if (gather) {
            if (key >> shift < prefix) return;
            const unsigned slot = atomicAdd(&work.list_size, 1u);
            work.list_value[slot] = value, work.list_id[slot] = id;
        } else if (level == 0 || key >> (shift + bits) == prefix) {
            add_to_bin(work, key >> shift & ((1u << bits) - 1), by_mass, value, filter.maximum);
        }
    }
};

// Over the list if it holds all candidates, else over the row. Not inlined: one copy is enough, and registers are free
// again after it.
static __device__ __noinline__ void run_scan(const Row& row, Workspace& work, const Filter& filter, Scan scan) {
    if (filter.in_list) {
        for (unsigned i = threadIdx.x; i < work.list_size; i += LOGITS_THREADS)
            scan.visit(work, filter, work.list_value[i], work.list_id[i]);
        return;
    }
    for (int first = threadIdx.x * LOGITS_VECTOR; first < row.vocab_size; first += LOGITS_THREADS * LOGITS_VECTOR) {
        float x[LOGITS_VECTOR];
        load_scaled(x, row, first);
        adjust(x, row, first);
#pragma unroll
        for (int i = 0; i < LOGITS_VECTOR; i++)
            if (first + i < row.vocab_size) scan.visit(work, filter, x[i], first + i);
    }
}

// Raise filter.key to that of the top_k-th value (by_mass false), or of the value with which the mass from above
// reaches top_p.
static __device__ __noinline__ void raise_threshold(Filter& filter, const Row& row, Workspace& work, bool by_mass,
                                                    int top_k, float top_p) {
    unsigned prefix = 0;
    u64 target = 0;
    for (int level = 0; level < 3; level++) {
        for (int bin = threadIdx.x; bin < NUM_BINS; bin += LOGITS_THREADS)
            work.count[bin] = work.mass_low[bin] = work.mass_high[bin] = 0;
        if (threadIdx.x == 0 && !filter.in_list) work.list_size = 0;
        __syncthreads();
        run_scan(row, work, filter, {prefix, level, by_mass, false});
        __syncthreads();
        target = find_bin(work, by_mass, [&](u64 total) -> u64 {
            if (level > 0) return target;
            if (!by_mass) return top_k;
            const u64 wanted = (u64)ceil((double)top_p * (double)total);
            return wanted > 0 ? wanted : 1;
        });
        target -= work.found_before;
        prefix = prefix << digit_bits(level) | work.found_bin;
        if (level == 0 && !filter.in_list && work.found_count <= LIST_SIZE) {
            run_scan(row, work, filter, {prefix, level, by_mass, true});
            filter.in_list = true;
        }
        __syncthreads();
    }
    filter.key = max(filter.key, prefix);
}

// Top-k, then top-p of what is left, then min-p; maximum is the largest value of the row.
__device__ __forceinline__ Filter make_filter(const Row& row, Workspace& work, float maximum, int top_k, float top_p,
                                              float min_p) {
    Filter filter;
    filter.maximum = maximum;
    if (top_k > 0 && top_k < row.vocab_size) raise_threshold(filter, row, work, false, top_k, top_p);
    if (top_p < 1.0f) raise_threshold(filter, row, work, true, top_k, top_p);
    filter.min_p = min_p;
    return filter;
}

__device__ __forceinline__ bool keeps(const Filter& filter, float value) {
    return order_key(value) >= filter.key && (filter.min_p <= 0.0f || expf(value - filter.maximum) >= filter.min_p);
}
