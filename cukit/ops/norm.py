"""RMSNorm, alone and with the residual addition before it."""

from ..autograd import Parameter, Tensor, record


def rms_norm(x: Tensor, w: Parameter, eps: float = 1e-6) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) · w over the last axis. x (T, C), w (C,) -> y like x. Saves x and rstd (T, 1)."""
    be = x.backend
    y, rstd = be.rms_norm_forward(x.data, w.data, eps)
    return record(y, (x, w), lambda dy: (be.rms_norm_backward(w.grad_buffer(), dy, x.data, w.data, rstd), None))


def add_rms_norm(x: Tensor, residual: Tensor, w: Parameter, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the step between two blocks. x, residual (T, C), w (C,). Saves the sum
    and rstd.
    """
    be = x.backend
    y, summed, rstd = be.add_rms_norm_forward(x.data, residual.data, w.data, eps)

    def rule(dy, dsummed):
        if dy is None:
            return dsummed, dsummed, None
        dx = be.add_rms_norm_backward(w.grad_buffer(), dy, dsummed, summed, w.data, rstd)
        return dx, dx, None

    return record((y, summed), (x, residual, w), rule)
