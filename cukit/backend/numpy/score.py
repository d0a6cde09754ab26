"""A linear map to one number a row: scores[n] = hidden[n] · weight. hidden (N, C) in the model's dtype, weight (1, C)
and scores (N,) in float32 or better.
"""

from ..dtypes import accumulator


def score_forward(hidden, weight):
    """Returns scores (N,)."""
    _check(hidden, weight)
    return hidden.astype(accumulator(hidden.dtype), copy=False) @ weight[0]


def score_backward(dweight, dscores, hidden, weight):
    """Returns dhidden[n] = dscores[n]·weight, like hidden; adds Σ dscores[n]·hidden[n] to dweight unless it is None."""
    _check(hidden, weight)
    if dweight is not None:
        dweight[0] += dscores @ hidden.astype(accumulator(hidden.dtype), copy=False)
    return (dscores[:, None] * weight).astype(hidden.dtype, copy=False)


def _check(hidden, weight):
    if hidden.ndim != 2 or weight.shape != (1, hidden.shape[1]):
        raise ValueError(
            f"scores of hidden states of shape {hidden.shape} by a weight of shape {weight.shape}: want "
            "(N, C) and (1, C)"
        )
