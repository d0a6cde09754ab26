"""Row gather from a table (V, C) by ids (T,) int32, and its scatter-add. Kernels: embedding.cu.

first: the table is a part of one, and has the rows of ids first … first + V − 1. An id elsewhere gives a row of zeros,
and its gradient goes nowhere.

Without first, ids are checked by callers. The NumPy shelf refuses one outside 0 … V − 1; here its row is NaN and its
gradient goes nowhere, because to look at ids would wait for the card.
"""

from .constants import source_constant
from .device import empty
from .loader import load

THREADS = source_constant("embedding", "THREADS")


def embedding_forward(table, ids, first=None):
    """y[t] = table[ids[t]]."""
    tokens, (vocab_size, cols) = len(ids), table.shape
    y = empty((tokens, cols), table.dtype)
    load("embedding", table.dtype).embedding_forward(
        tokens, THREADS, y, table, ids, first or 0, first is not None, vocab_size, cols
    )
    return y


def embedding_backward(dtable, dy, ids, first=None):
    """dtable[ids[t]] += dy[t], the rows of equal ids added in the order of t."""
    tokens, cols = dy.shape
    if len(ids) != tokens or dtable.shape[1] != cols:
        raise ValueError(f"dy of shape {dy.shape} does not fit {len(ids)} ids and a table of shape {dtable.shape}")
    parts = -(-cols * dy.itemsize // (16 * THREADS))
    load("embedding", dy.dtype).embedding_backward(
        (tokens, parts), THREADS, dtable, dy, ids, first or 0, tokens, len(dtable), cols
    )
