"""AdamW in place, sums of squares for clipping, and the rounding of weights (see the NumPy shelf): optimizer.cu."""

import math

import cupy as cp
import numpy as np

from .device import empty, to_numpy
from .loader import load

STEP_THREADS, SUM_THREADS = 256, 256
STEP_ELEMENTS = 4 * STEP_THREADS  # of a block
SUM_PIECES = SUM_THREADS // 32  # of a block


def adamw_step(master, m, v, grad, param, lr, beta1, beta2, eps, weight_decay, step, grad_scale):
    """One update of master, m, v and param (= master rounded as store_weights does; may be the same array), all of one
    size, contiguous.

    g = grad·grad_scale; m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g²; master −= lr·(weight_decay·master + (m/(1−β1^step))
    / (sqrt(v/(1−β2^step)) + eps)). step counts from 1. All but param float32.
    """
    assert master.size == m.size == v.size == grad.size == param.size, "one size for all"
    load("optimizer", param.dtype).adamw_step(
        -(-master.size // STEP_ELEMENTS),
        STEP_THREADS,
        master,
        m,
        v,
        None if param is master else param,
        grad,
        master.size,
        1 - lr * weight_decay,
        lr / (1 - beta1**step),
        1 - beta1,
        beta2,
        1 - beta2,
        math.sqrt(1 - beta2**step),
        eps,
        grad_scale,
    )


def store_weights(out, values):
    """out = values (of one shape) rounded to the dtype of out, as the NumPy shelf's header says."""
    if out.dtype == values.dtype:
        out[...] = values
        return
    if out.shape != values.shape:
        raise ValueError(f"values of shape {values.shape} do not fit weights of shape {out.shape}")
    values = values.astype(np.float32, copy=False)
    load("optimizer", out.dtype).store_weights(-(-out.size // STEP_ELEMENTS), STEP_THREADS, out, values, out.size)


def sums_of_squares(arrays, pieces):
    """Σ x² over each of `pieces` equal pieces of each array: (len(arrays), pieces) float64. An array's size is a
    multiple of `pieces`; a piece's sum depends on its own elements alone; NaN and infinity come through.
    """
    arrays = [cp.ascontiguousarray(x) for x in arrays]
    sums = empty((len(arrays), pieces), cp.float64)
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        rows = [row for row, x in enumerate(arrays) if x.dtype == dtype]
        table = cp.asarray(np.array([[arrays[i].data.ptr for i in rows], [arrays[i].size for i in rows]], np.int64))
        part = sums if len(rows) == len(arrays) else empty((len(rows), pieces), cp.float64)
        load("optimizer", dtype).sums_of_squares(
            (-(-pieces // SUM_PIECES), len(rows)), SUM_THREADS, part, table[0].view(cp.uint64), table[1], pieces
        )
        if part is not sums:
            sums[cp.asarray(rows)] = part
    return sums


def sum_in_order(sums):
    """The sum of sums (N, P) float64 as a float: each row first, then the rows, in an order that depends on N and P
    alone. Waits for the device.
    """
    rows, pieces = sums.shape
    totals, total = empty((1, rows), cp.float64), empty((1,), cp.float64)
    kernels = load("optimizer", np.float32)
    kernels.add_rows(rows, SUM_THREADS, totals, sums, pieces)
    kernels.add_rows(1, SUM_THREADS, total, totals, rows)
    return float(to_numpy(total)[0])
