"""A backend of arrays that have shapes and no memory: it counts the bytes that the rules of ops hold, at any size."""

from collections import Counter

import numpy as np

from cukit.backend import backend_for
from cukit.parallel.group import Group

cpu = backend_for("cpu")


class Ghost:
    """An array without numbers. A view (`of`) keeps the array that it shows part of."""

    def __init__(self, meter, shape, dtype, maker="", of=None, whole_rows=True):
        self.meter, self.shape, self.dtype, self.of = meter, tuple(map(int, shape)), np.dtype(dtype), of
        self.whole_rows = whole_rows  # else it shows some columns, which a change of shape would copy
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.nbytes, self.maker = self.size * self.dtype.itemsize, maker
        if of is None:
            meter.add(self, 1)

    def __del__(self):
        if self.of is None:
            self.meter.add(self, -1)

    def __len__(self):
        return self.shape[0]

    @property
    def ndim(self):
        return len(self.shape)

    def __getitem__(self, key):
        if isinstance(key, tuple):
            rows, columns = key
            assert rows == slice(None)
            width = len(range(*columns.indices(self.shape[1])))
            return Ghost(self.meter, (len(self), width), self.dtype, of=self, whole_rows=False)
        if isinstance(key, slice):
            rows = len(range(*key.indices(self.shape[0])))
            return Ghost(self.meter, (rows, *self.shape[1:]), self.dtype, of=self)
        return Ghost(self.meter, (len(key), *self.shape[1:]), self.dtype, "rows")

    def __setitem__(self, key, value):
        pass

    def reshape(self, *shape):
        assert self.whole_rows, "a copy"
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        shape = (self.size,) if shape == (-1,) else shape
        return Ghost(self.meter, shape, self.dtype, of=self)

    def swapaxes(self, a, b):
        shape = list(self.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return Ghost(self.meter, shape, self.dtype, of=self, whole_rows=False)

    def __add__(self, other):
        return Ghost(self.meter, self.shape, self.dtype, "sum")

    def __iadd__(self, other):
        return self


class Meter:
    """The array functions that training calls. live: bytes that exist now; peak: the most, and by whom they were made
    (at_peak: Counter of functions). Temporary arrays inside a function are not counted.
    """

    name = "meter"

    def __init__(self):
        self.live = self.peak = 0
        self._makers, self.at_peak = Counter(), Counter()
        self.dtype_of, self.accumulator = cpu.dtype_of, cpu.accumulator

    def add(self, ghost, sign):
        self.live += sign * ghost.nbytes
        self._makers[ghost.maker] += sign * ghost.nbytes
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, +self._makers

    def forget_peak(self):
        self.peak = self.live

    def zeros(self, shape, dtype):
        return Ghost(self, shape, dtype, "zeros")

    def empty(self, shape, dtype):
        return Ghost(self, shape, dtype, "empty")

    def array(self, host, dtype=None):
        return Ghost(self, np.shape(host), dtype or host.dtype, "array")

    def embedding_forward(self, table, ids, first=None):
        return Ghost(self, (len(ids), table.shape[1]), table.dtype, "embedding")

    def embedding_backward(self, dtable, dy, ids, first=None):
        pass

    def linear_forward(self, x, w, bias=None):
        return Ghost(self, (len(x), w.shape[0]), x.dtype, f"product of {w.shape[1]}")

    def linear_backward_input(self, dy, w):
        return Ghost(self, (len(dy), w.shape[1]), dy.dtype, f"gradient through product of {w.shape[1]}")

    def linear_backward_weight(self, dw, dy, x):
        assert dw.shape == (dy.shape[1], x.shape[1]) and len(dy) == len(x)

    def linear_backward_bias(self, db, dy):
        pass

    def rms_norm_forward(self, x, w, eps):
        wide = self.accumulator(x.dtype)
        return Ghost(self, x.shape, x.dtype, "norm"), Ghost(self, (len(x), 1), wide, "rstd")

    def add_rms_norm_forward(self, x, residual, w, eps):
        y, rstd = self.rms_norm_forward(x, w, eps)
        return y, Ghost(self, x.shape, x.dtype, "residual stream"), rstd

    def add_rms_norm_backward(self, dw, dy, dsummed, summed, w, rstd):
        return Ghost(self, summed.shape, summed.dtype, "gradient through norm")

    def add_rms_norm_backward_remade(self, dw, dy, dsummed, summed, w, rstd, eps):
        dx = self.add_rms_norm_backward(dw, dy, dsummed, summed, w, rstd)
        return dx, Ghost(self, summed.shape, summed.dtype, "norm")

    def qk_norm_rope_forward(self, qkv, q_weight, k_weight, cos, sin, positions, heads, kv_heads, eps):
        out, rstd = Ghost(self, qkv.shape, qkv.dtype, "rope"), None
        if q_weight is not None:
            rstd = Ghost(self, (len(qkv), heads + kv_heads, 1), self.accumulator(qkv.dtype), "rstd of heads")
        return out, rstd

    def qk_norm_rope_backward(self, dq, dk, dout, qkv, *rest):
        return Ghost(self, qkv.shape, qkv.dtype, "gradient through rope")

    def attention_forward(self, qkv, cu_seqlens, heads, kv_heads, prefixes=None):
        columns = qkv.shape[1] // (heads + 2 * kv_heads) * heads
        lse = Ghost(self, (len(qkv), heads), self.accumulator(qkv.dtype), "log-sum-exp")
        return Ghost(self, (len(qkv), columns), qkv.dtype, "attention"), lse

    def attention_backward(self, do, qkv, o, lse, *rest):
        assert do.shape == o.shape
        return Ghost(self, qkv.shape, qkv.dtype, "gradient through attention")

    def silu_mul_forward(self, gate_up):
        return Ghost(self, (len(gate_up), gate_up.shape[1] // 2), gate_up.dtype, "silu")

    def silu_mul_backward(self, dy, gate_up):
        return Ghost(self, gate_up.shape, gate_up.dtype, "gradient through silu")

    def silu_mul_backward_remade(self, dy, gate_up):
        return self.silu_mul_backward(dy, gate_up), self.silu_mul_forward(gate_up)


class GhostRanks(Group):
    """The first of ranks that exchange nothing."""

    def __init__(self, size):
        self.size = size

    def all_parts(self, array, what="all_parts"):
        return Ghost(array.meter, (self.size, *array.shape), array.dtype, what)
