"""Arrays, dtypes and memory of the CPU. The plain twin of the CUDA shelf's arena, streams and graphs."""

import os
import platform

import ml_dtypes
import numpy as np

name = "cpu"
DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
default_dtype = "float32"


def dtype_of(dtype):
    """numpy dtype for a name ("bfloat16", …, "auto" = this device's default) or for a dtype."""
    if not isinstance(dtype, str):
        return np.dtype(dtype)
    if dtype == "auto":
        dtype = default_dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported on {name}: choose auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def accumulator(dtype):
    """The dtype that sums of `dtype` are taken in: float32, or float64 for float64."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


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
    """Copy `host` into the device array `target`; `host` must not change until the device's next results are read."""
    target[...] = host


def synchronize():
    """Wait until the device has done what it was told."""


def device_name() -> str:
    """The processor as the system calls it, and its cores."""
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
