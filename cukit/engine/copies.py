"""Copies between host and device that nothing waits for: each way has two host buffers, used in turn."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np


def layout(fields: Iterable[tuple[str, Any, tuple[int, ...]]]) -> tuple[list, int]:
    """Where arrays (name, dtype, shape) lie in one block of bytes, so that one copy takes all of them: (what views()
    takes, bytes). The widest dtypes come first, so that each is aligned.
    """
    places, end = [], 0
    for name, dtype, shape in fields:
        start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        places.append((name, dtype, shape, start, end))
    return places, end


def views(block: Any, places: list) -> SimpleNamespace:
    """The arrays in `block` (n) uint8, of the host or of the device."""
    return SimpleNamespace(
        **{name: block[start:end].view(dtype).reshape(shape) for name, dtype, shape, start, end in places}
    )


class Outbox:
    """Copies to the device: one buffer may be written while the copy from the other waits for the step in flight."""

    def __init__(self, backend: Any, count: int, dtype: Any):
        self._backend, self._turn = backend, 0
        self._buffers = [_Buffers(backend, count, dtype) for _ in range(2)]

    def send(self, target: Any, values: Any) -> None:
        """Copy `values` (n) to the device array `target`. The caller may change them at once."""
        self._turn = 1 - self._turn
        buffers = self._buffers[self._turn]
        (host,) = buffers.ready(len(values))
        host[:] = values
        self._backend.upload(target, host)
        buffers.done.record()


class Inbox:
    """Copies to the host: the results of a step may be read while those of the next one are on their way."""

    def __init__(self, backend: Any, count: int, *dtypes: Any):
        self._backend, self._turn = backend, 0
        self._buffers = [_Buffers(backend, count, *dtypes) for _ in range(2)]

    def fetch(self, *arrays: Any) -> Results:
        """Start to copy device arrays (n). What the fetch before the last one gave is overwritten on the host."""
        self._turn = 1 - self._turn
        buffers = self._buffers[self._turn]
        hosts = buffers.ready(len(arrays[0]))
        for host, array in zip(hosts, arrays, strict=True):
            self._backend.download(host, array)
        buffers.done.record()
        return Results(arrays, hosts, buffers.done)


class Results:
    """Arrays of a step that was launched: on the device, and on their way to the host."""

    __slots__ = ("_done", "_hosts", "on_device")

    def __init__(self, on_device: tuple, hosts: list[np.ndarray], done: Any):
        self.on_device, self._hosts, self._done = on_device, hosts, done

    def on_host(self) -> list[np.ndarray]:
        """The arrays, once they are there. What the device was told after their copy is not waited for."""
        self._done.wait()
        return self._hosts


class _Buffers:
    """Page-locked arrays of equal length, and the moment at which the copies that were begun last are done."""

    def __init__(self, backend: Any, count: int, *dtypes: Any):
        self._backend, self._dtypes, self.done = backend, [np.dtype(dtype) for dtype in dtypes], backend.Event()
        self._make(count)

    def ready(self, count: int) -> list[np.ndarray]:
        """The arrays, `count` long, once they may be written."""
        self.done.wait()
        if count > len(self._arrays[0]):
            self._make(2 * count)
        return [array[:count] for array in self._arrays]

    def _make(self, count: int) -> None:
        self._arrays = [self._backend.host_buffer(count * dtype.itemsize).view(dtype) for dtype in self._dtypes]

    def __del__(self) -> None:
        # An engine may be dropped with a step in flight: the next owner of the memory must not meet its copies.
        with contextlib.suppress(Exception):
            self.done.wait()
