"""The q/k norm and the rotary embedding on the NumPy shelf against complex numbers."""

import numpy as np
import pytest
from check import check_formula, normal


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("heads, kv_heads, dim", [(1, 1, 2), (6, 2, 10)])
def test_rope_against_complex_numbers(heads, kv_heads, dim, with_norm):
    half, positions = dim // 2, np.array([0, 3, 3, 8], np.int32)
    angles = np.outer(np.arange(9), 0.3 ** np.arange(half))

    def formula(qkv, q_weight, k_weight, cos, sin, positions, heads, kv_heads, eps):
        x = qkv.reshape(len(qkv), heads + 2 * kv_heads, dim).copy()
        turned = x[:, : heads + kv_heads]
        rstd = None
        if with_norm:
            rstd = (np.square(turned).mean(axis=2, keepdims=True) + eps) ** -0.5
            turned *= rstd
            turned[:, :heads] *= q_weight
            turned[:, heads:] *= k_weight
        pairs = (turned[:, :, :half] + 1j * turned[:, :, half:]) * np.exp(1j * angles[positions])[:, None]
        turned[:, :, :half], turned[:, :, half:] = pairs.real, pairs.imag
        return x.reshape(qkv.shape), rstd

    weights = (normal(dim), normal(dim, seed=1)) if with_norm else (None, None)
    qkv = normal(4, (heads + 2 * kv_heads) * dim)
    tables = (np.cos(angles), np.sin(angles))
    check_formula("qk_norm_rope_forward", formula, qkv, *weights, *tables, positions, heads, kv_heads, 1e-6)
