"""Python's collector of garbage during a run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 10_000  # more objects than one step makes and drops again


@contextmanager
def rare_collections() -> Iterator[None]:
    """What lives when a run begins is not looked at again until it ends, and what is new not in the middle of a step.

    A collection stops the host while the device waits for it: tens of milliseconds over all objects of models, data
    and libraries, and half a millisecond several times in each pass over a tape that is about to be dropped.
    """
    before = gc.get_threshold()
    gc.collect()  # what is frozen stays: the model of a run before this one, too
    gc.freeze()
    if before[0]:  # else it is switched off
        gc.set_threshold(max(before[0], YOUNG), 2, 2)  # frozen objects left out, a collection of all others is quick
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
