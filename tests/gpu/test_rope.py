"""q/k norm and rotary kernels against NumPy. Run on a machine with a GPU: pytest -m gpu tests/gpu/test_rope.py"""

import numpy as np
import pytest
from check import DTYPES, Sum, check_kernel, normal, statistics

from cukit.backend import backend_for

pytestmark = pytest.mark.gpu
# T, H, K, D: every variant's edges, halves that are no multiple of a vector, an empty batch
SIZES = [
    (1, 1, 1, 2),
    (7, 7, 1, 6),
    (3, 4, 2, 64),
    (0, 2, 1, 64),
    (5, 3, 1, 66),
    (3, 2, 2, 80),
    (997, 16, 8, 128),
    (2, 2, 1, 194),
    (29, 4, 1, 256),
    (60, 14, 2, 64),
]


def inputs(tokens, heads, kv_heads, head_dim, seed=0):
    generator = np.random.default_rng(seed)
    angles = generator.uniform(0, 6, (50, head_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = generator.integers(0, 50, tokens).astype(np.int32)
    q_weight, k_weight = statistics(head_dim, around=1, scale=0.1), statistics(head_dim, seed=5, around=1, scale=0.1)
    return normal(tokens, (heads + 2 * kv_heads) * head_dim, seed=seed), q_weight, k_weight, cos, sin, positions


@pytest.mark.parametrize("tokens, heads, kv_heads, head_dim", SIZES)
def test_forward(tokens, heads, kv_heads, head_dim):
    qkv, q_weight, k_weight, *angles = inputs(tokens, heads, kv_heads, head_dim)
    check_kernel("qk_norm_rope_forward", qkv, q_weight, k_weight, *angles, heads, kv_heads, 1e-6)
    check_kernel("qk_norm_rope_forward", qkv, None, None, *angles, heads, kv_heads, 1e-6)


@pytest.mark.parametrize("tokens, heads, kv_heads, head_dim", SIZES)
def test_backward(tokens, heads, kv_heads, head_dim):
    qkv, q_weight, k_weight, *angles = inputs(tokens, heads, kv_heads, head_dim)
    turned = qkv.reshape(tokens, heads + 2 * kv_heads, head_dim)[:, : heads + kv_heads]
    rstd = (1 / np.sqrt(np.square(turned).mean(-1, keepdims=True) + 1e-6)).astype(np.float32)
    dout, rest = normal(*qkv.shape, seed=6), (*angles, heads, kv_heads)
    sums = Sum(statistics(head_dim, seed=7)), Sum(statistics(head_dim, seed=8))
    check_kernel("qk_norm_rope_backward", *sums, dout, qkv, q_weight, k_weight, rstd, *rest)
    check_kernel("qk_norm_rope_backward", None, None, dout, qkv, q_weight, k_weight, rstd, *rest)
    check_kernel("qk_norm_rope_backward", None, None, dout, qkv, None, None, None, *rest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(14, 2, 64), (16, 8, 128), (3, 1, 6)])
def test_a_token_alone_has_the_bits_of_the_token_in_a_batch(dtype, heads, kv_heads, head_dim):
    be = backend_for("cuda")
    qkv, *rest = inputs(201, heads, kv_heads, head_dim)
    qkv = be.array(qkv.astype(be.dtype_of(dtype)))
    q_weight, k_weight, cos, sin, positions = (be.array(x) for x in rest)
    out, rstd = be.qk_norm_rope_forward(qkv, q_weight, k_weight, cos, sin, positions, heads, kv_heads, 1e-6)
    for token in (0, 1, 100, 200):
        part = slice(token, token + 1)
        alone, rstd_alone = be.qk_norm_rope_forward(
            qkv[part].copy(), q_weight, k_weight, cos, sin, positions[part].copy(), heads, kv_heads, 1e-6
        )
        assert np.array_equal(be.to_numpy(alone), be.to_numpy(out)[part]) and np.array_equal(
            be.to_numpy(rstd_alone), be.to_numpy(rstd)[part]
        )


def test_wrong_inputs_are_refused():
    be = backend_for("cuda")
    cos, positions = be.zeros((9, 32), "float32"), be.zeros((3,), "int32")
    for columns, tokens, words in (
        (4 * 65, 3, "even and at most 256, got 65"),
        (4 * 64, 2, "3 positions"),
        (4 * 62, 3, "do not fit"),
    ):
        with pytest.raises(ValueError, match=words):
            be.qk_norm_rope_forward(
                be.zeros((tokens, columns), "bfloat16"), None, None, cos, cos, positions, 2, 1, 1e-6
            )
