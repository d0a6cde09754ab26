// From rewards to advantages: N learnt tokens of B rows side by side, the borders in cu_learnt (B + 1).
//   token_rewards: -kl_coef * KL a token, and the row's score at its last one. A block a row.
//   gae: generalised advantage estimates from a row's end, and returns = advantages + values. A warp a row.
//   whiten_sums, whiten: mean 0 and variance 1 over all N. Two levels of sums, the squares about the mean; the second
//   level is added up by every block that needs it, in the same order, so that nothing waits for the host.
// Sums are float64: there is little to compute. A row's bits depend on the row alone.
// specialise:
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "kl.cuh"

#define RETURNS_THREADS 256
#define ROWS_A_BLOCK (RETURNS_THREADS / WARP)
#define TOKENS_A_BLOCK 4096
#define WHITEN_EPS 1e-8

// ref_logprobs null: no KL
extern "C" __global__ void __launch_bounds__(RETURNS_THREADS)
token_rewards(float* rewards, const float* logprobs, const float* ref_logprobs, const float* scores,
              const int* cu_learnt, double kl_coef, int estimator, double max_log_ratio) {
    const int row = blockIdx.x, end = cu_learnt[row + 1];
    for (int i = cu_learnt[row] + (int)threadIdx.x; i < end; i += RETURNS_THREADS) {
        double reward = 0.0;
        if (ref_logprobs)
            reward = -kl_coef * kl_estimate((double)ref_logprobs[i] - logprobs[i], estimator, max_log_ratio).value;
        if (i == end - 1) reward += scores[row];
        rewards[i] = (float)reward;
    }
}

// The map a_t = delta_t + decay * a_{t+1}, decay = gamma * lambda, composed over the warp: a lane a token, lane 0 the
// last one of each 32, from the row's end backwards.
extern "C" __global__ void __launch_bounds__(RETURNS_THREADS)
gae(float* advantages, float* returns, const float* rewards, const float* values, const float* bootstrap,
    const int* cu_learnt, int num_rows, double gamma, double decay) {
    const int row = blockIdx.x * ROWS_A_BLOCK + warp_index();
    if (row >= num_rows) return;
    const int start = cu_learnt[row], end = cu_learnt[row + 1];
    double to_carry = decay;  // decay^(lane + 1): how far the first token behind these 32 reaches
    for (int i = 0; i < lane(); i++) to_carry *= decay;
    double carry = 0.0;  // its advantage
    for (int last = end - 1; last >= start; last -= WARP) {
        const int i = last - lane();
        double advantage = 0.0, value = 0.0;
        if (i >= start) {
            const double next_value = i + 1 < end ? values[i + 1] : bootstrap[row];
            value = values[i];
            advantage = rewards[i] + gamma * next_value - value;
        }
        double factor = decay;
#pragma unroll
        for (int reach = 1; reach < WARP; reach *= 2) {
            const double later = __shfl_up_sync(FULL_MASK, advantage, reach);
            if (lane() >= reach) advantage += factor * later;
            factor *= factor;
        }
        advantage += to_carry * carry;
        carry = __shfl_sync(FULL_MASK, advantage, WARP - 1);
        if (i >= start) advantages[i] = (float)advantage, returns[i] = (float)(advantage + value);
    }
}

__device__ __forceinline__ double sum_of(const double* numbers, int count, double* scratch) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += RETURNS_THREADS) sum += numbers[i];
    return block_sum(sum, scratch);
}

// sums (blocks,): of x, or of (x - mean)^2 if the sums of x (blocks,) are given as `first`
extern "C" __global__ void __launch_bounds__(RETURNS_THREADS)
whiten_sums(double* sums, const float* x, const double* first, long long n) {
    __shared__ double scratch[WARP];
    const double mean = first ? sum_of(first, gridDim.x, scratch) / n : 0.0;
    const long long start = blockIdx.x * (long long)TOKENS_A_BLOCK, end = min(start + TOKENS_A_BLOCK, n);
    double sum = 0.0;
    for (long long i = start + threadIdx.x; i < end; i += RETURNS_THREADS)
        sum += first ? (x[i] - mean) * (x[i] - mean) : x[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(RETURNS_THREADS)
whiten(float* whitened, const float* x, const double* sums, const double* squares, long long n, int shift_mean) {
    __shared__ double scratch[WARP];
    const double mean = sum_of(sums, gridDim.x, scratch) / n;
    const double variance = sum_of(squares, gridDim.x, scratch) / (n > 1 ? n - 1 : 1);
    const double scale = 1.0 / sqrt(variance + WHITEN_EPS), shift = shift_mean ? 0.0 : mean;
    const long long start = blockIdx.x * (long long)TOKENS_A_BLOCK, end = min(start + TOKENS_A_BLOCK, n);
    for (long long i = start + threadIdx.x; i < end; i += RETURNS_THREADS)
        whitened[i] = (float)((x[i] - mean) * scale + shift);
}
