"""Weights of 8 bits on a card against NumPy. Run on a machine with a GPU: pytest -m gpu tests/gpu/test_quantized.py"""

import numpy as np
import pytest
from check import DTYPES, check_errors, check_kernel, normal

from cukit.backend import backend_for

pytestmark = pytest.mark.gpu
KINDS = {"int8": np.int8, "fp8": np.uint8}
SIZES = [(1, 64, 32), (2, 13, 7), (3, 1, 1), (8, 16, 33), (9, 208, 130), (16, 520, 70), (0, 16, 8), (11, 70, 65)]
SIZES += [(12, 160, 257), (15, 1024, 96), (10, 48, 4100), (16, 96, 4099), (7, 24, 4096)]


def quantized(outs, ins, kind):
    q, scale = np.empty((outs, ins), KINDS[kind]), np.empty(outs, np.float32)
    backend_for("cpu").quantize_weight(q, scale, normal(outs, ins, seed=1, scale=ins**-0.5).astype(np.float32))
    return q, scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, ins, outs", SIZES)
def test_product_against_numpy(rows, ins, outs, kind):
    x, (q, scale) = normal(rows, ins), quantized(outs, ins, kind)
    check_kernel("quantized_linear_forward", x, q, scale)
    check_kernel("quantized_linear_forward", x, q, scale, normal(outs, seed=3), normal(rows, outs, seed=4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, ins, outs", [(17, 40, 33), (64, 1024, 96), (600, 208, 130)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_against_numpy(rows, ins, outs, kind, dtype):
    """The weight is rounded to the model's dtype there, and the addend comes after a rounding of its own."""
    device, host = backend_for("cuda"), backend_for("cpu")
    q, scale = quantized(outs, ins, kind)
    dtype = host.dtype_of(dtype)
    arrays = [normal(*s, seed=n).astype(dtype) for n, s in enumerate(((rows, ins), (outs,), (rows, outs)))]
    x, bias, addend = arrays
    true = host.quantized_linear_forward(x.astype(float), q, scale, bias.astype(float), addend.astype(float))
    w = np.empty(q.shape, dtype)
    host.dequantize_weight(w, q, scale)
    product = host.linear_forward(x, w, bias).astype(np.float32) + addend.astype(np.float32)
    x, bias, addend, q, scale = map(device.array, (*arrays, q, scale))
    got = [device.to_numpy(device.quantized_linear_forward(x, q, scale, bias, addend)) for _ in range(2)]
    assert got[0].tobytes() == got[1].tobytes() and got[0].dtype == dtype
    check_errors("many rows", got[0].astype(float), product.astype(dtype).astype(float), true, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ins, outs", [(200, 70), (64, 4100)])
def test_a_row_has_the_same_bits_at_every_row_count(ins, outs, dtype, kind):
    be = backend_for("cuda")
    q, scale = map(be.array, quantized(outs, ins, kind))
    x = be.array(normal(16, ins).astype(be.dtype_of(dtype)))
    whole = be.to_numpy(be.quantized_linear_forward(x, q, scale))
    for rows in (1, 2, 7, 8, 9, 15):
        part = be.to_numpy(be.quantized_linear_forward(x[:rows], q, scale))
        assert part.tobytes() == whole[:rows].tobytes(), rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_read_exactly(kind, dtype):
    """One weight a row and x = 1: y is the number itself."""
    be, host = backend_for("cuda"), backend_for("cpu")
    q = np.arange(256, dtype=np.uint8)
    q = q[q & 0x7F != 0x7F][:, None] if kind == "fp8" else q.view(np.int8)[:, None]
    ones = np.ones(len(q), np.float32)
    x = np.ones((16, 1), host.dtype_of(dtype))
    true = host.quantized_linear_forward(x, q, ones)
    for rows in (1, 16):
        got = be.to_numpy(be.quantized_linear_forward(be.array(x[:rows]), be.array(q), be.array(ones)))
        assert got.tobytes() == true[:rows].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols", [(1, 1), (3, 17), (70, 1030), (65, 256), (0, 8)])
def test_weights_have_numpys_bits(rows, cols, dtype, kind):
    device, host = backend_for("cuda"), backend_for("cpu")
    w = normal(rows, cols) * 10.0 ** normal(rows, 1, seed=1) * 0.01
    if rows > 2:
        w[0], w[1, 2], w[2, 1] = 0, np.nan, np.inf
    w = w.astype(host.dtype_of(dtype))
    found = []
    for be in (host, device):
        q, scale, back = be.zeros(w.shape, KINDS[kind]), be.zeros((rows,), np.float32), be.array(w)
        be.quantize_weight(q, scale, be.array(w))
        be.dequantize_weight(back, q, scale)
        found.append([be.to_numpy(x) for x in (q, scale, back)])
    for ours, theirs in zip(*found):
        np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(np.float32))


@pytest.mark.slow
def test_weights_with_more_rows_than_a_grid_has():
    be = backend_for("cuda")
    w = be.array(normal(70001, 16).astype(np.float32))
    q, scale, back = be.zeros(w.shape, np.int8), be.zeros((len(w),), np.float32), be.zeros(w.shape, np.float32)
    be.quantize_weight(q, scale, w)
    be.dequantize_weight(back, q, scale)
    error, one = np.abs(be.to_numpy(back) - be.to_numpy(w)), be.to_numpy(scale)
    assert (error <= one[:, None] * 0.5001).all()


def test_wrong_inputs_are_refused():
    be = backend_for("cuda")
    q, scale, x = be.zeros((8, 16), np.int8), be.zeros((8,), np.float32), be.zeros((4, 16), "float16")
    with pytest.raises(ValueError, match="does not fit"):
        be.quantized_linear_forward(be.zeros((4, 8), "float16"), q, scale)
    with pytest.raises(ValueError, match="int8 or uint8"):
        be.quantized_linear_forward(x, be.zeros((8, 16), np.float32), scale)
    with pytest.raises(ValueError, match="bias"):
        be.quantized_linear_forward(x, q, scale, be.zeros((9,), "float16"))
