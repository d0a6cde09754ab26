"""Log-probabilities of chosen tokens, and the entropy, from logits (N, V); statistics in float32 or better.

Ids from vocab_size on take no part: probability 0, gradient 0. log p = logits[target]/T − lse, lse = log Σ
exp(logits/T), entropy H = lse − Σ p·logits/T. A target in vocab_size … V − 1 is an id of probability 0: its log p is
-inf, and its gradient that of −lse alone. A target outside 0 … V − 1 is the caller's mistake: its log p is NaN.
"""

import numpy as np

from ..dtypes import accumulator

LOWEST_LOG_P = -1e30  # in place of a logit of -inf, so that probability 0 times it is 0


def token_logprobs_forward(logits, targets, temperature, vocab_size):
    """Returns logprobs, entropy, lse, each (N,)."""
    scaled = _scaled(logits, temperature, vocab_size)
    top = scaled.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # a row with +inf or without a finite logit gives NaN
        exp = np.exp(scaled - top)
    total = exp.sum(axis=1)
    lse = np.log(total) + top[:, 0]
    logprobs = np.where((targets >= 0) & (targets < logits.shape[1]), -np.inf, np.nan).astype(scaled.dtype)
    rows = _counting(targets, vocab_size)
    logprobs[rows] = scaled[rows, targets[rows]]
    logprobs -= lse
    np.maximum(scaled, LOWEST_LOG_P, out=scaled)
    entropy = lse - np.einsum("nv,nv->n", exp, scaled) / total
    return logprobs, entropy, lse


def token_logprobs_backward(logits, targets, lse, entropy, dlogprobs, dentropy, temperature, vocab_size, out=None):
    """dlogits like logits: (dlogprobs·(1[target] − p) − dentropy·p·(log p + H)) / T. dentropy may be None.

    out: where it is written, which may be the logits themselves; default: a new array.
    """
    scaled = _scaled(logits, temperature, vocab_size)
    log_p = scaled - lse[:, None]
    p = np.exp(log_p)
    grad = -dlogprobs[:, None] * p
    rows = _counting(targets, vocab_size)
    grad[rows, targets[rows]] += dlogprobs[rows]
    if dentropy is not None:
        grad -= dentropy[:, None] * p * (np.maximum(log_p, LOWEST_LOG_P) + entropy[:, None])
    dlogits = np.empty_like(logits) if out is None else out
    dlogits[:, :vocab_size] = grad / temperature
    dlogits[:, vocab_size:] = 0
    return dlogits


def _counting(targets, vocab_size):
    """The rows with a target that counts."""
    return np.flatnonzero((targets >= 0) & (targets < vocab_size))


def _scaled(logits, temperature, vocab_size):
    acc = accumulator(logits.dtype)
    return logits[:, :vocab_size].astype(acc, copy=False) / acc.type(temperature)
