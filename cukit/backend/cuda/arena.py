"""Memory for steps that are captured as graphs: what a graph writes to must stay its own for as long as it may be
replayed.

CuPy's pools cannot promise that: short of memory they give free blocks back to the driver, and a block is free to them
although a graph uses it at its next replay. A pool beside the default one would also fail while the default one holds
all memory without using it.
"""

import bisect

import cupy as cp

ALIGNMENT = 512
SLAB_BYTES = 32 << 20


class Arena:
    """arena.malloc is an allocator for cp.cuda.using_allocator, over slabs of the default pool that are kept as long as
    the arena.

    A request takes the smallest free range that is large enough, at its beginning; where there is none a slab is added,
    unless `frozen`.
    """

    def __init__(self, make_slab=None, device_id=None):
        self._make_slab = make_slab or _default_slab
        self._device_id = cp.cuda.runtime.getDevice() if device_id is None else device_id
        self._slabs = {}  # address -> memory
        self._starts, self._sizes = [], {}  # addresses of the free ranges, ascending; address -> bytes
        # (address, bytes) of ranges whose last array went, at any moment: the garbage collector may run within malloc
        self.returned = []
        self.frozen = False  # within a capture, where asking the driver for memory is not allowed

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self._slabs.values())

    def malloc(self, size: int):
        """A cp.cuda.MemoryPointer to at least `size` bytes, which come back when its last array goes."""
        size = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        while self.returned:
            self._join(*self.returned.pop())
        fitting = [start for start in self._starts if self._sizes[start] >= size]
        start = min(fitting, key=self._sizes.__getitem__) if fitting else self._add_slab(size)
        self._take(start, size)
        memory = cp.cuda.UnownedMemory(start, size, _Range(self, start, size), self._device_id)
        return cp.cuda.MemoryPointer(memory, 0)

    def _add_slab(self, size):
        if self.frozen:
            raise MemoryError(
                f"no free range of {size} bytes in the arena's {self.total_bytes}, and it may not grow within a capture"
            )
        size = max(size, SLAB_BYTES)
        memory = self._make_slab(size)
        self._slabs[memory.ptr] = memory, size
        self._put(memory.ptr, size)
        return memory.ptr

    def _take(self, start, size):
        rest = self._sizes.pop(start) - size
        self._starts.remove(start)
        if rest:
            self._put(start + size, rest)

    def _join(self, start, size):
        """Add a free range, as one with its free neighbours in the same slab."""
        place = bisect.bisect_left(self._starts, start)
        after = self._starts[place] if place < len(self._starts) else None
        if after == start + size and after not in self._slabs:
            size += self._sizes.pop(after)
            del self._starts[place]
        before = self._starts[place - 1] if place else None
        if before is not None and before + self._sizes[before] == start and start not in self._slabs:
            self._sizes[before] += size
        else:
            self._put(start, size)

    def _put(self, start, size):
        bisect.insort(self._starts, start)
        self._sizes[start] = size


class _Range:
    """The owner that CuPy keeps with the memory and drops with it. It keeps the arena, hence the slab."""

    def __init__(self, arena, start, size):
        self._arena, self._range = arena, (start, size)

    def __del__(self):
        self._arena.returned.append(self._range)


def _default_slab(size):
    with cp.cuda.Stream.null:  # whose blocks are the ones that training used before
        return cp.get_default_memory_pool().malloc(size)
