"""Arrays, dtypes and memory of the CPU. The plain twin of the CUDA shelf's arena, streams and graphs."""

import os
import platform

import numpy as np

from ..dtypes import accumulator as accumulator
from ..dtypes import resolve

name = "cpu"
default_dtype = "float32"
is_asynchronous = False  # whether the device computes while the host goes on


def dtype_of(dtype):
    """NumPy's dtype for a name ("bfloat16", …, "auto" = this device's default) or for a dtype."""
    return resolve(dtype, default_dtype, name)


def array(host, dtype=None):
    """A device array with the contents of `host` (always a copy)."""
    return np.array(host, dtype=dtype)


def empty(shape, dtype):
    return np.empty(shape, dtype)


def zeros(shape, dtype):
    return np.zeros(shape, dtype)


def to_numpy(x):
    """`x` on the host."""
    return np.asarray(x)


def host_buffer(nbytes: int):
    """Zeroed bytes on the host, (nbytes,) uint8, from where copies to the device are quickest."""
    return np.zeros(nbytes, np.uint8)


def upload(target, host):
    """Copy `host` into the device array `target`. `host` must not change until what the device is told after this is
    done: an Event says when.
    """
    target[...] = host


def download(host, source):
    """Start to copy the device array `source` into `host`, which host_buffer() gave. An Event that is recorded after
    this says when it is there. `source` may be freed at once, and what the device does later with `host` comes after.
    """
    host[...] = source


class Event:
    """A moment in the order of what the device was told."""

    def record(self) -> None:
        """The moment is now: after all that the device was told so far."""

    def wait(self) -> None:
        """Wait until the device is past that moment; not at all if there was none."""


class SideCopies:
    """Copies between host and device that run beside what the device computes: here they are done at once."""

    def upload(self, target, host):
        """Copy `host` into `target`; returns the copy, for join()."""
        target[...] = host

    def download(self, host, source):
        """Copy `source` into `host`; returns the copy, for join()."""
        host[...] = source

    def join(self, copy) -> None:
        """What the device is told from now on waits for the copy."""


def synchronize():
    """Wait until the device has done what it was told."""


def device_name() -> str:
    """The processor as the system calls it, and its cores."""
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
