"""Matrix products. x (T, I), w (O, I), bias (O,), y and dy (T, O). Half types: sums in float32, rounded once."""

import threading

import numpy as np

from .device import accumulator
from .threads import MANY_WEIGHTS, blas_threads, one_blas_thread, share

FEW_ROWS = 16  # up to here a product with a large weight streams the weight block by block (see _few_rows)
BLOCK = 2**16  # weights of a block: 256 KB in float32, which stay in a core's second cache until all rows are done
SMALL_PRODUCT = 999_999  # multiplications of a block; above it OpenBLAS copies the weight into a layout of its own
MOST_THREADS = 8  # that share a weight: so many use up the memory's bandwidth, and more take turns at the interpreter


def set_exact(policy: str):
    """auto, true or false: whether decoding and training must compute the same bits. A CPU cannot promise it:
    ValueError for true.
    """
    if policy not in ("auto", "true", "false"):
        raise ValueError(f"exact={policy!r} is not known: choose auto, true or false")
    if policy == "true":
        raise ValueError(
            "exact=true needs --device cuda: on a CPU a product's last bits change with its row count; use exact=auto"
        )


def row_bucket(rows: int) -> int:
    """The number of rows at which a step of `rows` rows is best run: here the same."""
    return rows


class WideCopies:
    """float32 copies of half-type weights, for many products with weights that do not change: to convert a weight takes
    longer than a product of few rows. `with copies:` uses them in this thread. They do not follow a change of a weight.
    """

    _active = threading.local()

    def __init__(self, weights):
        self._copies = {id(w): (w, w.astype(accumulator(w.dtype))) for w in weights if w.dtype.itemsize < 4}

    def __enter__(self):
        WideCopies._active.copies = self._copies
        return self

    def __exit__(self, *_):
        WideCopies._active.copies = {}

    @classmethod
    def of(cls, w):
        """The copy of w that is in use, or w itself."""
        return getattr(cls._active, "copies", {}).get(id(w), (w, w))[1]


def linear_forward(x, w, bias=None):
    """y = x wᵀ + bias."""
    acc, w = accumulator(x.dtype), WideCopies.of(w)
    if w.dtype == acc and w.size >= MANY_WEIGHTS and 1 < len(x) <= FEW_ROWS:
        y = _few_rows(x.astype(acc, copy=False), w)
    else:
        with one_blas_thread(w.size):
            y = x.astype(acc, copy=False) @ w.astype(acc, copy=False).T
    if bias is not None:
        y += bias
    return y.astype(x.dtype, copy=False)


def linear_backward_input(dy, w):
    """dx = dy w."""
    acc = accumulator(dy.dtype)
    with one_blas_thread(w.size):
        return (dy.astype(acc, copy=False) @ w.astype(acc, copy=False)).astype(dy.dtype, copy=False)


def linear_backward_weight(dw, dy, x):
    """dw += dyᵀ x, in dw's dtype."""
    with one_blas_thread(dw.size):
        dw += dy.astype(dw.dtype, copy=False).T @ x.astype(dw.dtype, copy=False)


def linear_backward_bias(db, dy):
    """db += sum of dy over its rows."""
    db += np.sum(dy, axis=0, dtype=db.dtype)


def _few_rows(x, w):
    """x wᵀ for a few rows and a large weight. Reading the weight from memory is what such a product costs.

    Above one row, OpenBLAS first copies the whole weight: 2 rows take three times as long as 1. It makes small products
    in place, so the weight is cut into blocks that are small products. Each thread takes a run of blocks.
    """
    rows, (outs, cols) = len(x), w.shape
    block = max(1, min(BLOCK, SMALL_PRODUCT // rows) // cols)
    y = np.empty((outs, rows), x.dtype)
    blocks = -(-outs // block)
    threads = max(1, min(blas_threads(), blocks // 2, MOST_THREADS))
    borders = [min(outs, blocks * number // threads * block) for number in range(threads + 1)]
    with one_blas_thread():
        share(lambda start, stop: _multiply_blocks(y[start:stop], w[start:stop], x.T, block), borders)
    return np.ascontiguousarray(y.T)


def _multiply_blocks(y, w, xt, block):
    """y = w xt, `block` rows of w at a time, by one call that keeps the interpreter out."""
    whole = len(w) // block * block
    if whole:
        np.matmul(w[:whole].reshape(-1, block, w.shape[1]), xt, out=y[:whole].reshape(-1, block, y.shape[1]))
    if whole < len(w):
        np.matmul(w[whole:], xt, out=y[whole:])
