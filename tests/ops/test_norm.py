"""RMSNorm on the NumPy shelf against its formula, alone and after the residual addition."""

import numpy as np
import pytest
from check import check_formula, normal

from cukit.backend.dtypes import DTYPES
from cukit.backend.numpy import add_rms_norm_forward, rms_norm_forward


def formula(x, w, eps):
    rstd = (np.square(x).mean(axis=-1, keepdims=True) + eps) ** -0.5
    return x * rstd * w, rstd


@pytest.mark.parametrize("rows, columns", [(1, 1), (0, 8), (3, 13)])
def test_norms_against_their_formula(rows, columns):
    x, residual, w = normal(rows, columns), normal(rows, columns, seed=1), normal(columns)
    check_formula("rms_norm_forward", formula, x, w, 1e-5)

    def after_addition(x, residual, w, eps):
        y, rstd = formula(x + residual, w, eps)
        return y, x + residual, rstd

    check_formula("add_rms_norm_forward", after_addition, x, residual, w, 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_sum_is_rounded_before_it_is_normalised(dtype):
    x, residual = (normal(5, 24, seed=seed).astype(DTYPES[dtype]) for seed in (0, 1))
    w = np.ones(24, np.float32)
    y, summed, rstd = add_rms_norm_forward(x, residual, w, 1e-6)
    assert summed.dtype == x.dtype and rstd.dtype == np.float32
    again, _ = rms_norm_forward(summed, w, 1e-6)
    assert again.tobytes() == y.tobytes()
