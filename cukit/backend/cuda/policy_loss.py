"""The policy-gradient losses of GRPO's family on packed completion tokens, with gradient: kernels/policy_loss.cu."""

import math

import cupy as cp

from .constants import source_constant
from .device import empty
from .loader import load

# the places in the kernel's enums
LOSSES = {"clip": 0, "cispo": 1, "sapo": 2, "vespo": 3}
LEVELS = {"token": 0, "sequence": 1, "sequence_token": 2}
ESTIMATORS = {"k1": 0, "k2": 1, "k3": 2}
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
    level="sequence",
    coefficients=(),
    kl_estimator="k3",
    factors=None,
    sampled=None,
    off_policy_threshold=None,
):
    """The loss (a 0-d array), dlogps (N,) = dloss/dnew, and stats (7,): the sums that ops.policy_loss.STATS names.

    The arguments are those of ops.policy_loss, which explains them; new is float32.
    """
    _check(beta, ref, kind, cu_seqlens, off_policy_threshold)
    kernels = load("policy_loss")
    num_tokens, level = new.size, level if cu_seqlens is not None else "token"
    borders = None if cu_seqlens is None else cp.ascontiguousarray(cu_seqlens, cp.int32)
    num_segments = -(-num_tokens // TOKENS_A_BLOCK) if borders is None else borders.size - 1
    given = (old, ref, advantages, weights, factors, sampled)
    columns = [None if x is None else cp.ascontiguousarray(x, cp.float32) for x in given]
    loss, stats, dlogps = empty((), cp.float32), empty((7,), cp.float64), empty(new.shape, cp.float32)
    partials = empty((num_segments, NUM_SUMS), cp.float64)
    kernels.policy_loss_segments(
        num_segments,
        THREADS,
        dlogps,
        partials,
        cp.ascontiguousarray(new),
        *columns,
        borders,
        num_tokens,
        LOSSES[kind],
        LEVELS[level],
        ESTIMATORS[kl_estimator],
        1 - eps_low,
        1 + eps_high,
        eps_high,
        math.inf if delta is None else delta,
        beta,
        max_log_ratio,
        int(bool(bias_kl)),
        *coefficients,
        *[0.0] * (4 - len(coefficients)),
        math.inf if off_policy_threshold is None else off_policy_threshold,
    )
    num_sequences = num_segments if level == "sequence" else -1
    kernels.policy_loss_sums(1, THREADS, loss, stats, partials, num_segments, num_sequences)
    return loss, dlogps, stats


def _check(beta, ref, kind, cu_seqlens, off_policy_threshold):
    if beta and ref is None:
        raise ValueError(f"beta={beta} needs the reference model's log-probabilities: give ref, or beta=0")
    if cu_seqlens is None and kind == "vespo":
        raise ValueError("vespo weighs whole sequences: give cu_seqlens")
    if cu_seqlens is None and off_policy_threshold is not None:
        raise ValueError("the off-policy mask drops whole sequences: give cu_seqlens")
