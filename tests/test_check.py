"""The rule by which kernels are judged (check.py): what it lets through, and what the maximum alone would miss."""

import numpy as np
import pytest
from check import check_errors, normal, rms, ulp

from cukit.backend.dtypes import DTYPES


def product(x, w, part, dtype, rounds):
    """x wᵀ summed over parts of the inner axis in float32; `rounds`: the running sum is stored in dtype after each."""
    total = np.zeros((len(x), len(w)), np.float32)
    for start in range(0, x.shape[1], part):
        total += x[:, start : start + part].astype(np.float32) @ w[:, start : start + part].astype(np.float32).T
        if rounds:
            total = total.astype(dtype).astype(np.float32)
    return total.astype(dtype).astype(np.float64)


def case(rows, inner, outs, dtype, seed):
    """x, w in dtype, the truth, and the yardstick: one float32 product, rounded once."""
    x, w = (normal(n, inner, seed=seed + n).astype(dtype) for n in (rows, outs))
    return x, w, x.astype(np.float64) @ w.astype(np.float64).T, product(x, w, inner, dtype, False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_order_of_adding_passes_at_every_size(dtype):
    for seed in range(60):
        for rows, outs in ((1, 1), (1, 2), (1, 3), (7, 1), (5, 13), (64, 64)):
            x, w, true, near = case(rows, 96, outs, DTYPES[dtype], seed)
            check_errors("a right kernel", product(x, w, 16, DTYPES[dtype], False), near, true, DTYPES[dtype])


def test_the_rms_rule_catches_sums_that_are_kept_in_bfloat16():
    """An accumulator rounded to bfloat16 after every 32 products: no single error is beyond what the maximum allows."""
    dtype = DTYPES["bfloat16"]
    x, w, true, near = case(64, 1024, 64, dtype, 0)
    got = product(x, w, 32, dtype, True)
    allowed = 2 * np.abs(near - true).max() + ulp(np.abs(true).max(), dtype)
    assert np.abs(got - true).max() <= allowed, "the maximum alone lets it through"
    with pytest.raises(AssertionError, match="rms error"):
        check_errors("a broken kernel", got, near, true, dtype)


def test_the_rms_rule_catches_small_values_with_the_error_of_large_ones():
    """Results of many sizes, rounded at one step: what a scale a row, or a fixed point, would do."""
    dtype = DTYPES["bfloat16"]
    true = normal(4096, 1)[:, 0] * 10.0 ** np.linspace(-4, 0, 4096)
    near = true.astype(dtype).astype(np.float64)
    step = ulp(np.abs(true).max(), dtype)
    got = np.round(true / step) * step
    assert np.abs(got - true).max() <= step
    with pytest.raises(AssertionError, match="rms error"):
        check_errors("a broken kernel", got, near, true, dtype)


def test_one_correct_rounding_has_the_rms_that_the_rule_assumes():
    for dtype in ("bfloat16", "float16"):
        true = normal(200_000)
        error = true.astype(DTYPES[dtype]).astype(np.float64) - true
        assert rms(error) == pytest.approx(rms(ulp(np.abs(true), dtype)) / 12**0.5, rel=0.02)


def test_the_maximum_rule_holds_in_float32_too():
    true = normal(100)
    check_errors("right", true.astype(np.float32).astype(np.float64), true, true, np.float32)
    wrong = true.copy()
    wrong[3] += 3 * ulp(np.abs(true).max(), np.float32)
    with pytest.raises(AssertionError, match="a wrong one: error"):
        check_errors("a wrong one", wrong, true, true, np.float32)
