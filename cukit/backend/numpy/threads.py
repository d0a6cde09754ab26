"""How many threads a product takes: BLAS's own, or ours where we cut the product up.

Every change of BLAS's count is undone when the product is done: the count belongs to the process, not to cukit.
"""

import functools
import itertools
import os
import queue
import threading

from threadpoolctl import ThreadpoolController

# Below this many weights a product gets one thread: a second one gains little there, and where a core is busy the
# threads wait for each other: 11 ms instead of 0.3 ms for 128 rows and a (512, 128) weight on 2 cores beside one busy
# process.
MANY_WEIGHTS = 2**18


def blas_threads() -> int:
    """The threads that BLAS takes now (its own choice, OPENBLAS_NUM_THREADS, or what the user set since)."""
    return max((get() for get, _ in _libraries()), default=1)


class one_blas_thread:
    """Inside, BLAS takes one thread, if `weights` is below MANY_WEIGHTS; afterwards what it took before."""

    __slots__ = ("_changed", "_few")

    def __init__(self, weights: int = 0):
        self._few, self._changed = weights < MANY_WEIGHTS, ()

    def __enter__(self):
        if self._few:
            self._changed = [(change, count) for get, change in _libraries() if (count := get()) > 1]
            for change, _ in self._changed:
                change(1)

    def __exit__(self, *_):
        for change, count in self._changed:
            change(count)


def share(function, borders):
    """Call function(borders[i], borders[i + 1]) for each i, the first here and the others in threads that wait for such
    work; empty ranges are left out. An exception in one of them is raised here when all are done.
    """
    ranges = [(start, stop) for start, stop in itertools.pairwise(borders) if start < stop]
    done = queue.SimpleQueue()
    for number, (start, stop) in enumerate(ranges[1:]):
        _worker(number).put((function, start, stop, done))
    errors = []
    try:
        for start, stop in ranges[:1]:
            function(start, stop)
    finally:  # what the others write into must live until they are done
        errors = [error for _ in ranges[1:] if (error := done.get()) is not None]
    if errors:
        raise errors[0]


@functools.cache
def _worker(number: int) -> queue.SimpleQueue:
    """The queue that worker thread `number` of this process reads its work from."""
    tasks = queue.SimpleQueue()
    threading.Thread(target=_work, args=(tasks,), name=f"cukit-product-{number}", daemon=True).start()
    return tasks


def _work(tasks):
    while True:
        function, start, stop, done = tasks.get()
        error = None
        try:
            function(start, stop)
        except BaseException as failure:  # the caller raises it
            error = failure
        done.put(error)
        del function, done, error


if hasattr(os, "register_at_fork"):  # a forked child has none of its parent's threads
    os.register_at_fork(after_in_child=lambda: _worker.cache_clear())


@functools.cache
def _libraries():
    """(get, set) of the thread count for each BLAS library in this process."""
    return [_get_and_set(library) for library in ThreadpoolController().select(user_api="blas").lib_controllers]


def _get_and_set(library):
    """OpenBLAS's own functions where they are found: threadpoolctl's take four times as long, which small products
    would feel.
    """
    for prefix, suffix in itertools.product(("", "scipy_"), ("", "64_", "_64")):
        names = [f"{prefix}openblas_{verb}_num_threads{suffix}" for verb in ("get", "set")]
        if library.internal_api == "openblas" and all(hasattr(library.dynlib, name) for name in names):
            return tuple(getattr(library.dynlib, name) for name in names)
    return library.get_num_threads, library.set_num_threads
