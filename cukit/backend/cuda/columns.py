"""Deterministic sums of columns, for the gradients of norm weights and biases. Kernels: norm.cu."""

from .device import empty
from .loader import load

BLOCK = (32, 32)  # columns, rows at a time


def add_columns(out, partial):
    """out (C,) += the sum of partial (R, C) over its rows, in a fixed order; both float32."""
    rows, cols = partial.shape
    if rows:
        load("norm", "float32").column_sum_add(-(-cols // 32), BLOCK, out, partial, rows, cols)


def add_column_sums(out, x):
    """out (C,) float32 += the sum of x (R, C), of any of the model's dtypes, over its rows."""
    rows, cols = x.shape
    rows_per_block = max(128, -(-rows // 256))
    blocks = -(-rows // rows_per_block)
    partial = empty((blocks, cols), "float32")
    load("norm", x.dtype).column_sum_partial((-(-cols // 32), blocks), BLOCK, partial, x, rows, cols, rows_per_block)
    add_columns(out, partial)
