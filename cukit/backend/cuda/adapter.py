"""Products with a low-rank adapter beside a weight, and the weight with an adapter added to it. Kernels: adapter.cu.

x (T, I), w (O, I), bias (O,), a (K, I), b (O, K), all in the model's dtype; K is a rank, or those of a fused weight's
parts side by side.
"""

import cupy as cp

from .constants import source_constant
from .cublas import gemm
from .linear import linear_backward_input, linear_forward
from .loader import load

THREADS, VECTOR_BYTES = source_constant("adapter", "THREADS"), 16
COLUMNS, ROWS = source_constant("adapter", "COLUMNS"), source_constant("adapter", "ROWS")


def linear_beside_forward(x, w, a, b, bias=None):
    """(y, u): y = (x wᵀ + bias) + u bᵀ with u = x aᵀ. Each product is rounded once, then their sum, so that a row's
    bits depend on the row alone (exact.py).
    """
    u = linear_forward(x, a)
    y = linear_forward(x, w, bias)
    change_rows(y, linear_forward(u, b))
    return y, u


def change_rows(y, change, owners=None, owner=0, instead=False):
    """y[t] += change[t], rounded, or (instead) y[t] = change[t], for the rows t with owners[t] == owner. The others
    keep their bits. y and change (T, O); owners (T,) int32, None: all rows. Returns y.
    """
    if y.shape != change.shape or y.dtype != change.dtype or (owners is not None and owners.shape != y.shape[:1]):
        raise ValueError(f"y {y.shape} {y.dtype} and change {change.shape} {change.dtype} do not fit, or not owners")
    if not (y._c_contiguous and change._c_contiguous):
        raise ValueError("change_rows needs C-contiguous arrays")
    if not y.size:
        return y
    if owners is None and instead:
        y[...] = change
    elif y.itemsize == 8:
        changed = change if instead else y + change
        y[...] = changed if owners is None else cp.where((owners == owner)[:, None], changed, y)
    elif owners is None:
        blocks = -(-y.nbytes // (VECTOR_BYTES * THREADS))
        load("adapter", y.dtype).add_in_place(blocks, THREADS, y, change, y.size)
    else:
        rows, cols = y.shape
        load("adapter", y.dtype).change_rows(rows, THREADS, y, change, owners, owner, int(instead), cols)
    return y


def linear_beside_backward_input(dy, w, du, a):
    """dx = dy w + du a; dy (T, O), du (T, K)."""
    if du.shape != (len(dy), len(a)) or a.shape[1] != w.shape[1] or du.dtype != dy.dtype or a.dtype != w.dtype:
        raise ValueError(
            f"du {du.shape} {du.dtype} and a {a.shape} {a.dtype} fit neither dy {dy.shape} nor w {w.shape}"
        )
    dx = linear_backward_input(dy, w)
    if dx.size and du.size:
        gemm(0, 0, a.shape[1], len(dy), len(a), a, du, 1, dx)
    return dx


def merge_adapter(out, w, a, b, scale):
    """out = w + scale · (b a), rounded once. out and w (O, I); a (K, I) and b (O, K) in float32.

    out may be w. Returns out.
    """
    (rows, cols), rank = w.shape, len(a)
    if out.shape != w.shape or out.dtype != w.dtype or a.shape != (rank, cols) or b.shape != (rows, rank):
        raise ValueError(f"out {out.shape}, w {w.shape}, a {a.shape} and b {b.shape} do not fit")
    if not (out._c_contiguous and w._c_contiguous and a._c_contiguous and b._c_contiguous):
        raise ValueError("merge_adapter needs C-contiguous arrays")
    if w.size and w.itemsize < 8:
        grid = -(-cols // (COLUMNS * THREADS)), -(-rows // ROWS)
        load("adapter", w.dtype).merge_adapter(grid, THREADS, out, w, a, b, scale, rows, cols, rank)
    elif w.size:
        out[...] = w + scale * (b @ a)
    return out
