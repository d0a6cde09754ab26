"""RMSNorm on the NumPy shelf against its formula, alone and after the residual addition."""

import numpy as np
import pytest
from check import check_formula, normal

from cukit.backend.dtypes import DTYPES
from cukit.backend.numpy import add_rms_norm_forward, rms_norm_forward, sum_add_rms_norm_forward


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


@pytest.mark.parametrize("rows, columns", [(1, 1), (0, 8), (3, 13)])
@pytest.mark.parametrize("count", [2, 3])
def test_the_norm_of_a_sum_of_parts_against_its_formula(count, rows, columns):
    def after_additions(parts, residual, w, eps):
        y, rstd = formula(parts.sum(0) + residual, w, eps)
        return y, parts.sum(0) + residual, rstd

    parts, residual, w = normal(count, rows, columns), normal(rows, columns, seed=1), normal(columns)
    check_formula("sum_add_rms_norm_forward", after_additions, parts, residual, w, 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_are_added_in_float32_and_rounded_once(dtype):
    parts = np.array([1, 1 / 1024, 1 / 1024, 1 / 1024]).astype(DTYPES[dtype])[:, None, None]
    parts = np.concatenate([parts * DTYPES[dtype].type(8)] * 4)
    total = parts.astype(np.float32).sum(0).astype(parts.dtype)
    zero, w = np.zeros((1, 1), parts.dtype), np.ones(1, np.float32)
    _, summed, _ = sum_add_rms_norm_forward(parts, zero, w, 1e-6)
    assert summed == total == np.float32(32 + 12 / 128).astype(parts.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_sum_is_rounded_before_it_is_normalised(dtype):
    x, residual = (normal(5, 24, seed=seed).astype(DTYPES[dtype]) for seed in (0, 1))
    w = np.ones(24, np.float32)
    y, summed, rstd = add_rms_norm_forward(x, residual, w, 1e-6)
    assert summed.dtype == x.dtype and rstd.dtype == np.float32
    again, _ = rms_norm_forward(summed, w, 1e-6)
    assert again.tobytes() == y.tobytes()
