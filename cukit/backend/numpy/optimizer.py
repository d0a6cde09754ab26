"""AdamW in place (Loshchilov & Hutter 2019), sums of squares for clipping, and the rounding of weights.

A bfloat16 weight is a float32 rounded to the nearest bfloat16, halves away from zero. The float32 is then exactly the
bfloat16 plus a signed 16-bit remainder, its low half: bits(float32) = (bits(bfloat16) << 16) + int16(low half).
(Halves to even would leave the remainder ±2^15 ambiguous.) A finite float32 beyond the largest finite bfloat16 becomes
that bfloat16, not infinity; only there, from 3.3961e38 on, the remainder does not fit. float16 has no such remainder:
it is rounded to even, and to infinity beyond 65,520.
"""

import math

import ml_dtypes
import numpy as np

CHUNK = 1 << 20  # elements worked on at a time, so that a large matrix needs no temporaries of its own size


def adamw_step(master, m, v, grad, param, lr, beta1, beta2, eps, weight_decay, step, grad_scale):
    """One update of master, m, v and param (= master rounded as store_weights does; may be the same array), all of one
    size, contiguous.

    g = grad·grad_scale; m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g²;
    master −= lr·(weight_decay·master + (m/(1−β1^step)) / (sqrt(v/(1−β2^step)) + eps)). step counts from 1.
    """
    same = param is master
    master, m, v, grad, param = (x.reshape(-1) for x in (master, m, v, grad, param))
    step_size, root_correction = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    for start in range(0, master.size, CHUNK):
        part = slice(start, start + CHUNK)
        w, first, second = master[part], m[part], v[part]
        g = grad[part].astype(w.dtype, copy=False) * w.dtype.type(grad_scale)
        first += (g - first) * (1 - beta1)
        second *= beta2
        second += (1 - beta2) * g * g
        w *= 1 - lr * weight_decay
        w -= step_size * first / (np.sqrt(second) / root_correction + eps)
        if not same:
            store_weights(param[part], w)


def store_weights(out, values):
    """out = values (of one shape) rounded to the dtype of out, as the module's header says."""
    if out.dtype != ml_dtypes.bfloat16 or values.dtype == out.dtype:
        with np.errstate(over="ignore"):
            out[...] = values.astype(out.dtype, copy=False)
        return
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    high = (bits + np.uint32(0x8000)) >> np.uint32(16)
    too_large = (magnitude >= 0x7F7F8000) & (magnitude < 0x7F800000)
    if too_large.any():
        high = np.where(too_large, bits >> np.uint32(16), high)
    not_a_number = magnitude > 0x7F800000
    if not_a_number.any():
        high = np.where(not_a_number, (bits >> np.uint32(16)) | np.uint32(0x40), high)
    out[...] = high.astype(np.uint16).view(out.dtype)


def sums_of_squares(arrays, pieces):
    """Σ x² over each of `pieces` equal pieces of each array: (len(arrays), pieces) float64. An array's size is a
    multiple of `pieces`; a piece's sum depends on its own elements alone; NaN and infinity come through.
    """
    sums = np.zeros((len(arrays), pieces), np.float64)
    for row, x in zip(sums, arrays):
        table = x.reshape(pieces, x.size // pieces)
        step = max(1, CHUNK // max(1, table.shape[1]))
        for start in range(0, pieces, step):
            part = table[start : start + step].astype(np.float64)
            np.einsum("pe,pe->p", part, part, out=row[start : start + step])
    return sums


def sum_in_order(sums):
    """The sum of sums (N, P) float64 as a float: each row first, then the rows, in an order that depends on N and P
    alone.
    """
    return float(np.add.reduce(np.add.reduce(sums, axis=1)))
