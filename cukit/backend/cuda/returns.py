"""Rewards of tokens, generalised advantage estimates and whitening on packed learnt tokens: kernels/returns.cu."""

import cupy as cp

from .constants import source_constant
from .device import empty
from .loader import load
from .policy_loss import ESTIMATORS

THREADS = source_constant("returns", "RETURNS_THREADS")
ROWS_A_BLOCK = THREADS // source_constant("returns", "WARP")
TOKENS_A_BLOCK = source_constant("returns", "TOKENS_A_BLOCK")


def token_rewards(logprobs, ref_logprobs, scores, cu_learnt, kl_coef, kl_estimator="k1", max_log_ratio=20.0):
    """Rewards (N,): −kl_coef · KL of each token, and scores[b] more at the last token of row b.

    logprobs, ref_logprobs (N,); ref_logprobs None: no KL. scores (B,). A row without tokens gets nothing.
    """
    rewards, borders = empty(logprobs.shape, cp.float32), cp.ascontiguousarray(cu_learnt, cp.int32)
    load("returns").token_rewards(
        borders.size - 1,
        THREADS,
        rewards,
        *_columns(logprobs, ref_logprobs, scores),
        borders,
        kl_coef,
        ESTIMATORS[kl_estimator],
        max_log_ratio,
    )
    return rewards


def gae(rewards, values, bootstrap, cu_learnt, gamma, lam):
    """Advantages and returns, (N,) each. rewards, values (N,); bootstrap (B,): the value after a row's last token, 0
    for a row that ended.
    """
    advantages, returns = (empty(values.shape, cp.float32) for _ in range(2))
    borders = cp.ascontiguousarray(cu_learnt, cp.int32)
    num_rows = borders.size - 1
    load("returns").gae(
        -(-num_rows // ROWS_A_BLOCK),
        THREADS,
        advantages,
        returns,
        *_columns(rewards, values, bootstrap),
        borders,
        num_rows,
        gamma,
        gamma * lam,
    )
    return advantages, returns


def whiten(x, shift_mean=True):
    """(x − mean) / √(variance + 1e-8), (N,), by the unbiased variance; the mean is added again unless shift_mean.

    The variance of one number is 0.
    """
    (x,) = _columns(x)
    kernels, num_blocks = load("returns"), -(-x.size // TOKENS_A_BLOCK)
    whitened, sums, squares = empty(x.shape, cp.float32), *(empty((num_blocks,), cp.float64) for _ in range(2))
    kernels.whiten_sums(num_blocks, THREADS, sums, x, None, x.size)
    kernels.whiten_sums(num_blocks, THREADS, squares, x, sums, x.size)
    kernels.whiten(num_blocks, THREADS, whitened, x, sums, squares, x.size, int(shift_mean))
    return whitened


def _columns(*given):
    return [None if x is None else cp.ascontiguousarray(x, cp.float32) for x in given]
