"""A group of ranks: processes that run the same program, each on its share of the work.

Collectives work in place on arrays, and every rank calls them in the same order. A sum adds the ranks' numbers in order
of ranks, so that a run repeats bit for bit, and all ranks get the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..backend import backend_of

SMALL = 1 << 20  # bytes of a sum up to which each rank gets all arrays in one exchange, and adds them up itself
CHUNK = 1 << 25  # elements that are exchanged at a time: what a sum takes besides, 128 MiB of float32


SAME_CALLS = (
    "every rank must make the same calls, a callback's evaluate(), save_checkpoint(), save_model() and "
    "stop_requested() too"
)


class RankLost(ConnectionError):
    """Another rank died, hangs, failed or did not come to a collective; the message says which, and why."""


class Group:
    """The group of one, in which nothing has to be done; and what every group offers."""

    rank, size, local_rank = 0, 1, 0

    def all_reduce(self, array: Any, what: str = "all_reduce", fast: bool = False) -> None:
        """array = the sum of all ranks' arrays. fast: added up in the library's own order."""

    def reduce_scatter(self, array: Any, what: str = "reduce_scatter") -> Any:
        """This rank's share (see shares) of the sum of all ranks' arrays, in place; the rest of array is undefined.
        Returns the share, a view.
        """
        return array.reshape(-1)

    def all_gather(self, array: Any, borders: Sequence[int] | None = None, what: str = "all_gather") -> None:
        """Fill a one-dimensional array of which each rank holds its own part: borders[rank] … borders[rank + 1] − 1
        (default: its share).
        """

    def all_parts(self, array: Any, what: str = "all_parts") -> Any:
        """(size, …): the array of each rank, in their order; memory of its own where there are several."""
        return array.reshape(1, *array.shape)

    def broadcast(self, array: Any, root: int = 0, what: str = "broadcast") -> None:
        """array = the root's."""

    def barrier(self, what: str = "barrier") -> None:
        """Wait until every rank is here."""

    def gather_values(self, value: Any, what: str = "gather_values") -> list:
        """The value of each rank, in their order: any small Python value."""
        return [value]

    def prepare_steps(self) -> None:
        """Before collectives are called in steps that the device repeats by itself (Graphs). Every rank calls it; again
        does nothing.
        """

    def beside(self) -> AbstractContextManager[None]:
        """Collectives inside, and what is computed there, come after what the device was told before; what it is told
        later does not wait for them. Their arrays must live until join().
        """
        return nullcontext()

    def moment(self) -> Any:
        """After all that was begun beside() so far; for join()."""
        return None

    def join(self, moment: Any = None) -> None:
        """What the device is told from now on comes after what was begun beside() before that moment; default: now."""

    def on(self, backend: Any) -> Group:
        """The group of the same ranks for a backend's arrays."""
        return self

    def part(self, ranks: Sequence[int]) -> Group | None:
        """The group of some of these ranks, in the order given, in which they count from 0; None for a rank that is not
        among them. Every rank of this group calls it. Disjoint parts can be made at once: each rank names its own.
        """
        return self if list(ranks) == [0] else None


def shares(count: int, size: int) -> list[int]:
    """Borders (size + 1) of the ranks' shares of `count` elements: equal where size divides count."""
    return [count * rank // size for rank in range(size + 1)]


def check_places(places: Sequence[str], members: Sequence[int] | None = None) -> None:
    """RankLost, the same on every rank, unless all ranks are at the same place. members: their numbers among all."""
    for rank, place in enumerate(places):
        if place != places[0]:
            first, other = (0, rank) if members is None else (members[0], members[rank])
            raise RankLost(f"rank {first} is in {places[0]} where rank {other} is in {place}: {SAME_CALLS}")


def flat_view(array: Any) -> Any:
    """An array's elements in one dimension, in place; ValueError where that would be a copy."""
    if not array.flags.c_contiguous:
        raise ValueError("collectives take contiguous arrays")
    return array.reshape(-1)


def _in_order(arrays: Sequence[Any]) -> Any:
    """The sum of at least two arrays in their order, of half types in float32, to be rounded once."""
    wide = [array.astype("float32") if array.itemsize == 2 else array for array in arrays]
    total = wide[0] + wide[1]
    for more in wide[2:]:
        total += more
    return total


class RankedGroup(Group):
    """Several ranks: the sums, in order of ranks, by means of an exchange of arrays between each two ranks."""

    @abstractmethod
    def _swap(self, outgoing: list, incoming: list, what: str) -> None:
        """Send outgoing[r] to rank r and receive incoming[r] from it; entries of this rank are left alone."""

    @abstractmethod
    def _add_up(self, array: Any, what: str) -> None:
        """array = the sum of all ranks' arrays, by the library's own function."""

    @abstractmethod
    def _empty_like(self, array: Any) -> Any: ...

    def all_reduce(self, array: Any, what: str = "all_reduce", fast: bool = False) -> None:
        flat = flat_view(array)
        if not fast and flat.nbytes <= SMALL and self.size > 1:
            flat[...] = _in_order(self.all_parts(flat, what)) if flat.size else 0
            return
        for start in range(0, flat.size, CHUNK):
            part = flat[start : start + CHUNK]
            if fast:
                self._add_up(part, what)
            else:
                self.reduce_scatter(part, what)
                self.all_gather(part, what=what)

    def reduce_scatter(self, array: Any, what: str = "reduce_scatter") -> Any:
        flat = flat_view(array)
        if self.size == 1:  # a part of one rank
            return flat
        borders = shares(flat.size, self.size)
        longest, most = max(b - a for a, b in zip(borders, borders[1:])), max(CHUNK // self.size, 1)
        for start in range(0, longest, most):
            parts = [flat[min(a + start, b) : min(a + start + most, b)] for a, b in zip(borders, borders[1:])]
            own = parts[self.rank]
            found = [own if rank == self.rank else self._empty_like(own) for rank in range(self.size)]
            self._swap(parts, found, what)
            own[...] = _in_order(found)
        return flat[borders[self.rank] : borders[self.rank + 1]]

    def all_gather(self, array: Any, borders: Sequence[int] | None = None, what: str = "all_gather") -> None:
        borders = shares(array.size, self.size) if borders is None else borders
        parts = [flat_view(array)[a:b] for a, b in zip(borders, borders[1:])]
        self._swap([parts[self.rank]] * self.size, parts, what)

    def all_parts(self, array: Any, what: str = "all_parts") -> Any:
        parts = backend_of(array).empty((self.size, *array.shape), array.dtype)
        parts[self.rank] = array
        self._swap([array] * self.size, list(parts), what)
        return parts
