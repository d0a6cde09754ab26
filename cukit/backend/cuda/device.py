"""Arrays, dtypes and memory of the GPU. Memory comes from CuPy's pool: after the first step of a shape nothing is asked
of the driver.
"""

import cupy as cp
import cupyx
import ml_dtypes
import numpy as np

name = "cuda"
DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
default_dtype = "bfloat16"


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
    if isinstance(host, cp.ndarray):
        return host.astype(host.dtype if dtype is None else dtype, order="C", copy=True)
    return cp.array(np.asarray(host, dtype=dtype), order="C")


def empty(shape, dtype):
    return cp.empty(shape, dtype)


def zeros(shape, dtype):
    return cp.zeros(shape, dtype)


def to_numpy(x):
    """`x` on the host."""
    return cp.asnumpy(x)


def host_buffer(nbytes: int):
    """Zeroed bytes on the host, (nbytes,) uint8, from where copies to the device are quickest: page-locked."""
    return cupyx.zeros_pinned(nbytes, np.uint8)


def upload(target, host):
    """Copy `host` into the device array `target`; `host` must not change until the device's next results are read."""
    target.set(host, stream=cp.cuda.get_current_stream())


def synchronize():
    """Wait until the device has done what it was told."""
    cp.cuda.get_current_stream().synchronize()


def device_name() -> str:
    """The card as the driver calls it."""
    return cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["name"].decode()
