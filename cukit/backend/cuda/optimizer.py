"""AdamW in place, and the sum of squares for clipping: kernels/optimizer.cu."""

import math

import cupy as cp
import numpy as np

from .constants import source_constant
from .device import empty, to_numpy
from .loader import load

STEP_THREADS, SUM_THREADS = source_constant("optimizer", "STEP_THREADS"), source_constant("optimizer", "SUM_THREADS")
STEP_ELEMENTS = source_constant("optimizer", "STEP_VECTOR") * STEP_THREADS  # of a block
SUM_BLOCKS = 256  # over each array


def adamw_step(master, m, v, grad, param, lr, beta1, beta2, eps, weight_decay, step, grad_scale):
    """One update of master, m, v and param (= master rounded to its own dtype; may be the same array), all of one size,
    contiguous.

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


def sum_of_squares(arrays):
    """Σ over all elements of all arrays, in float64; NaN and infinity come through. Waits for the device: the result is
    a float.
    """
    arrays = [cp.ascontiguousarray(x) for x in arrays]
    if not arrays:
        return 0.0
    partials, total = empty((len(arrays), SUM_BLOCKS), cp.float64), empty((1,), cp.float64)
    start = 0
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        group = [x for x in arrays if x.dtype == dtype]
        table = cp.asarray(np.array([[x.data.ptr for x in group], [x.size for x in group]], np.int64))
        load("optimizer", dtype).sum_of_squares(
            (SUM_BLOCKS, len(group)),
            SUM_THREADS,
            partials[start : start + len(group)],
            table[0].view(cp.uint64),
            table[1],
        )
        start += len(group)
    load("optimizer", arrays[0].dtype).sum_partials(1, SUM_THREADS, total, partials, partials.size)
    return float(to_numpy(total)[0])
