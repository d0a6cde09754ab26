"""Steps that are done again and again, as CUDA graphs: hundreds of launches become one (252 cost the host over 2 ms, a graph 0.02 ms).

A step runs plainly at its first call, which compiles kernels, compares products (exact.py) and fills the memory pool; its second call is
captured. All steps share one stream and one pool of their own, so that what a graph writes to belongs to nobody else; they run one after
the other, hence may use the same temporary memory.
"""

import contextlib
import functools
import sys

import cupy as cp

from .loader import CHECK

ATTEMPTS = 2  # a capture fails where the pool lacks a block of the right size; the plain call after it may have made one


def replayed(function):
    """A callable that does what `function()` does, at its lowest cost; results may be overwritten by the next call.

    `function` reads and writes fixed arrays only, and neither waits for the device nor asks it for values.
    """
    return function if CHECK else _Step(function)


def free_replays():
    """Give back the memory of steps that nobody calls any more."""
    _pool().free_all_blocks()


@functools.cache
def _stream():
    return cp.cuda.Stream()  # a blocking one: ordered with the default stream, which brings the inputs and takes the results


@functools.cache
def _pool():
    return cp.cuda.MemoryPool()


class _Step:
    def __init__(self, function):
        self._function = function
        self._graph = self._result = None
        self._calls = self._failures = 0

    def __call__(self):
        if self._graph is None:
            self._calls += 1
            if self._calls == 1 or self._failures == ATTEMPTS or not self._capture():
                with _stream(), cp.cuda.using_allocator(_pool().malloc):
                    return self._function()
        self._graph.launch()
        return self._result

    def _capture(self) -> bool:
        stream = _stream()
        with stream, cp.cuda.using_allocator(_pool().malloc):
            stream.begin_capture()
            try:
                self._result = self._function()
                self._graph = stream.end_capture()
            except Exception as error:
                with contextlib.suppress(Exception):
                    stream.end_capture()
                self._result = None
                self._failures += 1
                if self._failures == ATTEMPTS:
                    print(f"this step runs without a CUDA graph, which could not be captured: {error}", file=sys.stderr)
        return self._graph is not None
