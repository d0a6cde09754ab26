"""The policy-gradient losses of GRPO's family on packed completion tokens, with gradient: kernels/policy_loss.cu."""

import math

import cupy as cp

from .constants import source_constant
from .device import empty
from .loader import load

LOSSES = {"clip": 0, "cispo": 1}
THREADS = source_constant("policy_loss", "POLICY_THREADS")
TOKENS_A_BLOCK = source_constant("policy_loss", "TOKENS_A_BLOCK")
NUM_SUMS = source_constant("policy_loss", "NUM_SUMS")


def policy_loss_forward(
    new,
    old,
    ref,
    advantages,
    weights,
    cu_seqlens,
    kind,
    eps_low,
    eps_high,
    delta,
    beta,
    bias_kl,
    max_log_ratio=20.0,
):
    """The loss (a 0-d array), dlogps (N,) = dloss/dnew, and stats (6,): the sums that ops.policy_loss.STATS names.

    new float32, old, ref, advantages, weights (N,); ref may be None if beta is 0. A token of weight 0 takes no part, in
    the statistics neither. cu_seqlens (B+1): one ratio a sequence, exp(mean log_ratio) (GSPO); None: one a token. At
    sequence level the clip statistics count sequences, empty ones included. bias_kl: the k3 term is multiplied by the
    ratio. Log-ratios are held within ±max_log_ratio before exp; see the NumPy shelf.
    """
    if beta and ref is None:
        raise ValueError(f"beta={beta} needs the reference model's log-probabilities: give ref, or beta=0")
    kernels = load("policy_loss")
    num_tokens, sequence_level = new.size, cu_seqlens is not None
    num_sequences = cu_seqlens.size - 1 if sequence_level else -1
    num_segments = num_sequences if sequence_level else -(-num_tokens // TOKENS_A_BLOCK)
    old, ref, advantages, weights = (
        None if x is None else cp.ascontiguousarray(x, cp.float32) for x in (old, ref, advantages, weights)
    )
    cu_seqlens = cp.ascontiguousarray(cu_seqlens, cp.int32) if sequence_level else None
    loss, stats, dlogps = empty((), cp.float32), empty((6,), cp.float64), empty(new.shape, cp.float32)
    partials = empty((num_segments, NUM_SUMS), cp.float64)
    kernels.policy_loss_segments(
        num_segments,
        THREADS,
        dlogps,
        partials,
        cp.ascontiguousarray(new),
        old,
        ref,
        advantages,
        weights,
        cu_seqlens,
        num_tokens,
        LOSSES[kind],
        1 - eps_low,
        1 + eps_high,
        eps_high,
        math.inf if delta is None else delta,
        beta,
        max_log_ratio,
        int(bool(bias_kl)),
    )
    kernels.policy_loss_sums(1, THREADS, loss, stats, partials, num_segments, num_sequences)
    return loss, dlogps, stats
