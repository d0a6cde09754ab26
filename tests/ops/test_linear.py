"""Matrix products on the NumPy shelf against float64, biases included."""

import numpy as np
import pytest
from check import check_formula, normal

from cukit.backend.numpy import linear_backward_bias, linear_backward_input, linear_backward_weight

SIZES = [(1, 1, 1), (0, 3, 2), (5, 13, 7)]


@pytest.mark.parametrize("rows, ins, outs", SIZES)
def test_products_against_their_formulas(rows, ins, outs):
    x, w, bias, dy = normal(rows, ins), normal(outs, ins, seed=1), normal(outs), normal(rows, outs, seed=2)
    check_formula("linear_forward", lambda x, w: np.einsum("ti,oi->to", x, w), x, w)
    check_formula("linear_forward", lambda x, w, bias: np.einsum("ti,oi->to", x, w) + bias, x, w, bias)
    np.testing.assert_allclose(linear_backward_input(dy, w), np.einsum("to,oi->ti", dy, w), rtol=1e-12, atol=1e-14)
    dw, db = np.ones((outs, ins)), np.ones(outs)
    linear_backward_weight(dw, dy, x)
    linear_backward_bias(db, dy)
    np.testing.assert_allclose(dw, 1 + np.einsum("to,ti->oi", dy, x), rtol=1e-12)
    np.testing.assert_allclose(db, 1 + dy.sum(axis=0), rtol=1e-12)
