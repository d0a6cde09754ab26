"""What collectives move and how long they take by formula: NVLink within a host, the network between hosts. Simulated.

Rings: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005. All-reduce
is reduce-scatter and all-gather; each sends (n - 1)/n of the bytes a rank. Over hosts both go in two levels: ranks with
the same place on their hosts exchange 1/l of the bytes by the network, the l ranks of a host the rest by NVLink.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """Bytes a second that a GPU sends, and seconds that a message takes besides; by NVLink and by the network."""

    nvlink: float
    network: float
    nvlink_latency: float = 0.0
    network_latency: float = 0.0


@dataclass(frozen=True)
class Moved:
    """What one rank sends, and the seconds until all have what they need."""

    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.nvlink_bytes + other.nvlink_bytes,
            self.network_bytes + other.network_bytes,
            self.seconds + other.seconds,
        )

    def __mul__(self, times: float) -> Moved:
        return Moved(self.nvlink_bytes * times, self.network_bytes * times, self.seconds * times)


@dataclass(frozen=True)
class Ring:
    """`size` ranks, `local` of them on each host."""

    size: int
    local: int
    links: Links

    @property
    def hosts(self) -> int:
        return math.ceil(self.size / self.local)

    def one_way(self, nbytes: float) -> Moved:
        """Reduce-scatter, or all-gather, of arrays of so many bytes."""
        inside = nbytes * (self.local - 1) / self.local
        outside = nbytes / self.local * (self.hosts - 1) / self.hosts
        waits = (self.local - 1) * self.links.nvlink_latency + (self.hosts - 1) * self.links.network_latency
        return Moved(inside, outside, inside / self.links.nvlink + outside / self.links.network + waits)

    def ordered_scatter(self, nbytes: float) -> Moved:
        """Reduce-scatter in order of ranks: each rank sends every other one its share, which adds them up in order.
        NVLink and network work at the same time; every message waits for the one before.
        """
        inside = nbytes * (self.local - 1) / self.size
        outside = nbytes * (self.size - self.local) / self.size
        waits = (self.local - 1) * self.links.nvlink_latency + (self.size - self.local) * self.links.network_latency
        return Moved(inside, outside, max(inside / self.links.nvlink, outside / self.links.network) + waits)

    def scatter(self, nbytes: float, fast: bool) -> Moved:
        return self.one_way(nbytes) if fast else self.ordered_scatter(nbytes)

    def all_reduce(self, nbytes: float, fast: bool) -> Moved:
        return self.scatter(nbytes, fast) + self.one_way(nbytes)

    def broadcast(self, nbytes: float) -> Moved:
        """A chain that passes on pieces while it receives the next: the slowest link counts, once."""
        if self.size == 1:
            return Moved()
        if self.hosts == 1:
            return Moved(nbytes, 0, nbytes / self.links.nvlink + (self.size - 1) * self.links.nvlink_latency)
        waits = (self.local - 1) * self.links.nvlink_latency + (self.hosts - 1) * self.links.network_latency
        return Moved(nbytes, nbytes, nbytes / min(self.links.network, self.links.nvlink) + waits)
