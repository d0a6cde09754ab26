"""SwiGLU: silu(gate) · up, gate and up being the halves of one projection (T, 2F). Shazeer 2020, "GLU Variants"."""

import numpy as np

from ..dtypes import accumulator


def silu_mul_forward(gate_up):
    """y (T, F) = gate · sigmoid(gate) · up."""
    gate, up = _halves(gate_up)
    return (gate * _sigmoid(gate) * up).astype(gate_up.dtype, copy=False)


def silu_mul_backward(dy, gate_up):
    """dgate_up (T, 2F)."""
    gate, up = _halves(gate_up)
    dya = dy.astype(gate.dtype, copy=False)
    sigmoid = _sigmoid(gate)
    out = np.empty_like(gate_up)
    silu = gate * sigmoid
    out[:, gate.shape[1] :] = dya * silu
    out[:, : gate.shape[1]] = dya * up * (sigmoid + silu * (1 - sigmoid))
    return out


def silu_mul_backward_remade(dy, gate_up):
    """dgate_up, and silu_mul_forward(gate_up) to the bit."""
    return silu_mul_backward(dy, gate_up), silu_mul_forward(gate_up)


def _halves(gate_up):
    acc, width = accumulator(gate_up.dtype), gate_up.shape[1] // 2
    return gate_up[:, :width].astype(acc, copy=False), gate_up[:, width:].astype(acc, copy=False)


def _sigmoid(x):
    # tanh form: no overflow at either end
    return np.tanh(x * x.dtype.type(0.5)) * x.dtype.type(0.5) + x.dtype.type(0.5)
