"""The number types that arrays of a model may have, for both shelves."""

import ml_dtypes
import numpy as np

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


def resolve(dtype, default: str, device: str) -> np.dtype:
    """NumPy's dtype for a name of DTYPES, for "auto" (the device's default) or for a dtype. ValueError for another
    name.
    """
    if not isinstance(dtype, str):
        return np.dtype(dtype)
    if dtype == "auto":
        dtype = default
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported on {device}: choose auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def accumulator(dtype) -> np.dtype:
    """The dtype that sums of `dtype` are taken in: float32, or float64 for float64."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)
