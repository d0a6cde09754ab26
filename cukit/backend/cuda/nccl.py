"""NCCL through CuPy: exchanges between the GPUs of several processes, for parallel/nccl.py.

Everything runs on a stream of its own: after what the device was told before the call, and before what it is told
after it, unless it is called beside(). The host does not wait.

Exchanges of steps that become CUDA graphs (graph.py) have a communicator of their own. Then NCCL need not order those
of graphs among others, which takes as long as a small exchange itself (docs/BENCHMARKS.md). What it asks for instead
holds: graphs run one after the other, and no other call comes to that communicator while one runs.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import cupy as cp
from cupy.cuda import nccl

KINDS = {
    "bfloat16": "NCCL_BFLOAT16",
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}  # dtype -> NCCL's name of it
os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")  # NCCL reads it at its first call
INSTALL = "pip install 'nvidia-nccl-cu12>=2.18,<3' (of cupy-cuda13x: nvidia-nccl-cu13)"


def check() -> None:
    """ValueError in one line where CuPy finds no NCCL."""
    if not nccl.available:
        raise ValueError(f"several GPUs need the library NCCL, which CuPy does not find: {INSTALL}")


def unique_id() -> bytes:
    """What the processes of a new communicator have to know; one of them makes it."""
    return nccl.get_unique_id()


def device_place() -> str:
    """The current GPU's place on its host."""
    return cp.cuda.Device().pci_bus_id


class Communicator:
    """Rank `rank` of `size` processes with a GPU each. All of them make one, with the same id, at the same time. It
    lasts as long as its process.
    """

    def __init__(self, size: int, rank: int, unique_id: bytes):
        self.size, self.rank = size, rank
        self._link = self._new_link(unique_id)
        self._link_of_steps: nccl.NcclCommunicator | None = None
        self._stream = cp.cuda.Stream(non_blocking=True)
        self._side = cp.cuda.Stream(non_blocking=True)  # which waits for the calls beside what is computed

    def _new_link(self, unique_id: bytes):
        link = nccl.NcclCommunicator(self.size, unique_id, self.rank)
        # NCCL destroys a communicator after the last graph that holds its kernels, and waits for that for ever; Python
        # takes unused objects apart in any order. One reference more keeps this one.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(link))
        return link

    def prepare_steps(self, new_id: Callable[[], bytes]) -> None:
        """Make what the exchanges of steps that become graphs need, once; new_id gives all ranks one more id."""
        if self._link_of_steps is None:
            self._link_of_steps = self._new_link(new_id())

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, calls and arithmetic come after what the device was told before, and what it is told later waits for
        them at join() alone. What is allocated inside comes from the pool of that stream, so that no kernel outside
        gets memory that is still in use here; arrays from outside must live until join().
        """
        self._side.wait_event(cp.cuda.get_current_stream().record())
        with self._side:
            yield

    def moment(self):
        """After all that was begun beside() so far."""
        return self._side.record()

    @staticmethod
    def join(moment) -> None:
        """What the device is told from now on comes after that moment."""
        cp.cuda.get_current_stream().wait_event(moment)

    def swap(self, outgoing: list, incoming: list) -> None:
        """Send outgoing[r] to rank r and receive incoming[r] from it; entries of this rank are left alone."""
        for array in (*outgoing, *incoming):
            _check(array)
        with self._in_order() as (link, stream):
            nccl.groupStart()
            for rank, (sent, received) in enumerate(zip(outgoing, incoming, strict=True)):
                if rank != self.rank and sent.nbytes:
                    link.send(sent.data.ptr, sent.nbytes, nccl.NCCL_UINT8, rank, stream)
                if rank != self.rank and received.nbytes:
                    link.recv(received.data.ptr, received.nbytes, nccl.NCCL_UINT8, rank, stream)
            nccl.groupEnd()

    def all_gather(self, array) -> None:
        """Fill an array of which each rank holds its equal share."""
        _check(array)
        if share := array.nbytes // self.size:
            with self._in_order() as (link, stream):
                own = array.data.ptr + self.rank * share
                link.allGather(own, array.data.ptr, share, nccl.NCCL_UINT8, stream)

    def all_parts(self, array):
        """(size, elements): the array of each rank."""
        _check(array)
        parts = cp.empty((self.size, array.size), array.dtype)
        if array.nbytes:
            with self._in_order() as (link, stream):
                link.allGather(array.data.ptr, parts.data.ptr, array.nbytes, nccl.NCCL_UINT8, stream)
        return parts

    def broadcast(self, array, root: int) -> None:
        _check(array)
        if array.nbytes:
            with self._in_order() as (link, stream):
                link.broadcast(array.data.ptr, array.data.ptr, array.nbytes, nccl.NCCL_UINT8, root, stream)

    def add_up(self, array) -> None:
        """array = the sum of all ranks' arrays, of floating-point numbers, in NCCL's own order."""
        _check(array)
        if array.dtype.name not in KINDS:
            raise ValueError(f"NCCL adds up {', '.join(KINDS)} here, got {array.dtype}")
        if array.size:
            kind, place = getattr(nccl, KINDS[array.dtype.name]), array.data.ptr
            with self._in_order() as (link, stream):
                link.allReduce(place, place, array.size, kind, nccl.NCCL_SUM, stream)

    @staticmethod
    def empty_like(array):
        return cp.empty_like(array)

    @contextmanager
    def _in_order(self) -> Iterator[tuple]:
        """Inside: the communicator to call, and the stream."""
        current = cp.cuda.get_current_stream()
        self._stream.wait_event(current.record())
        yield self._link_of_steps if getattr(current, "is_of_steps", False) else self._link, self._stream.ptr
        current.wait_event(self._stream.record())


def _check(array) -> None:
    if not array.flags.c_contiguous:
        raise ValueError("collectives take contiguous arrays")
