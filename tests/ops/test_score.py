"""A number for each row of hidden states, on the NumPy shelf: the formula, the gradient, the dtypes."""

import numpy as np
import pytest
from check import check_formula, check_gradient, normal

from cukit import ops
from cukit.autograd import Parameter, Tensor
from cukit.backend.dtypes import DTYPES
from cukit.backend.numpy import score_backward, score_forward

SIZES = [(1, 1), (0, 8), (3, 13), (11, 32)]


@pytest.mark.parametrize("rows, columns", SIZES)
def test_scores_against_their_formula(rows, columns):
    def formula(hidden, weight):
        return (hidden * weight).sum(axis=1)

    check_formula("score_forward", lambda h, w: formula(h, w), normal(rows, columns), normal(1, columns, seed=1))


@pytest.mark.parametrize("rows, columns", [size for size in SIZES if size[0]])
def test_gradient(rows, columns):
    check_gradient(ops.score, normal(rows, columns), normal(1, columns, seed=1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_scores_are_float32_or_better_and_the_gradient_is_the_hidden_states_own(dtype):
    hidden = normal(5, 24).astype(DTYPES[dtype])
    wide = np.float64 if dtype == "float64" else np.float32
    weight, dweight = normal(1, 24, seed=1).astype(wide), np.ones((1, 24), wide)
    scores = score_forward(hidden, weight)
    assert scores.dtype == wide
    np.testing.assert_allclose(scores, hidden.astype(float) @ weight[0].astype(float), rtol=1e-4)
    dhidden = score_backward(dweight, scores, hidden, weight)
    assert dhidden.dtype == hidden.dtype
    np.testing.assert_allclose(dweight[0], 1 + scores @ hidden.astype(wide), rtol=1e-4, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_passes_one_on():
    hidden, weight = Tensor(normal(3, 4), requires_grad=True), Parameter(normal(1, 4, seed=1))
    weight.requires_grad = False
    ops.score(hidden, weight).sum().backward()
    np.testing.assert_array_equal(hidden.grad, np.repeat(weight.data, 3, axis=0))
    assert weight.grad is None


def test_a_weight_of_another_shape_is_refused():
    for shape in ((2, 4), (4,), (1, 5)):
        with pytest.raises(ValueError, match=r"want \(N, C\) and \(1, C\)"):
            score_forward(normal(3, 4), normal(*shape))
