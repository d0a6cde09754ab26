"""Products with weights of 8 bits. w (O, I); q (O, I) is int8, or uint8: E4M3 codes (../e4m3.py); scale (O,) float32,
one an output channel.
"""

import numpy as np

from ..dtypes import accumulator
from ..e4m3 import LARGEST, decode, encode
from .threads import one_blas_thread

INT8_LARGEST = 127
SMALLEST = 2.0**-100  # a row of nothing larger counts as zeros
CHUNK = 1 << 22  # elements that are worked on at a time


def quantize_weight(q, scale, w):
    """q, scale = the numbers of w by the largest size of each row / 127 (int8) or 448 (E4M3), to the nearest, halves to
    even; in place. A row that is not finite gets the scale NaN.
    """
    coded = q.dtype == np.uint8
    for part in _parts(w):
        rows = w[part].astype(np.float32, copy=False)
        largest = np.abs(rows).max(axis=1, initial=0)
        finite = np.isfinite(largest)
        limit = np.float32(LARGEST if coded else INT8_LARGEST)
        one = np.where(finite & (largest >= SMALLEST), np.where(finite, largest, 1) / limit, np.float32(1))
        scaled = np.where(finite[:, None], rows, 0) / one[:, None]
        q[part] = encode(scaled) if coded else np.rint(scaled).astype(np.int8)
        scale[part] = np.where(finite, one, np.float32(np.nan))


def dequantize_weight(w, q, scale):
    """w = q · scale, rounded once; in place."""
    for part in _parts(q):
        w[part] = (_numbers(q[part], np.float32) * scale[part, None]).astype(w.dtype)


def quantized_linear_forward(x, q, scale, bias=None, addend=None):
    """y = (x qᵀ) · scale + bias + addend, rounded once; x (T, I), bias (O,), addend and y (T, O) in x's dtype."""
    wide = accumulator(x.dtype)
    rows, y = x.astype(wide, copy=False), np.empty((len(x), len(q)), wide)
    with one_blas_thread(q.size):
        for part in _parts(q):
            y[:, part] = rows @ _numbers(q[part], wide).T
    y *= scale
    if bias is not None:
        y += bias.astype(wide, copy=False)
    if addend is not None:
        y += addend.astype(wide, copy=False)
    return y.astype(x.dtype, copy=False)


def _numbers(q, dtype):
    return decode(q, dtype) if q.dtype == np.uint8 else q.astype(dtype)


def _parts(matrix):
    """Slices of rows with about CHUNK elements."""
    rows = max(1, CHUNK // max(1, matrix.shape[1]))
    return [slice(start, start + rows) for start in range(0, len(matrix), rows)]
