"""Products with a low-rank adapter beside a weight, and the weight with an adapter added to it.

x (T, I), w (O, I), bias (O,), a (K, I), b (O, K), all in the model's dtype; K is a rank, or those of a fused weight's
parts side by side.
"""

from ..dtypes import accumulator
from .linear import linear_backward_input, linear_forward
from .threads import one_blas_thread

CHUNK = 1 << 22  # elements of a sum that are held at a time


def linear_beside_forward(x, w, a, b, bias=None):
    """(y, u): y = (x wᵀ + bias) + u bᵀ with u = x aᵀ. Each product is rounded once, then their sum."""
    u = linear_forward(x, a)
    return _sum(linear_forward(x, w, bias), linear_forward(u, b)), u


def change_rows(y, change, owners=None, owner=0, instead=False):
    """y[t] += change[t], rounded, or (instead) y[t] = change[t], for the rows t with owners[t] == owner. The others
    keep their bits. y and change (T, O); owners (T,) int32, None: all rows. Returns y.
    """
    rows = slice(None) if owners is None else owners == owner
    y[rows] = change[rows] if instead else _sum(y[rows], change[rows])
    return y


def linear_beside_backward_input(dy, w, du, a):
    """dx = dy w + du a; dy (T, O), du (T, K)."""
    return _sum(linear_backward_input(dy, w), linear_backward_input(du, a))


def merge_adapter(out, w, a, b, scale):
    """out = w + scale · (b a), rounded once. out and w (O, I); a (K, I) and b (O, K) in float32 or better.

    out may be w. Returns out.
    """
    wide = accumulator(w.dtype)
    rows = max(1, CHUNK // max(1, w.shape[1]))
    for start in range(0, len(w), rows):
        part = slice(start, start + rows)
        with one_blas_thread(w.size):
            change = b[part] @ a
        total = w[part].astype(wide, copy=False) + wide.type(scale) * change
        out[part] = total.astype(out.dtype, copy=False)
    return out


def _sum(x, y):
    wide = accumulator(x.dtype)
    return (x.astype(wide, copy=False) + y.astype(wide, copy=False)).astype(x.dtype, copy=False)
