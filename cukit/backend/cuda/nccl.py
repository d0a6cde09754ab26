"""NCCL through CuPy: exchanges between the GPUs of several processes, for parallel/nccl.py.

Everything runs on a stream of its own: after what the device was told before the call, and before what it is told
after it, unless it is called beside(). The host does not wait.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import cupy as cp
from cupy.cuda import nccl

KINDS = {
    "bfloat16": "NCCL_BFLOAT16",
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}  # dtype -> NCCL's name of it
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
        self._link = nccl.NcclCommunicator(size, unique_id, rank)
        # NCCL destroys a communicator after the last graph that holds its kernels, and waits for that for ever; Python
        # takes unused objects apart in any order. One reference more keeps this one.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._link))
        self._stream = cp.cuda.Stream(non_blocking=True)
        self._side = cp.cuda.Stream(non_blocking=True)  # which waits for the calls beside what is computed

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
        with self._in_order() as stream:
            nccl.groupStart()
            for rank, (sent, received) in enumerate(zip(outgoing, incoming, strict=True)):
                if rank != self.rank and sent.nbytes:
                    self._link.send(sent.data.ptr, sent.nbytes, nccl.NCCL_UINT8, rank, stream)
                if rank != self.rank and received.nbytes:
                    self._link.recv(received.data.ptr, received.nbytes, nccl.NCCL_UINT8, rank, stream)
            nccl.groupEnd()

    def all_gather(self, array) -> None:
        """Fill an array of which each rank holds its equal share."""
        _check(array)
        if share := array.nbytes // self.size:
            with self._in_order() as stream:
                own = array.data.ptr + self.rank * share
                self._link.allGather(own, array.data.ptr, share, nccl.NCCL_UINT8, stream)

    def all_parts(self, array):
        """(size, elements): the array of each rank."""
        _check(array)
        parts = cp.empty((self.size, array.size), array.dtype)
        if array.nbytes:
            with self._in_order() as stream:
                self._link.allGather(array.data.ptr, parts.data.ptr, array.nbytes, nccl.NCCL_UINT8, stream)
        return parts

    def broadcast(self, array, root: int) -> None:
        _check(array)
        if array.nbytes:
            with self._in_order() as stream:
                self._link.broadcast(array.data.ptr, array.data.ptr, array.nbytes, nccl.NCCL_UINT8, root, stream)

    def add_up(self, array) -> None:
        """array = the sum of all ranks' arrays, of floating-point numbers, in NCCL's own order."""
        _check(array)
        if array.dtype.name not in KINDS:
            raise ValueError(f"NCCL adds up {', '.join(KINDS)} here, got {array.dtype}")
        if array.size:
            kind, place = getattr(nccl, KINDS[array.dtype.name]), array.data.ptr
            with self._in_order() as stream:
                self._link.allReduce(place, place, array.size, kind, nccl.NCCL_SUM, stream)

    @staticmethod
    def empty_like(array):
        return cp.empty_like(array)

    @contextmanager
    def _in_order(self) -> Iterator[int]:
        current = cp.cuda.get_current_stream()
        self._stream.wait_event(current.record())
        yield self._stream.ptr
        current.wait_event(self._stream.record())


def _check(array) -> None:
    if not array.flags.c_contiguous:
        raise ValueError("collectives take contiguous arrays")
