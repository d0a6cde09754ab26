"""Elementwise ops and reductions, written with array operators alone: NumPy and CuPy take the same syntax. Enough to
write a loss.

Importing this module gives Tensor its operators (+, -, *, /). A number or an array may stand for a constant Tensor.
"""

import numpy as np

from ..autograd import Tensor, record


def _lift(x):
    return x if isinstance(x, Tensor) else Tensor(np.asarray(x) if isinstance(x, (int, float)) else x)


def _data(x):
    """The operand for arithmetic: a Python number stays one, so that it does not widen the other side's dtype."""
    return x.data if isinstance(x, Tensor) else x


def _fit(dx, shape):
    """dx summed over the axes along which an operand of this shape was broadcast (None: it wants no gradient)."""
    if shape is None:
        return None
    if dx.shape == shape:
        return dx
    extra = dx.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(extra + i for i, n in enumerate(shape) if n == 1 and dx.shape[extra + i] != 1)
    return dx.sum(axis=axes).reshape(shape)


def _binary(a, b, value, rule):
    """An op of two broadcast operands; rule(dy) -> (da, db) before summing to their shapes."""
    operands = _lift(a), _lift(b)
    shapes = [x.shape if x.requires_grad else None for x in operands]
    return record(value, operands, lambda dy: tuple(map(_fit, rule(dy), shapes)))


def add(a, b):
    """a + b."""
    return _binary(a, b, _data(a) + _data(b), lambda dy: (dy, dy))


def sub(a, b):
    """a - b."""
    return _binary(a, b, _data(a) - _data(b), lambda dy: (dy, -dy))


def mul(a, b):
    """a · b."""
    x, y = _data(a), _data(b)
    return _binary(a, b, x * y, lambda dy: (dy * y, dy * x))


def div(a, b):
    """a / b."""
    x, y = _data(a), _data(b)
    return _binary(a, b, x / y, lambda dy: (dy / y, -dy * x / (y * y)))


def neg(a):
    """-a."""
    return record(-a.data, (a,), lambda dy: (-dy,))


def exp(a: Tensor) -> Tensor:
    """e^a."""
    y = np.exp(a.data)  # NumPy's ufuncs hand CuPy arrays on to CuPy
    return record(y, (a,), lambda dy: (dy * y,))


def log(a: Tensor) -> Tensor:
    """Natural logarithm."""
    return record(np.log(a.data), (a,), lambda dy: (dy / a.data,))


def log_sigmoid(a: Tensor) -> Tensor:
    """log(1 / (1 + e^-a)), finite for every finite a."""
    x = a.data
    return record(-np.logaddexp(0, -x), (a,), lambda dy: (dy * np.exp(-np.logaddexp(0, x)),))


def minimum(a, b):
    """The smaller of a and b; where they are equal the gradient goes to a."""
    first = _data(a) <= _data(b)
    return where(first, a, b)


def maximum(a, b):
    """The larger of a and b; where they are equal the gradient goes to a."""
    first = _data(a) >= _data(b)
    return where(first, a, b)


def where(condition, a, b):
    """a where condition (a bool array) holds, else b."""
    value = np.where(condition, _data(a), _data(b))
    return _binary(a, b, value, lambda dy: (dy * condition, dy * ~condition))


def clip(a: Tensor, low: float, high: float) -> Tensor:
    """a held within [low, high]; no gradient where it was outside."""
    inside = (a.data >= low) & (a.data <= high)
    return record(np.clip(a.data, low, high), (a,), lambda dy: (dy * inside,))


def sum_all(a: Tensor) -> Tensor:
    """The sum of all elements, a scalar."""
    be, shape, dtype = a.backend, a.shape, a.dtype
    return record(a.data.sum(), (a,), lambda dy: (be.zeros(shape, dtype) + dy,))


def index_rows(a: Tensor, rows) -> Tensor:
    """a[rows] along the first axis; rows: an int array without repeats."""
    be, shape, dtype = a.backend, a.shape, a.dtype

    def rule(dy):
        da = be.zeros(shape, dtype)
        da[rows] = dy
        return (da,)

    return record(a.data[rows], (a,), rule)


Tensor.__add__ = add
Tensor.__radd__ = lambda a, b: add(b, a)
Tensor.__sub__ = sub
Tensor.__rsub__ = lambda a, b: sub(b, a)
Tensor.__mul__ = mul
Tensor.__rmul__ = lambda a, b: mul(b, a)
Tensor.__truediv__ = div
Tensor.__rtruediv__ = lambda a, b: div(b, a)
Tensor.__neg__ = neg
Tensor.sum = sum_all
