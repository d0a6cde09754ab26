"""Clocks: time of a call, the device's own limits, and the highest use of its memory."""

import itertools
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# a device queues about 1,024 launches; with more of them in flight the host would wait and its own time be hidden
HOST_CALLS = 50
INTERVAL = 0.01  # seconds between two looks at the driver's count
BLOCK_ELEMENTS = 1 << 22  # random numbers that are drawn; larger arrays repeat them


@dataclass(frozen=True)
class Timing:
    """Seconds a call: until its work is done (calls overlap as they do in use), and until the host is free again."""

    seconds: float
    host_seconds: float
    calls: int  # in a batch


@dataclass(frozen=True)
class Limits:
    """What this device reached in this run."""

    bytes_per_second: float  # read and written together
    flops_per_second: float

    def least_seconds(self, num_bytes: int, flops: int) -> tuple[float, str]:
        """(the time below which no kernel can do this, what sets it)."""
        memory, compute = num_bytes / self.bytes_per_second, flops / self.flops_per_second
        return max(memory, compute), "memory" if memory >= compute else "compute"


def time_calls(backend, calls: Sequence[Callable], min_seconds: float, repeats: int) -> Timing:
    """Time the same work on several copies of its inputs, which are taken in turn. The median of `repeats` batches.

    A batch holds as many calls as last min_seconds, so that launching one hides behind the work of the one before.
    """
    turn = itertools.cycle(calls)
    for _ in range(2):  # the first compiles, fills caches and pools
        next(turn)()
    count, seconds = 1, _batch_seconds(backend, turn, 1)
    while seconds < min_seconds:
        count = max(count + 1, min(10 * count, math.ceil(1.1 * count * min_seconds / max(seconds, 1e-9))))
        seconds = _batch_seconds(backend, turn, count)
    batches = [seconds, *(_batch_seconds(backend, turn, count) for _ in range(repeats - 1))]
    host = (
        _host_seconds(backend, turn, min(count, HOST_CALLS))
        if backend.name != "cpu"
        else statistics.median(batches) / count
    )
    return Timing(statistics.median(batches) / count, host, count)


def _batch_seconds(backend, turn, count: int) -> float:
    backend.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        next(turn)()
    backend.synchronize()
    return time.perf_counter() - start


def _host_seconds(backend, turn, count: int) -> float:
    samples = []
    for _ in range(3):
        backend.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            next(turn)()
        samples.append((time.perf_counter() - start) / count)
    backend.synchronize()
    return statistics.median(samples)


def seconds_of(backend, function: Callable[[], object]) -> float:
    """Wall-clock seconds of one run, the device's work included."""
    backend.synchronize()
    start = time.perf_counter()
    function()
    backend.synchronize()
    return time.perf_counter() - start


def random_array(backend, generator: np.random.Generator, shape: tuple, dtype, scale: float = 1.0):
    """Normal numbers of this spread on the device; a large array repeats the first BLOCK_ELEMENTS."""
    size = math.prod(shape)
    block = generator.standard_normal(min(size, BLOCK_ELEMENTS), dtype=np.float32) * np.float32(scale)
    block = backend.array(block.astype(dtype))
    flat = backend.empty((size,), dtype)
    for start in range(0, size, BLOCK_ELEMENTS):
        part = flat[start : start + BLOCK_ELEMENTS]
        part[...] = block[: len(part)]
    return flat.reshape(shape)


def measure_limits(backend, dtype, min_seconds: float, repeats: int) -> Limits:
    """Bytes from the copy of a large array, FLOPs from a large square product in `dtype`."""
    elements, side = (1 << 24, 1024) if backend.name == "cpu" else (1 << 28, 8192)
    return Limits(
        _copy_rate(backend, elements, min_seconds, repeats), _product_rate(backend, side, dtype, min_seconds, repeats)
    )


def _copy_rate(backend, elements: int, min_seconds: float, repeats: int) -> float:
    source = random_array(backend, np.random.default_rng(0), (elements,), np.dtype(np.float32))
    target = backend.zeros(source.shape, source.dtype)

    def copy():
        target[...] = source

    return 2 * source.nbytes / time_calls(backend, [copy], min_seconds, repeats).seconds


def _product_rate(backend, side: int, dtype, min_seconds: float, repeats: int) -> float:
    generator = np.random.default_rng(0)
    x, w = (random_array(backend, generator, (side, side), dtype) for _ in range(2))
    # the forward product may be bound to an order of summation, the other is not: the faster one is the limit
    products = [lambda: backend.linear_forward(x, w), lambda: backend.linear_backward_input(x, w)]
    return 2 * side**3 / min(time_calls(backend, [product], min_seconds, repeats).seconds for product in products)


def memory_in_use(backend) -> int:
    free, total = backend.memory_info()
    return total - free


def peak_memory(backend, function: Callable[[], object], before: int) -> int:
    """Most bytes of device memory in use beyond `before` while function runs, read after every array function; on the
    CPU the most that the process ever held. Slows the function down: for a run that is not timed.
    """
    if backend.name == "cpu":
        import resource  # not on Windows

        function()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    highest, shelf = 0, backend.__name__

    def look(frame, event, _):
        nonlocal highest
        if event == "return" and _in_shelf(frame, shelf) and not _in_shelf(frame.f_back, shelf):
            highest = max(highest, memory_in_use(backend))

    earlier = sys.getprofile()
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(earlier)
    return max(highest - before, 0)


class DriverPeak:
    """The most memory of the device that is taken by the driver's count between entering and leaving: CUDA context,
    libraries and unused parts of pools included. Asked every INTERVAL seconds by a thread; on a CPU there is none.
    """

    def __init__(self, backend):
        self._backend, self._highest, self._ended = backend, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._highest = max(self._highest, self._backend.memory_taken())

    def __enter__(self):
        if self._backend.name != "cpu":
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def gb(self) -> float | None:
        """In GB; None on a CPU."""
        if self._backend.name == "cpu":
            return None
        return max(self._highest, self._backend.memory_taken()) / 1e9


def _in_shelf(frame, shelf: str) -> bool:
    return frame is not None and frame.f_globals.get("__name__", "").startswith(shelf)
