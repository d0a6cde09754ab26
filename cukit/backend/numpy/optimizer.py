"""AdamW in place (Loshchilov & Hutter 2019), sums of squares for clipping, and the rounding of weights.

A bfloat16 weight is a float32 rounded to the nearest bfloat16, halves away from zero. The float32 is then exactly the
bfloat16 plus a signed 16-bit remainder, its low half: bits(float32) = (bits(bfloat16) << 16) + int16(low half).
(Halves to even would leave the remainder ±2^15 ambiguous.) A finite float32 beyond the largest finite bfloat16 becomes
that bfloat16, not infinity; only there, from 3.3961e38 on, the remainder does not fit. float16 has no such remainder:
it is rounded to even, and to infinity beyond 65,520. Lean forms of master and moments: ../states.py.
"""

import math

import ml_dtypes
import numpy as np

from ..states import (
    BLOCK,
    bfloat16_bits,
    decode_blocks,
    encode_blocks,
    join_master,
    split_master,
    stochastic_bfloat16,
)
from .sampling import _philox4x32

CHUNK = 1 << 20  # elements worked on at a time, so that a large matrix needs no temporaries of its own size


def adamw_step(master, m, v, grad, param, lr, beta1, beta2, eps, weight_decay, step, grad_scale, seed=0, offset=0):
    """One update of master, m, v and param (= master rounded as store_weights does; may be the same array), all of one
    size, contiguous.

    g = grad·grad_scale; m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g²;
    master −= lr·(weight_decay·master + (m/(1−β1^step)) / (sqrt(v/(1−β2^step)) + eps)). step counts from 1.

    An int16 master is the remainder of a bfloat16 param: together they are the float32 master, bit for bit. m and v in
    bfloat16 are rounded stochastically. The noise of the array's element i is a word of the counter generator (key
    seed, counter (step, (offset + i) // 4)): its low half for m, its high half for v. So a part of an array that is
    given its offset has the bits of the whole.
    """
    same, lean = param is master, m.dtype == ml_dtypes.bfloat16
    master, m, v, grad, param = (x.reshape(-1) for x in (master, m, v, grad, param))
    settings = lr, beta1, beta2, eps, weight_decay, step, grad_scale
    for start in range(0, master.size, CHUNK):
        part = slice(start, start + CHUNK)
        w, first, second = _masters(master[part], param[part]), m[part], v[part]
        if lean:
            first, second = (x.astype(w.dtype) for x in (first, second))
        _update(w, first, second, grad[part], *settings)
        if lean:
            noise = _noise(seed, step, offset + start, w.size)
            m[part] = stochastic_bfloat16(first, noise & np.uint32(0xFFFF))
            v[part] = stochastic_bfloat16(second, noise >> np.uint32(16))
        if not same:
            _store_masters(master[part], param[part], w)


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
    assert offset % BLOCK == 0, "a block belongs to one update"
    same = param is master
    master, m, v, grad, param = (x.reshape(-1) for x in (master, m, v, grad, param))
    for start in range(0, master.size, CHUNK):
        part, blocks = slice(start, start + CHUNK), slice(start // BLOCK, (start + CHUNK) // BLOCK)
        w = _masters(master[part], param[part])
        first = decode_blocks(m[part], m_exponents[blocks], True).astype(w.dtype, copy=False)
        second = decode_blocks(v[part], v_exponents[blocks], False).astype(w.dtype, copy=False)
        _update(w, first, second, grad[part], lr, beta1, beta2, eps, weight_decay, step, grad_scale)
        noise = _noise(seed, step, offset + start, w.size)
        m[part], m_exponents[blocks] = encode_blocks(first, True, noise & np.uint32(0xFFFF))
        v[part], v_exponents[blocks] = encode_blocks(second, False, noise >> np.uint32(16))
        if not same:
            _store_masters(master[part], param[part], w)


class AdamWSteps:
    """adamw_step or adamw_step_blocks of each of some states.Update, made by a call."""

    def __init__(self, updates, lr):
        self._updates, self._lr = list(updates), lr

    def __call__(self, beta1, beta2, eps, step, grad_scale):
        for one in self._updates:
            w, same, offset = one.master[one.part], one.param is one.master, one.origin + one.part.start
            own = w, one.m[one.part], one.v[one.part]
            rest = one.grad[one.part], w if same else one.param[one.part], self._lr, beta1, beta2, eps
            rest += one.weight_decay, step, grad_scale, one.seed, offset
            if one.m_exponents is None:
                adamw_step(*own, *rest)
            else:
                adamw_step_blocks(*own, one.m_exponents[one.blocks], one.v_exponents[one.blocks], *rest)


def _update(w, first, second, grad, lr, beta1, beta2, eps, weight_decay, step, grad_scale):
    """The update of adamw_step in place."""
    step_size, root_correction = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    g = grad.astype(w.dtype, copy=False) * w.dtype.type(grad_scale)
    first += (g - first) * (1 - beta1)
    second *= beta2
    second += (1 - beta2) * g * g
    w *= 1 - lr * weight_decay
    w -= step_size * first / (np.sqrt(second) / root_correction + eps)


def _masters(master, param):
    """The master weights: the array itself unless it is remainders."""
    return join_master(param, master) if master.dtype == np.int16 else master


def _store_masters(master, param, w):
    if master.dtype == np.int16:
        param[...], master[...] = split_master(w)
    else:
        store_weights(param, w)


def _noise(seed, step, offset, count):
    """A word (uint32) for each of the elements offset … offset + count - 1."""
    counters = np.arange(offset // 4, -(-(offset + count) // 4), dtype=np.uint64) & np.uint64(0xFFFFFFFF)
    position, zero = np.full(1, step, np.uint64), np.zeros(1, np.uint64)
    words = _philox4x32((position, counters, zero, zero), np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32))
    words = np.stack([np.broadcast_to(word, counters.shape) for word in words], axis=1).astype(np.uint32)
    return words.reshape(-1)[offset % 4 :][:count]


def store_weights(out, values):
    """out = values (of one shape) rounded to the dtype of out, as the module's header says."""
    if out.dtype != ml_dtypes.bfloat16 or values.dtype == out.dtype:
        with np.errstate(over="ignore"):
            out[...] = values.astype(out.dtype, copy=False)
    else:
        out[...] = bfloat16_bits(values).view(out.dtype)


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
