"""A KV cache of E4M3 codes on the GPU: the bits of the same attention over a cache that holds the decoded numbers.

Run: pytest -m gpu tests/gpu/test_fp8_cache.py
"""

import numpy as np
import pytest
from check import check_kernel, normal

from cukit.backend import backend_for, e4m3
from cukit.backend import numpy as reference

pytestmark = pytest.mark.gpu
SHAPES = [
    (2, 2, 64),
    (4, 1, 128),
    (14, 2, 64),
    (20, 1, 32),
    (2, 1, 16),
    (4, 2, 80),
    (2, 1, 256),
    (3, 1, 24),
    (33, 1, 8),
]
DTYPES = ["bfloat16", "float16", "float32"]
LENGTHS = [1, 7, 64, 255, 256, 257, 700, 17]
EMPTY = 0x7F  # NaN: what no sequence owns may not be read


class Case:
    """Sequences in a shuffled cache of codes."""

    def __init__(self, shape, block_size=16, seed=0):
        self.heads, self.kv_heads, dim = shape
        counts = [-(-length // block_size) for length in LENGTHS]
        blocks = np.random.default_rng(seed).permutation(sum(counts)) + 1
        self.tables = np.full((len(LENGTHS), max(counts)), -1, np.int32)
        slots, taken = [], 0
        for row, (length, count) in enumerate(zip(LENGTHS, counts)):
            self.tables[row, :count] = blocks[taken : taken + count]
            taken += count
            index, offset = np.divmod(np.arange(length), block_size)
            slots.append(self.tables[row, index].astype(np.int64) * block_size + offset)
        self.slots = np.concatenate(slots)
        self.qkv = normal(sum(LENGTHS), (self.heads + 2 * self.kv_heads) * dim, seed=seed)
        self.borders = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
        self.caches = [np.full((taken + 1, block_size, self.kv_heads, dim), EMPTY, np.uint8) for _ in range(2)]
        reference.store_kv(*self.caches, self.qkv, self.slots, self.heads, self.kv_heads)

    def on_device(self, be, dtype):
        """(caches of codes, caches of the decoded numbers)"""
        return [be.array(x) for x in self.caches], [be.array(e4m3.decode(x, be.dtype_of(dtype))) for x in self.caches]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_stored_is_numpys_codes(shape, dtype):
    be, case = backend_for("cuda"), Case(shape)
    qkv = (case.qkv * 10.0 ** normal(len(case.qkv), 1, seed=5)).astype(be.dtype_of(dtype))
    qkv[3, -1], qkv[4, -2], qkv[5, -1] = np.inf, -500, 449
    slots = case.slots.copy()
    slots[2] = -1
    expected = [np.full_like(x, EMPTY) for x in case.caches]
    reference.store_kv(*expected, qkv, slots, case.heads, case.kv_heads)
    found = [be.array(np.full_like(x, EMPTY)) for x in case.caches]
    be.store_kv(*found, be.array(qkv), be.array(slots), case.heads, case.kv_heads)
    for ours, theirs in zip(found, expected):
        assert np.array_equal(be.to_numpy(ours), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 12])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoding_has_the_bits_of_decoded_numbers(shape, block_size, dtype):
    be, case = backend_for("cuda"), Case(shape, block_size)
    qkv = be.array(case.qkv[case.borders[1:] - 1].astype(be.dtype_of(dtype)))
    context = be.array(np.array([*LENGTHS[:-1], 0], np.int32))
    results = [
        be.to_numpy(be.paged_decode_attention(qkv, *caches, be.array(case.tables), context, shape[0], 700))
        for caches in case.on_device(be, dtype)
    ]
    assert results[0].tobytes() == results[1].tobytes() and np.isfinite(results[0].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_has_the_bits_of_decoded_numbers(shape, dtype):
    """Of whole prompts and of chunks that begin anywhere."""
    be, case = backend_for("cuda"), Case(shape)
    starts = [0, 3, 60, 0, 255, 256, 650, 0]
    rows = [np.arange(a + start, b) for a, b, start in zip(case.borders, case.borders[1:], starts)]
    borders = be.array(np.concatenate([[0], np.cumsum(list(map(len, rows)))]).astype(np.int32))
    qkv = be.array(case.qkv[np.concatenate(rows)].astype(be.dtype_of(dtype)))
    lengths = be.array(np.array(LENGTHS, np.int32))
    results = [
        be.to_numpy(be.paged_prefill_attention(qkv, *caches, be.array(case.tables), borders, lengths, shape[0]))
        for caches in case.on_device(be, dtype)
    ]
    assert results[0].tobytes() == results[1].tobytes() and np.isfinite(results[0].astype(np.float32)).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_numpy(shape):
    case = Case(shape)
    lengths = np.array(LENGTHS, np.int32)
    last = case.qkv[case.borders[1:] - 1]
    check_kernel("paged_decode_attention", last, *case.caches, case.tables, lengths, shape[0], 700)
    check_kernel("paged_prefill_attention", case.qkv, *case.caches, case.tables, case.borders, lengths, shape[0])


def test_blocks_are_copied():
    be, case = backend_for("cuda"), Case((4, 1, 128))
    src, dst = np.array([1, 5, 7]), np.array([5, 9, 2])
    expected = np.stack(case.caches)
    caches = be.array(expected)
    be.copy_blocks(caches, be.array(src), be.array(dst))
    reference.copy_blocks(expected, src, dst)
    assert np.array_equal(be.to_numpy(caches), expected)


def test_what_does_not_fit_is_refused():
    be, case = backend_for("cuda"), Case((2, 1, 16))
    qkv = be.array(case.qkv.astype(np.float32))
    wrong = [be.array(x.astype(np.float16)) for x in case.caches]
    with pytest.raises(TypeError, match="or uint8"):
        be.store_kv(*wrong, qkv, be.array(case.slots), 2, 1)
    caches, narrow = [be.zeros((2, 16, 1, 12), np.uint8) for _ in range(2)], be.zeros((3, 48), "float32")
    with pytest.raises(ValueError, match="multiple of 8, got 12"):
        be.store_kv(*caches, narrow, be.array(np.arange(3)), 2, 1)
