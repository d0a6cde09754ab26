"""PPO's loss with a critic on N packed tokens, with its gradients. The formula and the arguments: ops.ppo_loss.

Log-ratios are held within ±max_log_ratio before exp, and k3's x = ref − new below it. A term with a held factor has
gradient 0. A clipped term has none either: of two equal ones, the unclipped one counts.

Clipped surrogate: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; dual clip: Ye et al.
2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", equation 5; clipped value loss: OpenAI
Baselines, as in TRL's PPO trainer.
"""

import math

import numpy as np

from .device import accumulator
from .policy_loss import _kl


def ppo_loss_forward(
    logps,
    values,
    entropies,
    old_logps,
    old_values,
    ref_logps,
    advantages,
    returns,
    weights,
    eps_low,
    eps_high,
    dual_clip,
    vf_coef,
    cliprange_value,
    entropy_coef=0.0,
    beta=0.0,
    kl_estimator="k3",
    max_log_ratio=20.0,
):
    """The loss (a 0-d array), its gradients dlogps, dvalues and dentropies, (N,) each, and stats (11,) float64: the
    sums that ops.ppo_loss.PPO_STATS names.

    A token of weight 0 takes no part, in the statistics neither. Sums are float32 or better.
    """
    acc = accumulator(logps.dtype)
    weights = np.asarray(weights).astype(acc, copy=False)
    used = weights != 0

    def column(x):  # an unused token may hold anything: 0 there keeps 0·inf out of the sums
        return np.where(used, x, 0).astype(acc, copy=False)

    logps, entropies, advantages = column(logps), column(entropies), column(advantages)
    log_ratio = logps - column(old_logps)
    held = np.abs(log_ratio) > max_log_ratio  # not NaN, which must come through
    log_ratio = np.clip(log_ratio, -max_log_ratio, max_log_ratio)
    ratio = np.exp(log_ratio)
    policy, dlog_ratio, clip, dual = _surrogate(ratio, advantages, 1 - eps_low, 1 + eps_high, dual_clip)
    value, dvalue, value_clip = _value_loss(column(values), column(old_values), column(returns), cliprange_value)
    per_token = policy + vf_coef * value - entropy_coef * entropies
    dlogps, extreme, kl_sum = np.where(held, 0, dlog_ratio), held, 0.0
    if beta:
        kl, dkl, too_far = _kl(column(ref_logps) - logps, kl_estimator, max_log_ratio)
        per_token, dlogps, extreme = per_token + beta * kl, dlogps + beta * dkl, held | too_far
        kl_sum = kl.sum()
    weighted = [np.sum(weights * x) for x in (policy, value, entropies)]
    counts = [clip.sum(), value_clip.sum(), dual.sum()]
    ratios = [np.sum(log_ratio**2) / 2, np.sum(ratio, where=used)]
    stats = np.array([*weighted, *counts, *ratios, kl_sum, extreme.sum(), used.sum()], np.float64)
    gradients = weights * dlogps, weights * vf_coef * dvalue, -entropy_coef * weights
    return np.asarray(np.sum(weights * per_token)), *gradients, stats


def _surrogate(ratio, advantages, low, high, dual_clip):
    """(N,) each: the loss, its slope in log_ratio, and where the clipped term or the dual clip is what counts."""
    plain, clipped = -advantages * ratio, -advantages * np.clip(ratio, low, high)
    is_clipped, loss = clipped > plain, np.maximum(plain, clipped)
    slope = np.where(is_clipped, 0, plain)
    if dual_clip is None:
        return loss, slope, is_clipped, np.zeros_like(is_clipped)
    bound = -dual_clip * advantages
    is_dual = (advantages < 0) & (loss > bound)
    return np.where(is_dual, bound, loss), np.where(is_dual, 0, slope), is_clipped, is_dual


def _value_loss(values, old_values, returns, cliprange):
    """(N,) each: the loss, its slope in values, and where the clipped term is what counts."""
    change, cliprange = values - old_values, math.inf if cliprange is None else cliprange
    # an exact value where nothing is clipped, so that the two terms are equal there
    near = np.where(np.abs(change) <= cliprange, values, old_values + np.clip(change, -cliprange, cliprange))
    plain, clipped = (values - returns) ** 2, (near - returns) ** 2
    is_clipped = clipped > plain
    return np.maximum(plain, clipped) / 2, np.where(is_clipped, 0, values - returns), is_clipped
