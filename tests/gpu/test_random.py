"""Normal noise on the GPU: the NumPy shelf's numbers to rounding."""

import numpy as np
import pytest
from check import DTYPES

from cukit.backend import backend_for

pytestmark = pytest.mark.gpu


def both(size, seed, scale, dtype):
    """(the GPU's numbers, NumPy's in float64)."""
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    got, true = cuda.zeros((size,), cuda.dtype_of(dtype)), cpu.zeros((size,), np.float64)
    cuda.fill_normal(got, seed, scale)
    cpu.fill_normal(true, seed, scale)
    return cuda.to_numpy(got).astype(np.float64), true


@pytest.mark.parametrize("size", [0, 1, 3, 211, 4096, 1_000_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_numpy(dtype, size):
    """The radius and the angle's sine are within some float32 ulps; a half type then rounds once."""
    got, true = both(size, 2**33 + 5, 0.02, dtype)
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}[dtype]
    # The radius, at most 6.7, and the sine may be off by 2 ulps each, the product by half of one: 6.7 · 4.5 · 2^-24.
    # A subnormal float16 is off by half its spacing.
    absolute = 0.02 * 2e-6 + (2.0**-25 if dtype == "float16" else 0.0)
    assert (np.abs(got - true) <= absolute + rounding * np.abs(true)).all()


def test_views_get_the_numbers_of_their_own_places_only():
    cuda = backend_for("cuda")
    whole = cuda.zeros((1003,), cuda.dtype_of("bfloat16"))
    cuda.fill_normal(whole[1:1002], 9, 1.0)
    alone = cuda.zeros((1001,), cuda.dtype_of("bfloat16"))
    cuda.fill_normal(alone, 9, 1.0)
    host = cuda.to_numpy(whole)
    np.testing.assert_array_equal(host[1:1002], cuda.to_numpy(alone))
    assert host[0] == 0 and host[1002] == 0


@pytest.mark.slow
def test_more_than_2_to_31_numbers():
    """A place beyond 2^31 has the number that its counter gives."""
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    x = cuda.zeros((2**31 + 4096,), cuda.dtype_of("bfloat16"))
    cuda.fill_normal(x, 1, 1.0)
    short = cpu.zeros((4096,), np.float64)
    cpu.fill_normal(short, 1, 1.0)
    np.testing.assert_allclose(cuda.to_numpy(x[:4096]).astype(np.float64), short, rtol=2**-8, atol=1e-5)
    tail = cuda.to_numpy(x[-4096:]).astype(np.float64)
    assert abs(tail.mean()) < 0.1 and abs(tail.std() - 1) < 0.1 and not np.array_equal(tail, short)
