"""RMSNorm over the last axis: y = x / sqrt(mean(x²) + eps) · w. x (R, C), w (C,), rstd (R, 1) in float32. Kernels:
norm.cu.
"""

from .constants import source_constant
from .device import empty
from .loader import load

# The backward pass keeps a float a column in shared memory; 96 KB is what the smallest card has.
MAX_COLUMNS = 24 * 1024
# Threads in flight in the backward pass: half of what an H100 holds, so partial sums stay small.
BACKWARD_THREADS = 132 * 1024
MAX_THREADS, WARP = source_constant("norm", "MAX_THREADS"), source_constant("norm", "WARP")
FOLD, STAGES = source_constant("norm", "FOLD"), source_constant("norm", "STAGES")
SUM_BLOCK = (WARP, WARP)  # of the column sums: columns, rows at a time
ADD_COLUMNS = source_constant("norm", "ADD_COLUMNS")


def rms_norm_forward(x, w, eps):
    """Returns y like x, and rstd."""
    rows, cols = _rows_cols(x, w)
    y, rstd = empty(x.shape, x.dtype), empty((*x.shape[:-1], 1), "float32")
    load("norm", x.dtype).rms_norm_forward(rows, _threads(x), y, rstd, x, w, cols, eps)
    return y, rstd


def rms_norm_backward(dw, dy, x, w, rstd):
    """Returns dx like x; adds to dw unless it is None. x̂ = x·rstd: dx = rstd·(dy·w − x̂·mean(dy·w·x̂))."""
    return add_rms_norm_backward(dw, dy, None, x, w, rstd)


def add_rms_norm_forward(x, residual, w, eps):
    """summed = x + residual (rounded to x's dtype), y = rms_norm(summed). Returns y, summed, rstd."""
    rows, cols = _rows_cols(x, w)
    if residual.shape != x.shape:
        raise ValueError(f"residual of shape {residual.shape} does not fit x of shape {x.shape}")
    y, summed, rstd = empty(x.shape, x.dtype), empty(x.shape, x.dtype), empty((*x.shape[:-1], 1), "float32")
    load("norm", x.dtype).add_rms_norm_forward(rows, _threads(x), y, summed, rstd, x, residual, w, cols, eps)
    return y, summed, rstd


def sum_add_rms_norm_forward(parts, residual, w, eps):
    """add_rms_norm_forward of x = the sum of the parts (N, R, C) in order: of half types in float32, rounded once."""
    count, shape = len(parts), parts.shape[1:]
    if residual.shape != shape:
        raise ValueError(f"residual of shape {residual.shape} does not fit parts of shape {shape}")
    rows, cols = _rows_cols(residual, w)
    y, summed, rstd = empty(shape, parts.dtype), empty(shape, parts.dtype), empty((*shape[:-1], 1), "float32")
    load("norm", parts.dtype).sum_add_rms_norm_forward(
        rows, _threads(residual), y, summed, rstd, parts, count, residual, w, rows, cols, eps
    )
    return y, summed, rstd


def add_rms_norm_backward(dw, dy, dsummed, summed, w, rstd):
    """The gradient of both x and residual: dsummed (or None) + what comes through the norm."""
    return _backward(dw, dy, dsummed, summed, w, rstd, None)


def add_rms_norm_backward_remade(dw, dy, dsummed, summed, w, rstd, eps):
    """What add_rms_norm_backward gives, and rms_norm_forward's y of summed to the bit."""
    if summed.dtype == "float32":  # its y is rounded once from float64 (Wide in common.cuh), and rstd is not so precise
        return add_rms_norm_backward(dw, dy, dsummed, summed, w, rstd), rms_norm_forward(summed, w, eps)[0]
    y = empty(summed.shape, summed.dtype)
    return _backward(dw, dy, dsummed, summed, w, rstd, y), y


def _backward(dw, dy, dsummed, summed, w, rstd, y):
    rows, cols = _rows_cols(summed, w)
    if dy.shape != summed.shape or (dsummed is not None and dsummed.shape != summed.shape) or rstd.size != rows:
        raise ValueError(f"gradients do not fit the input of shape {summed.shape}: dy {dy.shape}, rstd {rstd.shape}")
    threads = _threads(summed)
    blocks = min(rows, BACKWARD_THREADS // threads)
    dx, partial = empty(summed.shape, summed.dtype), None if dw is None else empty((blocks, cols), "float32")
    kernels, block, shared = load("norm", summed.dtype), threads, -(-cols * 4 // 32) * 32
    kernel = kernels.rms_norm_backward
    if _folds(threads, dy, dsummed, summed, w):
        kernel, block = kernels.rms_norm_backward_folded, -(-threads // (FOLD * WARP)) * WARP
        shared = cols * (STAGES * 3 * summed.itemsize + 4)
    kernel(blocks, block, dx, y, partial, dy, dsummed, summed, w, rstd, rows, cols, shared=shared)
    if dw is not None:
        _add_columns(dw, partial)
    return dx


def _folds(threads, dy, dsummed, summed, w):
    """Whether rms_norm_backward_folded can do it, has at least three threads' work for each of its own, and is sooner:
    measured on an H200, it is not where rms_norm_backward has blocks of 256 or 512 threads.
    """
    vectors, rest = divmod(summed.shape[-1] * summed.itemsize, 16)
    given = [dy, summed, w] if dsummed is None else [dy, summed, w, dsummed]
    fits = 2 * WARP < threads and rest == 0 and vectors <= threads and all(x.data.ptr % 16 == 0 for x in given)
    return fits and threads % 256 != 0


def _threads(x):
    """The threads of one row's block, from its columns alone: whole warps, at most MAX_THREADS, each with the same
    number of vectors.
    """
    vectors = -(-x.shape[-1] * x.itemsize // 16)
    rounds = -(-vectors // MAX_THREADS)
    return max(WARP, -(-vectors // (WARP * rounds)) * WARP)


def _rows_cols(x, w):
    cols = x.shape[-1]
    if w.shape != (cols,) or not 0 < cols <= MAX_COLUMNS:
        raise ValueError(
            f"rms_norm of {cols} columns with a weight of shape {w.shape}: want ({cols},), and at most "
            f"{MAX_COLUMNS} columns"
        )
    return x.size // cols, cols


# ---- sums of columns in a fixed order: the gradients of norm weights and of biases ----


def _add_columns(out, partial):
    """out (C,) += the sum of partial (R, C) over its rows, in a fixed order; both float32."""
    rows, cols = partial.shape
    if rows:
        block = (ADD_COLUMNS, WARP)
        load("norm", "float32").column_sum_add(-(-cols // ADD_COLUMNS), block, out, partial, rows, cols)


def _add_column_sums(out, x):
    """out (C,) float32 += the sum of x (R, C), of any of the model's dtypes, over its rows."""
    rows, cols = x.shape
    rows_per_block = max(128, -(-rows // 256))
    blocks = -(-rows // rows_per_block)
    partial = empty((blocks, cols), "float32")
    load("norm", x.dtype).column_sum_partial(
        (-(-cols // WARP), blocks), SUM_BLOCK, partial, x, rows, cols, rows_per_block
    )
    _add_columns(out, partial)
