"""Matrix products. x (T, I), w (O, I), bias (O,), y and dy (T, O). Half types are summed in float32 and rounded once."""

import numpy as np

from .device import accumulator


def linear_forward(x, w, bias=None):
    """y = x wᵀ + bias."""
    acc = accumulator(x.dtype)
    y = x.astype(acc, copy=False) @ w.astype(acc, copy=False).T
    if bias is not None:
        y += bias
    return y.astype(x.dtype, copy=False)


def linear_backward_input(dy, w):
    """dx = dy w."""
    acc = accumulator(dy.dtype)
    return (dy.astype(acc, copy=False) @ w.astype(acc, copy=False)).astype(dy.dtype, copy=False)


def linear_backward_weight(dw, dy, x):
    """dw += dyᵀ x, in dw's dtype."""
    dw += dy.astype(dw.dtype, copy=False).T @ x.astype(dw.dtype, copy=False)


def linear_backward_bias(db, dy):
    """db += sum of dy over its rows."""
    db += np.sum(dy, axis=0, dtype=db.dtype)
