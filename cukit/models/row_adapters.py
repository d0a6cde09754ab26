"""Which adapter the rows of a forward pass have: the model's own, one for all rows, or several in one batch.

An engine says it for each of its passes, inside choosing(); a training pass says nothing and has the model's own
adapter, unless that is off. A row's bits are those of a pass in which all rows have its adapter, because each product
is the same function of the same factors, and its rows do not depend on each other.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..autograd import Tensor


class _Thread(threading.local):
    rows: Any = None  # what choosing() says in this thread


_thread = _Thread()


@contextmanager
def choosing(rows: Any) -> Iterator[None]:
    """Inside, this thread's forward passes have these adapters: AllRows, RowsInOrder or RowsByOwner."""
    before, _thread.rows = _thread.rows, rows
    try:
        yield
    finally:
        _thread.rows = before


def adapter_at(layer: Any) -> Callable | None:
    """What computes a layer in place of its plain product, f(x, layer); None: nothing does."""
    if (rows := _thread.rows) is not None:
        return rows.at(layer)
    own = layer.adapter
    return own if own is not None and own.on else None


class AllRows:
    """One adapter for all rows; None: the model as it is without one."""

    def __init__(self, adapter: Any):
        self.adapter = adapter

    def at(self, layer: Any) -> Callable | None:
        return None if self.adapter is None else self.adapter.at(layer)


class RowsInOrder:
    """parts: (adapter, its rows, a slice); rows that no part has are the base's. Without gradients.

    Each adapter multiplies its own rows alone, which suits many rows.
    """

    def __init__(self, parts: list[tuple[Any, slice]]):
        self.parts = parts

    def at(self, layer: Any) -> Callable | None:
        found = [(one, rows) for adapter, rows in self.parts if (one := adapter.at(layer)) is not None]
        return partial(self._compute, found) if found else None

    @staticmethod
    def _compute(found: list, x: Tensor, layer: Any) -> Tensor:
        y, be = layer.plain(x).data, x.backend
        for one, rows in found:
            own = x.data[rows]
            if rows.start * own.shape[1] * own.itemsize % 16:  # products of aligned rows, as everywhere
                own = own.copy()
            change, instead = one.change(own, layer)
            be.change_rows(y[rows], change, instead=instead)
        return Tensor(y)


class RowsByOwner:
    """owners (T,) int32 on the device: the number of each row's adapter; rows with another number are the base's.
    Without gradients.

    Each adapter multiplies all rows and changes its own, so that a captured step serves whichever rows are whose.
    """

    def __init__(self, adapters: list, owners: Any):
        self.adapters, self.owners = adapters, owners

    def at(self, layer: Any) -> Callable | None:
        found = [(one, adapter.number) for adapter in self.adapters if (one := adapter.at(layer)) is not None]
        return partial(self._compute, found) if found else None

    def _compute(self, found: list, x: Tensor, layer: Any) -> Tensor:
        y, be = layer.plain(x).data, x.backend
        for one, number in found:
            change, instead = one.change(x.data, layer)
            be.change_rows(y, change, self.owners, number, instead)
        return Tensor(y)
