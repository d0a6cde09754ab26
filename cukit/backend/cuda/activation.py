"""SwiGLU: silu(gate) · up, gate and up being the halves of one projection (T, 2F). Kernels: activation.cu."""

from .device import empty
from .loader import load

THREADS = 128


def silu_mul_forward(gate_up):
    """y (T, F) = gate · sigmoid(gate) · up."""
    rows, width, blocks = _split(gate_up)
    y = empty((rows, width), gate_up.dtype)
    load("activation", gate_up.dtype).silu_mul_forward(rows * blocks, THREADS, y, gate_up, width, blocks)
    return y


def silu_mul_backward(dy, gate_up):
    """dgate_up (T, 2F)."""
    return _backward(dy, gate_up, None)


def silu_mul_backward_remade(dy, gate_up):
    """dgate_up, and silu_mul_forward(gate_up) to the bit."""
    y = empty(dy.shape, gate_up.dtype)
    return _backward(dy, gate_up, y), y


def _backward(dy, gate_up, y):
    rows, width, blocks = _split(gate_up)
    if dy.shape != (rows, width):
        raise ValueError(f"dy of shape {dy.shape} does not fit gate_up of shape {gate_up.shape}: want {(rows, width)}")
    dgate_up = empty(gate_up.shape, gate_up.dtype)
    load("activation", gate_up.dtype).silu_mul_backward(rows * blocks, THREADS, dgate_up, y, dy, gate_up, width, blocks)
    return dgate_up


def _split(gate_up):
    """Rows, columns of a half, blocks a row."""
    rows, both = gate_up.shape
    if both % 2:
        raise ValueError(f"gate_up of shape {gate_up.shape} has no two equal halves")
    return rows, both // 2, -(-both // 2 * gate_up.itemsize // (16 * THREADS))
