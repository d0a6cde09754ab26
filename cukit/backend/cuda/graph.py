"""Steps that are run again and again, as CUDA graphs, and the memory that they may write to.

Hundreds of launches become one: 252 cost the host over 2 ms, a graph 0.02 ms. A step runs plainly at its first call,
which compiles kernels, compares products (exact.py) and lets the arena grow; its second call is captured. The steps of
one Graphs run one after the other, so they share their temporary memory.
"""

import bisect
import contextlib
import functools
import logging

import cupy as cp

from .device import synchronize
from .loader import CHECK
from .pool import malloc

logger = logging.getLogger(__name__)
ALIGNMENT = 512
SLAB_BYTES = 32 << 20
SMALL_BYTES = 16 << 10
ATTEMPTS = 2  # a capture fails where the arena lacks a range of the right size; the plain call after it makes one


class Graphs:
    """Steps that share memory. nbytes: what they will take of it; the first step makes it, in one piece."""

    def __init__(self, nbytes=0):
        self._arena = _Arena(first_bytes=nbytes)

    def graphed(self, function):
        """A callable that does what `function()` does, at its lowest cost; a step's results may be overwritten by the
        next call of any step.

        `function` reads and writes fixed arrays only, and neither waits for the device nor asks it for values.
        """
        return function if CHECK else _Step(function, self._arena)


class _StepStream(cp.cuda.Stream):
    """A blocking one: ordered with the default stream, which brings the inputs and takes the results."""

    is_of_steps = True  # nccl.py looks for it


@functools.cache
def _stream():
    return _StepStream()


class _Step:
    def __init__(self, function, arena):
        self._function, self._arena = function, arena
        self._graph = self._result = None
        self._calls = self._failures = 0

    def __call__(self):
        if self._graph is None:
            self._calls += 1
            if self._calls == 1 or self._failures == ATTEMPTS or not self._capture():
                synchronize()  # no graph runs while the same exchanges come plainly (nccl.py)
                with _stream(), cp.cuda.using_allocator(self._arena.malloc):
                    return self._function()
        self._graph.launch()
        return self._result

    def _capture(self) -> bool:
        stream, arena = _stream(), self._arena
        with stream, cp.cuda.using_allocator(arena.malloc):
            try:
                arena.frozen = True
                stream.begin_capture()
                result = self._function()
                self._graph, self._result = stream.end_capture(), result
            except Exception as error:
                self._failures += 1
                if self._failures == ATTEMPTS:
                    logger.warning("a step runs without a CUDA graph, which could not be captured: %s", error)
            finally:
                arena.frozen = False
                if self._graph is None:  # also after an interrupt: a stream left in capture refuses all other work
                    with contextlib.suppress(Exception):
                        stream.end_capture()
        return self._graph is not None


# ---- their memory: what a graph writes to must stay its own for as long as it may be replayed ----
# CuPy's pools cannot promise that: short of memory they give free blocks back to the driver, and a block is free to
# them although a graph uses it at its next replay. A pool beside the default one would also fail while the default one
# holds all memory without using it.


class _Arena:
    """arena.malloc is an allocator for cp.cuda.using_allocator, over slabs of the default pool that are kept as long as
    the arena.

    A request takes the smallest free range that is large enough, at its beginning; where there is none a slab is added,
    unless `frozen`. A small one takes the last range, at its end: captured steps keep their results, which would part
    the ranges. first_bytes: of the first slab. Steps of many sizes leave fewer gaps in one than in several.
    """

    def __init__(self, make_slab=None, device_id=None, first_bytes=0):
        self._first_bytes = first_bytes
        self._make_slab = make_slab or _default_slab
        self._device_id = cp.cuda.runtime.getDevice() if device_id is None else device_id
        self._slabs = {}  # address -> memory
        self._starts, self._sizes = [], {}  # addresses of the free ranges, ascending; address -> bytes
        # (address, bytes) of each range after its last array went. That may be at any moment: the garbage collector may
        # run within malloc.
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
        fitting = fitting or [self._add_slab(size)]
        if size <= SMALL_BYTES:
            start = self._take(max(fitting), size, at_end=True)
        else:
            start = self._take(min(fitting, key=self._sizes.__getitem__), size)
        memory = cp.cuda.UnownedMemory(start, size, _Range(self, start, size), self._device_id)
        return cp.cuda.MemoryPointer(memory, 0)

    def _add_slab(self, size):
        if self.frozen:
            raise MemoryError(
                f"no free range of {size} bytes in the arena's {self.total_bytes}, and it may not grow within a capture"
            )
        size = max(size, SLAB_BYTES, 0 if self._slabs else self._first_bytes)
        memory = self._make_slab(size)
        self._slabs[memory.ptr] = memory, size
        self._put(memory.ptr, size)
        return memory.ptr

    def _take(self, start, size, at_end=False):
        """The address of `size` bytes at one end of a free range."""
        rest = self._sizes.pop(start) - size
        self._starts.remove(start)
        if rest:
            self._put(start if at_end else start + size, rest)
        return start + rest if at_end else start

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
    with cp.cuda.Stream.null:  # the pool of this stream holds the blocks that training used before
        return malloc(size)
