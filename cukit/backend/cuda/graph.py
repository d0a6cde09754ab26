"""Steps that are done again and again, as CUDA graphs: hundreds of launches become one (252 cost the host over 2 ms, a
graph 0.02 ms).

A step runs plainly at its first call, which compiles kernels, compares products (exact.py) and lets the arena grow; its
second call is captured. The steps of one Graphs run one after the other, hence share their temporary memory.
"""

import contextlib
import functools
import sys

import cupy as cp

from .arena import Arena
from .loader import CHECK

ATTEMPTS = 2  # a capture fails where the arena lacks a range of the right size; the plain call after it makes one


class Graphs:
    """Steps that share memory."""

    def __init__(self):
        self._arena = Arena()

    def graphed(self, function):
        """A callable that does what `function()` does, at its lowest cost; a step's results may be overwritten by the
        next call of any step.

        `function` reads and writes fixed arrays only, and neither waits for the device nor asks it for values.
        """
        return function if CHECK else _Step(function, self._arena)


@functools.cache
def _stream():
    return (
        cp.cuda.Stream()
    )  # a blocking one: ordered with the default stream, which brings the inputs and takes the results


class _Step:
    def __init__(self, function, arena):
        self._function, self._arena = function, arena
        self._graph = self._result = None
        self._calls = self._failures = 0

    def __call__(self):
        if self._graph is None:
            self._calls += 1
            if self._calls == 1 or self._failures == ATTEMPTS or not self._capture():
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
                    print(f"this step runs without a CUDA graph, which could not be captured: {error}", file=sys.stderr)
            finally:
                arena.frozen = False
                if self._graph is None:  # also after an interrupt: a stream left in capture would refuse all other work
                    with contextlib.suppress(Exception):
                        stream.end_capture()
        return self._graph is not None
