"""Causal attention on the NumPy shelf against its formula, over more than one chunk of keys."""

import numpy as np
import pytest
from check import check_formula, normal

from cukit.backend.numpy import attention_forward
from cukit.backend.numpy.attention_core import CHUNK_KEYS


def formula(qkv, cu_seqlens, num_heads, num_kv_heads):
    """One softmax a query, head by head; rows of no sequence are zeros."""
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, -1)
    dim = heads.shape[2]
    o, lse = np.zeros((len(qkv), num_heads, dim)), np.zeros((len(qkv), num_heads))
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        for t in range(start, end):
            for h in range(num_heads):
                kv_head = num_heads + h // (num_heads // num_kv_heads)
                scores = heads[start : t + 1, kv_head] @ heads[t, h] / np.sqrt(dim)
                lse[t, h] = np.log(np.sum(np.exp(scores)))
                o[t, h] = np.exp(scores - lse[t, h]) @ heads[start : t + 1, kv_head + num_kv_heads]
    return o.reshape(len(qkv), num_heads * dim), lse


@pytest.mark.parametrize("lengths", [[1], [3, 0, 5, 3], [CHUNK_KEYS + 7]])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 2)])
def test_attention_against_its_formula(lengths, heads, kv_heads):
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    qkv = normal(int(cu_seqlens[-1]) + 2, (heads + 2 * kv_heads) * 4)
    check_formula("attention_forward", formula, qkv, cu_seqlens, heads, kv_heads)


def test_no_sequences():
    o, lse = attention_forward(np.zeros((0, 12), np.float32), np.zeros(1, np.int32), 1, 1)
    assert o.shape == (0, 4) and lse.shape == (0, 1)
