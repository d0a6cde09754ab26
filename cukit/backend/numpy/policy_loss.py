"""The policy-gradient losses of GRPO's family on packed completion tokens, with their gradient. N tokens, B sequences.

loss = Σ weight_t · ℓ_t, where the weights say how the method averages (cukit/trainers/advantage.py) and ℓ_t is a
function of log_ratio = new − old, the advantage and new. A new loss is one function in LOSSES. Statistics are float32
or better.

Before exp, log_ratio (at sequence level its mean) is held within ±max_log_ratio, and the reference's x = ref − new is
held below max_log_ratio. A term with a held factor has gradient 0. x has no lower bound: k3 grows only linearly there,
and there the KL has to pull. CISPO's factor is a constant, so holding the ratio takes no gradient from it.

PPO's clip: Schulman 2017; DAPO's higher upper bound: Yu 2025; two-sided (delta): INTELLECT-2; CISPO: MiniMax-M1;
sequence level: GSPO.
"""

import numpy as np

from .device import accumulator


def _clipped_surrogate(log_ratio, new, advantages, eps_low, eps_high, delta):
    """ℓ = −min(r·A, clip(r, 1 − eps_low, 1 + eps_high)·A), r = exp(log_ratio), the first r at most delta if given."""
    ratio = np.exp(log_ratio)
    clipped = np.clip(ratio, 1 - eps_low, 1 + eps_high)
    unclipped = ratio if delta is None else np.minimum(ratio, delta)
    first, second = unclipped * advantages, clipped * advantages
    has_slope = np.where(first <= second, unclipped == ratio, clipped == ratio)
    low = (ratio < 1 - eps_low) & (advantages < 0)
    high = (ratio > 1 + eps_high) & (advantages > 0)
    return -np.minimum(first, second), -ratio * advantages * has_slope, 0 * ratio, low, high


def _capped_importance(log_ratio, new, advantages, eps_low, eps_high, delta):
    """CISPO: ℓ = −min(r, eps_high)·A·new, with a constant factor before `new`. eps_high caps the ratio itself."""
    ratio = np.exp(log_ratio)
    factor = -np.minimum(ratio, eps_high) * advantages
    return factor * new, 0 * ratio, factor, ratio < 0, (ratio > eps_high) & (advantages > 0)


# name -> function returning (N,) each: ℓ, dℓ/dlog_ratio, dℓ/dnew at a fixed ratio, clipped below, clipped above
LOSSES = {"clip": _clipped_surrogate, "cispo": _capped_importance}


def _k3(x):
    """Schulman's third estimate of KL(new || ref) from a sampled token (2020), x = ref − new -> (kl, dkl/dnew)."""
    return np.expm1(x) - x, -np.expm1(x)


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

    new, old, ref, advantages, weights (N,); ref may be None if beta is 0. A token of weight 0 takes no part, in the
    statistics neither. cu_seqlens (B+1): one ratio a sequence, exp(mean log_ratio) (GSPO); None: one a token. At
    sequence level the clip statistics count sequences, empty ones included. bias_kl: the k3 term is multiplied by the
    ratio.
    """
    acc = accumulator(new.dtype)
    new, old, advantages, weights = (np.asarray(x).astype(acc, copy=False) for x in (new, old, advantages, weights))
    used = weights != 0
    # an unused token may hold anything (padding, a log-prob of -inf): 0 there keeps 0·inf out of the sums
    log_ratio = np.subtract(new, old, where=used, out=np.zeros_like(new))
    if cu_seqlens is not None:
        log_ratio = _sequence_mean(log_ratio, used, cu_seqlens)
    held = np.abs(log_ratio) > max_log_ratio  # not NaN, which must come through
    extreme, log_ratio = held, np.clip(log_ratio, -max_log_ratio, max_log_ratio)
    used_new = np.where(used, new, 0)
    per_token, dlog_ratio, dnew, low, high = LOSSES[kind](log_ratio, used_new, advantages, eps_low, eps_high, delta)
    kl_sum = 0.0
    if beta:
        x = np.subtract(ref.astype(acc, copy=False), new, where=used, out=np.zeros_like(new))
        too_far = x > max_log_ratio
        kl, dkl = _k3(np.minimum(x, max_log_ratio))
        extreme, dkl = extreme | too_far, np.where(too_far, 0, dkl)
        if bias_kl:
            ratio = np.exp(log_ratio)
            kl, dkl = kl * ratio, np.where(held, 0, dkl * ratio)
            dlog_ratio = dlog_ratio + np.where(too_far, 0, beta * kl)
        per_token, dnew = per_token + beta * kl, dnew + beta * dkl
        kl_sum = np.sum(kl, where=used)
    through_ratio = weights * np.where(held, 0, dlog_ratio)
    if cu_seqlens is not None:  # every token of a sequence moves the one ratio by 1/length
        through_ratio = _sequence_share(through_ratio, used, cu_seqlens)
    clipped = _clip_counts(low & used, high & used, used, cu_seqlens)
    stats = np.array([*clipped, kl_sum, used.sum(), (extreme & used).sum()])
    return np.asarray(np.sum(weights * per_token)), through_ratio + weights * dnew, stats


def _clip_counts(low, high, used, cu_seqlens):
    """How many units (tokens, or sequences) were clipped below and above, and how many there are."""
    if cu_seqlens is None:
        return low.sum(), high.sum(), used.sum()
    rows = _row_of_token(cu_seqlens)
    return len(np.unique(rows[low])), len(np.unique(rows[high])), len(cu_seqlens) - 1


def _row_of_token(cu_seqlens):
    return np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))


def _sequence_mean(values, used, cu_seqlens):
    """(N,): the mean of a sequence's used values, at each of its tokens."""
    rows, num_rows = _row_of_token(cu_seqlens), len(cu_seqlens) - 1
    sums = np.bincount(rows, weights=values * used, minlength=num_rows)
    counts = np.bincount(rows, weights=used, minlength=num_rows)
    return (sums / np.maximum(counts, 1))[rows].astype(values.dtype, copy=False)


def _sequence_share(values, used, cu_seqlens):
    """(N,): the sum of a sequence's values divided by its used tokens, at those tokens; 0 elsewhere."""
    return _sequence_mean(values, used, cu_seqlens) * used
