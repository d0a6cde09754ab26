// What the losses and the rewards of a policy share: numbers held between two bounds, and Schulman's estimates (2020)
// of KL(new || ref) from a sampled token, x = ref - new. In float64: there is little to compute.
#pragma once
#include "common.cuh"

// The places of the names in the launchers' table.
enum Estimator { ESTIMATOR_K1, ESTIMATOR_K2, ESTIMATOR_K3 };

// Comparisons rather than fmin: a NaN log-probability must come through, so that the update is skipped.
__device__ __forceinline__ double held_within(double value, double low, double high) {
    return value < low ? low : value > high ? high : value;
}

struct Kl {
    double value, dnew;
    bool held;  // k3's x, at max_log_ratio: the estimate no longer moves
};

__device__ __forceinline__ Kl kl_estimate(double x, int estimator, double max_log_ratio) {
    if (estimator == ESTIMATOR_K1) return {-x, 1.0, false};
    if (estimator == ESTIMATOR_K2) return {x * x / 2.0, -x, false};
    const bool held = x > max_log_ratio;
    const double near = held ? max_log_ratio : x, growth = expm1(near);
    return {growth - near, held ? 0.0 : -growth, held};
}
