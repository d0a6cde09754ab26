"""Row gather from a table (V, C) by ids (T,), and its scatter-add."""

import numpy as np


def embedding_forward(table, ids):
    """y[t] = table[ids[t]]."""
    return table[ids]


def embedding_backward(dtable, dy, ids):
    """dtable[ids[t]] += dy[t], the rows of equal ids added in the order of t."""
    order = np.argsort(ids, kind="stable")
    if order.size:
        sorted_ids = ids[order]
        starts = np.flatnonzero(np.r_[True, sorted_ids[1:] != sorted_ids[:-1]])
        dtable[sorted_ids[starts]] += np.add.reduceat(dy[order].astype(dtable.dtype, copy=False), starts, axis=0)
