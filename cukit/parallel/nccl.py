"""The group of the same ranks for arrays on their GPUs: NCCL through CuPy, whose id travels by MPI."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..backend import nccl
from .group import RankedGroup, shares


class NCCLGroup(RankedGroup):
    """See the module. A call returns before the GPUs have done it: what they are told later comes after it. Values and
    barriers go through the host.
    """

    def __init__(self, host: Any):
        """host: the MPIGroup of the same ranks."""
        self._host, self.rank, self.size, self.local_rank = host, host.rank, host.size, host.local_rank
        library = nccl()
        places = host.gather_values((host.host_name, library.device_place()), "start of NCCL")
        for rank, place in enumerate(places):
            if (first := places.index(place)) != rank:
                raise ValueError(
                    f"ranks {first} and {rank} use the same GPU ({place[1]} of {place[0]}): start one process a GPU, "
                    "and let each see its own, or all of its host (CUDA_VISIBLE_DEVICES, --gpus-per-task)"
                )
        self._new_id = lambda: host.gather_values(library.unique_id() if self.rank == 0 else None, "start of NCCL")[0]
        self._link = library.Communicator(self.size, self.rank, self._new_id())

    def all_reduce(self, array: Any, what: str = "all_reduce", fast: bool = False) -> None:
        """Of two ranks the library's own sum has the bits of the sum in order, a + b, and is one launch."""
        super().all_reduce(array, what, fast or self.size == 2)

    def broadcast(self, array: Any, root: int = 0, what: str = "broadcast") -> None:
        self._link.broadcast(array, root)

    def all_gather(self, array: Any, borders: Sequence[int] | None = None, what: str = "all_gather") -> None:
        equal = array.size % self.size == 0
        if equal and (borders is None or list(borders) == shares(array.size, self.size)):
            self._link.all_gather(array)
        else:
            super().all_gather(array, borders, what)

    def all_parts(self, array: Any, what: str = "all_parts") -> Any:
        return self._link.all_parts(array).reshape(self.size, *array.shape)

    def prepare_steps(self) -> None:
        self._link.prepare_steps(self._new_id)

    def beside(self) -> AbstractContextManager[None]:
        return self._link.beside()

    def moment(self) -> Any:
        return self._link.moment()

    def join(self, moment: Any = None) -> None:
        self._link.join(self._link.moment() if moment is None else moment)

    def barrier(self, what: str = "barrier") -> None:
        self._host.barrier(what)

    def gather_values(self, value: Any, what: str = "gather_values") -> list:
        return self._host.gather_values(value, what)

    def _swap(self, outgoing: list, incoming: list, what: str) -> None:
        self._link.swap(outgoing, incoming)

    def _add_up(self, array: Any, what: str) -> None:
        self._link.add_up(array)

    def _empty_like(self, array: Any) -> Any:
        return self._link.empty_like(array)
