"""Matrix products. x (T, I), w (O, I), bias (O,), y and dy (T, O). Half types: sums in float32, rounded once."""

import functools

import numpy as np
from threadpoolctl import ThreadpoolController

from .device import accumulator

# Below this many weights the BLAS library gets one thread: a second one gains little there, and where a core is busy
# the threads wait for each other: 11 ms instead of 0.3 ms for 128 rows and a (512, 128) weight on 2 cores beside one
# busy process.
MANY_WEIGHTS = 2**18


def set_exact(policy: str):
    """auto, true or false: whether decoding and training must compute the same bits. A CPU cannot promise it:
    ValueError for true.
    """
    if policy not in ("auto", "true", "false"):
        raise ValueError(f"exact={policy!r} is not known: choose auto, true or false")
    if policy == "true":
        raise ValueError(
            "exact=true needs --device cuda: on a CPU a product's last bits change with its row count; use exact=auto"
        )


def row_bucket(rows: int) -> int:
    """The number of rows at which a step of `rows` rows is best run: here the same."""
    return rows


def linear_forward(x, w, bias=None):
    """y = x wᵀ + bias."""
    _use_many_threads(w.size >= MANY_WEIGHTS)
    acc = accumulator(x.dtype)
    y = x.astype(acc, copy=False) @ w.astype(acc, copy=False).T
    if bias is not None:
        y += bias
    return y.astype(x.dtype, copy=False)


def linear_backward_input(dy, w):
    """dx = dy w."""
    acc = accumulator(dy.dtype)
    return (dy.astype(acc, copy=False) @ w.astype(acc, copy=False)).astype(dy.dtype, copy=False)


def linear_backward_weight(dw, dy, x):
    """dw += dyᵀ x, in dw's dtype."""
    dw += dy.astype(dw.dtype, copy=False).T @ x.astype(dw.dtype, copy=False)


def linear_backward_bias(db, dy):
    """db += sum of dy over its rows."""
    db += np.sum(dy, axis=0, dtype=db.dtype)


@functools.lru_cache(maxsize=1)  # only a change of the answer reaches the library
def _use_many_threads(many: bool):
    for library, most in _blas():
        library.set_num_threads(most if many else 1)


@functools.cache
def _blas():
    """The BLAS libraries in this process and the threads each began with (its own choice, or OPENBLAS_NUM_THREADS)."""
    return [
        (library, library.num_threads) for library in ThreadpoolController().select(user_api="blas").lib_controllers
    ]
