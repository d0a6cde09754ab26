// Draw the next token of every row of logits (B, V): penalty, bans, temperature, top-k, top-p, min-p, Gumbel-max; and
// the filters alone. One block of LOGITS_THREADS threads a row. All parameters of a row lie in device memory, so that a
// CUDA graph can hold a launch; a row without filters reads its logits once. Results of a row depend on its logits,
// parameters, seed and position alone.
// specialise: SCALAR=bf16,f16,f32
// The tokens' own kernel needs no SCALAR:
// specialise:
// arch: sm_80 sm_89 sm_90a sm_100 sm_120

// tokens (count): [i] = drawn[sources[i]], where sources[i] is not -1. One thread a token.
extern "C" __global__ void __launch_bounds__(256)
newest_tokens(int* tokens, const int* sources, const int* drawn, int count) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < count && sources[i] >= 0) tokens[i] = drawn[sources[i]];
}

#ifdef SCALAR
#include "filters.cuh"
#include "philox.cuh"

constexpr int NO_TOKEN = 0x7fffffff;

struct Best {
    float score = -INFINITY;
    int id = NO_TOKEN;

    __device__ __forceinline__ void take(float other_score, int other_id) {
        if (other_score > score || (other_score == score && other_id < id)) score = other_score, id = other_id;
    }
};

__device__ __forceinline__ float gumbel_score(float value, float uniform) { return value - logf(-log1pf(-uniform)); }

// Draw among 8 ids. The noise -log(-log1p(-u)) is at most -log(u), which is cheap: only ids that can beat the warp's
// best so far (warp_best) get the exact score. All 32 threads of a warp must call it together.
__device__ __forceinline__ void draw_among(Best& best, float& warp_best, const float (&value)[LOGITS_VECTOR], int first,
                                           u64 seed, unsigned position) {
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
    for (int offset = 16; offset > 0; offset >>= 1)
        warp_best = fmaxf(warp_best, __shfl_xor_sync(FULL_MASK, warp_best, offset));
}

// The winner of the block, in every thread.
__device__ __forceinline__ Best best_over_block(Best best, Workspace& work) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        best.take(__shfl_xor_sync(FULL_MASK, best.score, offset), __shfl_xor_sync(FULL_MASK, best.id, offset));
    if (threadIdx.x % WARP == 0)
        work.best_score[threadIdx.x / WARP] = best.score, work.best_id[threadIdx.x / WARP] = best.id;
    __syncthreads();
    for (int w = 0; w < LOGITS_WARPS; w++) best.take(work.best_score[w], work.best_id[w]);
    return best;
}

// The first pass: statistics of the scaled logits; the winner, unless the row has filters; the largest adjusted value.
__device__ __forceinline__ RowStatistics first_pass(Best& best, float& maximum, const Row& row, Workspace& work,
                                                    bool greedy, bool filtered, u64 seed, unsigned position) {
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

// banned, repetition_penalty and seen may be null. A row with a NaN, with +inf or without a finite logit gives some id
// below vocab_size and a log-probability of NaN; no other row sees it.
extern "C" __global__ void __launch_bounds__(LOGITS_THREADS, 2)
sample(int* tokens, float* logprobs, const SCALAR* logits, const float* temperature, const int* top_k,
       const float* top_p, const float* min_p, const unsigned long long* seeds, const long long* positions,
       const int* banned, const float* repetition_penalty, const bool* seen, long long stride, int vocab_size,
       int num_banned) {
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
    const RowStatistics statistics =
        first_pass(best, maximum, row, work, greedy, filtered, seeds[b], (unsigned)positions[b]);
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
filter_logits(SCALAR* kept, const SCALAR* scaled_logits, const int* top_k, const float* top_p, const float* min_p,
              int vocab_size) {
    __shared__ Workspace work;
    const long long b = blockIdx.x;
    Row row = {scaled_logits + b * vocab_size, nullptr, nullptr, 0, vocab_size, 1.0f, 1.0f, false};
    row.aligned = rows_are_aligned(scaled_logits, vocab_size);
    float maximum = LOWEST_FLOAT;
    for (int id = threadIdx.x; id < vocab_size; id += LOGITS_THREADS)
        maximum = fmaxf(maximum, to_float(row.logits[id]));
    const Filter filter = make_filter(row, work, block_max(maximum, work.scratch), top_k[b], top_p[b], min_p[b]);
    for (int id = threadIdx.x; id < vocab_size; id += LOGITS_THREADS)
        kept[b * vocab_size + id] =
            keeps(filter, to_float(row.logits[id])) ? row.logits[id] : from_float<SCALAR>(-INFINITY);
}
#endif
