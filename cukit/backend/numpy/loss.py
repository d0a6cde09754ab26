"""Log-probabilities of chosen tokens, and the entropy, from logits (N, V); statistics in float32 or better.

Ids from vocab_size on take no part: probability 0, gradient 0. log p = logits[target]/T − lse, lse = log Σ
exp(logits/T), entropy H = lse − Σ p·logits/T.
"""

import numpy as np

from .device import accumulator


def token_logprobs_forward(logits, targets, temperature, vocab_size):
    """Returns logprobs, entropy, lse, each (N,)."""
    scaled = _scaled(logits, temperature, vocab_size)
    top = scaled.max(axis=1, keepdims=True)
    exp = np.exp(scaled - top)
    total = exp.sum(axis=1)
    lse = np.log(total) + top[:, 0]
    logprobs = scaled[np.arange(len(targets)), targets] - lse
    entropy = lse - np.einsum("nv,nv->n", exp, scaled) / total
    return logprobs, entropy, lse


def token_logprobs_backward(logits, targets, lse, entropy, dlogprobs, dentropy, temperature, vocab_size):
    """dlogits like logits: (dlogprobs·(1[target] − p) − dentropy·p·(log p + H)) / T. dentropy may be None."""
    scaled = _scaled(logits, temperature, vocab_size)
    log_p = scaled - lse[:, None]
    p = np.exp(log_p)
    grad = -dlogprobs[:, None] * p
    grad[np.arange(len(targets)), targets] += dlogprobs
    if dentropy is not None:
        grad -= dentropy[:, None] * p * (log_p + entropy[:, None])
    dlogits = np.zeros_like(logits)
    dlogits[:, :vocab_size] = grad / temperature
    return dlogits


def _scaled(logits, temperature, vocab_size):
    acc = accumulator(logits.dtype)
    return logits[:, :vocab_size].astype(acc, copy=False) / acc.type(temperature)
