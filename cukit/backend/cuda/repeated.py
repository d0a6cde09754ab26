"""Large arrays whose rows repeat, in the memory of a few of them: what exact.py compares products with.

The same memory is mapped behind many ranges of addresses in a row (CUDA driver API, "Virtual Memory Management").
"""

import contextlib
import math

import cupy as cp
import numpy as np

from . import memory


def repeated_rows(block: np.ndarray, rows: int) -> cp.ndarray:
    """(rows, C) on the device: the rows of the host's block (R, C) over and over, to be read only. MemoryError where
    the card has no room.
    """
    unit = memory._driver().granularity(memory._properties(memory._current_device()))
    period = len(block) * (unit // math.gcd(unit, block.nbytes))  # rows that fill whole units
    if rows <= 2 * period:
        return cp.array(_first_rows(block, rows))
    array = SameMemory(period * block.strides[0], -(-rows // period), unit).array((rows, block.shape[1]), block.dtype)
    array[:period] = cp.array(_first_rows(block, period))
    return array


def _first_rows(block: np.ndarray, rows: int) -> np.ndarray:
    return block[np.arange(rows) % len(block)]


class SameMemory:
    """nbytes, a multiple of the driver's unit, that lie behind `times` ranges of addresses in a row. Freed when neither
    it nor an array of it is left, after the device has done what it was told.
    """

    def __init__(self, nbytes: int, times: int, unit: int):
        self._nbytes, self._size, self._mapped, self._address = nbytes, nbytes * times, 0, 0
        self._device = memory._current_device()
        memory._enter(self._device)
        self._driver, properties = memory._driver(), memory._properties(self._device)
        self._address = self._driver.reserve(self._size, unit)
        with self._driver.memory(nbytes, properties) as handle:
            while self._mapped < self._size:
                self._driver.map(self._address + self._mapped, nbytes, handle)
                self._mapped += nbytes
        self._driver.allow_access(self._address, self._size, properties.location)

    def array(self, shape: tuple[int, ...], dtype) -> cp.ndarray:
        owned = cp.cuda.UnownedMemory(self._address, self._size, self, self._device)
        return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(owned, 0))

    def __del__(self):
        with contextlib.suppress(Exception):  # the process ends, say
            memory._enter(self._device)
            memory._wait()  # what runs may still read the bytes
            while self._mapped:
                self._mapped -= self._nbytes
                self._driver.unmap(self._address + self._mapped, self._nbytes)
            if self._address:
                self._driver.free(self._address, self._size)
