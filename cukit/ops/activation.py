"""SwiGLU's gate."""

from ..autograd import Remade, Tensor, record


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up. gate_up (T, 2F), gate first -> (T, F). Saves gate_up. Remade."""
    be, x = gate_up.backend, gate_up.data
    again = Remade(lambda: be.silu_mul_forward(x))

    def rule(dy):
        if not again.wanted:
            return (be.silu_mul_backward(dy, x),)
        dx, y = be.silu_mul_backward_remade(dy, x)
        again.give(y)
        return (dx,)

    return record(be.silu_mul_forward(x), (gate_up,), rule, (again,))
