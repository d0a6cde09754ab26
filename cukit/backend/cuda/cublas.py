"""cublasLtMatmul of the cuBLAS that CuPy loaded, called through ctypes: CuPy has no binding of it.

It serves cupy-cuda12x (libcublasLt.so.12) and cupy-cuda13x (libcublasLt.so.13): both have the functions and numbers
used here. Sums are taken in float32 (float64 for float64), without TF32 and without split sums in half precision.

cuBLAS is asked once which kernel computes a product, and the answer is kept for products of the same shape.
cublasGemmEx asks at every call, and takes the host nearly twice as long.
"""

import ctypes
import functools
import re
import weakref
from ctypes import c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p

import cupy as cp
import numpy as np

from .pool import malloc

# NVIDIA's advice for Hopper; given to cuBLAS so that it never allocates, not even inside a capture.
WORKSPACE_BYTES = 32 << 20
MOST_PLANS = 4096
ALIGNMENT = 256  # bytes; cuBLAS asks for no more

# cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t, cublasLtReductionScheme_t
TRANSPOSE_A, TRANSPOSE_B = 3, 4
WORKSPACE, REDUCTIONS, ALIGNMENTS = 1, 3, (5, 6, 7, 8)
IN_COMPUTE_TYPE = 2  # of parts of a sum

# dtype name -> cudaDataType, cublasComputeType, cudaDataType of alpha and beta, their C type
_TYPES = {
    "float32": (0, 68, 0, ctypes.c_float),
    "float16": (2, 68, 0, ctypes.c_float),
    "bfloat16": (14, 68, 0, ctypes.c_float),
    "float64": (1, 70, 1, ctypes.c_double),
}
_plans: dict[tuple, "_Plan"] = {}


def gemm(transpose_a, transpose_b, m, n, k, a, b, beta, c):
    """c = op(a) op(b) + beta c in cuBLAS's column-major terms: op(a) is (m, k), op(b) (k, n), c (m, n); beta 0 or 1.

    a, b, c are C-contiguous cupy arrays of exactly these sizes, which are read by columns.
    """
    places = a.data.ptr, b.data.ptr, c.data.ptr
    bits = places[0] | places[1] | places[2] | ALIGNMENT
    key = transpose_a, transpose_b, m, n, k, a.dtype.num, c.dtype.num, beta, bits & -bits
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) == MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _Plan(*key[:5], np.dtype(a.dtype).name, np.dtype(c.dtype).name, *key[7:])
    plan.run(*places)


class _Plan:
    """How a product of one shape is computed."""

    def __init__(self, transpose_a, transpose_b, m, n, k, dtype, c_dtype, beta, alignment):
        self._what = f"m={m} n={n} k={k} in {dtype} into {c_dtype}"
        (kind, compute, scale, scalar), c_kind = _TYPES[dtype], _TYPES[c_dtype][0]
        product = _Owned("MatmulDesc", compute, scale)
        product.set(TRANSPOSE_A, c_int32(transpose_a))
        product.set(TRANSPOSE_B, c_int32(transpose_b))
        rows_a, rows_b = k if transpose_a else m, n if transpose_b else k
        matrices = [
            _Owned("MatrixLayout", kind, c_uint64(rows), c_uint64(columns), c_int64(rows))
            for kind, rows, columns in ((kind, rows_a, m + k - rows_a), (kind, rows_b, k + n - rows_b), (c_kind, m, n))
        ]
        limits = _Owned("MatmulPreference")
        limits.set(WORKSPACE, c_uint64(WORKSPACE_BYTES))
        limits.set(REDUCTIONS, c_uint32(IN_COMPUTE_TYPE))
        for attribute in ALIGNMENTS:
            limits.set(attribute, c_uint32(alignment))
        choice, count = _Choice(), c_int()
        a, b, c = (c_void_p(matrix.address) for matrix in matrices)
        given = c_void_p(product.address), a, b, c, c, c_void_p(limits.address)
        _call("MatmulAlgoGetHeuristic", _handle(), *given, 1, ctypes.byref(choice), ctypes.byref(count))
        if not count.value or choice.state:
            raise RuntimeError(f"cuBLAS has no kernel for {self._what}")
        numbers = scalar(1.0), scalar(1.0 if beta else 0.0)
        self._kept = product, matrices, choice, numbers
        self._head = _handle().value, product.address, ctypes.addressof(numbers[0])
        self._layouts = [matrix.address for matrix in matrices]
        self._beta = ctypes.addressof(numbers[1])
        self._tail = ctypes.addressof(choice), _workspace().ptr, choice.workspace_bytes
        self._matmul = _matmul()

    def run(self, a, b, c):
        """On CuPy's current stream. a, b, c: addresses."""
        of_a, of_b, of_c = self._layouts
        stream = cp.cuda.get_current_stream().ptr
        status = self._matmul(*self._head, a, of_a, b, of_b, self._beta, c, of_c, c, of_c, *self._tail, stream)
        if status:
            raise RuntimeError(f"cublasLtMatmul failed with status {status} for {self._what}")


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t, which begins with the cublasLtMatmulAlgo_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", c_int),
        ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    )


class _Owned:
    """A descriptor of cuBLAS's, destroyed with this object."""

    def __init__(self, kind, *numbers):
        made = c_void_p()
        _call(f"{kind}Create", ctypes.byref(made), *numbers)
        self._kind, self.address = kind, made.value
        weakref.finalize(self, getattr(_library(), f"cublasLt{kind}Destroy"), made).atexit = False

    def set(self, attribute, value):
        given = c_void_p(self.address), attribute, ctypes.byref(value), c_uint64(ctypes.sizeof(value))
        _call(f"{self._kind}SetAttribute", *given)


def _call(function, *arguments):
    if status := getattr(_library(), f"cublasLt{function}")(*arguments):
        raise RuntimeError(f"cublasLt{function} failed with status {status}")


@functools.cache
def _matmul():
    function = _library().cublasLtMatmul
    function.argtypes = [c_void_p] * 14 + [ctypes.c_size_t, c_void_p]
    return function


@functools.cache
def _handle() -> c_void_p:
    handle = c_void_p()
    _call("Create", ctypes.byref(handle))
    return handle


@functools.cache
def _workspace():
    """One for all products, because a process multiplies on one stream at a time."""
    return malloc(WORKSPACE_BYTES)  # not from the memory of a captured step


@functools.cache
def _library():
    """libcublasLt, on which the cuBLAS that CuPy loaded depends (a wheel's or a toolkit's)."""
    cp.cuda.device.get_cublas_handle()  # loads them
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return ctypes.CDLL(mapped_library(maps.read()))


def mapped_library(maps: str) -> str:
    """The path of libcublasLt.so.12, .13, … in the text of /proc/self/maps. RuntimeError if it is not there."""
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[5:]  # address, permissions, offset, device, inode, path, which may hold spaces
        if path and re.search(r"/libcublasLt\.so[.\d]*$", path[0]):
            return path[0]
    raise RuntimeError("CuPy loaded no libcublasLt.so: pip install 'cukit[cuda12]' (or 'cukit[cuda13]')")
