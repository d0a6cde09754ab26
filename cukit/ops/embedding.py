"""Token embedding."""

from ..autograd import Parameter, Tensor, record


def embedding(table: Parameter, ids) -> Tensor:
    """y[t] = table[ids[t]]. table (V, C), ids (T,) int32 array -> (T, C)."""
    be = table.backend

    def rule(dy):
        if (dtable := table.grad_buffer()) is not None:
            be.embedding_backward(dtable, dy, ids)
        return (None,)

    return record(be.embedding_forward(table.data, ids), (table,), rule)
