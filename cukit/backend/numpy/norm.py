"""RMSNorm over the last axis: y = x / sqrt(mean(x²) + eps) · w. x (R, C), w (C,), rstd (R, 1) in float32 or better.

Zhang & Sennrich 2019, "Root Mean Square Layer Normalization".
"""

import numpy as np

from ..dtypes import accumulator


def rms_norm_forward(x, w, eps):
    """Returns y like x, and rstd."""
    xa = x.astype(accumulator(x.dtype), copy=False)
    rstd = 1 / np.sqrt(np.einsum("...c,...c->...", xa, xa)[..., None] / x.shape[-1] + xa.dtype.type(eps))
    return (xa * rstd * w).astype(x.dtype, copy=False), rstd


def rms_norm_backward(dw, dy, x, w, rstd):
    """Returns dx like x; adds to dw unless it is None. x̂ = x·rstd: dx = rstd·(dy·w − x̂·mean(dy·w·x̂))."""
    acc = rstd.dtype
    normed = x.astype(acc, copy=False) * rstd
    dya = dy.astype(acc, copy=False)
    if dw is not None:
        dw += np.einsum("rc,rc->c", dya.reshape(-1, x.shape[-1]), normed.reshape(-1, x.shape[-1]))
    dnormed = dya * w
    mean = np.einsum("...c,...c->...", dnormed, normed)[..., None] / x.shape[-1]
    return (rstd * (dnormed - normed * mean)).astype(x.dtype, copy=False)


def add_rms_norm_forward(x, residual, w, eps):
    """summed = x + residual (rounded to x's dtype), y = rms_norm(summed). Returns y, summed, rstd."""
    summed = x + residual
    y, rstd = rms_norm_forward(summed, w, eps)
    return y, summed, rstd


def sum_add_rms_norm_forward(parts, residual, w, eps):
    """add_rms_norm_forward of x = the sum of the parts (N, R, C) in order: of half types in float32, rounded once."""
    x = parts[0].astype(accumulator(parts.dtype))
    for part in parts[1:]:
        x += part
    return add_rms_norm_forward(x.astype(parts.dtype, copy=False), residual, w, eps)


def add_rms_norm_backward(dw, dy, dsummed, summed, w, rstd):
    """The gradient of both x and residual: dsummed (or None) + what comes through the norm."""
    dx = rms_norm_backward(dw, dy, summed, w, rstd)
    return dx if dsummed is None else dx + dsummed


def add_rms_norm_backward_remade(dw, dy, dsummed, summed, w, rstd, eps):
    """What add_rms_norm_backward gives, and rms_norm_forward's y of summed to the bit."""
    return add_rms_norm_backward(dw, dy, dsummed, summed, w, rstd), rms_norm_forward(summed, w, eps)[0]
