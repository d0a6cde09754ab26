// SwiGLU: y (T, F) = silu(gate) · up with gate, up = the halves of gate_up (T, 2F), and its gradient dgate_up (T, 2F);
// beside the gradient y again, to the bit (null: not wanted).
// A thread does VECTOR neighbouring columns of one row; blocks_per_row blocks do a row. Computed in float, rounded
// once.
// specialise: SCALAR=bf16,f16,f32
// arch: sm_80 sm_89 sm_90a sm_100 sm_120
#include "common.cuh"

// tanh form, as in NumPy: no overflow at either end
__device__ inline float sigmoid(float x) { return tanhf(x * 0.5f) * 0.5f + 0.5f; }

extern "C" __global__ void silu_mul_forward(SCALAR* y, const SCALAR* gate_up, int F, int blocks_per_row) {
    const int row = blockIdx.x / blocks_per_row;
    const int col = (blockIdx.x % blocks_per_row * blockDim.x + threadIdx.x) * VECTOR;
    if (col >= F) return;
    const bool vectorised = F % VECTOR == 0 && aligned16(y) && aligned16(gate_up);
    const SCALAR* gate_row = gate_up + (long long)row * 2 * F;
    float gate[VECTOR], up[VECTOR];
    load_floats(gate, gate_row, col, F, vectorised);
    load_floats(up, gate_row + F, col, F, vectorised);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) up[i] = gate[i] * sigmoid(gate[i]) * up[i];
    store_floats(y + (long long)row * F, up, col, F, vectorised);
}

extern "C" __global__ void silu_mul_backward(SCALAR* dgate_up, SCALAR* y, const SCALAR* dy, const SCALAR* gate_up,
                                             int F, int blocks_per_row) {
    const int row = blockIdx.x / blocks_per_row;
    const int col = (blockIdx.x % blocks_per_row * blockDim.x + threadIdx.x) * VECTOR;
    if (col >= F) return;
    const bool vectorised = F % VECTOR == 0 && aligned16(dgate_up) && aligned16(y) && aligned16(dy) &&
                            aligned16(gate_up);
    const long long start = (long long)row * 2 * F;
    float gate[VECTOR], up[VECTOR], gradient[VECTOR];
    load_floats(gate, gate_up + start, col, F, vectorised);
    load_floats(up, gate_up + start + F, col, F, vectorised);
    load_floats(gradient, dy + (long long)row * F, col, F, vectorised);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        const float s = sigmoid(gate[i]), silu = gate[i] * s, product = silu * up[i];
        gate[i] = gradient[i] * up[i] * (s + silu * (1.0f - s));
        up[i] = gradient[i] * silu;
        gradient[i] = product;
    }
    if (y != nullptr) store_floats(y + (long long)row * F, gradient, col, F, vectorised);
    store_floats(dgate_up + start, gate, col, F, vectorised);
    store_floats(dgate_up + start + F, up, col, F, vectorised);
}
