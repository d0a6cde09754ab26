"""Token embedding."""

from ..autograd import Parameter, Tensor, record


def embedding(table: Parameter, ids, first: int | None = None) -> Tensor:
    """y[t] = table[ids[t]]. table (V, C), ids (T,) int32 array -> (T, C).

    first: the table is a part of one, and has the rows of ids first … first + V − 1; y is zeros for the others.
    """
    be = table.backend

    def rule(dy):
        if (dtable := table.grad_buffer()) is not None:
            be.embedding_backward(dtable, dy, ids, first)
        return (None,)

    return record(be.embedding_forward(table.data, ids, first), (table,), rule)
