"""From rewards to advantages for a policy with a critic: rewards of tokens, generalised advantage estimates, whitening.

N learnt tokens of B rows stand side by side; cu_learnt (B+1,) int32 has the borders. A token that does not learn is not
there: those on its two sides are neighbours. A row may be empty. Results are float32, or float64 where the inputs are.

Advantages: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (GAE),
equations 11 and 16. Rewards of tokens and whitening: TRL's PPO trainer, masked_whiten.
"""

import numpy as np

from .device import accumulator
from .policy_loss import _kl

WHITEN_EPS = 1e-8


def token_rewards(logprobs, ref_logprobs, scores, cu_learnt, kl_coef, kl_estimator="k1", max_log_ratio=20.0):
    """Rewards (N,): −kl_coef · KL of each token, and scores[b] more at the last token of row b.

    logprobs, ref_logprobs (N,); ref_logprobs None: no KL. scores (B,). The KL by kl_estimator, with x = ref − logprob:
    k1 = −x, k2 = x²/2, k3 = exp(x) − x − 1 with x held below max_log_ratio. A row without tokens gets nothing.
    """
    acc = accumulator(logprobs.dtype)
    rewards = np.zeros(logprobs.shape, acc)
    if ref_logprobs is not None:
        x = ref_logprobs.astype(acc, copy=False) - logprobs.astype(acc, copy=False)
        rewards = -kl_coef * _kl(x, kl_estimator, max_log_ratio)[0]
    rows, ends = _ends(cu_learnt)
    rewards[ends - 1] += scores[rows].astype(acc, copy=False)
    return rewards


def gae(rewards, values, bootstrap, cu_learnt, gamma, lam):
    """Advantages and returns, (N,) each. rewards, values (N,); bootstrap (B,): the value after a row's last token, 0
    for a row that ended.

    δ_t = r_t + gamma·V_{t+1} − V_t, A_t = δ_t + gamma·lam·A_{t+1} with A = 0 after the row, returns = A + V.
    """
    acc = accumulator(values.dtype)
    values = values.astype(acc, copy=False)
    rows, ends = _ends(cu_learnt)
    next_values = np.append(values[1:], acc.type(0))[: len(values)]
    next_values[ends - 1] = bootstrap[rows]
    advantages = rewards.astype(acc, copy=False) + gamma * next_values - values
    lengths = np.diff(cu_learnt)[rows]
    for distance in range(2, lengths.max(initial=0) + 1):  # from a row's end, in all rows at once
        tokens = ends[lengths >= distance] - distance
        advantages[tokens] += gamma * lam * advantages[tokens + 1]
    return advantages, advantages + values


def whiten(x, shift_mean=True):
    """(x − mean) / √(variance + 1e-8), (N,), by the unbiased variance; the mean is added again unless shift_mean.

    The variance of one number is 0. Sums are float64.
    """
    if not x.size:
        return np.zeros(x.shape, accumulator(x.dtype))
    mean = x.mean(dtype=np.float64)
    around = x.astype(np.float64) - mean
    whitened = around / np.sqrt(np.sum(around**2) / max(x.size - 1, 1) + WHITEN_EPS)
    return (whitened if shift_mean else whitened + mean).astype(accumulator(x.dtype), copy=False)


def _ends(cu_learnt):
    """The rows with tokens, and where each of them ends."""
    rows = np.flatnonzero(np.diff(cu_learnt))
    return rows, np.asarray(cu_learnt)[1:][rows]
