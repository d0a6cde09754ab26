"""Row gather from a table (V, C) by ids (T,) int32, and its scatter-add. Kernels: embedding.cu."""

from .device import empty
from .loader import load

THREADS = 128


def embedding_forward(table, ids):
    """y[t] = table[ids[t]]."""
    tokens, cols = len(ids), table.shape[1]
    y = empty((tokens, cols), table.dtype)
    load("embedding", table.dtype).embedding_forward(tokens, THREADS, y, table, ids, cols)
    return y


def embedding_backward(dtable, dy, ids):
    """dtable[ids[t]] += dy[t], the rows of equal ids added in the order of t."""
    tokens, cols = dy.shape
    if len(ids) != tokens or dtable.shape[1] != cols:
        raise ValueError(f"dy of shape {dy.shape} does not fit {len(ids)} ids and a table of shape {dtable.shape}")
    parts = -(-cols * dy.itemsize // (16 * THREADS))
    load("embedding", dy.dtype).embedding_backward((tokens, parts), THREADS, dtable, dy, ids, tokens, cols)
