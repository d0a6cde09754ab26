"""The arena of captured steps: its book-keeping, without a GPU."""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("cupy", reason="the arena hands out CuPy's memory pointers")
from cukit.backend.cuda.graph import ALIGNMENT, SLAB_BYTES, SMALL_BYTES, _Arena  # noqa: E402

LARGE = 2 * SMALL_BYTES


def make_arena(gap=0, first_bytes=0):
    """An arena over addresses that are never read; gap: bytes between two slabs."""
    made, end = [], [1 << 20]

    def slab(size):
        made.append((end[0], size))
        end[0] += size + gap
        return SimpleNamespace(ptr=made[-1][0])

    return _Arena(slab, device_id=0, first_bytes=first_bytes), made


def test_freed_memory_is_used_again_and_joined():
    arena, made = make_arena()
    first, second, third = (arena.malloc(40_000) for _ in range(3))
    assert [p.ptr - made[0][0] for p in (first, second, third)] == [0, 40_448, 80_896]
    del first, second
    assert arena.malloc(80_896).ptr == made[0][0], "two neighbours make room for one of both sizes"
    assert arena.malloc(0).ptr % ALIGNMENT == 0
    del third
    assert arena.malloc(SLAB_BYTES).ptr == made[0][0] and len(made) == 1, "all of it is free again, as one range"


def test_the_smallest_range_that_fits_is_taken():
    arena, made = make_arena()
    large, fence, small, fence_too = (arena.malloc(n * LARGE) for n in (8, 1, 2, 1))
    place = small.ptr
    del large, small
    assert arena.malloc(2 * LARGE).ptr == place


def test_what_is_small_stands_at_the_end():
    """Captured steps keep it; all before it stays one range."""
    arena, made = make_arena()
    large = arena.malloc(LARGE)
    kept = [arena.malloc(size) for size in (1, SMALL_BYTES, 600)]
    del large
    assert sum(made[0]) - kept[-1].ptr == ALIGNMENT + SMALL_BYTES + 2 * ALIGNMENT
    assert arena.malloc(kept[-1].ptr - made[0][0]).ptr == made[0][0] and len(made) == 1


@pytest.mark.parametrize("gap", [0, 4096])
def test_slabs_are_added_but_not_within_a_capture_and_never_joined(gap):
    arena, made = make_arena(gap)
    whole = arena.malloc(SLAB_BYTES)
    arena.frozen = True
    with pytest.raises(MemoryError, match="may not grow within a capture"):
        arena.malloc(1)
    arena.frozen = False
    other = arena.malloc(2 * SLAB_BYTES)
    assert arena.total_bytes == 3 * SLAB_BYTES and [size for _, size in made] == [SLAB_BYTES, 2 * SLAB_BYTES]
    del whole, other
    arena.malloc(3 * SLAB_BYTES)
    assert len(made) == 3, "two slabs that happen to be neighbours are not one"


def test_the_first_slab_is_as_large_as_was_asked():
    arena, made = make_arena(first_bytes=3 * SLAB_BYTES)
    held = [arena.malloc(size) for size in (1, 2 * SLAB_BYTES, 2 * SLAB_BYTES, 1)]
    assert [size for _, size in made] == [3 * SLAB_BYTES, 2 * SLAB_BYTES] and len(held) == 4


def test_ranges_in_use_never_overlap():
    arena, made = make_arena()
    generator, held = random.Random(0), []
    for _ in range(3000):
        if held and generator.random() < 0.5:
            held.pop(generator.randrange(len(held)))
        else:
            size = generator.choice([1, 700, 5000, 1 << 20, 9 << 20])
            held.append((arena.malloc(size), size))
        if len(held) > 60:
            del held[:30]
    ranges = sorted((pointer.ptr, pointer.ptr + size) for pointer, size in held)
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:]))
    assert all(any(start >= slab and end <= slab + size for slab, size in made) for start, end in ranges)
    held.clear()
    again = [arena.malloc(size) for _, size in made]
    assert sorted(p.ptr for p in again) == sorted(slab for slab, _ in made), "nothing was lost"


def test_memory_keeps_its_slab():
    kept = []

    class Slab(SimpleNamespace):
        def __del__(self):
            kept.append("gone")

    arena = _Arena(lambda size: Slab(ptr=1 << 20), device_id=0)
    pointer = arena.malloc(10)
    del arena
    assert not kept
    del pointer
    assert kept == ["gone"]
