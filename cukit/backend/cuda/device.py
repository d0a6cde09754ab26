"""Arrays, dtypes and memory of the GPU. Memory comes from CuPy's pool: after the first step of a shape, no step asks
the driver for memory.
"""

import cupy as cp
import numpy as np

from ..dtypes import accumulator as accumulator
from ..dtypes import resolve

name = "cuda"
default_dtype = "bfloat16"
is_asynchronous = True  # whether the device computes while the host goes on


def dtype_of(dtype):
    """NumPy's dtype for a name ("bfloat16", …, "auto" = this device's default) or for a dtype."""
    return resolve(dtype, default_dtype, name)


def array(host, dtype=None):
    """A device array with the contents of `host` (always a copy)."""
    if isinstance(host, cp.ndarray):
        return host.astype(host.dtype if dtype is None else dtype, order="C", copy=True)
    return cp.array(np.asarray(host, dtype=dtype), order="C")


def empty(shape, dtype):
    return cp.ndarray(shape, dtype)  # what cp.empty gives, one call less


def zeros(shape, dtype):
    return cp.zeros(shape, dtype)


def to_numpy(x):
    """`x` on the host."""
    return cp.asnumpy(x)


def host_buffer(nbytes: int):
    """Zeroed bytes on the host, (nbytes,) uint8, from where copies to the device are quickest: page-locked.

    MemoryError where the system gives no such memory.
    """
    try:
        memory = cp.cuda.PinnedMemory(nbytes)  # CuPy's pool would take the next power of two
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise MemoryError(f"the system gives no page-locked memory of {nbytes} bytes: {error}") from None
    buffer = np.frombuffer(cp.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)
    buffer[...] = 0
    return buffer


def upload(target, host):
    """Copy `host` into the device array `target`. `host` must not change until what the device is told after this is
    done: an Event says when.
    """
    target.set(host, stream=cp.cuda.get_current_stream())


def download(host, source):
    """Start to copy the device array `source` into `host`, which host_buffer() gave. An Event that is recorded after
    this says when it is there. `source` may be freed at once, and what the device does later with `host` comes after.
    """
    source.get(out=host, blocking=False)


class Event:
    """A moment in the order of what the device was told."""

    def __init__(self):
        self._event = cp.cuda.Event(disable_timing=True)

    def record(self) -> None:
        """The moment is now: after all that the device was told so far."""
        self._event.record()

    def wait(self) -> None:
        """Wait until the device is past that moment; not at all if there was none."""
        self._event.synchronize()


class SideCopies:
    """Copies between host and device that run beside what the device computes, one after the other.

    An upload begins after all that the device was told before; join(copy) makes what it is told next wait for it. Host
    arrays are those of host_buffer(). A device array must live until its copy is joined.
    """

    def __init__(self):
        self._stream = cp.cuda.Stream(non_blocking=True)

    def upload(self, target, host):
        """Begin to copy `host` into the device array `target`; returns the copy, for join()."""
        self._after_what_was_told()
        target.set(host, stream=self._stream)
        return self._moment()

    def download(self, host, source):
        """Begin to copy the device array `source` into `host`; returns the copy, for join()."""
        self._after_what_was_told()
        source.get(out=host, stream=self._stream, blocking=False)
        return self._moment()

    def join(self, copy) -> None:
        """What the device is told from now on waits for the copy."""
        cp.cuda.get_current_stream().wait_event(copy)

    def _after_what_was_told(self):
        now = cp.cuda.Event(disable_timing=True)
        now.record(cp.cuda.get_current_stream())
        self._stream.wait_event(now)

    def _moment(self):
        moment = cp.cuda.Event(disable_timing=True)
        moment.record(self._stream)
        return moment


def synchronize():
    """Wait until the device has done what it was told."""
    cp.cuda.get_current_stream().synchronize()


def device_name() -> str:
    """The card as the driver calls it."""
    return cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["name"].decode()
