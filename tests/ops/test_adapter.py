"""Products with a low-rank adapter on the NumPy shelf: formulas, gradients, rounding points."""

import numpy as np
import pytest
from check import check_gradient, normal

from cukit import ops
from cukit.autograd import Parameter, Tensor
from cukit.backend import backend_for
from cukit.backend.dtypes import DTYPES
from cukit.backend.numpy import (
    change_rows,
    linear_beside_backward_input,
    linear_beside_forward,
    linear_forward,
    merge_adapter,
)

be = backend_for("cpu")
SIZES = [(1, 1, 1, 1), (0, 3, 2, 1), (5, 13, 7, 3)]  # rows, ins, outs, rank


@pytest.mark.parametrize("rows, ins, outs, rank", SIZES)
def test_products_against_their_formulas(rows, ins, outs, rank):
    x, w, bias = normal(rows, ins), normal(outs, ins, seed=1), normal(outs, seed=2)
    a, b, dy, du = normal(rank, ins, seed=3), normal(outs, rank, seed=4), normal(rows, outs), normal(rows, rank)
    whole = w + b @ a
    for given, more in ((None, 0), (bias, bias)):
        y, u = linear_beside_forward(x, w, a, b, given)
        np.testing.assert_allclose(y, x @ whole.T + more, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(u, x @ a.T, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(linear_beside_backward_input(dy, w, du, a), dy @ w + du @ a, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_stands_beside_is_rounded_where_the_card_rounds(dtype):
    x, w, a, b = (normal(*shape).astype(DTYPES[dtype]) for shape in ((6, 24), (9, 24), (4, 24), (9, 4)))
    y, u = linear_beside_forward(x, w, a, b)
    base, change = linear_forward(x, w), linear_forward(linear_forward(x, a), b)
    expected = (base.astype(np.float32) + change.astype(np.float32)).astype(DTYPES[dtype])
    assert y.dtype == u.dtype == DTYPES[dtype]
    assert y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_merged_weight_is_the_sum_rounded_once(dtype):
    w, wide = normal(300, 17).astype(DTYPES[dtype]), be.accumulator(DTYPES[dtype])
    a, b = normal(5, 17).astype(wide), normal(300, 5, seed=1).astype(wide)
    true = w.astype(np.float64) + 0.37 * (b.astype(np.float64) @ a.astype(np.float64))
    out = np.empty_like(w)
    assert merge_adapter(out, w, a, b, 0.37) is out
    half_ulp = np.abs(true) * {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 0}[dtype]
    assert (np.abs(out.astype(np.float64) - true) <= half_ulp * 1.01 + 1e-6 * (wide == np.float32) + 1e-13).all()
    merge_adapter(w, w, a, b, 0.37)
    assert w.tobytes() == out.tobytes(), "in place"


def test_a_merged_weight_does_not_depend_on_the_rows_that_are_summed_at_a_time(monkeypatch):
    w, a, b = (normal(*shape).astype(np.float32) for shape in ((50, 8), (3, 8), (50, 3)))
    whole = merge_adapter(np.empty_like(w), w, a, b, 2.0)
    monkeypatch.setattr("cukit.backend.numpy.adapter.CHUNK", 8 * 7)
    np.testing.assert_allclose(merge_adapter(np.empty_like(w), w, a, b, 2.0), whole, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("instead", [False, True])
def test_rows_of_an_owner_change_and_the_others_keep_their_bits(dtype, instead):
    y, change = normal(9, 5).astype(DTYPES[dtype]), normal(9, 5, seed=1).astype(DTYPES[dtype])
    owners, wide = np.array([3, -1, 3, 7, 3, 0, -1, 3, 4], np.int32), be.accumulator(DTYPES[dtype])
    change[owners != 3] = np.nan
    changed = change if instead else (y.astype(wide) + change.astype(wide)).astype(DTYPES[dtype])
    expected = np.where((owners == 3)[:, None], changed, y)
    found = y.copy()
    assert change_rows(found, change, owners, 3, instead) is found
    assert found.tobytes() == expected.tobytes()
    part = y[:3].copy()
    change_rows(part[2:], change[2:3], instead=instead)  # all rows of a part
    assert part.tobytes() == y[:2].tobytes() + expected[2].tobytes()


BLOCKS = [(slice(0, 4), slice(0, 4), slice(0, 2)), (slice(5, 8), slice(4, 7), slice(2, 4))]  # of an O of 8, rank 2


def factors_of(a, b, scale):
    """Two parts of a fused weight with a part between them that has no adapter."""
    down, up = a.data, np.zeros((8, 4), b.data.dtype)
    for rows, own, columns in BLOCKS:
        up[rows, columns] = scale * b.data[own]
    return ops.Factors(a, b, scale, down, up, BLOCKS)


@pytest.mark.parametrize("biased", [False, True])
def test_gradient_of_a_product_beside(biased):
    def op(x, a, b):
        w, bias = Parameter(normal(8, 6, seed=7)), Parameter(normal(8, seed=8)) if biased else None
        w.requires_grad = False
        return ops.linear_beside(x, w, factors_of(a, b, 1.7), bias)

    check_gradient(op, normal(5, 6), normal(4, 6, seed=1), normal(7, 2, seed=2))


@pytest.mark.parametrize("biased", [False, True])
def test_gradient_of_a_merged_product(biased):
    def op(x, a, b):
        bias = Parameter(normal(8, seed=8)) if biased else None
        factors = factors_of(a, b, 1.7)
        return ops.linear_merged(x, normal(8, 6, seed=7) + factors.up @ factors.down, factors, bias)

    check_gradient(op, normal(5, 6), normal(4, 6, seed=1), normal(7, 2, seed=2))


@pytest.mark.parametrize("way", ["beside", "merged"])
def test_frozen_factors_and_constant_inputs_get_no_gradient(way):
    a, b, w = Parameter(normal(4, 6)), Parameter(normal(7, 2)), Parameter(normal(8, 6))
    b.requires_grad = w.requires_grad = False
    factors, x = factors_of(a, b, 0.5), Tensor(normal(3, 6, seed=3))
    y = ops.linear_beside(x, w, factors) if way == "beside" else ops.linear_merged(x, w.data, factors)
    y.sum().backward()
    assert a.grad is not None and b.grad is None and w.grad is None and x.grad is None
