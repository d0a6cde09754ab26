"""A number for each row of hidden states: the head of a reward model or of a critic."""

from ..autograd import Parameter, Tensor, record


def score(hidden: Tensor, weight: Parameter) -> Tensor:
    """scores[n] = hidden[n] · weight. hidden (N, C), weight (1, C) in float32 or better -> (N,) in the weight's dtype.

    Saves hidden.
    """
    be = hidden.backend

    def rule(dscores):
        return be.score_backward(weight.grad_buffer(), dscores, hidden.data, weight.data), None

    return record(be.score_forward(hidden.data, weight.data), (hidden, weight), rule)
