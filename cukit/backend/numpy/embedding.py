"""Row gather from a table (V, C) by ids (T,), and its scatter-add. ValueError for an id outside 0 … V − 1."""

import numpy as np


def embedding_forward(table, ids):
    """y[t] = table[ids[t]]."""
    _check(ids, table)
    return table[ids]


def embedding_backward(dtable, dy, ids):
    """dtable[ids[t]] += dy[t], the rows of equal ids added in the order of t."""
    _check(ids, dtable)
    order = np.argsort(ids, kind="stable")
    if order.size:
        sorted_ids = ids[order]
        starts = np.flatnonzero(np.r_[True, sorted_ids[1:] != sorted_ids[:-1]])
        dtable[sorted_ids[starts]] += np.add.reduceat(dy[order].astype(dtable.dtype, copy=False), starts, axis=0)


def _check(ids, table):
    if len(ids) and not (0 <= ids.min() and ids.max() < len(table)):
        outside = ids[(ids < 0) | (ids >= len(table))]
        raise ValueError(f"id {outside[0]} is not in 0 … {len(table) - 1}: the embedding has {len(table)} rows")
