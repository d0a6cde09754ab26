"""Launches that need not wait for the end of the kernel ahead: programmatic dependent launch, of cards from 9.0 on.

A kernel that begins with wait_for_inputs() (kernels/common.cuh) waits there itself for what the kernel ahead writes. So
its blocks may be set up while that one still runs, which hides most of the time between two small kernels. The loader
launches so within a captured step; elsewhere the host's launches come too late for it to matter.
"""

import ctypes
import functools
import logging
from contextlib import contextmanager

import cupy as cp
import numpy as np

logger = logging.getLogger(__name__)
DRIVER = 12030  # from this on, graphs know such launches
ALLOWED_AHEAD = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

on = False  # whether kernels that wait for their inputs are launched early


@contextmanager
def early_launches():
    """Within it they are, where card and driver can."""
    global on
    on = _can()
    try:
        yield
    finally:
        on = False


@functools.cache
def _can() -> bool:
    capability = int(cp.cuda.Device().compute_capability)
    return capability >= 90 and cp.cuda.runtime.driverGetVersion() >= DRIVER


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def _launch_kernel():
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = [ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return function


def launch_early(function, grid, block, values, shared) -> None:
    """Launch a cupy Function on the current stream, as function(grid, block, values, shared) does, but before the
    kernel ahead has ended. values: cupy arrays and NumPy scalars.
    """
    places = [np.array(x.data.ptr if isinstance(x, cp.ndarray) else x) for x in values]
    pointers = (ctypes.c_void_p * len(places))(*(place.ctypes.data for place in places))
    attribute = _Attribute(ALLOWED_AHEAD, 0, 1)
    stream = cp.cuda.get_current_stream().ptr
    config = _Config(_three(grid), _three(block), shared, stream, ctypes.pointer(attribute), 1)
    status = _launch_kernel()(ctypes.byref(config), function.ptr, ctypes.addressof(pointers), None)
    if status:
        raise RuntimeError(f"cuLaunchKernelEx failed with status {status} for grid {grid}, block {block}")


def _three(sizes):
    return (ctypes.c_uint * 3)(*sizes, *(1,) * (3 - len(sizes)))
