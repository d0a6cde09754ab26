"""SwiGLU on the NumPy shelf against its formula. Gradients: test_gradients.py; the kernel: tests/gpu."""

import numpy as np
import pytest
from check import check_formula, normal

from cukit.backend.numpy import silu_mul_forward


@pytest.mark.parametrize("rows, width", [(1, 1), (0, 4), (3, 13)])
def test_silu_mul_against_its_formula(rows, width):
    def formula(gate_up):
        gate, up = gate_up[:, :width], gate_up[:, width:]
        return gate / (1 + np.exp(-gate)) * up

    check_formula("silu_mul_forward", formula, normal(rows, 2 * width, scale=3))


def test_silu_mul_does_not_overflow():
    y = silu_mul_forward(np.array([[1e4, -1e4, 2, 2]], np.float32))
    np.testing.assert_array_equal(y, [[2e4, 0]])
