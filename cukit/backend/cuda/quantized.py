"""Products with weights of 8 bits: launches kernels/quantized.cu. Same functions as the NumPy shelf.

Up to MOST_ROWS rows the product reads the 8 bits as they are, and a row's bits do not depend on the number of rows.
Above, the weight is brought to the model's dtype in a workspace, and the usual product takes that.
"""

import numpy as np

from .constants import source_constant
from .device import empty
from .linear import linear_forward
from .loader import load

THREADS = source_constant("quantized", "THREADS")
MOST_ROWS = 16  # one block reads its part of the weight for all of them
MANY_OUTS = 4096  # from here on blocks of 32 outs are enough to keep a card busy


def quantize_weight(q, scale, w):
    """q, scale = the numbers of w by the largest size of each row / 127 (int8) or 448 (E4M3), to the nearest, halves to
    even; in place. A row that is not finite gets the scale NaN.
    """
    _check(q, scale)
    if w.shape != q.shape:
        raise ValueError(f"w {w.shape} does not fit q {q.shape}")
    if w.size:
        _kernels(w.dtype, q).quantize_weight(len(w), THREADS, q, scale, w, w.shape[1])


def dequantize_weight(w, q, scale):
    """w = q · scale, rounded once; in place."""
    _check(q, scale)
    if w.shape != q.shape:
        raise ValueError(f"w {w.shape} does not fit q {q.shape}")
    if w.size:
        for start in range(0, len(w), 65535):  # the most of a grid's second dimension
            rows = slice(start, start + 65535)
            grid = -(-w.shape[1] // (4 * THREADS)), len(w[rows])
            _kernels(w.dtype, q).dequantize_weight(grid, THREADS, w[rows], q[rows], scale[rows], w.shape[1])


def quantized_linear_forward(x, q, scale, bias=None, addend=None):
    """y = (x qᵀ) · scale + bias + addend, rounded once; x (T, I), bias (O,), addend and y (T, O) in x's dtype.

    Above MOST_ROWS rows: q · scale is rounded to x's dtype, and the product before the addend is added.
    """
    (rows, ins), outs = x.shape, len(q)
    _check(q, scale)
    if q.shape[1] != ins:
        raise ValueError(f"x {x.shape} does not fit q {q.shape}")
    for name, array, shape in (("bias", bias, (outs,)), ("addend", addend, (rows, outs))):
        if array is not None and (array.shape != shape or array.dtype != x.dtype):
            raise ValueError(f"{name} {array.shape} {array.dtype} does not fit x {x.shape} {x.dtype} and q {q.shape}")
    if rows > MOST_ROWS:
        w = empty(q.shape, x.dtype)
        dequantize_weight(w, q, scale)
        y = linear_forward(x, w, bias)
        if addend is not None:
            load("adapter", y.dtype).add_in_place(-(-y.nbytes // 2048), 128, y, addend, y.size)
        return y
    y = empty((rows, outs), x.dtype)
    if not y.size:
        return y
    tiles = 2 if outs >= MANY_OUTS else 1, -(-rows // 8)
    grid = -(-outs // (16 * tiles[0]))
    _kernels(x.dtype, q).quantized_few_rows(grid, THREADS, y, x, q, scale, bias, addend, rows, ins, outs, *tiles)
    return y


def _kernels(dtype, q):
    return load("quantized", dtype, CODES=int(q.dtype == np.uint8))


def _check(q, scale):
    if q.dtype not in (np.int8, np.uint8) or scale.shape != (len(q),) or scale.dtype != np.float32:
        raise ValueError(f"q {q.shape} {q.dtype} and scale {scale.shape} {scale.dtype}: int8 or uint8, a float32 a row")
