"""RMSNorm, alone and with the residual addition before it."""

from ..autograd import Parameter, Remade, Tensor, record


def rms_norm(x: Tensor, w: Parameter, eps: float = 1e-6) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) · w over the last axis. x (T, C), w (C,) -> y like x. Saves x and rstd (T, 1).
    y is remade.
    """
    y, rstd = x.backend.rms_norm_forward(x.data, w.data, eps)
    again, gradient = _backward(x.data, w, rstd, eps)
    return record(y, (x, w), lambda dy: (gradient(dy, None), None), (again,))


def add_rms_norm(x: Tensor, residual: Tensor, w: Parameter, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the step between two blocks. x, residual (T, C), w (C,). Saves the sum
    and rstd. The norm is remade.
    """
    y, summed, rstd = x.backend.add_rms_norm_forward(x.data, residual.data, w.data, eps)
    again, gradient = _backward(summed, w, rstd, eps)

    def rule(dy, dsummed):
        dx = dsummed if dy is None else gradient(dy, dsummed)
        return dx, dx, None

    return record((y, summed), (x, residual, w), rule, (again,))


def sum_add_rms_norm(parts, residual: Tensor, w: Parameter, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """add_rms_norm of x = the sum of the parts (N, T, C) in order: of half types in float32, rounded once. parts is an
    array: without gradients.
    """
    y, summed, _ = residual.backend.sum_add_rms_norm_forward(parts, residual.data, w.data, eps)
    return Tensor(y), Tensor(summed)


def _backward(x, w: Parameter, rstd, eps):
    """The Remade of y = rms_norm(x), and the function (dy, dx or None) -> dx + what comes through the norm, which gives
    y to what waits for it.
    """
    be = w.backend
    again = Remade(lambda: be.rms_norm_forward(x, w.data, eps)[0])

    def gradient(dy, dx):
        if not again.wanted:
            return be.add_rms_norm_backward(w.grad_buffer(), dy, dx, x, w.data, rstd)
        dx, y = be.add_rms_norm_backward_remade(w.grad_buffer(), dy, dx, x, w.data, rstd, eps)
        again.give(y)
        return dx

    return again, gradient
