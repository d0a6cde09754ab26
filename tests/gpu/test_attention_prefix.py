"""Attention of sequences that share the rows of a prefix, on the GPU: the bits of the same sequences without sharing,
gradients against NumPy. Run: pytest -m gpu tests/gpu/test_attention_prefix.py
"""

import numpy as np
import pytest
from check import check_kernel, normal
from shared_prefixes import packing, random_groups

from cukit.backend import backend_for
from cukit.backend.numpy import attention_forward

pytestmark = pytest.mark.gpu
HEADS = [(2, 2), (3, 1), (8, 2)]  # 1, 3 and 4 query heads of a key head
DIMS = [64, 96, 128]
GROUPS = [
    [(1, [1]), (3, [0, 2]), (5, [])],
    [(300, [1, 64, 0, 257, 520]), (0, [5, 130, 0]), (1, [3, 0])],
    [(256, [256, 1, 63]), (255, [1, 2]), (64, [64, 64, 65])],
    [(700, [13, 40, 333]), (65, [7] * 16)],
    random_groups(7, 600),
]


@pytest.fixture
def gpu():
    return backend_for("cuda")


def inputs(groups, heads, kv_heads, dim):
    packed = packing(groups)
    return normal(int(packed.cu_seqlens[-1]), (heads + 2 * kv_heads) * dim), packed


def gradient_inputs(groups, heads, kv_heads, dim):
    qkv, packed = inputs(groups, heads, kv_heads, dim)
    o, lse = attention_forward(qkv, packed.cu_seqlens, heads, kv_heads, packed.prefixes)
    given = packed.cu_seqlens, heads, kv_heads, packed.prefixes
    return normal(*o.shape, seed=1), qkv, o, lse.astype(np.float32), *given


def same(first, second):
    assert first.tobytes() == second.tobytes(), f"{np.count_nonzero(first != second)} of {first.size} differ"


def passes(gpu, qkv, do, cu_seqlens, heads, kv_heads, prefixes=None):
    """o, lse and dqkv on the host."""
    given = gpu.array(cu_seqlens), heads, kv_heads, prefixes if prefixes is None else gpu.array(prefixes)
    qkv, do = gpu.array(qkv), gpu.array(do)
    o, lse = gpu.attention_forward(qkv, *given)
    return [gpu.to_numpy(x) for x in (o, lse, gpu.attention_backward(do, qkv, o, lse, *given))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_the_bits_are_those_without_sharing(gpu, heads, kv_heads, dim, groups, dtype):
    """o and lse of every row, and the gradient of its query."""
    qkv, packed = inputs(groups, heads, kv_heads, dim)
    qkv = qkv.astype(gpu.dtype_of(dtype))
    do = normal(len(qkv), heads * dim, seed=1).astype(qkv.dtype)
    o, lse, dqkv = passes(gpu, qkv, do, packed.cu_seqlens, heads, kv_heads, packed.prefixes)
    whole = passes(gpu, qkv[packed.rows], do[packed.rows], packed.whole_cu_seqlens, heads, kv_heads)
    same(o[packed.rows], whole[0])
    same(lse[packed.rows], whole[1])
    same(dqkv[packed.rows, : heads * dim], whole[2][:, : heads * dim])
    for first, again in zip(
        (o, lse, dqkv), passes(gpu, qkv, do, packed.cu_seqlens, heads, kv_heads, packed.prefixes), strict=True
    ):
        same(first, again)


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_gradients(heads, kv_heads, dim, groups):
    check_kernel("attention_backward", *gradient_inputs(groups, heads, kv_heads, dim))


@pytest.mark.parametrize("shape", [(4, 2, 80), (2, 1, 256), (2, 1, 12), (1, 1, 132)], ids=str)
def test_other_head_dims(shape):
    check_kernel("attention_backward", *gradient_inputs([(70, [1, 90, 33]), (0, [40])], *shape))


@pytest.mark.parametrize("count", [33, 700])
def test_many_short_sequences(count):
    """More sequences than find_piece probes at once."""
    draw = np.random.default_rng(count)
    groups = [(int(draw.integers(0, 5)), draw.integers(0, 4, draw.integers(0, 4)).tolist()) for _ in range(count)]
    check_kernel("attention_backward", *gradient_inputs(groups, 2, 1, 16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lengths", [[1, 7, 300], [0, 64, 65]], ids=str)
def test_without_a_prefix_all_bits_are_those_of_the_other_kernels(gpu, lengths, dtype):
    qkv, packed = inputs([(0, lengths)], 4, 2, 64)
    qkv = qkv.astype(gpu.dtype_of(dtype))
    do = normal(len(qkv), 256, seed=1).astype(qkv.dtype)
    for found, expected in zip(
        passes(gpu, qkv, do, packed.cu_seqlens, 4, 2, packed.prefixes),
        passes(gpu, qkv, do, packed.cu_seqlens, 4, 2),
        strict=True,
    ):
        same(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_no_sequence_are_zero(gpu, dtype):
    qkv, packed = inputs([(70, [5, 20])], 2, 1, 64)
    qkv, do = (normal(len(qkv) + 90, columns).astype(gpu.dtype_of(dtype)) for columns in (256, 128))
    given = packed.cu_seqlens, 2, 1, packed.prefixes
    for found, expected in zip(passes(gpu, qkv, do, *given), passes(gpu, qkv[:95], do[:95], *given), strict=True):
        same(found[:95], expected)
        assert found[:95].any() and not found[95:].any()


def test_refusals(gpu):
    qkv, packed = gpu.zeros((3, 256), np.float32), packing([(1, [2])])
    cu_seqlens, prefixes = gpu.array(packed.cu_seqlens), gpu.array(packed.prefixes)
    with pytest.raises(ValueError, match=r"prefixes \(1, 3\) for 2 sequences"):
        gpu.attention_forward(qkv, cu_seqlens, 2, 1, prefixes[:1])
    with pytest.raises(TypeError, match="int32"):
        gpu.attention_forward(qkv, cu_seqlens, 2, 1, prefixes.astype(np.int64))
