"""Weights of 8 bits on the NumPy shelf: codes, scales, the errors that rounding may make, products."""

import ml_dtypes
import numpy as np
import pytest

from cukit.backend import backend_for, e4m3

KINDS = {"int8": np.int8, "fp8": np.uint8}


def quantized(w, kind):
    q, scale = np.empty(w.shape, KINDS[kind]), np.empty(len(w), np.float32)
    backend_for("cpu").quantize_weight(q, scale, w)
    return q, scale


def numbers(q):
    return e4m3.decode(q, np.float64) if q.dtype == np.uint8 else q.astype(np.float64)


def test_codes_are_those_of_ml_dtypes():
    """Written without it, since a kernel and this table must agree; ml_dtypes says what E4M3 is."""
    theirs = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(e4m3.VALUES, theirs, equal_nan=True)
    finite = ~np.isnan(e4m3.VALUES)
    assert np.array_equal(e4m3.encode(e4m3.VALUES[finite]), np.arange(256)[finite])
    assert e4m3.decode(np.array([0x38, 0xC0], np.uint8), ml_dtypes.bfloat16).tolist() == [1.0, -2.0]


@pytest.mark.parametrize("seed", range(20))
def test_encode_rounds_as_ml_dtypes(seed):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(5000) * 10.0 ** generator.uniform(-5, 3, 5000)
    halves = (e4m3.VALUES[:126] + e4m3.VALUES[1:127]) / 2  # exactly between two codes
    x = np.concatenate([x, halves, -halves, np.nextafter(halves, 0), [0.0, -0.0]]).astype(np.float32)
    x = x[np.abs(x) <= 448]
    assert np.array_equal(e4m3.encode(x), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_what_no_code_holds():
    x = np.array([449, 1e30, np.inf, -np.inf, np.nan], np.float32)
    assert e4m3.decode(e4m3.encode(x)).tolist() == [448, 448, 448, -448, 448]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("seed", range(5))
def test_a_weight_comes_back_within_half_a_step(kind, dtype, seed):
    """int8: half of scale. E4M3: 1/16 of a number's size, or half of the smallest code, 2^-10 · scale. The scale and
    the quotient are float32: up to 127 steps times 2^-23 beyond, which is 3.1e-5 of half a step.
    """
    generator = np.random.default_rng(seed)
    rows, cols = generator.integers(1, 40, 2)
    w = (generator.standard_normal((rows, cols)) * 10.0 ** generator.uniform(-3, 2, (rows, 1))).astype(
        backend_for("cpu").dtype_of(dtype)
    )
    q, scale = quantized(w, kind)
    wide = w.astype(np.float64)
    limit = 127 if kind == "int8" else 448
    np.testing.assert_allclose(scale, np.abs(wide).max(axis=1) / limit, rtol=1e-6)
    found = numbers(q) * scale[:, None].astype(np.float64)
    step = scale[:, None] / 2 if kind == "int8" else np.maximum(np.abs(wide) / 16, scale[:, None] * 2.0**-10)
    assert (np.abs(found - wide) <= step * (1 + 3.1e-5)).all()
    assert np.abs(numbers(q)).max() == limit, "the largest number of a row uses the largest code"
    back = np.empty_like(w)
    backend_for("cpu").dequantize_weight(back, q, scale)
    assert np.array_equal(back, (numbers(q).astype(np.float32) * scale[:, None]).astype(w.dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_and_rows_that_are_not_finite(kind):
    w = np.ones((5, 3), np.float32)
    w[0], w[1, 1], w[2, 2], w[3] = 0, np.nan, -np.inf, 1e-38
    q, scale = quantized(w, kind)
    y = backend_for("cpu").quantized_linear_forward(np.ones((1, 3), np.float32), q, scale)[0]
    assert y[0] == 0 and np.isnan(y[1:3]).all() and y[3] == 0 and y[4] == pytest.approx(3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, ins, outs", [(1, 1, 1), (3, 17, 5), (0, 4, 3), (33, 130, 70)])
def test_product(kind, rows, ins, outs):
    generator = np.random.default_rng([rows, ins, outs])
    x, w, bias, addend = (generator.standard_normal(s) for s in ((rows, ins), (outs, ins), (outs,), (rows, outs)))
    q, scale = quantized(w, kind)
    be = backend_for("cpu")
    exact = x @ (numbers(q) * scale[:, None]).T
    np.testing.assert_allclose(be.quantized_linear_forward(x, q, scale), exact, rtol=1e-12, atol=1e-12)
    found = be.quantized_linear_forward(x, q, scale, bias, addend)
    np.testing.assert_allclose(found, exact + bias + addend, rtol=1e-12, atol=1e-12)
    if rows:
        half = x.astype(ml_dtypes.bfloat16)
        found = be.quantized_linear_forward(half, q, scale)
        exact = half.astype(np.float64) @ (numbers(q) * scale[:, None]).T
        assert found.dtype == half.dtype
        # one rounding to 8 bits, and float32 sums of ins terms
        allowed = (
            np.abs(exact) * 2.0**-8 + np.abs(half.astype(float)).sum(1)[:, None] * np.abs(w).max() * ins * 2.0**-23
        )
        assert (np.abs(found.astype(np.float64) - exact) <= allowed).all()


def test_large_weights_are_worked_on_in_parts(monkeypatch):
    from cukit.backend.numpy import quantized as shelf

    w, x = np.random.default_rng(0).standard_normal((50, 30)), np.ones((2, 30))
    whole = quantized(w, "fp8")
    y = backend_for("cpu").quantized_linear_forward(x, *whole)
    monkeypatch.setattr(shelf, "CHUNK", 100)
    parts = quantized(w, "fp8")
    assert all(np.array_equal(a, b) for a, b in zip(whole, parts))
    np.testing.assert_allclose(backend_for("cpu").quantized_linear_forward(x, *parts), y, rtol=1e-12)
