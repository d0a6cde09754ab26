"""Norm, rotation, store and decode attention in one launch against the same one after the other, bit for bit.

Run: pytest -m gpu tests/gpu/test_rope_decode.py
"""

import numpy as np
import pytest
from check import check_kernel, normal, statistics

from cukit.backend import backend_for, e4m3

pytestmark = pytest.mark.gpu
HALF_TYPES = ["bfloat16", "float16"]
# groups of 1, 2, 3, 4, 7, and of more than a tile of 16; head_dims with and without whole vectors and padding
SHAPES = [
    (2, 2, 64),
    (4, 2, 128),
    (6, 2, 96),
    (16, 4, 128),
    (14, 2, 64),
    (16, 1, 128),
    (20, 1, 128),
    (33, 1, 8),
    (4, 2, 80),
    (3, 1, 24),
    (2, 1, 12),
]
ONE_CHUNK = [1, 2, 63, 64, 65, 128, 255, 256]
CHUNKS = [600, 257, 1, 0, 512, 513, 256, 321]
NOT_STORED = 7  # of CHUNKS: its slot is -1, so its newest key is what the cache has


@pytest.fixture
def gpu():
    return backend_for("cuda")


class Step:
    """A decode step on the GPU: caches that have all keys but the newest ones, and NaN in every other slot."""

    def __init__(self, gpu, lengths, shape, dtype, norm=True, block_size=16, coded=False):
        self.gpu, (self.heads, self.kv_heads, dim) = gpu, shape
        rng, kind = np.random.default_rng(0), gpu.dtype_of(dtype)
        counts = [-(-length // block_size) for length in lengths]
        blocks, total = rng.permutation(sum(counts)) + 1, sum(counts) + 1
        tables = np.full((len(lengths) + 1, max(counts) + 2), -1, np.int32)
        caches = [np.full((total * block_size, self.kv_heads, dim), np.nan) for _ in range(2)]
        slots, taken = np.full(len(lengths), -1, np.int64), 0
        for row, (length, count) in enumerate(zip(lengths, counts)):
            tables[row, :count] = blocks[taken : taken + count]
            taken += count
            index, offset = np.divmod(np.arange(length), block_size)
            places = tables[row, index].astype(np.int64) * block_size + offset
            if length and row != NOT_STORED:
                places, slots[row] = places[:-1], places[-1]
            for cache in caches:
                cache[places] = rng.standard_normal((len(places), self.kv_heads, dim))
        shaped = [x.reshape(total, block_size, self.kv_heads, dim) for x in caches]
        self.caches = [
            np.where(np.isnan(x), np.uint8(0x7F), e4m3.encode(x)) if coded else x.astype(kind) for x in shaped
        ]
        self.qkv = normal(len(lengths), (self.heads + 2 * self.kv_heads) * dim, seed=1).astype(kind)
        weights = [statistics(dim, seed=seed, around=1, scale=0.2) if norm else None for seed in (2, 3)]
        angles = rng.uniform(0, 6, (max(lengths) + 1, dim // 2))
        positions = np.maximum(np.array(lengths) - 1, 0).astype(np.int32)
        host = *weights, *(f(angles).astype(np.float32) for f in (np.cos, np.sin)), positions
        self.turn = [None if x is None else gpu.array(x) for x in host]
        self.slots, self.tables = gpu.array(slots), gpu.array(tables)
        self.context, self.longest = gpu.array(np.array(lengths, np.int32)), max(lengths)

    def __call__(self, at_once, qkv=None):
        """(result, k_cache, v_cache), from caches of its own."""
        gpu, caches = self.gpu, [self.gpu.array(x) for x in self.caches]
        qkv = gpu.array(self.qkv) if qkv is None else qkv
        given, sizes = (*caches, self.slots, qkv, *self.turn), (self.heads, self.kv_heads, 1e-6)
        where = self.tables, self.context
        if at_once:
            out = gpu.rope_paged_decode_attention(*given, *where, *sizes, self.longest)
        else:
            queries = gpu.qk_norm_rope_store(*given, *sizes)
            out = gpu.paged_decode_attention(queries, *caches, *where, self.heads, self.longest)
        return [gpu.to_numpy(x) for x in (out, *caches)]


def check_bits(step, **more):
    found, expected = step(True, **more), step(False)
    assert np.isfinite(found[0].astype(np.float32)).all()
    for ours, theirs, what in zip(found, expected, ("result", "keys", "values"), strict=True):
        assert ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes(), what
    assert found[1].tobytes() != step.caches[0].tobytes() and found[2].tobytes() != step.caches[1].tobytes()


@pytest.fixture(params=["one warp a block", "several warps"])
def blocks(request, monkeypatch):
    from cukit.backend.cuda import paged_attention

    monkeypatch.setattr(paged_attention, "FEW_BLOCKS", 0 if request.param == "one warp a block" else 10**9)


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that are launched."""
    from cukit.backend.cuda import loader

    names, call = [], loader.Kernel.__call__

    def noting(kernel, *args, **more):
        names.append(kernel.name.rpartition(".")[2])
        return call(kernel, *args, **more)

    monkeypatch.setattr(loader.Kernel, "__call__", noting)
    return names


@pytest.mark.parametrize("coded", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_one_after_the_other(gpu, shape, dtype, norm, coded, blocks):
    if coded and shape[2] % 8:
        pytest.skip("a cache of codes has rows of whole 8 bytes")
    for lengths in (ONE_CHUNK, CHUNKS):
        check_bits(Step(gpu, lengths, shape, dtype, norm, coded=coded))


@pytest.mark.parametrize("block_size", [1, 12, 256])
@pytest.mark.parametrize("shape", [(4, 2, 128), (14, 2, 64), (2, 1, 12)], ids=str)
def test_blocks_of_other_sizes(gpu, shape, block_size, blocks):
    for lengths in (ONE_CHUNK, CHUNKS):
        check_bits(Step(gpu, lengths, shape, "bfloat16", block_size=block_size))


@pytest.mark.parametrize("length", [1, 2, 64, 65, 129, 256, 257, 600])
def test_a_sequence_alone(gpu, length, blocks):
    check_bits(Step(gpu, [length], (16, 8, 128), "bfloat16"))


def test_it_is_one_launch(gpu, launches, blocks):
    from cukit.backend.cuda import paged_attention

    step = Step(gpu, ONE_CHUNK, (4, 2, 64), "bfloat16")
    launches.clear()
    step(True)
    assert launches == ["paged_decode_chunks_few" if paged_attention.FEW_BLOCKS else "paged_decode_chunks"]


@pytest.mark.parametrize("shape, dtype", [((4, 2, 64), "float32"), ((2, 1, 256), "bfloat16"), ((3, 1, 132), "float16")])
def test_what_is_done_one_after_the_other(gpu, shape, dtype, launches, blocks):
    for lengths in (ONE_CHUNK, CHUNKS):
        step = Step(gpu, lengths, shape, dtype)
        launches.clear()
        step(True)
        assert launches[0] == "qk_norm_rope_store"
        check_bits(step)


def test_a_projection_that_is_not_aligned(gpu, launches):
    step = Step(gpu, CHUNKS, (4, 2, 64), "bfloat16")
    flat = gpu.array(np.concatenate([step.qkv.ravel()[:1], step.qkv.ravel()]))
    check_bits(step, qkv=flat[1:].reshape(step.qkv.shape))
    assert launches[0] == "qk_norm_rope_store"


@pytest.mark.parametrize("shape", [(4, 2, 128), (14, 2, 64), (3, 1, 24)], ids=str)
def test_token_by_token_has_the_bits_of_training(gpu, shape, blocks):
    """Two sequences from empty caches on; each step reads what the steps before have stored."""
    (heads, kv_heads, dim), longest, block_size = shape, 270, 16
    lengths, dtype = [longest, 70], gpu.dtype_of("bfloat16")
    borders = np.cumsum([0, *lengths]).astype(np.int32)
    qkv = normal(sum(lengths), (heads + 2 * kv_heads) * dim).astype(dtype)
    angles = np.random.default_rng(0).uniform(0, 6, (longest, dim // 2))
    tables = [gpu.array(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
    given = *(gpu.array(statistics(dim, seed=s, around=1, scale=0.2)) for s in (2, 3)), *tables
    sizes, positions = (heads, kv_heads, 1e-6), np.concatenate([np.arange(x, dtype=np.int32) for x in lengths])
    turned, _ = gpu.qk_norm_rope_forward(gpu.array(qkv), *given, gpu.array(positions), *sizes)
    wanted = gpu.to_numpy(gpu.attention_forward(turned, gpu.array(borders), heads, kv_heads)[0])
    count = -(-longest // block_size)
    block_tables = np.random.default_rng(1).permutation(2 * count).reshape(2, count).astype(np.int32)
    caches = [gpu.array(np.full((2 * count, block_size, kv_heads, dim), np.nan).astype(dtype)) for _ in range(2)]
    for position in range(longest):
        present = np.array([position < length for length in lengths])
        rows = np.where(present, borders[:-1] + position, 0)
        slots = block_tables[:, position // block_size].astype(np.int64) * block_size + position % block_size
        places = gpu.array(np.where(present, slots, -1)), gpu.array(qkv[rows])
        context = gpu.array(np.where(present, position + 1, 0).astype(np.int32))
        where = gpu.array(np.where(present, position, 0).astype(np.int32)), gpu.array(block_tables), context
        out = gpu.to_numpy(gpu.rope_paged_decode_attention(*caches, *places, *given, *where, *sizes, longest))
        assert out[present].tobytes() == wanted[rows[present]].tobytes(), position
        assert not out[~present].any()


@pytest.mark.parametrize("shape", [(4, 2, 64), (14, 2, 64), (4, 1, 128)], ids=str)
def test_against_numpy(shape):
    heads, kv_heads, dim = shape
    lengths, tables = np.array([5, 0, 300], np.int32), np.arange(60, dtype=np.int32).reshape(3, 20)
    slots = np.array([4, -1, (40 + 299 // 16) * 16 + 299 % 16])
    caches = [normal(60, 16, kv_heads, dim, seed=seed) for seed in (1, 2)]
    angles = np.random.default_rng(0).uniform(0, 6, (300, dim // 2))
    turn = (
        *(statistics(dim, seed=s, around=1, scale=0.1) for s in (3, 4)),
        *(f(angles).astype(np.float32) for f in (np.cos, np.sin)),
    )
    given = *caches, slots, normal(3, (heads + 2 * kv_heads) * dim), *turn, np.maximum(lengths - 1, 0)
    check_kernel("rope_paged_decode_attention", *given, tables, lengths, heads, kv_heads, 1e-6, 300)


def test_what_does_not_fit_is_refused(gpu):
    step = Step(gpu, ONE_CHUNK, (4, 2, 64), "bfloat16")
    step.slots = step.slots[1:]
    with pytest.raises(ValueError, match="7 slots do not fit 8 tokens"):
        step(True)
