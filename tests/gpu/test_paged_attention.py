"""The paged KV cache on the GPU against NumPy; decoding and prefill against the training forward, bit for bit.

Run: pytest -m gpu tests/gpu/test_paged_attention.py
"""

import numpy as np
import pytest
from check import check_kernel, normal

from cukit.backend import backend_for
from cukit.backend import numpy as reference

pytestmark = pytest.mark.gpu
SHAPES = [
    (2, 2, 64),
    (4, 2, 64),
    (4, 1, 128),
    (7, 1, 128),
    (14, 2, 64),
    (20, 1, 32),
    (2, 1, 16),
    (4, 2, 80),
    (2, 1, 256),
    (2, 1, 12),
    (33, 1, 8),
]
DTYPES = ["bfloat16", "float16", "float32"]


@pytest.fixture
def gpu():
    return backend_for("cuda")


class Paged:
    """Sequences of random q, k, v in a shuffled paged cache with NaN in unused slots; a table's unused entries are
    -1.
    """

    def __init__(self, lengths, heads, kv_heads, dim, block_size=16, seed=0):
        rng = np.random.default_rng(seed)
        self.lengths, self.heads, self.kv_heads = lengths, heads, kv_heads
        counts = [-(-length // block_size) for length in lengths]
        self.tables = np.full((len(lengths), max(counts, default=0) + 1), -1, np.int32)
        blocks = iter(rng.permutation(sum(counts)) + 1)
        self.qkv = normal(sum(lengths), (heads + 2 * kv_heads) * dim, seed=seed)
        self.cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        slots = []
        for row, (length, count) in enumerate(zip(lengths, counts)):
            self.tables[row, :count] = [next(blocks) for _ in range(count)]
            positions = np.arange(length)
            slots.append(
                self.tables[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
            )
        self.slots = np.concatenate([*slots, np.zeros(0, np.int64)])
        self.k_cache, self.v_cache = (np.full((sum(counts) + 1, block_size, kv_heads, dim), np.nan) for _ in range(2))
        reference.store_kv(self.k_cache, self.v_cache, self.qkv, self.slots, heads, kv_heads)

    def rows(self, starts):
        """Packed rows of each sequence from starts[b] on, and their borders."""
        rows = [
            np.arange(first + start, last) for first, last, start in zip(self.cu_seqlens, self.cu_seqlens[1:], starts)
        ]
        return np.concatenate(rows), np.concatenate([[0], np.cumsum([len(x) for x in rows])]).astype(np.int32)

    def to(self, gpu, dtype):
        """qkv in the model's dtype, the caches on the GPU, and the training forward's result."""
        qkv, k_cache, v_cache = (x.astype(gpu.dtype_of(dtype)) for x in (self.qkv, self.k_cache, self.v_cache))
        expected, _ = gpu.attention_forward(gpu.array(qkv), gpu.array(self.cu_seqlens), self.heads, self.kv_heads)
        return qkv, gpu.array(k_cache), gpu.array(v_cache), gpu.to_numpy(expected)


def different(first, second):
    assert first.shape == second.shape and first.dtype == second.dtype
    bits = np.dtype(f"u{first.dtype.itemsize}")
    return np.count_nonzero(first.view(bits) != second.view(bits))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_against_numpy(shape):
    case = Paged([7, 1, 64, 300, 520, 257], *shape)
    rows, borders = case.rows([0, 0, 60, 250, 0, 256])
    qkv = np.concatenate([case.qkv[rows], normal(5, case.qkv.shape[1])])  # and five rows of no sequence
    check_kernel(
        "paged_prefill_attention",
        qkv,
        case.k_cache,
        case.v_cache,
        case.tables,
        borders,
        np.array(case.lengths, np.int32),
        shape[0],
    )


@pytest.mark.parametrize("block_size", [16, 256, 12])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_against_numpy(shape, block_size):
    case = Paged([1, 7, 64, 255, 256, 257, 700, 17], *shape, block_size=block_size)
    context = np.array([*case.lengths[:-1], 0], np.int32)
    qkv = case.qkv[case.cu_seqlens[1:] - 1]
    check_kernel("paged_decode_attention", qkv, case.k_cache, case.v_cache, case.tables, context, shape[0], 700)
    wide = np.pad(case.tables, ((0, 3), (0, 5)), constant_values=-1)  # one table serves steps of every size
    check_kernel("paged_decode_attention", qkv, case.k_cache, case.v_cache, wide, context, shape[0], 700)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_has_the_bits_of_training(gpu, shape, dtype):
    """Every query position of sequences of length 1, 7, 64, 255, 256, 257 and 700, all in one batch, some alone."""
    case = Paged([1, 7, 64, 255, 256, 257, 700], *shape)
    qkv, k_cache, v_cache, expected = case.to(gpu, dtype)
    owner = np.repeat(np.arange(len(case.lengths)), case.lengths)
    context = (np.arange(len(owner)) - case.cu_seqlens[owner] + 1).astype(np.int32)

    def decode(rows):
        return gpu.to_numpy(
            gpu.paged_decode_attention(
                gpu.array(qkv[rows]),
                k_cache,
                v_cache,
                gpu.array(case.tables[owner[rows]]),
                gpu.array(context[rows]),
                shape[0],
                int(context[rows].max()),
            )
        )

    assert different(decode(np.arange(len(owner))), expected) == 0
    for row in (0, 7, 8 + 63, len(owner) - 1, len(owner) - 700 + 256):
        assert different(decode(np.array([row])), expected[row : row + 1]) == 0


@pytest.mark.parametrize("cache", [None, "E4M3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 1, 192), (5, 1, 132), (2, 2, 24)], ids=str)
def test_blocks_of_several_warps_have_the_bits_of_one(gpu, shape, dtype, cache, monkeypatch):
    """Lengths around the borders of tiles and chunks, with one chunk at the most and with several; no key at all."""
    from cukit.backend.cuda import paged_attention

    for lengths in ([1, 31, 32, 33, 63, 64, 65, 200, 256], [0, 257, 1, 512, 600, 320, 64]):
        case = Paged([max(length, 1) for length in lengths], *shape)
        qkv, k_cache, v_cache, _ = case.to(gpu, dtype)
        if cache is not None:
            if shape[2] % 8:
                pytest.skip("a cache of codes has rows of whole 8 bytes")
            codes = np.random.default_rng(0).integers(0, 0x7F, (2, *k_cache.shape), np.uint8)  # no NaN
            k_cache, v_cache = map(gpu.array, codes)
        given = [gpu.array(qkv[case.cu_seqlens[1:] - 1]), k_cache, v_cache, gpu.array(case.tables)]
        given += [gpu.array(np.array(lengths, np.int32)), shape[0], max(lengths)]
        found = []
        for blocks in (10**9, 0):
            monkeypatch.setattr(paged_attention, "FEW_BLOCKS", blocks)
            found.append(gpu.to_numpy(gpu.paged_decode_attention(*given)))
        assert np.isfinite(found[0].astype(np.float32)).all() and found[0][0].any() == bool(lengths[0])
        assert different(*found) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_has_the_bits_of_training(gpu, shape, dtype):
    """New tokens from any position on, in pieces, next to other sequences."""
    case = Paged([300, 7, 1, 700, 64, 257], *shape)
    qkv, k_cache, v_cache, expected = case.to(gpu, dtype)
    tables, lengths = case.tables, np.array(case.lengths)
    for starts in ([0] * 6, [299, 3, 0, 256, 63, 256], [17, 7, 1, 511, 16, 100]):
        rows, borders = case.rows(starts)
        got = gpu.paged_prefill_attention(
            gpu.array(qkv[rows]),
            k_cache,
            v_cache,
            gpu.array(tables),
            gpu.array(borders),
            gpu.array(lengths.astype(np.int32)),
            shape[0],
        )
        assert different(gpu.to_numpy(got), expected[rows]) == 0
    for start, stop in ((0, 100), (100, 101), (101, 613), (613, 700)):  # the fourth sequence in chunks
        rows = case.cu_seqlens[3] + np.arange(start, stop)
        got = gpu.paged_prefill_attention(
            gpu.array(qkv[rows]),
            k_cache,
            v_cache,
            gpu.array(tables[3:4]),
            gpu.array(np.array([0, stop - start], np.int32)),
            gpu.array(np.array([stop], np.int32)),
            shape[0],
        )
        assert different(gpu.to_numpy(got), expected[rows]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, tokens", [(64, 37), (128, 1), (12, 5), (256, 300)])
def test_store_and_copy(gpu, monkeypatch, dim, tokens, dtype):
    from cukit.backend.cuda import paged_attention

    rng = np.random.default_rng(0)
    dtype = gpu.dtype_of(dtype)
    qkv, slots = normal(tokens, (4 + 2 * 2) * dim).astype(dtype), rng.permutation(40 * 16)[:tokens].astype(np.int64)
    slots[::5] = -1
    caches = normal(4, 40, 16, 2, dim).astype(dtype)
    on_gpu = gpu.array(caches)
    reference.store_kv(*caches[:2], qkv, slots, 4, 2)
    gpu.store_kv(*on_gpu[:2], gpu.array(qkv), gpu.array(slots), 4, 2)
    source, target = np.array([1, 0, 39]), np.array([0, 2, 7])  # block 0 is read and written
    reference.copy_blocks(caches, source, target)
    gpu.copy_blocks(on_gpu, gpu.array(source), gpu.array(target))
    gpu.copy_blocks(on_gpu, gpu.array(source[:0]), gpu.array(target[:0]))
    assert different(gpu.to_numpy(on_gpu), caches) == 0
    monkeypatch.setattr(paged_attention, "STAGING_BYTES", 1)  # a cache at a time
    reference.copy_blocks(caches, target, source)
    gpu.copy_blocks(on_gpu, gpu.array(target), gpu.array(source))
    assert different(gpu.to_numpy(on_gpu), caches) == 0


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("heads, kv_heads, dim", [(16, 8, 128), (9, 3, 64), (7, 1, 20), (4, 4, 132), (2, 1, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_turn_and_store_at_once_has_the_bits_of_one_after_the_other(gpu, dtype, heads, kv_heads, dim, norm):
    tokens, block_size, rng = 77, 16, np.random.default_rng(1)
    slots = rng.permutation(10 * block_size)[:tokens].astype(np.int64)
    slots[rng.random(tokens) < 0.1] = -1
    empty = np.full((10, block_size, kv_heads, dim), 7, np.float32).astype(gpu.dtype_of(dtype))
    qkv = gpu.array(normal(tokens, (heads + 2 * kv_heads) * dim).astype(gpu.dtype_of(dtype)))
    weights = [gpu.array(normal(dim, seed=seed).astype(np.float32)) if norm else None for seed in (2, 3)]
    tables = [gpu.array(normal(500, dim // 2, seed=seed).astype(np.float32)) for seed in (4, 5)]
    positions = gpu.array(rng.integers(0, 500, tokens).astype(np.int32))
    given = qkv, *weights, *tables, positions, heads, kv_heads, 1e-6
    apart, at_once = ([gpu.array(empty) for _ in range(2)] for _ in range(2))
    expected, _ = gpu.qk_norm_rope_forward(*given)
    gpu.store_kv(*apart, expected, gpu.array(slots), heads, kv_heads)
    queries = gpu.qk_norm_rope_store(*at_once, gpu.array(slots), *given)
    found, wanted = (np.ascontiguousarray(gpu.to_numpy(x)[:, : heads * dim]) for x in (queries, expected))
    assert not different(found, wanted)
    for mine, theirs in zip(at_once, apart, strict=True):
        assert not different(gpu.to_numpy(mine), gpu.to_numpy(theirs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_batches_and_ghosts(gpu, dtype):
    case = Paged([5], 4, 2, 64)
    qkv, k_cache, v_cache, _ = case.to(gpu, dtype)
    qkv, tables, none = gpu.array(qkv), case.tables, np.zeros(0, np.int32)
    assert gpu.paged_decode_attention(
        qkv[:0], k_cache, v_cache, gpu.array(tables[:0]), gpu.array(none), 4, 5
    ).shape == (
        0,
        256,
    )
    assert gpu.paged_prefill_attention(
        qkv[:0], k_cache, v_cache, gpu.array(tables[:0]), gpu.array(np.zeros(1, np.int32)), gpu.array(none), 4
    ).shape == (0, 256)
    ghosts = gpu.paged_decode_attention(
        qkv, k_cache, v_cache, gpu.array(np.full((5, 3), -1, np.int32)), gpu.array(np.zeros(5, np.int32)), 4, 20
    )
    assert not gpu.to_numpy(ghosts).any()
    gpu.store_kv(k_cache, v_cache, qkv[:0], gpu.array(np.zeros(0, np.int64)), 4, 2)


@pytest.mark.parametrize("count", [0, 1, 255, 257, 3001])
def test_update_block_tables(gpu, count):
    rng = np.random.default_rng(count)
    tables = rng.integers(0, 99, (61, 67)).astype(np.int32)
    rows, columns = np.divmod(rng.permutation(tables.size)[:count], 67)
    entries = [x.astype(np.int32) for x in (rows, columns, rng.integers(0, 10**6, count))]
    on_gpu = gpu.array(tables)
    reference.update_block_tables(tables, *entries)
    gpu.update_block_tables(on_gpu, *map(gpu.array, entries))
    np.testing.assert_array_equal(gpu.to_numpy(on_gpu), tables)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_decode_in_a_graph(gpu, dtype):
    """A captured decode follows the contents of its buffers, whatever their lengths."""
    import cupy as cp

    case = Paged([300, 520, 40], 4, 2, 64)
    qkv, k_cache, v_cache, expected = case.to(gpu, dtype)
    queries, context, tables = (
        gpu.zeros((3, qkv.shape[1]), qkv.dtype),
        gpu.array(np.array([1, 0, 1], np.int32)),
        gpu.array(case.tables),
    )
    stream = cp.cuda.Stream(non_blocking=True)
    gpu.synchronize()
    with stream:
        gpu.paged_decode_attention(
            queries, k_cache, v_cache, tables, context, 4, 520
        )  # its memory stays in the pool for the capture
        stream.synchronize()
        stream.begin_capture()
        out = gpu.paged_decode_attention(queries, k_cache, v_cache, tables, context, 4, 520)
        graph = stream.end_capture()
        for lengths in ([300, 520, 40], [1, 257, 0], [256, 0, 7]):
            rows = [case.cu_seqlens[row] + max(length, 1) - 1 for row, length in enumerate(lengths)]
            queries[...] = gpu.array(qkv[rows])
            context[...] = gpu.array(np.array(lengths, np.int32))
            graph.launch(stream)
            got = gpu.to_numpy(out)
            for row, length in enumerate(lengths):
                wanted = expected[rows[row]] if length else np.zeros_like(expected[0])
                assert different(got[row], wanted) == 0


def test_refusals(gpu):
    case = Paged([5], 4, 2, 64)
    qkv, k_cache, v_cache, _ = case.to(gpu, "bfloat16")
    qkv, tables, context = gpu.array(qkv), gpu.array(case.tables), gpu.array(np.array([5], np.int32))
    with pytest.raises(ValueError, match="caches of shape"):
        gpu.store_kv(k_cache, v_cache[:1], qkv, gpu.array(case.slots), 4, 2)
    with pytest.raises(ValueError, match="for 5 sequences"):
        gpu.paged_decode_attention(qkv, k_cache, v_cache, tables, context, 4, 5)
    with pytest.raises(ValueError, match="max_context_len=999"):
        gpu.paged_decode_attention(qkv[:1], k_cache, v_cache, tables, context, 4, 999)
    with pytest.raises(ValueError, match="does not fit|does not hold"):
        gpu.paged_decode_attention(gpu.zeros((1, 7 * 64), qkv.dtype), k_cache, v_cache, tables, context, 4, 5)


@pytest.mark.slow
def test_cache_with_more_than_two_billion_elements(gpu):
    """A sequence in the last blocks of a cache of over 2^31 elements has the bits that it has in a small cache."""
    case, dtype = Paged([300], 4, 2, 128), gpu.dtype_of("bfloat16")
    qkv, _, _, expected = case.to(gpu, "bfloat16")
    qkv, tables = gpu.array(qkv), case.tables
    num_blocks = 2**31 // (16 * 2 * 128) + 64
    k_cache, v_cache = caches = gpu.zeros((2, num_blocks, 16, 2, 128), dtype)
    shift = num_blocks - int(tables.max()) - 1
    tables = gpu.array(np.where(tables >= 0, tables + shift, -1).astype(np.int32))
    gpu.store_kv(k_cache, v_cache, qkv, gpu.array(case.slots + shift * 16), 4, 2)
    length = gpu.array(np.array([300], np.int32))
    decoded = gpu.paged_decode_attention(qkv[-1:], k_cache, v_cache, tables, length, 4, 300)
    assert different(gpu.to_numpy(decoded), expected[-1:]) == 0
    got = gpu.paged_prefill_attention(qkv, k_cache, v_cache, tables, gpu.array(case.cu_seqlens), length, 4)
    assert different(gpu.to_numpy(got), expected) == 0
    gpu.copy_blocks(caches, tables[0, :1].astype(np.int64), gpu.array(np.array([3])))
    assert different(gpu.to_numpy(k_cache[3]), gpu.to_numpy(k_cache[int(case.tables[0, 0] + shift)])) == 0
