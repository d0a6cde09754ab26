"""SwiGLU kernels against NumPy. Run on a machine with a GPU: pytest -m gpu tests/gpu/test_activation.py"""

import numpy as np
import pytest
from check import DTYPES, check_kernel, normal

from cukit.backend import backend_for

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows, width", [(1, 1), (1, 8), (3, 13), (0, 16), (19, 1024), (101, 1100), (5, 8191)])
def test_against_numpy(rows, width):
    gate_up = normal(rows, 2 * width, scale=3)
    check_kernel("silu_mul_forward", gate_up)
    check_kernel("silu_mul_backward", normal(rows, width, seed=1), gate_up)
    check_kernel("silu_mul_backward_remade", normal(rows, width, seed=1), gate_up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 13), (65, 3072), (5, 8191)])
def test_what_is_remade_has_the_bits_of_the_forward_pass(rows, width, dtype):
    """And the gradient those of the kernel that writes it alone; gates beyond what a sigmoid tells apart too."""
    be = backend_for("cuda")
    gate_up, dy = (
        be.array(x.astype(be.dtype_of(dtype))) for x in (normal(rows, 2 * width, scale=30), normal(rows, width))
    )
    dgate_up, y = be.silu_mul_backward_remade(dy, gate_up)
    assert be.to_numpy(y).tobytes() == be.to_numpy(be.silu_mul_forward(gate_up)).tobytes()
    assert be.to_numpy(dgate_up).tobytes() == be.to_numpy(be.silu_mul_backward(dy, gate_up)).tobytes()


def test_large_gates_do_not_overflow():
    gate_up = np.concatenate([np.linspace(-200, 200, 400), np.ones(400)])[None]
    check_kernel("silu_mul_forward", gate_up)
    check_kernel("silu_mul_backward", np.ones((1, 400)), gate_up)
    check_kernel("silu_mul_backward_remade", np.ones((1, 400)), gate_up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(dtype):
    be = backend_for("cuda")
    for width in (13, 3072):
        gate_up = be.array(normal(65, 2 * width).astype(be.dtype_of(dtype)))
        y = be.to_numpy(be.silu_mul_forward(gate_up))
        for row in (0, 1, 64):
            assert np.array_equal(be.to_numpy(be.silu_mul_forward(gate_up[row : row + 1].copy()))[0], y[row])


@pytest.mark.slow
def test_more_than_2_to_31_elements():
    be = backend_for("cuda")
    width, rows = 1 << 20, 1100
    gate_up = be.zeros((rows, 2 * width), "bfloat16")
    last = normal(1, 2 * width).astype(be.dtype_of("bfloat16"))
    gate_up[-1:] = be.array(last)
    y = be.silu_mul_forward(gate_up)
    assert (
        np.array_equal(be.to_numpy(y[-1:]), be.to_numpy(be.silu_mul_forward(be.array(last))))
        and not be.to_numpy(y[:2]).any()
    )
    dgate_up, again = be.silu_mul_backward_remade(y, gate_up)
    assert np.array_equal(be.to_numpy(again[-1:]), be.to_numpy(y[-1:]))
    del again
    assert np.array_equal(be.to_numpy(dgate_up[-1:]), be.to_numpy(be.silu_mul_backward(y[-1:], gate_up[-1:])))
