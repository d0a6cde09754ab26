"""Matrix product with a weight stored as (out, in), as Hugging Face stores it."""

from ..autograd import Parameter, Tensor, record


def linear(x: Tensor, w: Parameter, bias: Parameter | None = None) -> Tensor:
    """y = x wᵀ + bias. x (T, I), w (O, I), bias (O,) -> (T, O). Saves x unless w is frozen."""
    be, saved, has_gradient = x.backend, x.saved if w.requires_grad else None, x.requires_grad

    def rule(dy):
        if saved is not None and (dw := w.grad_buffer()) is not None:
            saved.use(lambda x: be.linear_backward_weight(dw, dy, x))
        if bias is not None and (db := bias.grad_buffer()) is not None:
            be.linear_backward_bias(db, dy)
        return be.linear_backward_input(dy, w.data) if has_gradient else None, None, None

    return record(be.linear_forward(x.data, w.data, None if bias is None else bias.data), (x, w, bias), rule)
