// Statistics of softmax(logits / temperature) of one row, by one block of LOGITS_THREADS threads. loss.cu and
// sampling.cu both use this, so that a sampled token's log-probability and the one computed in training are the same
// bits. Which thread takes which id, and the order of every sum, depend on nothing but the id.
#pragma once
#include "common.cuh"

constexpr int LOGITS_THREADS = 512;
constexpr int LOGITS_VECTOR = 8;  // consecutive ids that a thread takes at a time
constexpr float LOWEST_FLOAT = -3.402823466e+38f;

// Whether a row of `stride` elements after another can be read 16 bytes at a time from its first id on.
__device__ __forceinline__ bool rows_are_aligned(const SCALAR* logits, long long stride) {
    return aligned16(logits) && stride * (long long)sizeof(SCALAR) % 16 == 0;
}

// x[i] = the logit of id first + i, -inf from `limit` on; first is a multiple of LOGITS_VECTOR.
__device__ __forceinline__ void load_logits(float (&x)[LOGITS_VECTOR], const SCALAR* row, int first, int limit,
                                            bool aligned) {
    if (aligned && first + LOGITS_VECTOR <= limit) {
#pragma unroll
        for (int start = 0; start < LOGITS_VECTOR; start += VECTOR) {
            const Vec<SCALAR, VECTOR> part = load_vec<VECTOR>(row + first + start);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) x[start + i] = to_float(part[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < LOGITS_VECTOR; i++) x[i] = first + i < limit ? to_float(row[first + i]) : -INFINITY;
    }
}

// A logit by its temperature: the one rounding that loss and sampler share. Temperature 1 changes no bit.
__device__ __forceinline__ float scale_logit(float logit, float temperature) {
    return temperature == 1.0f ? logit : logit / temperature;
}

__device__ __forceinline__ void scale_logits(float (&x)[LOGITS_VECTOR], float temperature) {
    if (temperature == 1.0f) return;
#pragma unroll
    for (int i = 0; i < LOGITS_VECTOR; i++) x[i] = scale_logit(x[i], temperature);
}

// A running sum over e = exp(x - maximum): total = sum of e, moment = sum of e (x - maximum).
struct SoftmaxSum {
    float maximum = LOWEST_FLOAT, total = 0.0f, moment = 0.0f;

    // Go over to another maximum. The difference is kept finite, so that empty sums stay 0.
    __device__ __forceinline__ void rescale(float to) {
        const float shift = fmaxf(maximum - to, -1e30f), factor = expf(shift);
        moment = factor * fmaf(shift, total, moment);
        total = factor * total;
        maximum = to;
    }

    // -inf adds an exact 0. The moment costs a third of the work: the sampler leaves it out, which does not touch the
    // total.
    template <bool WITH_MOMENT>
    __device__ __forceinline__ void add(const float (&x)[LOGITS_VECTOR]) {
        float top = x[0];
#pragma unroll
        for (int i = 1; i < LOGITS_VECTOR; i++) top = fmaxf(top, x[i]);
        if (top > maximum) rescale(top);
        float sum = 0.0f, weighted = 0.0f;
#pragma unroll
        for (int i = 0; i < LOGITS_VECTOR; i++) {
            const float difference = x[i] - maximum, e = expf(difference);
            sum += e;
            if (WITH_MOMENT) weighted = fmaf(e, fmaxf(difference, -1e30f), weighted);
        }
        total += sum;
        if (WITH_MOMENT) moment += weighted;
    }
};

// log softmax(x)[i] = (x[i] - maximum) - log_total.
struct RowStatistics {
    float maximum, log_total, entropy;

    __device__ __forceinline__ float log_probability(float scaled) const { return scaled - maximum - log_total; }
    __device__ __forceinline__ float log_sum_exp() const { return maximum + log_total; }
};

// Every thread's sum together, the same in every thread; entropy is 0 without the moment. scratch: 32 floats.
template <bool WITH_MOMENT>
__device__ __forceinline__ RowStatistics combine_over_block(SoftmaxSum sum, float* scratch) {
    RowStatistics statistics;
    statistics.maximum = block_max(sum.maximum, scratch);
    sum.rescale(statistics.maximum);
    const float total = block_sum(sum.total, scratch);
    statistics.log_total = logf(total);
    statistics.entropy = 0.0f;
    if (WITH_MOMENT) {
        const float moment = block_sum(sum.moment, scratch);
        statistics.entropy = statistics.log_total - moment / total;
    }
    return statistics;
}
