"""AdamW in place, sums of squares for clipping, and the rounding of weights (see the NumPy shelf): optimizer.cu."""

import math

import cupy as cp
import numpy as np

from .constants import source_constant
from .device import empty, to_numpy
from .loader import load

STEP_THREADS, SUM_THREADS = source_constant("optimizer", "STEP_THREADS"), source_constant("optimizer", "SUM_THREADS")
STEP_ELEMENTS = source_constant("optimizer", "STEP_VECTOR") * STEP_THREADS  # of a block
STATE_BLOCK = source_constant("optimizer", "STATE_BLOCK")
STEP_BLOCKS = STEP_THREADS // 32  # blocks of codes of a block of threads: one a warp
SUM_PIECES = SUM_THREADS // 32  # of a block


def adamw_step(master, m, v, grad, param, lr, beta1, beta2, eps, weight_decay, step, grad_scale, seed=0, offset=0):
    """One update of master, m, v and param (= master rounded as store_weights does; may be the same array), all of one
    size, contiguous.

    g = grad·grad_scale; m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g²; master −= lr·(weight_decay·master + (m/(1−β1^step))
    / (sqrt(v/(1−β2^step)) + eps)). step counts from 1. grad is float32; master float32, or the int16 remainder of a
    bfloat16 param; m and v float32, or bfloat16 with the noise of (seed, step, offset + i) that the NumPy shelf names.
    """
    assert master.size == m.size == v.size == grad.size == param.size, "one size for all"
    lean = m.dtype != np.float32
    kernel = getattr(load("optimizer", param.dtype), "adamw_step_bf16" if lean else "adamw_step")
    settings = _settings(lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    noise = (seed, step, offset) if lean else ()
    blocks = -(-master.size // STEP_ELEMENTS)
    kernel(blocks, STEP_THREADS, *_weights(master, param), m, v, grad, master.size, *settings, *noise)


def adamw_step_blocks(
    master,
    m,
    v,
    m_exponents,
    v_exponents,
    grad,
    param,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    step,
    grad_scale,
    seed=0,
    offset=0,
):
    """adamw_step with m and v as codes of 8 bits (uint8) under an exponent (uint8) of each block, as ../states.py says;
    rounded stochastically by the same noise. offset is a multiple of the block.
    """
    assert master.size == m.size == v.size == grad.size == param.size, "one size for all"
    blocks = -(-master.size // STATE_BLOCK)
    assert m_exponents.size == v_exponents.size == blocks and offset % STATE_BLOCK == 0, "a block belongs to one update"
    load("optimizer", param.dtype).adamw_step_blocks(
        -(-blocks // STEP_BLOCKS),
        STEP_THREADS,
        *_weights(master, param),
        m,
        v,
        m_exponents,
        v_exponents,
        grad,
        master.size,
        *_settings(lr, beta1, beta2, eps, weight_decay, step, grad_scale),
        seed,
        step,
        offset,
    )


def _weights(master, param):
    """master, remainder and param as the kernels take them; None: there is none."""
    if master.dtype == np.int16:
        return None, master, param
    return master, None, None if param is master else param


def _settings(lr, beta1, beta2, eps, weight_decay, step, grad_scale):
    root_correction = math.sqrt(1 - beta2**step)
    step_size = lr / (1 - beta1**step)
    return 1 - lr * weight_decay, step_size, 1 - beta1, beta2, 1 - beta2, root_correction, eps, grad_scale


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
