"""The policy-gradient losses of GRPO's family on packed completion tokens, with their gradient. N tokens, B sequences.

loss = Σ weight_t · (ℓ_t + beta · KL_t), where the weights say how the method averages (cukit/trainers/advantage.py) and
ℓ_t is a function of log_ratio = new − old, the advantage and new. A new loss is one function in LOSSES. Statistics are
float32 or better.

Before exp, log_ratio (at sequence level its mean) is held within ±max_log_ratio, and k3's x = ref − new is held below
max_log_ratio. A term with a held factor has gradient 0. x has no lower bound: k3 grows only linearly there, and there
the KL has to pull. The factors of CISPO and VESPO are constants, so holding the ratio takes no gradient from them.

PPO's clip: Schulman 2017; DAPO's higher upper bound: Yu 2025; two-sided (delta): INTELLECT-2; CISPO: MiniMax-M1; SAPO:
arXiv 2511.20347; VESPO's gamma weights: TRL's loss_type "vespo"; sequence level and GSPO-token: Zheng 2025; the
off-policy mask: DeepSeek-V3.2, equation 9.
"""

import math
from typing import NamedTuple

import numpy as np

from .device import accumulator

LOWEST_LOG_WEIGHT, LOWEST_DECAY = math.log(1e-8), 1e-4  # of VESPO's weight of a sequence


class _Settings(NamedTuple):
    eps_low: float
    eps_high: float
    delta: float | None
    coefficients: tuple


def _clipped_surrogate(log_ratio, log_weight, new, advantages, settings):
    """ℓ = −min(r·A, clip(r, 1 − eps_low, 1 + eps_high)·A), r = exp(log_ratio), the first r at most delta if given."""
    eps_low, eps_high, delta = settings[:3]
    ratio = np.exp(log_ratio)
    clipped = np.clip(ratio, 1 - eps_low, 1 + eps_high)
    unclipped = ratio if delta is None else np.minimum(ratio, delta)
    first, second = unclipped * advantages, clipped * advantages
    has_slope = np.where(first <= second, unclipped == ratio, clipped == ratio)
    low = (ratio < 1 - eps_low) & (advantages < 0)
    high = (ratio > 1 + eps_high) & (advantages > 0)
    return -np.minimum(first, second), -ratio * advantages * has_slope, 0 * ratio, low, high


def _capped_importance(log_ratio, log_weight, new, advantages, settings):
    """CISPO: ℓ = −min(r, eps_high)·A·new, with a constant factor before `new`. eps_high caps the ratio itself."""
    ratio = np.exp(log_ratio)
    factor = -np.minimum(ratio, settings.eps_high) * advantages
    return factor * new, 0 * ratio, factor, ratio < 0, (ratio > settings.eps_high) & (advantages > 0)


def _soft_gate(log_ratio, log_weight, new, advantages, settings):
    """SAPO: ℓ = −A·4/τ·sigmoid(τ·(r − 1)), τ = coefficients[0] where A > 0, coefficients[1] elsewhere."""
    ratio = np.exp(log_ratio)
    tau = np.where(advantages > 0, *map(ratio.dtype.type, settings.coefficients[:2]))
    decay = np.exp(-tau * (ratio - 1))
    gate = 1 / (1 + decay)
    slope = 4 * decay * gate * gate * ratio
    return -gate * 4 / tau * advantages, -slope * advantages, 0 * ratio, ratio < 0, ratio < 0


def _gamma_weighted(log_ratio, log_weight, new, advantages, settings):
    """VESPO: ℓ = −φ(w)·A·new, a constant factor; w is the ratio of the whole sequence, φ(w) = exp(λ + k·log w − λ·w).

    coefficients: k and λ where A ≥ 0, then k and λ elsewhere. φ(1) = 1.
    """
    k_above, lambda_above, k_below, lambda_below = map(log_weight.dtype.type, settings.coefficients)
    k = np.where(advantages >= 0, k_above, k_below)
    decay = np.maximum(np.where(advantages >= 0, lambda_above, lambda_below), LOWEST_DECAY)
    factor = -np.exp(decay + k * log_weight - decay * np.exp(log_weight)) * advantages
    nothing = log_ratio < -np.inf
    return factor * new, 0 * log_ratio, factor, nothing, nothing


# name -> function returning (N,) each: ℓ, dℓ/dlog_ratio, dℓ/dnew at a fixed ratio, clipped below, clipped above
LOSSES = {"clip": _clipped_surrogate, "cispo": _capped_importance, "sapo": _soft_gate, "vespo": _gamma_weighted}


# Schulman's estimates of KL(new || ref) from a sampled token (2020), x = ref − new: name -> function returning (N,)
# each: kl, dkl/dnew
ESTIMATORS = {
    "k1": lambda x: (-x, np.ones_like(x)),
    "k2": lambda x: (x * x / 2, -x),
    "k3": lambda x: (np.expm1(x) - x, -np.expm1(x)),
}


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

    The arguments are those of ops.policy_loss, which explains them. A token of weight 0 takes no part, in the
    statistics neither. At level "sequence" the clip statistics count sequences, empty ones included.
    """
    acc = accumulator(new.dtype)
    new, old, advantages, weights = (np.asarray(x).astype(acc, copy=False) for x in (new, old, advantages, weights))
    used = weights != 0
    settings = _Settings(eps_low, eps_high, delta, coefficients)
    # an unused token may hold anything (padding, a log-prob of -inf): 0 there keeps 0·inf out of the sums
    log_ratio = np.subtract(new, old, where=used, out=np.zeros_like(new))
    drift = log_ratio if sampled is None else np.subtract(new, sampled.astype(acc), where=used, out=np.zeros_like(new))
    log_weight = _log_weight(log_ratio, used, cu_seqlens, max_log_ratio) if kind == "vespo" else None
    if cu_seqlens is not None and level != "token":
        log_ratio = _sequence_mean(log_ratio, used, cu_seqlens)
    held = np.abs(log_ratio) > max_log_ratio  # not NaN, which must come through
    extreme, log_ratio = held, np.clip(log_ratio, -max_log_ratio, max_log_ratio)
    used_new = np.where(used, new, 0)
    per_token, dlog_ratio, dnew, low, high = LOSSES[kind](log_ratio, log_weight, used_new, advantages, settings)
    factor, dropped = _factor(factors, drift, advantages, used, cu_seqlens, off_policy_threshold)
    if factor is not None:
        per_token, dlog_ratio, dnew = per_token * factor, dlog_ratio * factor, dnew * factor
    kl_sum = 0.0
    if beta:
        x = np.subtract(ref.astype(acc, copy=False), new, where=used, out=np.zeros_like(new))
        kl, dkl, too_far = _kl(x, kl_estimator, max_log_ratio)
        if bias_kl:
            ratio = np.exp(log_ratio)
            kl, dkl = kl * ratio, np.where(held, 0, dkl * ratio)
            dlog_ratio = dlog_ratio + np.where(too_far, 0, beta * kl)
        per_token, dnew = per_token + beta * kl, dnew + beta * dkl
        extreme, kl_sum = extreme | too_far, np.sum(kl, where=used)
    through_ratio = weights * np.where(held, 0, dlog_ratio)
    cu_seqlens = cu_seqlens if level == "sequence" else None
    if cu_seqlens is not None:  # every token of a sequence moves the one ratio by 1/length
        through_ratio = _sequence_share(through_ratio, used, cu_seqlens)
    clipped = _clip_counts(low & used, high & used, used, cu_seqlens)
    stats = np.array([*clipped, kl_sum, used.sum(), (extreme & used).sum(), dropped])
    return np.asarray(np.sum(weights * per_token)), through_ratio + weights * dnew, stats


def _kl(x, estimator, max_log_ratio):
    """(N,) each: the estimate of KL(new || ref), its dkl/dnew, and where k3's x is held."""
    too_far = (x > max_log_ratio) & (estimator == "k3")
    kl, dkl = ESTIMATORS[estimator](np.where(too_far, x.dtype.type(max_log_ratio), x))
    return kl, np.where(too_far, 0, dkl), too_far


def _log_weight(log_ratio, used, cu_seqlens, max_log_ratio):
    """VESPO's log w, (N,): the sum of a sequence's log-ratios, each of them and the sum held."""
    if cu_seqlens is None:
        raise ValueError("vespo weighs whole sequences: give cu_seqlens")
    held = np.clip(log_ratio, -max_log_ratio, max_log_ratio)
    return np.clip(_sequence_sum(held, used, cu_seqlens), LOWEST_LOG_WEIGHT, max_log_ratio)


def _factor(factors, drift, advantages, used, cu_seqlens, threshold):
    """What ℓ is multiplied by, (N,) or None, and how many sequences the mask dropped. drift: new − sampled, (N,)."""
    if factors is not None:
        factors = np.asarray(factors).astype(drift.dtype, copy=False)
    if threshold is None:
        return factors, 0
    if cu_seqlens is None:
        raise ValueError("the off-policy mask drops whole sequences: give cu_seqlens")
    dropped = (advantages < 0) & (-_sequence_mean(drift, used, cu_seqlens) > threshold)
    keep = 1 - dropped.astype(drift.dtype)
    count = len(np.unique(_row_of_token(cu_seqlens)[dropped & used]))
    return keep if factors is None else factors * keep, count


def _clip_counts(low, high, used, cu_seqlens):
    """How many units (tokens, or sequences) were clipped below and above, and how many there are."""
    if cu_seqlens is None:
        return low.sum(), high.sum(), used.sum()
    rows = _row_of_token(cu_seqlens)
    return len(np.unique(rows[low])), len(np.unique(rows[high])), len(cu_seqlens) - 1


def _row_of_token(cu_seqlens):
    return np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))


def _sequence_sum(values, used, cu_seqlens):
    """(N,): the sum of a sequence's used values, at each of its tokens."""
    rows = _row_of_token(cu_seqlens)
    sums = np.bincount(rows, weights=values * used, minlength=len(cu_seqlens) - 1)
    return sums[rows].astype(values.dtype, copy=False)


def _sequence_mean(values, used, cu_seqlens):
    """(N,): the mean of a sequence's used values, at each of its tokens."""
    rows, num_rows = _row_of_token(cu_seqlens), len(cu_seqlens) - 1
    sums = np.bincount(rows, weights=values * used, minlength=num_rows)
    counts = np.bincount(rows, weights=used, minlength=num_rows)
    return (sums / np.maximum(counts, 1))[rows].astype(values.dtype, copy=False)


def _sequence_share(values, used, cu_seqlens):
    """(N,): the sum of a sequence's values divided by its used tokens, at those tokens; 0 elsewhere."""
    return _sequence_mean(values, used, cu_seqlens) * used
