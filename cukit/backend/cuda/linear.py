"""Matrix products. x (T, I), w (O, I), bias (O,), y and dy (T, O). Half types are summed in float32 and rounded once.

cuBLAS computes them, or linear.cu where cuBLAS does not add in order. cuBLAS reads by columns and takes a C-contiguous
(R, C) array for a (C, R) matrix, so every product is asked for transposed.
"""

from .cublas import gemm
from .device import empty
from .exact import choose_product, next_bucket, set_policy
from .loader import load
from .norm import _add_column_sums


def set_exact(policy: str):
    """auto, true or false: whether decoding and training must compute the same bits; see exact.py. For the whole
    process.
    """
    set_policy(policy)


def row_bucket(rows: int) -> int:
    """The number of rows at which a step of `rows` rows is best run: products then need no copy of their input with
    rows added (exact.py).
    """
    return next_bucket(rows)


class WideCopies:
    """The NumPy shelf's copies of half-type weights in float32. A card multiplies half types as they are: no copies."""

    def __init__(self, weights):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def linear_forward(x, w, bias=None):
    """y = x wᵀ + bias. A row's bits do not depend on the other rows nor on their number (see exact.py)."""
    _check("linear_forward", x, w, x.shape[1], w.shape[1])
    if bias is not None and (bias.shape != (w.shape[0],) or bias.dtype != w.dtype):
        raise ValueError(f"bias {bias.shape} {bias.dtype} does not fit w {w.shape} {w.dtype}")
    run, product = choose_product(len(x), w.shape[0], w.shape[1], x.dtype, bias is not None)
    if run == len(x):
        return product(x, w, bias)
    padded = empty((run, x.shape[1]), x.dtype)
    blocks = -(-padded.nbytes // (16 * 256))
    load("linear", x.dtype).pad_rows(blocks, 256, padded, x, x.size, padded.size)
    return product(padded, w, bias)[: len(x)]


def linear_backward_input(dy, w):
    """dx = dy w."""
    _check("linear_backward_input", dy, w, dy.shape[1], w.shape[0])
    (rows, outs), cols = dy.shape, w.shape[1]
    dx = empty((rows, cols), dy.dtype)
    if dx.size:
        gemm(0, 0, cols, rows, outs, w, dy, 0, dx)
    return dx


def linear_backward_weight(dw, dy, x):
    """dw += dyᵀ x, in dw's dtype."""
    _check("linear_backward_weight", dy, x, len(dy), len(x))
    outs, cols = dy.shape[1], x.shape[1]
    if dw.shape != (outs, cols) or not dw._c_contiguous:
        raise ValueError(f"dw {dw.shape} does not fit dy {dy.shape} and x {x.shape}, or is not C-contiguous")
    if x.size:
        gemm(0, 1, cols, outs, len(x), x, dy, 1, dw)


def linear_backward_bias(db, dy):
    """db += sum of dy over its rows."""
    if db.shape != (dy.shape[1],):
        raise ValueError(f"db {db.shape} does not fit dy {dy.shape}")
    _add_column_sums(db, dy)


def _check(what, a, b, a_inner, b_inner):
    if a_inner != b_inner or a.dtype != b.dtype:
        raise ValueError(f"{what}: {a.shape} {a.dtype} and {b.shape} {b.dtype} do not fit")
    if not (a._c_contiguous and b._c_contiguous):
        raise ValueError(f"{what} needs C-contiguous arrays, got strides {a.strides} and {b.strides}")
