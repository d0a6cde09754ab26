// The policy-gradient losses of GRPO's family on N packed tokens: loss, dlogps (N,) = dloss/dnew, and seven sums of
// statistics. A block of POLICY_THREADS threads takes a segment of tokens: one sequence if cu_seqlens is given,
// TOKENS_A_BLOCK tokens otherwise. It writes its sums to partials (segments, 7): loss, clipped below, clipped above,
// kl, used tokens, extreme log-ratios, dropped by the off-policy mask; policy_loss_sums adds those up in a fixed order.
// Formulas, their order and what NaN does are those of the NumPy shelf, in float64: there is little to compute. A new
// loss is one function that returns a Token, and its place in Kind.
// specialise:
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "kl.cuh"

#define POLICY_THREADS 256
#define TOKENS_A_BLOCK 1024
#define NUM_SUMS 7

// The places of the names in the launcher's tables.
enum Kind { KIND_CLIP, KIND_CISPO, KIND_SAPO, KIND_VESPO };
enum Level { LEVEL_TOKEN, LEVEL_SEQUENCE, LEVEL_SEQUENCE_TOKEN };

#define LOWEST_LOG_WEIGHT -18.420680743952367  // log(1e-8), of VESPO's weight of a sequence
#define LOWEST_DECAY 1e-4

struct Settings {
    int kind, estimator;
    // clip's bounds 1 - eps_low and 1 + eps_high; cispo's bound; delta is +inf if there is none
    double low, high, cap, delta, beta;
    double max_log_ratio;                // log-ratios are held within ±this before exp
    bool bias_kl;
    double coefficients[4];              // sapo: tau where A > 0, elsewhere; vespo: k, lambda where A >= 0, elsewhere
};

// What a token adds, at its ratio.
struct Token {
    double loss, dlog_ratio, dnew, kl;
    bool low, high, extreme;
};

__device__ __forceinline__ Token clipped_surrogate(double ratio, double advantage, const Settings& s) {
    const double clipped = held_within(ratio, s.low, s.high), unclipped = ratio > s.delta ? s.delta : ratio;
    const double first = unclipped * advantage, second = clipped * advantage;
    const bool has_slope = first <= second ? unclipped == ratio : clipped == ratio;
    return {-(first <= second ? first : second), -ratio * advantage * (has_slope ? 1.0 : 0.0), 0.0 * ratio, 0.0,
            ratio < s.low && advantage < 0.0, ratio > s.high && advantage > 0.0, false};
}

__device__ __forceinline__ Token capped_importance(double ratio, double new_logp, double advantage, const Settings& s) {
    const double factor = -(ratio > s.cap ? s.cap : ratio) * advantage;
    return {factor * new_logp, 0.0 * ratio, factor, 0.0, false, ratio > s.cap && advantage > 0.0, false};
}

__device__ __forceinline__ Token soft_gate(double ratio, double advantage, const Settings& s) {
    const double tau = advantage > 0.0 ? s.coefficients[0] : s.coefficients[1], decay = exp(-tau * (ratio - 1.0));
    const double gate = 1.0 / (1.0 + decay), slope = 4.0 * decay * gate * gate * ratio;
    return {-gate * 4.0 / tau * advantage, -slope * advantage, 0.0 * ratio, 0.0, false, false, false};
}

__device__ __forceinline__ Token gamma_weighted(double ratio, double log_weight, double new_logp, double advantage,
                                                const Settings& s) {
    const double k = advantage >= 0.0 ? s.coefficients[0] : s.coefficients[2];
    const double lambda = advantage >= 0.0 ? s.coefficients[1] : s.coefficients[3];
    const double decay = lambda < LOWEST_DECAY ? LOWEST_DECAY : lambda;
    const double factor = -exp(decay + k * log_weight - decay * exp(log_weight)) * advantage;
    return {factor * new_logp, 0.0 * ratio, factor, 0.0, false, false, false};
}

// factor: a constant that the loss, not the KL, is multiplied by.
__device__ __forceinline__ Token policy_token(double log_ratio, double log_weight, double new_logp, double ref_logp,
                                              double advantage, double factor, const Settings& s) {
    const bool above = log_ratio > s.max_log_ratio, below = log_ratio < -s.max_log_ratio;
    const double ratio = exp(above ? s.max_log_ratio : below ? -s.max_log_ratio : log_ratio);
    Token token = s.kind == KIND_CLIP    ? clipped_surrogate(ratio, advantage, s)
                  : s.kind == KIND_CISPO ? capped_importance(ratio, new_logp, advantage, s)
                  : s.kind == KIND_SAPO  ? soft_gate(ratio, advantage, s)
                                         : gamma_weighted(ratio, log_weight, new_logp, advantage, s);
    token.extreme = above || below;
    token.loss *= factor, token.dlog_ratio *= factor, token.dnew *= factor;
    if (s.beta != 0.0) {
        const Kl estimate = kl_estimate(ref_logp - new_logp, s.estimator, s.max_log_ratio);
        double kl = estimate.value, dkl = estimate.dnew;
        token.extreme |= estimate.held;
        if (s.bias_kl) {
            kl *= ratio, dkl = above || below ? 0.0 : dkl * ratio;
            if (!estimate.held) token.dlog_ratio += s.beta * kl;
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

// ref may be null if beta is 0; factors null: 1; sampled null: old_logps; off_policy_threshold +inf: there is none.
// cu_seqlens (segments + 1) null: one ratio a token. A token of weight 0 takes no part and has gradient 0.
extern "C" __global__ void __launch_bounds__(POLICY_THREADS)
policy_loss_segments(float* dlogps, double* partials, const float* new_logps, const float* old_logps,
                     const float* ref_logps, const float* advantages, const float* weights, const float* factors,
                     const float* sampled, const int* cu_seqlens, long long num_tokens, int kind, int level,
                     int estimator, double low, double high, double cap, double delta, double beta,
                     double max_log_ratio, int bias_kl, double coefficient0, double coefficient1, double coefficient2,
                     double coefficient3, double off_policy_threshold) {
    __shared__ double scratch[POLICY_THREADS / WARP];
    const Settings settings = {kind, estimator, low, high, cap, delta, beta, max_log_ratio, bias_kl != 0,
                               {coefficient0, coefficient1, coefficient2, coefficient3}};
    const long long segment = blockIdx.x;
    const long long start = cu_seqlens ? cu_seqlens[segment] : segment * TOKENS_A_BLOCK;
    const long long end = cu_seqlens ? cu_seqlens[segment + 1] : min(start + TOKENS_A_BLOCK, num_tokens);

    double used = 0.0, log_ratios = 0.0, held_log_ratios = 0.0, drifts = 0.0;
    for (long long i = start + threadIdx.x; i < end; i += POLICY_THREADS) {
        if (weights[i] == 0.0f) continue;
        const double log_ratio = (double)new_logps[i] - old_logps[i];
        used += 1.0;
        log_ratios += log_ratio;
        held_log_ratios += held_within(log_ratio, -max_log_ratio, max_log_ratio);
        drifts += sampled ? (double)new_logps[i] - sampled[i] : log_ratio;
    }
    used = sum_over_block(used, scratch);
    const double mean = sum_over_block(log_ratios, scratch) / fmax(used, 1.0);
    const double log_weight = held_within(sum_over_block(held_log_ratios, scratch), LOWEST_LOG_WEIGHT, max_log_ratio);
    const bool is_off_policy = -(sum_over_block(drifts, scratch) / fmax(used, 1.0)) > off_policy_threshold;

    double sums[NUM_SUMS] = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0}, through_ratio = 0.0;
    for (long long i = start + threadIdx.x; i < end; i += POLICY_THREADS) {
        const double weight = weights[i];
        if (weight == 0.0) {
            dlogps[i] = 0.0f;
            continue;
        }
        const double log_ratio = level == LEVEL_TOKEN ? (double)new_logps[i] - old_logps[i] : mean;
        const bool dropped = is_off_policy && advantages[i] < 0.0f;
        const Token token = policy_token(log_ratio, log_weight, new_logps[i], ref_logps ? ref_logps[i] : 0.0f,
                                         advantages[i], dropped ? 0.0 : factors ? factors[i] : 1.0, settings);
        sums[0] += weight * token.loss;
        sums[1] += token.low, sums[2] += token.high, sums[3] += token.kl, sums[5] += token.extreme;
        sums[6] += dropped;
        through_ratio += weight * token.dlog_ratio;
        dlogps[i] = (float)(level == LEVEL_SEQUENCE ? weight * token.dnew
                                                    : weight * token.dlog_ratio + weight * token.dnew);
    }
    for (int k = 0; k < NUM_SUMS; k++)
        if (k != 4) sums[k] = sum_over_block(sums[k], scratch);
    sums[4] = used;
    sums[6] = sums[6] > 0.0;
    // every used token of a sequence moves the one ratio by 1/length; a sequence counts as clipped once
    if (level == LEVEL_SEQUENCE) {
        const double share = sum_over_block(through_ratio, scratch) / fmax(used, 1.0);
        for (long long i = start + threadIdx.x; i < end; i += POLICY_THREADS)
            if (weights[i] != 0.0f) dlogps[i] = (float)(share + dlogps[i]);
        sums[1] = sums[1] > 0.0, sums[2] = sums[2] > 0.0;
    }
    if (threadIdx.x < NUM_SUMS) partials[segment * NUM_SUMS + threadIdx.x] = sums[threadIdx.x];
}

// loss () and stats (7,): clipped below, clipped above, how many could be (sequences if num_sequences >= 0, tokens
// else), kl, used tokens, extreme log-ratios, sequences that the off-policy mask dropped.
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
        stats[2] = num_sequences >= 0 ? num_sequences : sums[4], stats[6] = sums[6];
    }
}
