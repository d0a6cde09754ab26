// Log-probabilities of chosen tokens, the entropy, and their gradient, over logits (N, V) of which the ids from
// vocab_size on take no part.
//   forward:  logprobs[n] = log softmax(logits[n] / T)[targets[n]], entropy[n], lse[n] = log sum exp(logits[n] / T)
//   backward: dlogits (N, V) = (dlogprobs (1[target] - p) - dentropy p (log p + H)) / T; may be written over the logits
// A target in vocab_size .. V - 1 is an id of probability 0: its log-probability is -inf, its gradient that of the
// normaliser alone, -dlogprobs p / T. A target outside 0 .. V - 1 is the caller's mistake: its log-probability is NaN.
// Forward: one block of LOGITS_THREADS threads a row, one pass. Backward: grid (rows, parts of a row), every thread 8
// ids at a time.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "logits.cuh"

extern "C" __global__ void __launch_bounds__(LOGITS_THREADS, 2)
token_logprobs_forward(float* logprobs, float* entropy, float* lse, const SCALAR* logits, const int* targets,
                       long long stride, int vocab_size, float temperature) {
    __shared__ float scratch[WARP];
    const long long n = blockIdx.x;
    const SCALAR* row = logits + n * stride;
    const bool aligned = rows_are_aligned(logits, stride);
    SoftmaxSum sum;
    for (int first = threadIdx.x * LOGITS_VECTOR; first < vocab_size; first += LOGITS_THREADS * LOGITS_VECTOR) {
        float x[LOGITS_VECTOR];
        load_logits(x, row, first, vocab_size, aligned);
        scale_logits(x, temperature);
        sum.add<true>(x);
    }
    const RowStatistics statistics = combine_over_block<true>(sum, scratch);
    if (threadIdx.x == 0) {
        const int target = targets[n];
        float scaled = target >= 0 && target < stride ? -INFINITY : NAN_FLOAT;
        if (target >= 0 && target < vocab_size) scaled = scale_logit(to_float(row[target]), temperature);
        logprobs[n] = statistics.log_probability(scaled);
        entropy[n] = statistics.entropy;
        lse[n] = statistics.log_sum_exp();
    }
}

// dentropy may be null.
extern "C" __global__ void __launch_bounds__(LOGITS_THREADS)
token_logprobs_backward(SCALAR* dlogits, const SCALAR* logits, const int* targets, const float* lse,
                        const float* entropy, const float* dlogprobs, const float* dentropy, long long stride,
                        int vocab_size, float temperature) {
    const long long n = blockIdx.x;
    const bool aligned = rows_are_aligned(logits, stride) && rows_are_aligned(dlogits, stride);
    const float row_lse = lse[n], upstream = dlogprobs[n];
    const float row_entropy = dentropy ? entropy[n] : 0.0f, entropy_upstream = dentropy ? dentropy[n] : 0.0f;
    const int target = targets[n];
    const long long start = (long long)(blockIdx.y * LOGITS_THREADS + threadIdx.x) * LOGITS_VECTOR;
    const int step = gridDim.y * LOGITS_THREADS * LOGITS_VECTOR;
    for (long long first = start; first < stride; first += step) {
        float x[LOGITS_VECTOR];
        load_logits(x, logits + n * stride, (int)first, vocab_size, aligned);
        scale_logits(x, temperature);
        float gradients[LOGITS_VECTOR];
#pragma unroll
        for (int i = 0; i < LOGITS_VECTOR; i++) {
            const float log_p = x[i] - row_lse, p = expf(log_p);
            float gradient = -upstream * p;
            if (first + i == target) gradient += upstream;
            if (dentropy) gradient -= entropy_upstream * p * (fmaxf(log_p, -1e30f) + row_entropy);
            gradients[i] = first + i < vocab_size ? gradient : 0.0f;
        }
        scale_logits(gradients, temperature);
        SCALAR* destination = dlogits + n * stride + first;
        if (aligned && first + LOGITS_VECTOR <= stride) {
#pragma unroll
            for (int part_start = 0; part_start < LOGITS_VECTOR; part_start += VECTOR) {
                Vec<SCALAR, VECTOR> part;
#pragma unroll
                for (int i = 0; i < VECTOR; i++) part[i] = from_float<SCALAR>(gradients[part_start + i]);
                store_vec(destination + part_start, part);
            }
        } else {
#pragma unroll
            for (int i = 0; i < LOGITS_VECTOR; i++)
                if (first + i < stride) destination[i] = from_float<SCALAR>(gradients[i]);
        }
    }
}
