// Draw the next token of every row of logits (B, V): penalty, bans, temperature, top-k, top-p, min-p, Gumbel-max; and the filters alone.
// One block of LOGITS_THREADS threads a row. All parameters of a row lie in device memory, so that a CUDA graph can hold a launch; a row
// without filters reads its logits once. Results of a row depend on its logits, parameters, seed and position alone.
//
// Filters without a sort: every filter keeps the values from a threshold on. The threshold's bits are found digit by digit (11 + 11 + 10
// bits of a key that orders like the value) from a histogram of counts (top-k) or of probability mass (top-p). Mass is counted in units of
// 2^-40 of the largest probability: integer sums are the same in every order. As soon as few values are left, they are gathered in shared
// memory and the rest is done there.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "logits.cuh"

#define LOGITS_WARPS (LOGITS_THREADS / WARP)
#define NUM_BINS 2048
#define BINS_PER_THREAD (NUM_BINS / LOGITS_THREADS)
#define LIST_SIZE 1024
#define NO_TOKEN 0x7fffffff
#define MASS_UNITS 1099511627776.0f

using u64 = unsigned long long;

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

// What the filters keep: values whose key is at least `key` and whose probability is at least min_p times the largest.
struct Filter {
    unsigned key = 0;
    float maximum = 0.0f, min_p = 0.0f;
    bool in_list = false;  // all candidates are in the workspace's list
};

struct Best {
    float score = -INFINITY;
    int id = NO_TOKEN;

    __device__ __forceinline__ void take(float other_score, int other_id) {
        if (other_score > score || (other_score == score && other_id < id)) score = other_score, id = other_id;
    }
};

// An unsigned integer that orders as the value does; -0 and 0 are equal.
__device__ __forceinline__ unsigned order_key(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// ---- values --------------------------------------------------------------------------------------------------------

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

// ---- thresholds ----------------------------------------------------------------------------------------------------

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

// From the highest bin down, find the first with which the sum of the weights reaches the target, and write it to found_bin, with the
// sum before it and the number of values down to it. make_target(sum of all) gives the target, at least 1.
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

// What a scan does with the values that the filter keeps: put those whose higher digits are `prefix` into the bins of digit `level`, or
// append those whose first digit is at least `prefix` to the list.
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

// Over the list if it holds all candidates, else over the row. Not inlined: one copy is enough, and registers are free again after it.
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

// Raise filter.key to that of the top_k-th value (by_mass false), or of the value with which the mass from above reaches top_p.
static __device__ __noinline__ void raise_threshold(Filter& filter, const Row& row, Workspace& work, bool by_mass, int top_k, float top_p) {
    unsigned prefix = 0;
    u64 target = 0;
    for (int level = 0; level < 3; level++) {
        for (int bin = threadIdx.x; bin < NUM_BINS; bin += LOGITS_THREADS) work.count[bin] = work.mass_low[bin] = work.mass_high[bin] = 0;
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
__device__ __forceinline__ Filter make_filter(const Row& row, Workspace& work, float maximum, int top_k, float top_p, float min_p) {
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

// ---- the draw ------------------------------------------------------------------------------------------------------

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

// In (0, 1): rounding may give 1, whose noise would be infinite.
__device__ __forceinline__ float uniform_of(unsigned word) {
    return fminf((__uint2float_rn(word) + 0.5f) * 2.3283064365386963e-10f, 0.99999994f);
}

__device__ __forceinline__ float gumbel_score(float value, float uniform) { return value - logf(-log1pf(-uniform)); }

// Draw among 8 ids. The noise -log(-log1p(-u)) is at most -log(u), which is cheap: only ids that can beat the warp's best so far
// (warp_best) get the exact score. All 32 threads of a warp must call it together.
__device__ __forceinline__ void draw_among(Best& best, float& warp_best, const float (&value)[LOGITS_VECTOR], int first, u64 seed,
                                           unsigned position) {
    const uint4 lower = philox(seed, position, first / 4), upper = philox(seed, position, first / 4 + 1);
    const unsigned words[LOGITS_VECTOR] = {lower.x, lower.y, lower.z, lower.w, upper.x, upper.y, upper.z, upper.w};
    unsigned possible = 0;
#pragma unroll
    for (int i = 0; i < LOGITS_VECTOR; i++) {
        const float slack = fmaf(fabsf(value[i]), 1e-6f, 1e-3f);
        if (fmaf(-LN_2, __log2f(uniform_of(words[i])), value[i]) + slack >= warp_best) possible |= 1u << i;
    }
    if (!__any_sync(FULL_MASK, possible)) return;
#pragma unroll
    for (int i = 0; i < LOGITS_VECTOR; i++)
        if (possible >> i & 1) best.take(gumbel_score(value[i], uniform_of(words[i])), first + i);
    warp_best = fmaxf(warp_best, best.score);
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) warp_best = fmaxf(warp_best, __shfl_xor_sync(FULL_MASK, warp_best, offset));
}

// The winner of the block, in every thread.
__device__ __forceinline__ Best best_over_block(Best best, Workspace& work) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        best.take(__shfl_xor_sync(FULL_MASK, best.score, offset), __shfl_xor_sync(FULL_MASK, best.id, offset));
    if (threadIdx.x % WARP == 0) work.best_score[threadIdx.x / WARP] = best.score, work.best_id[threadIdx.x / WARP] = best.id;
    __syncthreads();
    for (int w = 0; w < LOGITS_WARPS; w++) best.take(work.best_score[w], work.best_id[w]);
    return best;
}

// The first pass: statistics of the scaled logits; the winner, unless the row has filters; the largest adjusted value.
__device__ __forceinline__ RowStatistics first_pass(Best& best, float& maximum, const Row& row, Workspace& work, bool greedy, bool filtered,
                                                    u64 seed, unsigned position) {
    SoftmaxSum sum;
    float warp_best = -INFINITY;
    maximum = LOWEST_FLOAT;
    for (int start = 0; start < row.vocab_size; start += LOGITS_THREADS * LOGITS_VECTOR) {
        const int first = start + threadIdx.x * LOGITS_VECTOR;
        float x[LOGITS_VECTOR];
        load_scaled(x, row, first);
        sum.add<false>(x);
        adjust(x, row, first);
        if (greedy) {
#pragma unroll
            for (int i = 0; i < LOGITS_VECTOR; i++) best.take(x[i], first + i < row.vocab_size ? first + i : NO_TOKEN);
        } else if (filtered) {
#pragma unroll
            for (int i = 0; i < LOGITS_VECTOR; i++) maximum = fmaxf(maximum, x[i]);
        } else {
            draw_among(best, warp_best, x, first, seed, position);
        }
    }
    return combine_over_block<false>(sum, work.scratch);
}

// The winner among what the filter keeps.
static __device__ __noinline__ Best draw_filtered(const Row& row, const Workspace& work, const Filter& filter, u64 seed,
                                                  unsigned position) {
    Best best;
    if (filter.in_list) {
        for (unsigned i = threadIdx.x; i < work.list_size; i += LOGITS_THREADS) {
            const float value = work.list_value[i];
            const int id = work.list_id[i];
            if (!keeps(filter, value)) continue;
            const uint4 words = philox(seed, position, id / 4);
            const unsigned word = id % 4 == 0 ? words.x : id % 4 == 1 ? words.y : id % 4 == 2 ? words.z : words.w;
            best.take(gumbel_score(value, uniform_of(word)), id);
        }
        return best;
    }
    float warp_best = -INFINITY;
    for (int start = 0; start < row.vocab_size; start += LOGITS_THREADS * LOGITS_VECTOR) {
        const int first = start + threadIdx.x * LOGITS_VECTOR;
        float x[LOGITS_VECTOR];
        load_scaled(x, row, first);
        adjust(x, row, first);
#pragma unroll
        for (int i = 0; i < LOGITS_VECTOR; i++)
            if (!keeps(filter, x[i])) x[i] = -INFINITY;
        draw_among(best, warp_best, x, first, seed, position);
    }
    return best;
}

// banned, repetition_penalty and seen may be null.
extern "C" __global__ void __launch_bounds__(LOGITS_THREADS, 2)
sample(int* tokens, float* logprobs, const SCALAR* logits, const float* temperature, const int* top_k, const float* top_p,
       const float* min_p, const unsigned long long* seeds, const long long* positions, const int* banned,
       const float* repetition_penalty, const bool* seen, long long stride, int vocab_size, int num_banned) {
    __shared__ Workspace work;
    const long long b = blockIdx.x;
    const bool greedy = temperature[b] == 0.0f;
    const bool penalised = repetition_penalty && repetition_penalty[b] != 1.0f;
    Row row;
    row.logits = logits + b * stride;
    row.aligned = rows_are_aligned(logits, stride);
    row.vocab_size = vocab_size;
    row.temperature = greedy ? 1.0f : temperature[b];
    row.penalty = penalised ? repetition_penalty[b] : 1.0f;
    row.seen = penalised ? seen + b * stride : nullptr;
    row.num_banned = num_banned;
    bool any_banned = false;
    for (int s = threadIdx.x; s < num_banned; s += LOGITS_THREADS) any_banned |= banned[b * num_banned + s] >= 0;
    row.banned = __syncthreads_or(any_banned) ? banned + b * num_banned : nullptr;
    const bool filtered = !greedy && ((top_k[b] > 0 && top_k[b] < vocab_size) || top_p[b] < 1.0f || min_p[b] > 0.0f);
    Best best;
    float maximum;
    const RowStatistics statistics = first_pass(best, maximum, row, work, greedy, filtered, seeds[b], (unsigned)positions[b]);
    if (threadIdx.x == 0) work.statistics = statistics;  // not in registers while the filters are at work
    if (filtered) {
        const Filter filter = make_filter(row, work, block_max(maximum, work.scratch), top_k[b], top_p[b], min_p[b]);
        best = draw_filtered(row, work, filter, seeds[b], (unsigned)positions[b]);
    }
    best = best_over_block(best, work);
    if (threadIdx.x == 0) {
        const int token = best.id == NO_TOKEN ? 0 : best.id;
        tokens[b] = token;
        logprobs[b] = work.statistics.log_probability(scale_logit(to_float(row.logits[token]), row.temperature));
    }
}

// kept (B, V) = the scaled logits (B, V), -inf where a filter removes one.
extern "C" __global__ void __launch_bounds__(LOGITS_THREADS)
filter_logits(SCALAR* kept, const SCALAR* scaled_logits, const int* top_k, const float* top_p, const float* min_p, int vocab_size) {
    __shared__ Workspace work;
    const long long b = blockIdx.x;
    Row row = {scaled_logits + b * vocab_size, nullptr, nullptr, 0, vocab_size, 1.0f, 1.0f, rows_are_aligned(scaled_logits, vocab_size)};
    float maximum = LOWEST_FLOAT;
    for (int id = threadIdx.x; id < vocab_size; id += LOGITS_THREADS) maximum = fmaxf(maximum, to_float(row.logits[id]));
    const Filter filter = make_filter(row, work, block_max(maximum, work.scratch), top_k[b], top_p[b], min_p[b]);
    for (int id = threadIdx.x; id < vocab_size; id += LOGITS_THREADS)
        kept[b * vocab_size + id] = keeps(filter, to_float(row.logits[id])) ? row.logits[id] : from_float<SCALAR>(-INFINITY);
}
