// The policy-gradient losses of GRPO's family on N packed tokens: loss, dlogps (N,) = dloss/dnew, and six sums of
// statistics. A block of POLICY_THREADS threads takes a segment of tokens: one sequence if the ratio is one a sequence
// (cu_seqlens given), TOKENS_A_BLOCK tokens otherwise. It writes its sums to partials (segments, 6): loss, clipped
// below, clipped above, kl, used tokens, extreme log-ratios; policy_loss_sums adds those up in a fixed order. Formulas,
// their order and what NaN does are those of the NumPy shelf, in float64: there is little to compute.
// specialise:
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "common.cuh"

#define POLICY_THREADS 256
#define TOKENS_A_BLOCK 1024
#define NUM_SUMS 6
#define KIND_CLIP 0  // the other kind is CISPO

struct Settings {
    int kind;
    // clip's bounds 1 - eps_low and 1 + eps_high; cispo's bound; delta is +inf if there is none
    double low, high, cap, delta, beta;
    double max_log_ratio;                // log-ratios are held within ±this before exp
    bool bias_kl;
};

// What a token adds, at its ratio.
struct Token {
    double loss, dlog_ratio, dnew, kl;
    bool low, high, extreme;
};

// Comparisons rather than fmin: a NaN log-probability must come through, so that the update is skipped.
__device__ __forceinline__ Token policy_token(double log_ratio, double new_logp, double ref_logp, double advantage,
                                              const Settings& s) {
    Token token;
    const bool above = log_ratio > s.max_log_ratio, below = log_ratio < -s.max_log_ratio;
    const double ratio = exp(above ? s.max_log_ratio : below ? -s.max_log_ratio : log_ratio);
    token.extreme = above || below;
    if (s.kind == KIND_CLIP) {
        const double clipped = ratio < s.low ? s.low : ratio > s.high ? s.high : ratio;
        const double unclipped = ratio > s.delta ? s.delta : ratio;
        const double first = unclipped * advantage, second = clipped * advantage;
        const bool has_slope = first <= second ? unclipped == ratio : clipped == ratio;
        token.loss = -(first <= second ? first : second);
        token.dlog_ratio = -ratio * advantage * (has_slope ? 1.0 : 0.0);
        token.dnew = 0.0 * ratio;
        token.low = ratio < s.low && advantage < 0.0;
        token.high = ratio > s.high && advantage > 0.0;
    } else {
        const double factor = -(ratio > s.cap ? s.cap : ratio) * advantage;
        token.loss = factor * new_logp;
        token.dlog_ratio = 0.0 * ratio;
        token.dnew = factor;
        token.low = false;
        token.high = ratio > s.cap && advantage > 0.0;
    }
    token.kl = 0.0;
    if (s.beta != 0.0) {
        const double far = ref_logp - new_logp;
        const bool too_far = far > s.max_log_ratio;
        const double reference_ratio = too_far ? s.max_log_ratio : far, growth = expm1(reference_ratio);
        double kl = growth - reference_ratio, dkl = too_far ? 0.0 : -growth;
        token.extreme |= too_far;
        if (s.bias_kl) {
            kl *= ratio, dkl = above || below ? 0.0 : dkl * ratio;
            if (!too_far) token.dlog_ratio += s.beta * kl;
        }
        token.loss += s.beta * kl;
        token.dnew += s.beta * dkl;
        token.kl = kl;
    }
    if (above || below) token.dlog_ratio = 0.0;  // the ratio no longer moves
    return token;
}

// The block's sum, in every thread. scratch: POLICY_THREADS / WARP doubles.
__device__ __forceinline__ double sum_over_block(double value, double* scratch) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(FULL_MASK, value, offset);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    double total = 0.0;
    for (int w = 0; w < POLICY_THREADS / WARP; w++) total += scratch[w];
    return total;
}

// ref may be null if beta is 0; cu_seqlens (segments + 1) null: one ratio a token. A token of weight 0 takes no part
// and has gradient 0.
extern "C" __global__ void __launch_bounds__(POLICY_THREADS)
policy_loss_segments(float* dlogps, double* partials, const float* new_logps, const float* old_logps,
                     const float* ref_logps, const float* advantages, const float* weights, const int* cu_seqlens,
                     long long num_tokens, int kind, double low,
                     double high, double cap, double delta, double beta, double max_log_ratio, int bias_kl) {
    __shared__ double scratch[POLICY_THREADS / WARP];
    const Settings settings = {kind, low, high, cap, delta, beta, max_log_ratio, bias_kl != 0};
    const long long segment = blockIdx.x;
    const long long start = cu_seqlens ? cu_seqlens[segment] : segment * TOKENS_A_BLOCK;
    const long long end = cu_seqlens ? cu_seqlens[segment + 1] : min(start + TOKENS_A_BLOCK, num_tokens);

    double used = 0.0, log_ratios = 0.0;
    for (long long i = start + threadIdx.x; i < end; i += POLICY_THREADS) {
        if (weights[i] == 0.0f) continue;
        used += 1.0;
        log_ratios += (double)new_logps[i] - old_logps[i];
    }
    used = sum_over_block(used, scratch);
    const double mean = sum_over_block(log_ratios, scratch) / fmax(used, 1.0);

    double sums[NUM_SUMS] = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0}, through_ratio = 0.0;
    for (long long i = start + threadIdx.x; i < end; i += POLICY_THREADS) {
        const double weight = weights[i];
        if (weight == 0.0) {
            dlogps[i] = 0.0f;
            continue;
        }
        const double log_ratio = cu_seqlens ? mean : (double)new_logps[i] - old_logps[i];
        const Token token = policy_token(log_ratio, new_logps[i], ref_logps ? ref_logps[i] : 0.0f, advantages[i],
                                         settings);
        sums[0] += weight * token.loss;
        sums[1] += token.low, sums[2] += token.high, sums[3] += token.kl, sums[5] += token.extreme;
        through_ratio += weight * token.dlog_ratio;
        dlogps[i] = (float)(cu_seqlens ? weight * token.dnew : weight * token.dlog_ratio + weight * token.dnew);
    }
    for (int k = 0; k < NUM_SUMS; k++)
        if (k != 4) sums[k] = sum_over_block(sums[k], scratch);
    sums[4] = used;
    // every used token of a sequence moves the one ratio by 1/length; a sequence counts as clipped once
    if (cu_seqlens) {
        const double share = sum_over_block(through_ratio, scratch) / fmax(used, 1.0);
        for (long long i = start + threadIdx.x; i < end; i += POLICY_THREADS)
            if (weights[i] != 0.0f) dlogps[i] = (float)(share + dlogps[i]);
        sums[1] = sums[1] > 0.0, sums[2] = sums[2] > 0.0;
    }
    if (threadIdx.x < NUM_SUMS) partials[segment * NUM_SUMS + threadIdx.x] = sums[threadIdx.x];
}

// loss () and stats (6,): clipped below, clipped above, how many could be (sequences if num_sequences >= 0, tokens
// else), kl, used tokens, extreme log-ratios.
extern "C" __global__ void __launch_bounds__(POLICY_THREADS)
policy_loss_sums(float* loss, double* stats, const double* partials, int num_segments, int num_sequences) {
    __shared__ double scratch[POLICY_THREADS / WARP];
    double sums[NUM_SUMS];
    for (int k = 0; k < NUM_SUMS; k++) {
        double sum = 0.0;
        for (int i = threadIdx.x; i < num_segments; i += POLICY_THREADS) sum += partials[(long long)i * NUM_SUMS + k];
        sums[k] = sum_over_block(sum, scratch);
    }
    if (threadIdx.x == 0) {
        *loss = (float)sums[0];
        stats[0] = sums[1], stats[1] = sums[2], stats[3] = sums[3], stats[4] = sums[4], stats[5] = sums[5];
        stats[2] = num_sequences >= 0 ? num_sequences : sums[4];
    }
}
