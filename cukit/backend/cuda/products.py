"""Two ways to y (T, O) = x (T, I) wᵀ + bias (O,) with w (O, I), at exactly the given number of rows. Kernels:
linear.cu.
"""

from .cublas import gemm
from .device import empty
from .loader import load

TILE, THREADS = 64, 128  # linear.cu's


def cublas_product(x, w, bias=None):
    """By cuBLAS, whose order of adding may depend on the number of rows."""
    (rows, ins), outs = x.shape, w.shape[0]
    y = empty((rows, outs), x.dtype)
    if not rows:
        return y
    if bias is not None:  # as the product's starting value, so that the sum is rounded once
        load("linear", x.dtype).broadcast_row(rows, 128, y, bias, outs)
    gemm(1, 0, outs, rows, ins, w, x, bias is not None, y)
    return y


def in_order_product(x, w, bias=None):
    """By sums over I in one order, for half types on tensor cores: a row's bits never depend on the other rows."""
    (rows, ins), outs = x.shape, w.shape[0]
    y = empty((rows, outs), x.dtype)
    load("linear", x.dtype).linear_in_order(
        (-(-outs // TILE), -(-rows // TILE)), THREADS, y, x, w, bias, rows, ins, outs
    )
    return y
