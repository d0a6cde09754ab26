"""SwiGLU's gate."""

from ..autograd import Tensor, record


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up. gate_up (T, 2F), gate first -> (T, F). Saves gate_up."""
    be = gate_up.backend
    return record(be.silu_mul_forward(gate_up.data), (gate_up,), lambda dy: (be.silu_mul_backward(dy, gate_up.data),))
