"""AdamW in place, sums of squares for clipping, and the rounding of weights (see the NumPy shelf): optimizer.cu."""

import math

import cupy as cp
import numpy as np

from ..states import Update
from .constants import source_constant
from .device import empty, to_numpy
from .loader import load

FLOAT, SHORT = np.dtype(np.float32), np.dtype(np.int16)
STEP_THREADS, SUM_THREADS = source_constant("optimizer", "STEP_THREADS"), source_constant("optimizer", "SUM_THREADS")
STEP_ELEMENTS = source_constant("optimizer", "STEP_VECTOR") * STEP_THREADS  # of a block
STATE_BLOCK = source_constant("optimizer", "STATE_BLOCK")
# dtype of the moments -> kernel, elements of a block of threads; of codes a warp does a block
KERNELS = {
    "float32": ("adamw_step", STEP_ELEMENTS),
    "bfloat16": ("adamw_step_bf16", STEP_ELEMENTS),
    "uint8": ("adamw_step_blocks", STEP_THREADS // 32 * STATE_BLOCK),
}
SUM_PIECES = SUM_THREADS // 32  # of a block


def adamw_step(master, m, v, grad, param, lr, beta1, beta2, eps, weight_decay, step, grad_scale, seed=0, offset=0):
    """One update of master, m, v and param (= master rounded as store_weights does; may be the same array), all of one
    size, contiguous.

    g = grad·grad_scale; m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g²; master −= lr·(weight_decay·master + (m/(1−β1^step))
    / (sqrt(v/(1−β2^step)) + eps)). step counts from 1. grad is float32; master float32, or the int16 remainder of a
    bfloat16 param; m and v float32, or bfloat16 with the noise of (seed, step, offset + i) that the NumPy shelf names.
    """
    whole = slice(0, master.size)
    update = Update(master, m, v, grad, param, whole, weight_decay, seed, offset)
    AdamWSteps([update], lr)(beta1, beta2, eps, step, grad_scale)


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
    whole, exponents = slice(0, master.size), (m_exponents, v_exponents)
    update = Update(master, m, v, grad, param, whole, weight_decay, seed, offset, *exponents)
    AdamWSteps([update], lr)(beta1, beta2, eps, step, grad_scale)


class AdamWSteps:
    """adamw_step or adamw_step_blocks of each of some states.Update, made by a call: one launch for each dtype of param
    and form of moments. What the host has to do for it is done before the call.
    """

    def __init__(self, updates, lr):
        self._lr, self._launches = lr, []
        kinds: dict[tuple, list] = {}
        for one in updates:
            kinds.setdefault((one.param.dtype, KERNELS[one.m.dtype.name]), []).append(one)
        keeps = {decay: np.float32(1 - lr * decay).view(np.uint32) for decay in {one.weight_decay for one in updates}}
        for (dtype, (kernel, elements)), found in kinds.items():
            parts = np.array([_part(one, keeps[one.weight_decay]) for one in found], np.uint64)
            blocks = [-(-(one.part.stop - one.part.start) // elements) for one in found]
            begins = np.cumsum([0, *blocks[:-1]], dtype=np.int32)
            table = cp.asarray(np.concatenate([parts.reshape(-1).view(np.int32), begins]))
            launch = getattr(load("optimizer", dtype), kernel), sum(blocks), table, len(found), kernel != "adamw_step"
            self._launches.append(launch)

    def __call__(self, beta1, beta2, eps, step, grad_scale):
        root_correction, step_size = math.sqrt(1 - beta2**step), self._lr / (1 - beta1**step)
        settings = step_size, 1 - beta1, beta2, 1 - beta2, root_correction, eps, grad_scale
        for kernel, blocks, table, count, has_noise in self._launches:
            counted = (step,) if has_noise else ()
            kernel(blocks, STEP_THREADS, table, table[-count:], count, *counted, *settings)


def _part(one, keep) -> tuple:
    """An Update as struct Part of optimizer.cu. keep: its float's bits."""
    master, m, v, grad, param, (start, stop) = *one[:5], (one.part.start, one.part.stop)
    assert master.size == m.size == v.size == grad.size == param.size, "one size for all"
    assert master._c_contiguous and m._c_contiguous and v._c_contiguous and grad._c_contiguous and param._c_contiguous
    assert m.dtype == v.dtype and grad.dtype == FLOAT and (master.dtype == FLOAT or master.dtype == SHORT)
    offset, block, exponents = one.origin + start, start // STATE_BLOCK, (0, 0)
    if one.m_exponents is not None:
        assert offset % STATE_BLOCK == start % STATE_BLOCK == 0, "a block belongs to one update"
        exponents = one.m_exponents.data.ptr + block, one.v_exponents.data.ptr + block
    first = master.data.ptr + start * master.itemsize
    weights = (0, first) if master.itemsize == 2 else (first, 0)
    own = 0 if param is master else param.data.ptr + start * param.itemsize
    moments = m.data.ptr + start * m.itemsize, v.data.ptr + start * v.itemsize
    return *weights, own, *moments, *exponents, grad.data.ptr + 4 * start, stop - start, offset, one.seed, keep


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
