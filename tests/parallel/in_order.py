"""A product whose bits do not depend on shapes, in place of the NumPy shelf's, which BLAS makes."""

from contextlib import nullcontext

import numpy as np

from cukit.backend import backend_for

CPU = backend_for("cpu")


def in_order_product(x, w, bias=None):
    """y = x wᵀ + bias, each element added up in order, as kernels/linear.cu does."""
    wide = CPU.accumulator(x.dtype)
    rows, columns, y = x.astype(wide), np.ascontiguousarray(w.T.astype(wide)), np.zeros((len(x), len(w)), wide)
    for number, column in enumerate(columns):
        y += rows[:, number : number + 1] * column
    return (y if bias is None else y + bias).astype(x.dtype)


def use_it(monkeypatch):
    """For the rest of a test."""
    monkeypatch.setattr(CPU, "linear_forward", in_order_product)
    monkeypatch.setattr(CPU, "WideCopies", lambda weights: nullcontext())
