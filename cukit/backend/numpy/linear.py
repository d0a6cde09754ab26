"""Matrix products. x (T, I), w (O, I), bias (O,), y and dy (T, O). Half types: sums in float32, rounded once."""

import numpy as np

from .device import accumulator
from .threads import MANY_WEIGHTS, blas_threads, one_blas_thread, share

FEW_ROWS = 16  # up to here a product with a large weight streams the weight block by block (see _few_rows)
BLOCK = (
    2**16
)  # weights of a block: 256 KB in float32, which stay in a core's second cache until all rows have used them
SMALL_PRODUCT = 999_999  # multiplications of a block; above it OpenBLAS copies the weight into a layout of its own


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


def linear_forward(x, w, bias=None):
    """y = x wᵀ + bias."""
    acc = accumulator(x.dtype)
    if w.size >= MANY_WEIGHTS and 0 < len(x) <= FEW_ROWS and (len(x) > 1 or w.dtype != acc):
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
    """x wᵀ for a few rows and a large weight, whose reading from memory is what such a product costs.

    Above one row, OpenBLAS first copies the whole weight: 2 rows take three times as long as 1. Small products it makes
    in place, so the weight is cut into blocks that are small products. A weight in half precision becomes float32 block
    by block in the cache, which costs less than reading a float32 weight from memory; nothing is kept, so a changed
    weight needs no word to anybody. Each thread takes a run of blocks.
    """
    rows, (outs, cols) = len(x), w.shape
    block = max(1, min(BLOCK, SMALL_PRODUCT // rows) // cols)
    y = np.empty((outs, rows), x.dtype)
    blocks, threads = -(-outs // block), blas_threads()
    borders = [min(outs, blocks * number // threads * block) for number in range(threads + 1)]
    multiply = _multiply_blocks if w.dtype == x.dtype else _convert_and_multiply_blocks
    with one_blas_thread():
        share(lambda start, stop: multiply(y[start:stop], w[start:stop], x.T, block), borders)
    return np.ascontiguousarray(y.T)


def _multiply_blocks(y, w, xt, block):
    """y = w xt, `block` rows of w at a time, by one call that keeps the interpreter out."""
    whole = len(w) // block * block
    if whole:
        np.matmul(w[:whole].reshape(-1, block, w.shape[1]), xt, out=y[:whole].reshape(-1, block, y.shape[1]))
    if whole < len(w):
        np.matmul(w[whole:], xt, out=y[whole:])


def _convert_and_multiply_blocks(y, w, xt, block):
    """The same for a weight of another dtype than xt's."""
    converted = np.empty((block, w.shape[1]), xt.dtype)
    for start in range(0, len(w), block):
        part = w[start : start + block]
        converted[: len(part)] = part
        np.matmul(converted[: len(part)], xt, out=y[start : start + block])
