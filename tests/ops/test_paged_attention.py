"""Attention through block tables against attention over plain arrays, and both against a direct softmax in float64."""

import ml_dtypes
import numpy as np
import pytest

from cukit.backend import e4m3
from cukit.backend.numpy import (
    copy_blocks,
    paged_decode_attention,
    paged_prefill_attention,
    qk_norm_rope_forward,
    rope_paged_decode_attention,
    store_kv,
    update_block_tables,
)
from cukit.backend.numpy.attention_core import chunked_attention


def direct(q, k, v):
    """softmax(q k^T / sqrt(D)) v in float64 for q (Tq, H, D), k and v (Tk, K, D); also the log-sum-exp (H, Tq)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    scores[:, np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]] = -np.inf
    maximum = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - maximum)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights / total, v), (maximum + np.log(total))[..., 0]


class Paged:
    """Sequences with random q, k, v in a shuffled paged cache; its unused slots are NaN."""

    def __init__(self, lengths, queries, num_heads, num_kv_heads, head_dim, block_size=4, dtype=np.float64, seed=0):
        rng = np.random.default_rng(seed)
        self.lengths, self.queries, self.num_heads, self.num_kv_heads = lengths, queries, num_heads, num_kv_heads
        width = max(-(-length // block_size) for length in [*lengths, 1])
        count = sum(-(-length // block_size) for length in lengths)
        free = rng.permutation(count) + 1
        self.tables = np.full((len(lengths), width), -1, np.int32)
        self.k_cache, self.v_cache = (
            np.full((count + 1, block_size, num_kv_heads, head_dim), np.nan).astype(dtype) for _ in range(2)
        )
        self.qkv, taken = [], 0
        for row, length in enumerate(lengths):
            blocks = -(-length // block_size)
            self.tables[row, :blocks] = free[taken : taken + blocks]
            taken += blocks
            qkv = rng.normal(size=(length, (num_heads + 2 * num_kv_heads) * head_dim)).astype(dtype)
            index, offset = np.divmod(np.arange(length), block_size)
            slots = self.tables[row, index].astype(np.int64) * block_size + offset
            store_kv(self.k_cache, self.v_cache, qkv, slots, num_heads, num_kv_heads)
            self.qkv.append(qkv)
        self.head_dim = head_dim

    def split(self, row):
        heads = self.qkv[row].reshape(self.lengths[row], -1, self.head_dim)
        first, second = self.num_heads, self.num_heads + self.num_kv_heads
        return heads[len(heads) - self.queries[row] :, :first], heads[:, first:second], heads[:, second:]

    def packed(self):
        return np.concatenate([qkv[len(qkv) - count :] for qkv, count in zip(self.qkv, self.queries, strict=True)])

    def check(self, out, tolerance=1e-13):
        start = 0
        for row, count in enumerate(self.queries):
            if count:
                expected = direct(*self.split(row))[0].reshape(count, -1)
                np.testing.assert_allclose(
                    out[start : start + count].astype(np.float64), expected, atol=tolerance, rtol=tolerance
                )
            start += count


SHAPES = [(4, 2, 16), (6, 3, 8), (1, 1, 4), (8, 1, 12)]


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill(shape):
    case = Paged([7, 4, 1, 9, 7, 300, 520], [7, 2, 1, 3, 7, 50, 520], *shape)
    cu_seqlens = np.concatenate([[0], np.cumsum(case.queries)]).astype(np.int32)
    out = paged_prefill_attention(
        case.packed(), case.k_cache, case.v_cache, case.tables, cu_seqlens, np.array(case.lengths, np.int32), shape[0]
    )
    case.check(out)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [[5], [1, 4, 8, 3], [17, 300, 2, 255, 256, 257, 513, 17]])
def test_decode(shape, lengths):
    case = Paged(lengths, [1] * len(lengths), *shape)
    out = paged_decode_attention(
        case.packed(), case.k_cache, case.v_cache, case.tables, np.array(lengths, np.int32), shape[0], max(lengths)
    )
    case.check(out)


def test_decode_ghost_rows_and_empty_batch():
    case = Paged([5, 300, 3], [1, 1, 1], 4, 2, 8)
    qkv = np.concatenate([case.packed(), np.ones((2, 64))])
    tables = np.concatenate([case.tables, np.full((2, case.tables.shape[1]), -1, np.int32)])
    out = paged_decode_attention(qkv, case.k_cache, case.v_cache, tables, np.array([5, 300, 3, 0, 0], np.int32), 4, 300)
    case.check(out[:3])
    assert not out[3:].any()
    ghosts = np.zeros(2, np.int32)
    assert not paged_decode_attention(qkv[3:], case.k_cache, case.v_cache, tables[3:], ghosts, 4, 0).any()
    nothing = qkv[:0], case.k_cache, case.v_cache, tables[:0]
    assert paged_decode_attention(*nothing, np.zeros(0, np.int32), 4, 0).shape == (0, 32)
    none = paged_prefill_attention(*nothing, np.zeros(1, np.int32), np.zeros(0, np.int32), 4)
    assert none.shape == (0, 32)


def test_ghost_rows_of_prefill_are_zero():
    case = Paged([5, 3], [5, 3], 4, 2, 8)
    qkv = np.concatenate([case.packed(), np.ones((4, 64))])
    out = paged_prefill_attention(
        qkv, case.k_cache, case.v_cache, case.tables, np.array([0, 5, 8], np.int32), np.array([5, 3]), 4
    )
    case.check(out)
    assert not out[8:].any()


def test_decode_equals_prefill_and_training_attention():
    """The three ways to the same number: one query at a time, a chunk of queries, the whole sequence."""
    length, (num_heads, num_kv_heads, head_dim) = 521, (4, 2, 16)
    case = Paged([length], [length], num_heads, num_kv_heads, head_dim)
    q, k, v = case.split(0)
    whole, lse = chunked_attention(q[None], k[None], v[None])
    expected, expected_lse = direct(q, k, v)
    np.testing.assert_allclose(whole[0], expected, atol=1e-13)
    np.testing.assert_allclose(lse[0], expected_lse, rtol=1e-13)
    for position in (0, 3, 255, 256, 300, 511, 512, 520):
        out = paged_decode_attention(
            case.qkv[0][position : position + 1],
            case.k_cache,
            case.v_cache,
            case.tables,
            np.array([position + 1]),
            num_heads,
            position + 1,
        )
        np.testing.assert_allclose(out[0], whole[0, position].ravel(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("norm", [True, False])
def test_a_step_that_turns_its_newest_tokens(norm):
    """From the raw projection: each query sees its own key, turned and stored, and a ghost row stores nothing."""
    lengths, (heads, kv_heads, dim) = [5, 300, 1], (4, 2, 16)
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=dim) if norm else None for _ in range(2)]
    angles = rng.uniform(0, 6, (300, dim // 2))
    turn, sizes = (*weights, np.cos(angles), np.sin(angles)), (heads, kv_heads, 1e-6)
    case = Paged(lengths, [1, 1, 1], heads, kv_heads, dim)
    raw = [qkv[-1:] for qkv in case.qkv]
    slots = case.tables[range(3), [(x - 1) // 4 for x in lengths]].astype(np.int64) * 4 + (np.array(lengths) - 1) % 4
    for row, qkv in enumerate(
        case.qkv
    ):  # what the steps before have stored, and of the newest token what this one will
        case.qkv[row], _ = qk_norm_rope_forward(qkv, *turn, np.arange(lengths[row]), *sizes)
        index, offset = np.divmod(np.arange(lengths[row] - 1), 4)
        places = case.tables[row, index].astype(np.int64) * 4 + offset
        store_kv(case.k_cache, case.v_cache, case.qkv[row][:-1], places, heads, kv_heads)
    for cache in (case.k_cache, case.v_cache):
        cache.reshape(-1, kv_heads, dim)[slots] = np.nan
    empty = [np.isnan(cache).sum() for cache in (case.k_cache, case.v_cache)]
    out = rope_paged_decode_attention(
        case.k_cache,
        case.v_cache,
        np.append(slots, -1),
        np.concatenate([*raw, raw[0]]),
        *turn,
        np.array([4, 299, 0, 0]),
        np.pad(case.tables, ((0, 1), (0, 0)), constant_values=-1),
        np.array([*lengths, 0]),
        *sizes,
        300,
    )
    case.check(out[:3])
    assert not out[3].any()
    assert [np.isnan(cache).sum() for cache in (case.k_cache, case.v_cache)] == [x - 3 * kv_heads * dim for x in empty]


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (np.float16, 4e-3), (ml_dtypes.bfloat16, 3e-2)])
def test_narrow_types_keep_their_dtype(dtype, tolerance):
    case = Paged([9, 270], [1, 1], 4, 2, 16, dtype=dtype)
    out = paged_decode_attention(case.packed(), case.k_cache, case.v_cache, case.tables, np.array([9, 270]), 4, 270)
    assert out.dtype == dtype
    case.check(out, tolerance)
    q, k, v = case.split(1)
    out, lse = chunked_attention(q[None], k[None], v[None])
    assert out.dtype == dtype and lse.dtype == np.float32


def test_ragged_groups_mask_exactly():
    """Rows with fewer keys than the widest give the bits of a batch without the others."""
    rng = np.random.default_rng(5)
    q, k, v = rng.normal(size=(3, 2, 4, 8)), rng.normal(size=(3, 20, 2, 8)), rng.normal(size=(3, 20, 2, 8))
    out, lse = chunked_attention(q, k, v, np.array([20, 11, 2]))
    for row, length in enumerate([20, 11, 2]):
        expected, expected_lse = direct(q[row], k[row, :length], v[row, :length])
        np.testing.assert_allclose(out[row], expected, atol=1e-14)
        np.testing.assert_allclose(lse[row], expected_lse, atol=1e-14)


def test_store_skips_minus_one_and_copies_blocks():
    k_cache, v_cache = caches = np.zeros((2, 3, 2, 1, 2))
    qkv = np.arange(24.0).reshape(3, 8)
    store_kv(k_cache, v_cache, qkv, np.array([3, -1, 0]), 2, 1)
    np.testing.assert_array_equal(k_cache[1, 1, 0], [4, 5])
    np.testing.assert_array_equal(v_cache[0, 0, 0], [22, 23])
    assert np.count_nonzero(k_cache) == 4
    copy_blocks(caches, np.array([1, 0]), np.array([0, 2]))
    np.testing.assert_array_equal(k_cache[0, 1, 0], [4, 5])
    np.testing.assert_array_equal(k_cache[2, 0, 0], [20, 21])


def test_a_table_may_be_larger_than_the_step():
    """Rows and columns beyond those of the step are not read: the engine keeps one table for steps of every size."""
    case = Paged([5, 300, 3], [1, 1, 1], 4, 2, 8)
    wide = np.full((7, case.tables.shape[1] + 9), -1, np.int32)
    wide[:3, : case.tables.shape[1]] = case.tables
    lengths = np.array(case.lengths, np.int32)
    out = paged_decode_attention(case.packed(), case.k_cache, case.v_cache, wide, lengths, 4, 512)
    case.check(out)
    with pytest.raises(ValueError, match="300 keys, more than max_context_len=256"):
        paged_decode_attention(case.packed(), case.k_cache, case.v_cache, wide, lengths, 4, 256)


def test_update_block_tables():
    tables = np.zeros((4, 3), np.int32)
    update_block_tables(tables, *np.array([[3, 0, 0], [2, 0, 2], [7, 8, 9]], np.int32))
    assert tables.tolist() == [[8, 0, 9], [0] * 3, [0] * 3, [0, 0, 7]]
    update_block_tables(tables, *np.zeros((3, 0), np.int32))
    assert tables.sum() == 24


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16, np.float16])
def test_a_cache_of_codes_is_the_cache_of_their_numbers(dtype):
    """E4M3: stored rounded, read exactly; what no sequence owns is not read, though it is NaN."""
    lengths, shape, bfloat = [5, 300, 17, 0], (4, 2, 16), np.dtype(dtype)
    case = Paged(lengths[:3], [1, 1, 1], *shape, dtype=bfloat)
    codes = [np.full(case.k_cache.shape, 0x7F, np.uint8) for _ in range(2)]
    for row, qkv in enumerate(case.qkv):
        index, offset = np.divmod(np.arange(lengths[row]), 4)
        slots = case.tables[row, index].astype(np.int64) * 4 + offset
        store_kv(*codes, qkv, slots, *shape[:2])
    numbers = [e4m3.decode(x, bfloat) for x in codes]
    for number, cache in zip(numbers, (case.k_cache, case.v_cache)):
        owned = ~np.isnan(cache.astype(np.float64))
        assert np.array_equal(owned, ~np.isnan(number.astype(np.float64)))
        error = np.abs(number.astype(np.float64) - cache.astype(np.float64))[owned]
        assert (
            error <= np.maximum(np.abs(cache.astype(np.float64)[owned]) / 16, 2.0**-10)
        ).all() and error.max() > 0.01
    tables = np.concatenate([case.tables, np.full((1, case.tables.shape[1]), -1, np.int32)])
    qkv, counts = np.concatenate([case.packed(), case.packed()[:1]]), np.array(lengths, np.int32)
    found, expected = (paged_decode_attention(qkv, *x, tables, counts, 4, 300) for x in (codes, numbers))
    assert found.tobytes() == expected.tobytes() and found.dtype == bfloat
    borders = np.array([0, 1, 2, 3], np.int32)
    found, expected = (
        paged_prefill_attention(case.packed(), *x, case.tables, borders, counts[:3], 4) for x in (codes, numbers)
    )
    assert found.tobytes() == expected.tobytes()
