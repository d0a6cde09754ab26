"""AdamW and the sum of squares on the GPU."""

import math

import numpy as np
import pytest
from check import DTYPES, normal, statistics

from cukit.backend import backend_for

pytestmark = pytest.mark.gpu


def state(size, dtype, own_param):
    master, grad = statistics(size, seed=1), statistics(size, seed=2, scale=100.0)
    m, v = statistics(size, seed=3), np.abs(statistics(size, seed=4))
    param = master.astype(dtype) if own_param else None
    return master, m, v, grad, param


@pytest.mark.parametrize("size", [0, 1, 3, 211, 4096, 100_003])
@pytest.mark.parametrize("dtype", [*DTYPES, "master"])
def test_steps_have_numpys_bits(dtype, size):
    """Three steps; "master" is a float32 parameter that is its own master. Only IEEE operations in one order: equal in
    every bit.
    """
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    own_param = dtype != "master"
    *arrays, param = state(size, cpu.dtype_of(dtype) if own_param else np.float32, own_param)
    host = [x.copy() for x in arrays]
    device = [cuda.array(x) for x in arrays]
    host_param, device_param = (param.copy(), cuda.array(param)) if own_param else (host[0], device[0])
    for step in (1, 2, 3):
        settings = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, grad_scale=0.37)
        cpu.adamw_step(*host, host_param, **settings)
        cuda.adamw_step(*device, device_param, **settings)
        for name, got, expected in zip(
            ("master", "m", "v", "grad", "param"), (*device, device_param), (*host, host_param)
        ):
            np.testing.assert_array_equal(cuda.to_numpy(got), expected, err_msg=f"{name} after step {step}")


def test_an_unaligned_view_is_stepped_in_place():
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    *arrays, param = state(1003, cpu.dtype_of("bfloat16"), True)
    whole = [cuda.array(x) for x in (*arrays, param)]
    parts = [x[1:1002] for x in whole]
    host = [x[1:1002].copy() for x in (*arrays, param)]
    settings = dict(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=5, grad_scale=1.0)
    cuda.adamw_step(*parts, **settings)
    cpu.adamw_step(*host, **settings)
    for got, expected, before in zip(whole, host, (*arrays, param)):
        got = cuda.to_numpy(got)
        np.testing.assert_array_equal(got[1:1002], expected)
        assert got[0] == before[0] and got[1002] == before[1002]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_squares(dtype):
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    arrays = [
        normal(*shape, seed=7).astype(cpu.dtype_of(dtype))
        for shape in ((1,), (211,), (64, 1024), (0,), (1000, 1003), (5, 7))
    ]
    arrays.append(statistics(333))
    device = [cuda.array(x) for x in arrays]
    found = cuda.sum_of_squares(device)
    assert isinstance(found, float)
    np.testing.assert_allclose(found, cpu.sum_of_squares(arrays), rtol=1e-13)
    assert found == cuda.sum_of_squares(device)


def test_sum_of_squares_of_what_is_not_finite_or_not_there():
    cuda = backend_for("cuda")
    assert cuda.sum_of_squares([]) == 0.0
    assert cuda.sum_of_squares([cuda.array(np.zeros(0, np.float32))]) == 0.0
    x = statistics(5000)
    for bad, check in ((np.nan, math.isnan), (np.inf, math.isinf), (-np.inf, math.isinf)):
        x[4999] = bad
        assert check(cuda.sum_of_squares([cuda.array(statistics(10)), cuda.array(x)]))
    assert math.isfinite(cuda.sum_of_squares([cuda.array(np.full(100, 3e38, np.float32))]))


@pytest.mark.slow
def test_more_than_2_to_31_elements():
    cuda = backend_for("cuda")
    size = 2**31 + 12345
    x = cuda.zeros((size,), np.float32)
    for where in (0, 2**31 - 1, 2**31, size - 1):
        x[where] = 2.0
    assert cuda.sum_of_squares([x]) == 16.0
    master, m, v = (cuda.zeros((size,), np.float32) for _ in range(3))
    cuda.adamw_step(
        master, m, v, x, master, lr=1.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1, grad_scale=1.0
    )
    assert [float(master[i]) for i in (1, 2**31 - 2, size - 2)] == [0.0, 0.0, 0.0]
    np.testing.assert_allclose([float(master[i]) for i in (0, 2**31 - 1, 2**31, size - 1)], -1.0, rtol=1e-6)
