"""Messages between two ranks at any time, while neither waits: for what no collective can do."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import numpy as np


class Mailbox(ABC):
    """Of one rank of a group. Messages of two ranks arrive in the order in which they were sent."""

    rank: int
    size: int
    num_uses = 0  # so far; every rank counts alike, and tells messages of one from those of another

    @abstractmethod
    def send(self, rank: int, value: Any) -> None:
        """Send a Python value to a rank, this one included. Returns at once."""

    @abstractmethod
    def receive(self) -> tuple[int, Any] | None:
        """(sender, value) of the message that came first, None if none is here."""

    @abstractmethod
    def check(self) -> None:
        """RankLost if a rank is lost."""


class MPIMailbox(Mailbox):
    """By an mpi4py communicator of its own. The library moves messages on only while it is called: look often."""

    def __init__(self, communicator: Any, watch: Any):
        from mpi4py import MPI

        self._mpi, self._comm, self._watch = MPI, communicator, watch
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self._leaving: list[tuple[Any, np.ndarray]] = []  # requests and what they send
        self._coming: deque[tuple[Any, int, np.ndarray]] = deque()  # requests, senders, what is filled

    def send(self, rank: int, value: Any) -> None:
        data = np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8)
        self._leaving.append((self._comm.Isend(data, rank), data))

    def receive(self) -> tuple[int, Any] | None:
        self._leaving = [(request, data) for request, data in self._leaving if not request.Test()]
        status = self._mpi.Status()
        while (message := self._comm.Improbe(status=status)) is not None:
            data = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            self._coming.append((message.Irecv(data), status.Get_source(), data))
        if not self._coming or not self._coming[0][0].Test():
            return None
        _, sender, data = self._coming.popleft()
        return sender, pickle.loads(data.tobytes())

    def check(self) -> None:
        if self._watch.lost is not None:
            self._watch.check()
