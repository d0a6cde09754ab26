"""Log-probabilities of chosen tokens, and the entropy, from logits (N, V): kernels/loss.cu."""

import cupy as cp

from .constants import source_constant
from .device import empty
from .loader import load

THREADS = source_constant("loss", "LOGITS_THREADS")
IDS_A_BLOCK = 4 * THREADS * source_constant("loss", "LOGITS_VECTOR")  # of a row, in the backward kernel


def token_logprobs_forward(logits, targets, temperature, vocab_size):
    """Returns logprobs, entropy, lse, each (N,) float32.

    A target in vocab_size … V − 1 is an id of probability 0, logprob -inf; one outside 0 … V − 1 gives NaN.
    """
    num_rows, stride = logits.shape
    outputs = tuple(empty((num_rows,), cp.float32) for _ in range(3))
    load("loss", logits.dtype).token_logprobs_forward(
        num_rows, THREADS, *outputs, logits, cp.ascontiguousarray(targets, cp.int32), stride, vocab_size, temperature
    )
    return outputs


def token_logprobs_backward(logits, targets, lse, entropy, dlogprobs, dentropy, temperature, vocab_size, out=None):
    """dlogits like logits: (dlogprobs·(1[target] − p) − dentropy·p·(log p + H)) / T. dentropy may be None.

    out: where it is written, which may be the logits themselves; default: a new array.
    """
    num_rows, stride = logits.shape
    dlogits = empty(logits.shape, logits.dtype) if out is None else out
    if dlogits.shape != logits.shape:
        raise ValueError(f"out {dlogits.shape} does not fit logits {logits.shape}")
    vectors = [None if x is None else cp.ascontiguousarray(x, cp.float32) for x in (lse, entropy, dlogprobs, dentropy)]
    grid = (num_rows, -(-stride // IDS_A_BLOCK))
    load("loss", logits.dtype).token_logprobs_backward(
        grid,
        THREADS,
        dlogits,
        logits,
        cp.ascontiguousarray(targets, cp.int32),
        *vectors,
        stride,
        vocab_size,
        temperature,
    )
    return dlogits
