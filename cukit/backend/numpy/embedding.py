"""Row gather from a table (V, C) by ids (T,), and its scatter-add. ValueError for an id outside 0 … V − 1.

first: the table is a part of one, and has the rows of ids first … first + V − 1. An id elsewhere gives a row of zeros,
and its gradient goes nowhere.
"""

import numpy as np


def embedding_forward(table, ids, first=None):
    """y[t] = table[ids[t]]."""
    if first is not None:
        here = _here(ids, first, table)
        y = np.zeros((len(ids), table.shape[1]), table.dtype)
        y[here] = table[ids[here] - first]
        return y
    _check(ids, table)
    return table[ids]


def embedding_backward(dtable, dy, ids, first=None):
    """dtable[ids[t]] += dy[t], the rows of equal ids added in the order of t."""
    if first is not None:
        here = _here(ids, first, dtable)
        dy, ids = dy[here], ids[here] - first
    _check(ids, dtable)
    order = np.argsort(ids, kind="stable")
    if order.size:
        sorted_ids = ids[order]
        starts = np.flatnonzero(np.r_[True, sorted_ids[1:] != sorted_ids[:-1]])
        dtable[sorted_ids[starts]] += np.add.reduceat(dy[order].astype(dtable.dtype, copy=False), starts, axis=0)


def _here(ids, first, table):
    """Which ids have a row in this part."""
    return (ids >= first) & (ids < first + len(table))


def _check(ids, table):
    if len(ids) and not (0 <= ids.min() and ids.max() < len(table)):
        outside = ids[(ids < 0) | (ids >= len(table))]
        raise ValueError(f"id {outside[0]} is not in 0 … {len(table) - 1}: the embedding has {len(table)} rows")
