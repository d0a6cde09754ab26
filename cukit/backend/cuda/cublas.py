"""cublasGemmEx of the library that CuPy loaded, called through ctypes: CuPy's own binding refuses stream capture.

It serves cupy-cuda12x (libcublas.so.12) and cupy-cuda13x (libcublas.so.13): both have the functions and numbers used
here. Sums are taken in float32 (float64 for float64), without TF32 and without split sums in half precision.
"""

import ctypes
import functools
import re

import cupy as cp
import numpy as np

# NVIDIA's advice for Hopper; given to cuBLAS so that it never allocates, not even inside a capture.
WORKSPACE_BYTES = 32 << 20
DISALLOW_REDUCED_PRECISION_REDUCTION = 16
DEFAULT_ALGORITHM = -1

# dtype name -> cudaDataType, cublasComputeType, C type of alpha and beta
_TYPES = {
    "float32": (0, 68, ctypes.c_float),
    "float16": (2, 68, ctypes.c_float),
    "bfloat16": (14, 68, ctypes.c_float),
    "float64": (1, 70, ctypes.c_double),
}


def gemm(transpose_a, transpose_b, m, n, k, a, b, beta, c):
    """c = op(a) op(b) + beta c in cuBLAS's column-major terms: op(a) is (m, k), op(b) (k, n), c (m, n).

    a, b, c are C-contiguous cupy arrays. Read by columns, each is a matrix; its leading dimension is its last axis.
    """
    blas = _blas()
    blas.use_stream(cp.cuda.get_current_stream().ptr)
    a_type, compute, one, zero = _constants(a.dtype)
    c_type = a_type if c.dtype == a.dtype else _constants(c.dtype)[0]
    status = blas.gemm_ex(
        blas.handle,
        transpose_a,
        transpose_b,
        m,
        n,
        k,
        one,
        a.data.ptr,
        a_type,
        a.shape[-1],
        b.data.ptr,
        a_type,
        b.shape[-1],
        one if beta else zero,
        c.data.ptr,
        c_type,
        c.shape[-1],
        compute,
        DEFAULT_ALGORITHM,
    )
    if status:
        raise RuntimeError(
            f"cublasGemmEx failed with status {status} for m={m} n={n} k={k} in {a.dtype} into {c.dtype}"
        )


@functools.cache
def _constants(dtype):
    """cudaDataType, compute type, addresses of 1 and 0 (kept alive by the cache)."""
    data_type, compute, scalar = _TYPES[np.dtype(dtype).name]
    numbers = scalar(1.0), scalar(0.0)
    _keep.append(numbers)
    return data_type, compute, ctypes.addressof(numbers[0]), ctypes.addressof(numbers[1])


_keep = []


@functools.cache
def _blas():
    return _Blas()


class _Blas:
    """Our own handle: no other code moves its stream. One workspace serves it, because a process multiplies on one
    stream at a time.
    """

    def __init__(self):
        library = ctypes.CDLL(_library_path())
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self.gemm_ex = library.cublasGemmEx
        self.gemm_ex.argtypes = [
            pointer,
            integer,
            integer,
            integer,
            integer,
            integer,
            pointer,
            pointer,
            integer,
            integer,
            pointer,
            integer,
            integer,
            pointer,
            pointer,
            integer,
            integer,
            integer,
            integer,
        ]
        self._set_stream, self._set_workspace = library.cublasSetStream_v2, library.cublasSetWorkspace_v2
        self._set_stream.argtypes = [pointer, pointer]
        self._set_workspace.argtypes = [pointer, pointer, ctypes.c_size_t]
        library.cublasSetMathMode.argtypes = [pointer, integer]
        handle = pointer()
        self._check(library.cublasCreate_v2(ctypes.byref(handle)), "cublasCreate")
        self.handle = handle.value
        self._check(library.cublasSetMathMode(self.handle, DISALLOW_REDUCED_PRECISION_REDUCTION), "cublasSetMathMode")
        self.workspace = cp.cuda.alloc(WORKSPACE_BYTES)
        self._stream = None

    def use_stream(self, stream):
        if stream != self._stream:
            self._check(self._set_stream(self.handle, stream), "cublasSetStream")  # this also takes the workspace away
            self._check(self._set_workspace(self.handle, self.workspace.ptr, WORKSPACE_BYTES), "cublasSetWorkspace")
            self._stream = stream

    @staticmethod
    def _check(status, what):
        if status:
            raise RuntimeError(f"{what} failed with status {status}")


def _library_path() -> str:
    """The file of the cuBLAS that CuPy loaded (a wheel's or a toolkit's)."""
    cp.cuda.device.get_cublas_handle()  # loads it
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return mapped_library(maps.read())


def mapped_library(maps: str) -> str:
    """The path of libcublas.so.12, .13, … in the text of /proc/self/maps. RuntimeError if it is not there."""
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[5:]  # address, permissions, offset, device, inode, path, which may hold spaces
        if path and re.search(r"/libcublas\.so[.\d]*$", path[0]):
            return path[0]
    raise RuntimeError("CuPy loaded no libcublas.so: pip install 'cukit[cuda12]' (or 'cukit[cuda13]')")
