"""A linear map to one number a row: scores[n] = hidden[n] · weight. hidden (N, C) in the model's dtype, weight (1, C)
and scores (N,) in float32. Kernels: score.cu.
"""

from .constants import source_constant
from .device import empty
from .loader import load

WARP, ROWS = source_constant("score", "WARP"), source_constant("score", "ROWS_A_BLOCK")
ADD_THREADS = source_constant("score", "ADD_THREADS")
# Blocks of rows in the backward pass, at most; each has at least MIN_ROWS rows.
MAX_BLOCKS, MIN_ROWS = 256, 64


def score_forward(hidden, weight):
    """Returns scores (N,)."""
    rows, cols = _rows_cols(hidden, weight)
    scores = empty((rows,), "float32")
    load("score", hidden.dtype).score_forward(-(-rows // ROWS), WARP * ROWS, scores, hidden, weight, rows, cols)
    return scores


def score_backward(dweight, dscores, hidden, weight):
    """Returns dhidden[n] = dscores[n]·weight, like hidden; adds Σ dscores[n]·hidden[n] to dweight unless it is None."""
    rows, cols = _rows_cols(hidden, weight)
    if dscores.shape != (rows,) or (dweight is not None and dweight.shape != weight.shape):
        raise ValueError(f"dscores of shape {dscores.shape} do not fit hidden states of shape {hidden.shape}")
    module = load("score", hidden.dtype)
    dhidden = empty(hidden.shape, hidden.dtype)
    rows_per_block = max(MIN_ROWS, -(-rows // MAX_BLOCKS))
    blocks = -(-rows // rows_per_block)
    partial = None if dweight is None else empty((blocks, cols), "float32")
    columns_a_block = WARP * (16 // hidden.itemsize)
    module.score_backward(
        (-(-cols // columns_a_block), blocks),
        (WARP, ROWS),
        dhidden,
        partial,
        dscores,
        hidden,
        weight,
        rows,
        cols,
        rows_per_block,
    )
    if dweight is not None and blocks:
        module.score_add_partial(-(-cols // ADD_THREADS), ADD_THREADS, dweight, partial, blocks, cols)
    return dhidden


def _rows_cols(hidden, weight):
    if hidden.ndim != 2 or weight.shape != (1, hidden.shape[1]):
        raise ValueError(
            f"scores of hidden states of shape {hidden.shape} by a weight of shape {weight.shape}: want "
            "(N, C) and (1, C)"
        )
    return hidden.shape
