"""Attention of sequences that share the rows of a prefix, on the NumPy shelf: the numbers of the same sequences without
sharing.
"""

import numpy as np
import pytest
from check import check_gradient, normal
from shared_prefixes import packing, random_groups

from cukit import ops
from cukit.autograd import no_grad
from cukit.backend.numpy import attention_backward, attention_forward
from cukit.models.attend import PackedCausal
from cukit.models.weights import load_model

GROUPS = [
    [(1, [1])],
    [(3, [2, 0, 5])],
    [(4, [])],
    [(0, [3]), (2, [0]), (0, [0, 4]), (5, [1, 1])],
    [(255, [3, 300]), (256, [1, 0]), (257, [2])],  # about the border of a chunk of keys
    *(random_groups(seed) for seed in range(6)),
]


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2)])
def test_rows_and_gradients_are_those_without_sharing(groups, heads, kv_heads):
    """The gradient of a prefix's rows is the sum over its copies."""
    packed = packing(groups)
    total, filling = int(packed.cu_seqlens[-1]), 2
    qkv = normal(total + filling, (heads + 2 * kv_heads) * 4)
    o, lse = attention_forward(qkv, packed.cu_seqlens, heads, kv_heads, packed.prefixes)
    whole = qkv[packed.rows], packed.whole_cu_seqlens, heads, kv_heads
    whole_o, whole_lse = attention_forward(*whole)
    close(o[packed.rows], whole_o)
    close(lse[packed.rows], whole_lse)

    do = normal(*whole_o.shape, seed=1)
    shared_do = np.concatenate([packed.summed(do), np.ones((filling, do.shape[1]))])
    found = attention_backward(shared_do, qkv, o, lse, packed.cu_seqlens, heads, kv_heads, packed.prefixes)
    expected = packed.summed(attention_backward(do, whole[0], whole_o, whole_lse, *whole[1:]))
    close(found[:total], expected)
    assert not found[total:].any() and not o[total:].any() and not lse[total:].any()


@pytest.mark.parametrize("groups", [[(3, [2, 0, 4]), (0, [3])], [(1, [1, 1])], [(260, [3, 2])]], ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 2)])
def test_gradient_against_finite_differences(groups, heads, kv_heads):
    packed = packing(groups)
    qkv = normal(int(packed.cu_seqlens[-1]) + 1, (heads + 2 * kv_heads) * 6)
    check_gradient(lambda x: ops.attention(x, packed.cu_seqlens, heads, kv_heads, packed.prefixes), qkv)


def test_a_sequence_sees_no_row_of_its_neighbours():
    """Rows of other sequences of the group, and a prefix's rows for those without it, may hold anything."""
    packed = packing([(3, [2, 4]), (0, [3])])
    qkv = normal(12, 12)
    o, _ = attention_forward(qkv, packed.cu_seqlens, 1, 1, packed.prefixes)
    for changed, same in ((slice(3, 5), np.r_[0:3, 5:12]), (slice(5, 9), np.r_[0:5, 9:12]), (slice(0, 3), np.r_[9:12])):
        other = qkv.copy()
        other[changed] += 1
        moved, _ = attention_forward(other, packed.cu_seqlens, 1, 1, packed.prefixes)
        np.testing.assert_array_equal(moved[same], o[same])
        assert (moved[changed] != o[changed]).any()


def test_a_model_gives_the_states_without_sharing(golden):
    """A forward pass of all layers in which a prompt stands once."""
    model = load_model(golden / "qwen3_tiny", dtype="float64")
    packed = packing([(7, [3, 0, 5]), (0, [4])])
    tokens = np.random.default_rng(0).integers(0, 100, packed.cu_seqlens[-1]).astype(np.int32)
    with no_grad():
        shared = model.forward(tokens, packed.positions, PackedCausal(packed.cu_seqlens, packed.prefixes))
        attend = PackedCausal(packed.whole_cu_seqlens)
        whole = model.forward(tokens[packed.rows], packed.positions[packed.rows], attend)
    close(shared.data[packed.rows], whole.data)
