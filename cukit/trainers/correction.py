"""Importance correction: what a token weighs where the engine and the trainer do not have the same numbers."""

from __future__ import annotations

import numpy as np

from ..ops.policy_loss import MAX_LOG_RATIO


def importance_correction(
    log_ratio: np.ndarray, borders: np.ndarray, mode: str, clip_min: float | None, clip_max: float | None
) -> np.ndarray:
    """(N,): a bounded ratio of the trainer's policy, before any update, to the one that sampled.

    log_ratio (N,): log p(trainer) − log p(engine) of the learnt tokens; borders (B + 1,): of their rows. mode, TRL's
    vllm_importance_sampling_mode: token_truncate is TIS (Yao et al. 2025): a ratio a token, clipped to [clip_min,
    clip_max]; token_mask is IcePop: 0 outside of the bounds; sequence_truncate and sequence_mask (MIS): the same with
    the ratio of the whole row, exp(Σ log_ratio), at each of its tokens. Where engine and trainer agree in every bit,
    each is exactly 1. The sum of log-ratios is held within ±20 before exp, as in the loss.
    """
    level, bound = mode.split("_")
    if level == "sequence":
        rows = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
        log_ratio = np.bincount(rows, weights=log_ratio, minlength=len(borders) - 1)[rows]
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    low, high = -np.inf if clip_min is None else clip_min, np.inf if clip_max is None else clip_max
    if bound == "truncate":
        return np.clip(ratio, low, high)
    return np.where((ratio < low) | (ratio > high), 0.0, ratio)
