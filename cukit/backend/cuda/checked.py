"""CUKIT_CHECK=1: every function of the CUDA shelf that computes also runs on the NumPy shelf, and the two are compared.

The rule resembles that of the kernel tests. The truth is NumPy in float64, the yardstick is NumPy in the given dtypes.
The kernel may be twice as far from the truth as the yardstick, plus some ulps at the largest value (ULPS): tests choose
their inputs, but here an array may be one number with a yardstick that is exact by luck, or log-probabilities near 0,
which are differences of large logits. This finds wrong kernels: their errors are larger by orders of magnitude. It is
slow: the loader also waits after each launch.
"""

import functools
import importlib
import logging

import cupy as cp
import numpy as np

from .. import CONTRACT
from . import compile as compiler

logger = logging.getLogger(__name__)
# Names without arithmetic in files with it.
NOT_COMPARED = {"WideCopies", "row_bucket", "set_exact"}
# Their results are differences of logits: the ulp is that of the largest logit.
DIFFERENCES = {"sample", "token_logprobs_forward"}
ULPS = {"bfloat16": 2, "float16": 2, "float32": 64, "float64": 64}
_MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}


class KernelMismatch(AssertionError):
    """A kernel's result is farther from the truth than NumPy's arithmetic explains."""


def wrap(namespace):
    """Replace the functions of the shelf's namespace by ones that compare: those of the files with a kernel source."""
    reference = importlib.import_module("cukit.backend.numpy")  # by name: the shelves do not import each other
    sources = compiler.families()
    for file, names in CONTRACT.items():
        for name in names if file in sources else ():
            if name not in NOT_COMPARED:
                namespace[name] = _comparing(name, namespace[name], getattr(reference, name))


def _comparing(name, function, reference):
    @functools.wraps(function)
    def call(*args, **kwargs):
        given = (args, kwargs)
        near, true = _on_host(given, {}, False), _on_host(given, {}, True)
        found = function(*args, **kwargs)
        near_found, true_found = reference(*near[0], **near[1]), reference(*true[0], **true[1])
        # results, then the arguments, some of which are written
        got, expected, exact = ([*_arrays(x)] for x in ((found, given), (near_found, near), (true_found, true)))
        if len(got) != len(expected):
            raise KernelMismatch(f"{name}: {len(got)} arrays on cuda, {len(expected)} on numpy")
        scale = (
            max(np.abs(x[np.isfinite(x)]).max(initial=0) for x in _arrays(true) if _is_float(x))
            if name in DIFFERENCES
            else 0
        )
        for index, (a, b, c) in enumerate(zip(got, expected, exact)):
            _compare(
                f"{name}, array {index} of results and arguments", cp.asnumpy(a), np.asarray(b), np.asarray(c), scale
            )
        return found

    return call


def _on_host(value, seen, precise):
    """A copy of nested arguments for NumPy: an array that stands in two places stays one. precise: in float64."""
    if isinstance(value, cp.ndarray):
        if id(value) not in seen:
            host = cp.asnumpy(value)
            seen[id(value)] = host.astype(np.float64) if precise and _is_float(host) else host
        return seen[id(value)]
    if isinstance(value, dict):
        return {key: _on_host(item, seen, precise) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item, seen, precise) for item in value)
    return value


def _arrays(value):
    """The arrays (and numbers) in nested results, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, (cp.ndarray, np.ndarray, np.generic, float)):
        yield value if isinstance(value, cp.ndarray) else np.asarray(value)


def _is_float(array):
    return array.dtype.name in _MANTISSA_BITS


def _compare(what, got, near, true, scale):
    """scale: at least this large is what the ulp is taken of."""
    if got.shape != near.shape:
        raise KernelMismatch(f"{what}: shape {got.shape} on cuda, {near.shape} on numpy")
    if not got.size:
        return
    if not _is_float(got):
        different = np.count_nonzero(got != near)
        if different:  # a draw or a filter can fall on the other side of a tie by rounding: said, not raised
            logger.warning("CUKIT_CHECK: %s: %d of %d entries differ from NumPy's", what, different, got.size)
        return
    got64, near64, true64 = (x.astype(np.float64) for x in (got, near, true))
    if not np.array_equal(np.isfinite(got64), np.isfinite(near64)):
        raise KernelMismatch(f"{what}: non-finite values where NumPy has none, or the reverse")
    finite = np.isfinite(got64) & np.isfinite(true64)
    if finite.any():
        error, yardstick = np.abs(got64 - true64)[finite].max(), np.abs(near64 - true64)[finite].max()
        largest = max(np.abs(true64)[finite].max(), scale, 1e-30)
        kind = got.dtype.name
        allowed = 2 * yardstick + ULPS[kind] * 2.0 ** (np.floor(np.log2(largest)) - _MANTISSA_BITS[kind])
        if error > allowed:
            raise KernelMismatch(f"{what} ({got.dtype}, shape {got.shape}): error {error:.3e}, allowed {allowed:.3e}")
