"""Packed causal attention on the GPU against NumPy, and what must hold in every bit. Run: pytest -m gpu
tests/gpu/test_attention.py
"""

import numpy as np
import pytest
from check import check_kernel, normal, tensor_core_product

from cukit.backend import backend_for
from cukit.backend.numpy import attention_forward

pytestmark = pytest.mark.gpu
SHAPES = [
    (1, 1, 64),
    (4, 2, 64),
    (4, 1, 128),
    (2, 2, 128),
    (7, 1, 32),
    (2, 1, 16),
    (4, 2, 80),
    (2, 1, 256),
    (2, 1, 12),
    (1, 1, 132),
    (3, 3, 8),
]
LENGTHS = [[1, 7, 13], [64, 1, 0, 7], [255, 256, 257], [700, 13]]


@pytest.fixture
def gpu():
    return backend_for("cuda")


def borders(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def inputs(lengths, heads, kv_heads, dim, seed=0):
    return normal(sum(lengths), (heads + 2 * kv_heads) * dim, seed=seed), borders(lengths)


def gradient_inputs(lengths, heads, kv_heads, dim):
    qkv, cu_seqlens = inputs(lengths, heads, kv_heads, dim)
    o, lse = attention_forward(qkv, cu_seqlens, heads, kv_heads)
    return normal(*o.shape, seed=1), qkv, o, lse.astype(np.float32), cu_seqlens, heads, kv_heads


def same(first, second):
    assert first.tobytes() == second.tobytes(), f"{np.count_nonzero(first != second)} of {first.size} differ"


def lse_of_tensor_cores(dtype, qkv, cu_seqlens, heads, kv_heads):
    """The log-sum-exp (T, H) from scores as tensor cores sum them: lse stays float32, so their truncation shows."""
    split = qkv.astype(dtype).reshape(len(qkv), heads + 2 * kv_heads, -1)
    lse = np.zeros((len(qkv), heads), np.float32)
    for first, last in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        rows = slice(int(first), int(last))
        q = split[rows, :heads].transpose(1, 0, 2)
        k = np.repeat(split[rows, heads : heads + kv_heads].transpose(1, 0, 2), heads // kv_heads, axis=0)
        scores = tensor_core_product(q, k) * np.float32(split.shape[2] ** -0.5)
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        if last > first:
            top = scores.max(axis=2)
            lse[rows] = (np.log(np.exp(scores - top[..., None]).sum(axis=2)) + top).T
    return lse


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape, lengths):
    arguments = (*inputs(lengths, *shape), *shape[:2])
    check_kernel("attention_forward", *arguments, yardsticks={1: lambda dtype: lse_of_tensor_cores(dtype, *arguments)})


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(shape, lengths):
    check_kernel("attention_backward", *gradient_inputs(lengths, *shape))


def test_large_scores():
    """Scores up to some hundreds: the maximum moves within and between chunks, weights underflow."""
    qkv, cu_seqlens = inputs([600, 90], 2, 1, 64)
    check_kernel("attention_forward", qkv * 6, cu_seqlens, 2, 1)


@pytest.mark.parametrize("count", [33, 1500])
def test_many_short_sequences(count):
    """More sequences than the 32 (or 1,024) that find_piece probes at once, some of them empty."""
    lengths = np.random.default_rng(count).integers(0, 4, count).tolist()
    check_kernel("attention_forward", *inputs(lengths, 2, 1, 16), 2, 1)
    check_kernel("attention_backward", *gradient_inputs(lengths, 2, 1, 16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(4, 2, 64), (7, 1, 128), (2, 1, 256)], ids=str)
def test_alone_equals_packed(gpu, shape, dtype):
    """A sequence's forward and gradient have the same bits alone and between others; a prefix has the forward bits of
    the whole.
    """
    lengths, (heads, kv_heads, _) = [130, 1, 257, 65], shape
    qkv, cu_seqlens = inputs(lengths, *shape)
    qkv = gpu.array(qkv, gpu.dtype_of(dtype))
    do = gpu.array(normal(len(qkv), heads * shape[2], seed=1), qkv.dtype)
    o, lse = gpu.attention_forward(qkv, gpu.array(cu_seqlens), heads, kv_heads)
    dqkv = gpu.attention_backward(do, qkv, o, lse, gpu.array(cu_seqlens), heads, kv_heads)
    for first, last in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        rows = slice(int(first), int(last))
        alone = gpu.array(borders([last - first]))
        alone_o, alone_lse = gpu.attention_forward(qkv[rows], alone, heads, kv_heads)
        same(gpu.to_numpy(alone_o), gpu.to_numpy(o[rows]))
        same(gpu.to_numpy(alone_lse), gpu.to_numpy(lse[rows]))
        same(
            gpu.to_numpy(gpu.attention_backward(do[rows], qkv[rows], o[rows], lse[rows], alone, heads, kv_heads)),
            gpu.to_numpy(dqkv[rows]),
        )
    prefix = gpu.attention_forward(qkv[131 : 131 + 200], gpu.array(borders([200])), heads, kv_heads)
    same(gpu.to_numpy(prefix[0]), gpu.to_numpy(o[131 : 131 + 200]))
    same(gpu.to_numpy(prefix[1]), gpu.to_numpy(lse[131 : 131 + 200]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(4, 2, 64), (4, 2, 128)], ids=str)
def test_wgmma_has_the_bits_of_mma(gpu, monkeypatch, shape, dtype):
    """The instructions of Hopper (sm_90a) against those of other cards, which it runs when compiled for sm_90: forward
    and gradients, in every bit.
    """
    from cukit.backend.cuda import loader

    if loader._architecture() != "sm_90a":
        pytest.skip("this card has no wgmma: it runs the other way always")
    lengths, (heads, kv_heads, _) = [1, 700, 64, 65, 300, 2000, 7], shape
    qkv, cu_seqlens = inputs(lengths, *shape)
    qkv, cu_seqlens = gpu.array(qkv, gpu.dtype_of(dtype)), gpu.array(cu_seqlens)
    do = gpu.array(normal(len(qkv), heads * shape[2], seed=1), qkv.dtype)

    def run():
        o, lse = gpu.attention_forward(qkv, cu_seqlens, heads, kv_heads)
        dqkv = gpu.attention_backward(do, qkv, o, lse, cu_seqlens, heads, kv_heads)
        geometry = loader.load("attention", qkv.dtype, HEAD_DIM=shape[2]).constants("attention_geometry", 5)
        return geometry, [gpu.to_numpy(x) for x in (o, lse, dqkv)]

    hopper_geometry, hopper = run()
    monkeypatch.setattr(loader, "_arch", "sm_90")
    monkeypatch.setattr(loader, "_modules", {})
    other_geometry, others = run()
    assert hopper_geometry != other_geometry
    for first, second in zip(hopper, others):
        same(first, second)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_no_sequence_are_zero(gpu, dtype):
    """Rows beyond cu_seqlens[-1] (a batch rounded up to a bucket) and empty batches."""
    qkv, _ = inputs([100], 2, 1, 64)
    qkv = gpu.array(qkv, gpu.dtype_of(dtype))
    cu_seqlens = gpu.array(borders([5, 20]))
    o, lse = gpu.attention_forward(qkv, cu_seqlens, 2, 1)
    dqkv = gpu.attention_backward(o, qkv, o, lse, cu_seqlens, 2, 1)
    expected = gpu.attention_forward(qkv[:25], cu_seqlens, 2, 1)
    same(gpu.to_numpy(o[:25]), gpu.to_numpy(expected[0]))
    assert gpu.to_numpy(dqkv[:25]).any()
    assert not gpu.to_numpy(o[25:]).any() and not gpu.to_numpy(lse[25:]).any() and not gpu.to_numpy(dqkv[25:]).any()
    for nothing in (gpu.array(borders([])), gpu.array(borders([0, 0]))):
        o, lse = gpu.attention_forward(qkv[:0], nothing, 2, 1)
        assert o.shape == (0, 128) and lse.shape == (0, 2)
        assert gpu.attention_backward(o, qkv[:0], o, lse, nothing, 2, 1).shape == (0, 256)


def test_refusals(gpu):
    cu_seqlens = gpu.array(borders([3]))
    for dim in (6, 260):
        with pytest.raises(ValueError, match=f"head_dim {dim}"):
            gpu.attention_forward(gpu.zeros((3, 4 * dim), np.float32), cu_seqlens, 2, 1)
    with pytest.raises(ValueError, match="does not hold"):
        gpu.attention_forward(gpu.zeros((3, 130), np.float32), cu_seqlens, 2, 1)
    with pytest.raises(ValueError, match="contiguous"):
        gpu.attention_forward(gpu.zeros((6, 256), np.float32)[::2], cu_seqlens, 2, 1)
    with pytest.raises(TypeError, match="int32"):
        gpu.attention_forward(gpu.zeros((3, 256), np.float32), cu_seqlens.astype(np.int64), 2, 1)


@pytest.mark.slow
def test_more_than_two_billion_elements(gpu):
    """qkv with over 2^31 elements: the last sequences have the bits that they have alone."""
    dtype, length, count = gpu.dtype_of("bfloat16"), 256, 43_800
    assert count * length * 192 > 2**31
    qkv = gpu.zeros((count * length, 192), dtype)
    tail = gpu.array(normal(2 * length, 192), dtype)
    qkv[-2 * length :] = tail
    cu_seqlens = gpu.array(np.arange(count + 1, dtype=np.int32) * length)
    o, lse = gpu.attention_forward(qkv, cu_seqlens, 1, 1)
    dqkv = gpu.attention_backward(o, qkv, o, lse, cu_seqlens, 1, 1)
    alone = gpu.array(borders([length, length]))
    tail_o, tail_lse = gpu.attention_forward(tail, alone, 1, 1)
    same(gpu.to_numpy(o[-2 * length :]), gpu.to_numpy(tail_o))
    same(
        gpu.to_numpy(dqkv[-2 * length :]),
        gpu.to_numpy(gpu.attention_backward(tail_o, tail, tail_o, tail_lse, alone, 1, 1)),
    )
