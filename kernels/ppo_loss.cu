// PPO's loss of N packed tokens with a critic: loss, its gradients with respect to log-probabilities, values and
// entropies (N,) each, and eleven sums of statistics. A block of PPO_THREADS threads takes TOKENS_A_BLOCK tokens and
// writes its sums to partials (blocks, 12); ppo_loss_sums adds those up in a fixed order. Formulas and what NaN does
// are those of the NumPy shelf, in float64: there is little to compute.
// specialise:
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "kl.cuh"

#define PPO_THREADS 256
#define TOKENS_A_BLOCK 1024
#define NUM_SUMS 12  // the loss, then the statistics in the order of ops.ppo_loss.PPO_STATS

// low, high: bounds of the ratio; dual_clip and value_range are +inf if there is none; log-ratios are held within
// ±max_log_ratio before exp
struct Settings {
    double low, high, dual_clip, value_range, vf_coef, entropy_coef, beta, max_log_ratio;
    int estimator;
};

// A term of a token's loss and its derivative.
struct Surrogate {
    double loss, dlog_ratio;
    bool clipped, dual_clipped;
};
struct ValueLoss {
    double loss, dvalue;
    bool clipped;
};

// NaN comes through: the clipped term is NaN wherever the plain one is.
__device__ __forceinline__ double larger(double plain, double clipped) { return plain > clipped ? plain : clipped; }

__device__ __forceinline__ Surrogate surrogate(double ratio, double advantage, const Settings& s) {
    const double plain = -advantage * ratio, clipped = -advantage * held_within(ratio, s.low, s.high);
    const bool is_clipped = clipped > plain;
    const double loss = larger(plain, clipped), bound = -s.dual_clip * advantage;
    if (advantage < 0.0 && loss > bound) return {bound, 0.0, is_clipped, true};
    return {loss, is_clipped ? 0.0 : plain, is_clipped, false};
}

__device__ __forceinline__ ValueLoss value_loss(double value, double old_value, double target, const Settings& s) {
    const double change = value - old_value, held = held_within(change, -s.value_range, s.value_range);
    const double near = held == change ? value : old_value + held;  // an exact value where nothing is clipped
    const double plain = (value - target) * (value - target), clipped = (near - target) * (near - target);
    const bool is_clipped = clipped > plain;
    return {0.5 * larger(plain, clipped), is_clipped ? 0.0 : value - target, is_clipped};
}

// ref_logps may be null if beta is 0. A token of weight 0 takes no part and has gradient 0.
extern "C" __global__ void __launch_bounds__(PPO_THREADS)
ppo_loss_tokens(float* dlogps, float* dvalues, float* dentropies, double* partials, const float* logps,
                const float* values, const float* entropies, const float* old_logps, const float* old_values,
                const float* ref_logps, const float* advantages, const float* returns, const float* weights,
                long long num_tokens, double low, double high, double dual_clip, double vf_coef, double value_range,
                double entropy_coef, double beta, int estimator, double max_log_ratio) {
    __shared__ double scratch[WARP];
    const Settings settings = {low,          high, dual_clip,     value_range, vf_coef,
                               entropy_coef, beta, max_log_ratio, estimator};
    const long long start = blockIdx.x * (long long)TOKENS_A_BLOCK, end = min(start + TOKENS_A_BLOCK, num_tokens);
    double sums[NUM_SUMS] = {};
    for (long long i = start + threadIdx.x; i < end; i += PPO_THREADS) {
        const double weight = weights[i];
        if (weight == 0.0) {
            dlogps[i] = dvalues[i] = dentropies[i] = 0.0f;
            continue;
        }
        const double log_ratio = (double)logps[i] - old_logps[i], entropy = entropies[i];
        const double held_log_ratio = held_within(log_ratio, -max_log_ratio, max_log_ratio);
        const bool is_held = fabs(log_ratio) > max_log_ratio;
        const double ratio = exp(held_log_ratio);
        const Surrogate policy = surrogate(ratio, advantages[i], settings);
        const ValueLoss value = value_loss(values[i], old_values[i], returns[i], settings);
        const Kl kl = beta != 0.0 ? kl_estimate((double)ref_logps[i] - logps[i], estimator, max_log_ratio) : Kl{};
        dlogps[i] = (float)(weight * ((is_held ? 0.0 : policy.dlog_ratio) + beta * kl.dnew));
        dvalues[i] = (float)(weight * vf_coef * value.dvalue);
        dentropies[i] = (float)(-entropy_coef * weight);
        sums[0] += weight * (policy.loss + vf_coef * value.loss - entropy_coef * entropy + beta * kl.value);
        sums[1] += weight * policy.loss, sums[2] += weight * value.loss, sums[3] += weight * entropy;
        sums[4] += policy.clipped, sums[5] += value.clipped, sums[6] += policy.dual_clipped;
        sums[7] += 0.5 * held_log_ratio * held_log_ratio, sums[8] += ratio, sums[9] += kl.value;
        sums[10] += is_held || kl.held, sums[11] += 1.0;
    }
#pragma unroll
    for (int k = 0; k < NUM_SUMS; k++) {
        const double sum = block_sum(sums[k], scratch);
        if (threadIdx.x == 0) partials[blockIdx.x * (long long)NUM_SUMS + k] = sum;
    }
}

// loss () and stats (11,)
extern "C" __global__ void __launch_bounds__(PPO_THREADS)
ppo_loss_sums(float* loss, double* stats, const double* partials, int num_blocks) {
    __shared__ double scratch[WARP];
    for (int k = 0; k < NUM_SUMS; k++) {
        double sum = 0.0;
        for (int i = threadIdx.x; i < num_blocks; i += PPO_THREADS) sum += partials[(long long)i * NUM_SUMS + k];
        sum = block_sum(sum, scratch);
        if (threadIdx.x > 0) continue;
        if (k == 0) *loss = (float)sum;
        else stats[k - 1] = sum;
    }
}
