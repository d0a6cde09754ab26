"""Weights of a frozen base that lie in the host's memory, while copies with an adapter merged in stand in their place.

The device holds each weight once: the merged copy takes the memory of the weight itself. The base comes back layer by
layer: into that memory, to be merged anew after an update; and into memory of its own, for a pass without the adapter.
Copies run beside what the device computes: the next weight comes while the one before is merged or multiplied with.
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np


class HostBase:
    """weights: arrays of the device, in the order in which a pass multiplies with them. They are copied to the host,
    page-locked; from then on their own memory is free for merged copies. MemoryError where the system gives no such
    memory.
    """

    def __init__(self, backend, weights: list):
        self._backend, self._weights, self._copies = backend, weights, backend.SideCopies()
        self._held = [backend.host_buffer(weight.nbytes).view(np.dtype(weight.dtype)) for weight in weights]
        self._held = [host.reshape(weight.shape) for host, weight in zip(self._held, weights, strict=True)]
        for host, weight in zip(self._held, weights, strict=True):
            backend.download(host, weight)
        backend.synchronize()
        self._thread = threading.local()

    @property
    def nbytes(self) -> int:
        """On the host."""
        return sum(host.nbytes for host in self._held)

    def bring_back(self) -> Iterator[int]:
        """Copy each weight back into its own memory. Yields its place once what the device is told next finds it."""
        under_way = [self._copies.upload(weight, host) for weight, host in zip(self._weights, self._held, strict=True)]
        for place, copy in enumerate(under_way):
            self._copies.join(copy)
            yield place

    def weight(self, place: int) -> Any:
        """A weight as it is in the base, in memory that is free once the array goes. The next one begins to come."""
        ahead = self._ahead
        found, copy = ahead.pop(place, None) or self._begin(place)
        self.drop_ahead()
        if place + 1 < len(self._held):
            ahead[place + 1] = self._begin(place + 1)
        self._copies.join(copy)
        return found

    def drop_ahead(self) -> None:
        """Forget what came for this thread's next product."""
        for _, copy in self._ahead.values():
            self._copies.join(copy)  # before its memory is anything else's
        self._ahead.clear()

    @property
    def _ahead(self) -> dict[int, tuple]:
        if not hasattr(self._thread, "ahead"):
            self._thread.ahead = {}
        return self._thread.ahead

    def _begin(self, place: int) -> tuple:
        """(memory on the device, the copy that is under way)."""
        weight = self._weights[place]
        found = self._backend.empty(weight.shape, weight.dtype)
        return found, self._copies.upload(found, self._held[place])
