"""The memory of the card: how much is free, how much this process may take, and memory that is given back while its
addresses stay.

CUDA graphs hold addresses, so sleeping memory must come back at its old ones. Addresses are reserved once; the driver
maps memory to them and unmaps it (CUDA driver API, "Virtual Memory Management").
"""

import contextlib
import ctypes
import functools
import math
from collections.abc import Iterator

import cupy as cp
import numpy as np

from . import pool

CHUNK_BYTES = 64 << 20  # mapped at a time: 12 GB are 180 chunks of three driver calls each
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def memory_info() -> tuple[int, int]:
    """(free, total) bytes of the device; what the pool holds but nothing uses counts as free."""
    free, total = cp.cuda.runtime.memGetInfo()
    return free + cp.get_default_memory_pool().free_bytes(), total


def memory_taken() -> int:
    """Bytes of the device that are taken by the driver's count: by this process, its CUDA context and what its pool
    holds unused included, and by others.
    """
    free, total = cp.cuda.runtime.memGetInfo()
    return total - free


def free_unused_memory() -> None:
    """Give what the pool holds and nothing uses back to the driver."""
    _free_unused_memory()


def limit_memory(nbytes: int | None) -> None:
    """From now on this process takes at most `nbytes` of the card, CUDA context and libraries included; None: all that
    there is. What would take more ends in a MemoryError.
    """
    pool.set_limit(nbytes)


def memory_limit() -> int | None:
    """What limit_memory() said."""
    return pool.limit()


class Reservation:
    """Memory for arrays at fixed addresses; its bytes can be given back to the driver and taken again.

    Zeros at first and after restore(). Freed when neither it nor an array of it is left, after the device has done what
    it was told. MemoryError where the card has no room.
    """

    def __init__(self, nbytes: int):
        self.nbytes, self._size, self._address, self._mapped = nbytes, 0, 0, 0
        _free_what_was_left()
        self._device = _current_device()
        _enter(self._device)
        self._driver = _driver()
        self._properties = _properties(self._device)
        unit = self._driver.granularity(self._properties)
        self._chunk = _rounded_up(CHUNK_BYTES, unit)
        self._size = _rounded_up(max(nbytes, 1), unit)
        self._address = self._driver.reserve(self._size, unit)
        try:
            self.restore()
        except BaseException:
            self._close()
            raise

    @property
    def resident(self) -> bool:
        """Whether memory lies behind the addresses."""
        return self._size > 0 and self._mapped == self._size

    def array(self, offset: int, shape: tuple[int, ...], dtype) -> cp.ndarray:
        """The array of this shape that begins `offset` bytes from the start. To be used only while resident."""
        dtype = np.dtype(dtype)
        assert 0 <= offset <= self.nbytes - math.prod(shape) * dtype.itemsize, "an array outside of its reservation"
        memory = cp.cuda.UnownedMemory(self._address, self._size, self, self._device)
        return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, offset))

    def release(self) -> None:
        """Give the bytes back to the driver, once the device has done what it was told."""
        if self._mapped:
            _enter(self._device)
            _wait()  # what runs may still read the bytes
            self._unmap()

    def restore(self) -> None:
        """Take bytes for the same addresses again: zeros. Memory that CuPy's pool holds unused is freed where the card
        is full.
        """
        if self.resident:
            return
        _enter(self._device)
        pool.hold(self._size - self._mapped)
        try:
            self._map()
        except MemoryError:
            _free_unused_memory()
            self._map()
        # The bytes may be another process's old ones, and a masked key's weight of 0 times NaN is NaN.
        _fill_with_zeros(self._address, self._size)

    def _map(self):
        try:
            while self._mapped < self._size:
                size = min(self._chunk, self._size - self._mapped)
                with self._driver.memory(size, self._properties) as handle:
                    self._driver.map(self._address + self._mapped, size, handle)
                self._count(size)
            self._driver.allow_access(self._address, self._size, self._properties.location)
        except BaseException:
            self._unmap()
            raise

    def _unmap(self):
        while self._mapped:
            size = self._mapped % self._chunk or self._chunk  # what was mapped last
            self._driver.unmap(self._address + self._mapped - size, size)
            self._count(-size)
        pool.hold()

    def _count(self, size: int):
        self._mapped += size
        pool.count_reserved(size)

    def _close(self):
        self.release()
        if self._address:
            _enter(self._device)
            self._driver.free(self._address, self._size)
            self._address = self._size = 0

    def __del__(self):
        try:
            self._close()
        except Exception:  # a stream is being captured, say, which refuses to wait
            if self._address:
                left = object.__new__(Reservation)
                left.__dict__.update(self.__dict__)
                _left.append(left)


_left: list[Reservation] = []  # could not be freed when they were collected


def _free_what_was_left():
    waiting, _left[:] = list(_left), []
    for reservation in waiting:
        with contextlib.suppress(Exception):  # then its __del__ puts it back
            reservation._close()


def _rounded_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


# ---- the driver ----


class _Location(ctypes.Structure):
    """CUmemLocation: type 1 is a device, id its number."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    """allocFlags in CUmemAllocationProp; zeros ask for nothing special."""

    _fields_ = [
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp: type 1 is pinned, the only one there is; handle type 0 means that none is exported."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _AccessDescription(ctypes.Structure):
    """CUmemAccessDesc: flags 3 allow reading and writing."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_PINNED, _DEVICE, _READ_AND_WRITE, _RECOMMENDED = 1, 1, 3, 1
_pointer, _size_t, _handle = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64


def _properties(device: int) -> _AllocationProperties:
    return _AllocationProperties(type=_PINNED, location=_Location(_DEVICE, device))


class _Driver:
    """The calls of libcuda that are needed, with errors as exceptions."""

    def __init__(self, library):
        self._library = library

    def granularity(self, properties) -> int:
        """What sizes and addresses are multiples of."""
        found = _size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(properties), _RECOMMENDED)
        return found.value

    def reserve(self, size: int, alignment: int) -> int:
        address = _pointer()
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), _size_t(size), _size_t(alignment), _pointer(0), _handle(0)
        )
        return address.value

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", _pointer(address), _size_t(size))

    @contextlib.contextmanager
    def memory(self, size: int, properties) -> Iterator[ctypes.c_uint64]:
        """The handle of new memory. What is mapped to it inside keeps it; at the end the handle is released."""
        handle = _handle()
        self._call("cuMemCreate", ctypes.byref(handle), _size_t(size), ctypes.byref(properties), _handle(0))
        try:
            yield handle
        finally:
            self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: ctypes.c_uint64) -> None:
        """The handle's memory behind [address, address + size)."""
        self._call("cuMemMap", _pointer(address), _size_t(size), _size_t(0), handle, _handle(0))

    def allow_access(self, address: int, size: int, location) -> None:
        access = _AccessDescription(location, _READ_AND_WRITE)
        self._call("cuMemSetAccess", _pointer(address), _size_t(size), ctypes.byref(access), _size_t(1))

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", _pointer(address), _size_t(size))

    def _call(self, name, *arguments):
        status = getattr(self._library, name)(*arguments)
        if status == OUT_OF_MEMORY:
            raise MemoryError("the card has no room: end what else uses it, or lower gpu_memory_utilization")
        if status:
            raise RuntimeError(f"{name} of the CUDA driver failed with status {status}")


@functools.cache
def _driver() -> _Driver:
    return _Driver(ctypes.CDLL("libcuda.so.1"))


# ---- CuPy ----


def _current_device() -> int:
    return cp.cuda.runtime.getDevice()


def _enter(device: int):
    """Make the device's context this thread's: the driver's calls, unlike the runtime's, do not."""
    cp.cuda.runtime.setDevice(device)


def _wait():
    cp.cuda.runtime.deviceSynchronize()


def _fill_with_zeros(address: int, nbytes: int):
    cp.cuda.runtime.memsetAsync(address, 0, nbytes, cp.cuda.get_current_stream().ptr)


def _free_unused_memory():
    cp.get_default_memory_pool().free_all_blocks()
