"""PPO's loss with a critic on packed tokens, with its gradients: kernels/ppo_loss.cu."""

import math

import cupy as cp

from .constants import source_constant
from .device import empty
from .loader import load
from .policy_loss import ESTIMATORS

THREADS = source_constant("ppo_loss", "PPO_THREADS")
TOKENS_A_BLOCK = source_constant("ppo_loss", "TOKENS_A_BLOCK")
NUM_SUMS = source_constant("ppo_loss", "NUM_SUMS")


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

    The arguments are those of ops.ppo_loss, which explains them.
    """
    kernels, num_tokens = load("ppo_loss"), logps.size
    num_blocks = -(-num_tokens // TOKENS_A_BLOCK)
    given = (logps, values, entropies, old_logps, old_values, ref_logps, advantages, returns, weights)
    gradients = [empty(logps.shape, cp.float32) for _ in range(3)]
    loss, stats, partials = (
        empty((), cp.float32),
        empty((NUM_SUMS - 1,), cp.float64),
        empty((num_blocks, NUM_SUMS), cp.float64),
    )
    kernels.ppo_loss_tokens(
        num_blocks,
        THREADS,
        *gradients,
        partials,
        *(None if x is None else cp.ascontiguousarray(x, cp.float32) for x in given),
        num_tokens,
        1 - eps_low,
        1 + eps_high,
        math.inf if dual_clip is None else dual_clip,
        vf_coef,
        math.inf if cliprange_value is None else cliprange_value,
        entropy_coef,
        beta,
        ESTIMATORS[kl_estimator],
        max_log_ratio,
    )
    kernels.ppo_loss_sums(1, THREADS, loss, stats, partials, num_blocks)
    return loss, *gradients, stats
