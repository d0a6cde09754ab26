"""From rewards to advantages, and from a method's name to the weight of each token. Small host arrays, NumPy only."""

from __future__ import annotations

import numpy as np

SCALE_EPS = 1e-4  # added to the standard deviation, as TRL does


def combine_rewards(rewards: np.ndarray, reward_weights: list[float] | None) -> np.ndarray:
    """(rows, functions) -> (rows,): the weighted sum over the functions that gave a number; NaN where none did."""
    weights = np.ones(rewards.shape[1]) if reward_weights is None else np.asarray(reward_weights, np.float64)
    total = np.nansum(rewards * weights, axis=1)
    return np.where(np.isnan(rewards).all(axis=1), np.nan, total)


def group_advantages(rewards: np.ndarray, num_generations: int, scale_rewards: str):
    """Rewards (rows,) of consecutive groups -> (advantages (rows,), mean (groups,), std (groups,)).

    advantage = (r − group mean) / (std + 1e-4), the standard deviation with n − 1 over the group ("group"), over all
    rows ("batch"), or without a division ("none": Dr. GRPO). A NaN reward is left out of the statistics and has
    advantage 0.
    """
    groups = rewards.reshape(-1, num_generations)
    mean = _nan_mean(groups)
    std = _nan_std(groups)
    advantages = groups - mean[:, None]
    if scale_rewards == "group":
        advantages = advantages / (std[:, None] + SCALE_EPS)
    elif scale_rewards == "batch":
        advantages = advantages / (_nan_std(rewards[None])[0] + SCALE_EPS)
    return np.nan_to_num(advantages, nan=0.0).reshape(-1), mean, std


def _nan_mean(rows):
    """Mean over the last axis of what is not NaN; NaN where nothing is left (without NumPy's warning)."""
    count = np.sum(~np.isnan(rows), axis=-1)
    return np.where(count > 0, np.nansum(rows, axis=-1) / np.maximum(count, 1), np.nan)


def _nan_std(rows):
    """Standard deviation with n − 1 over the last axis; 0 where fewer than two numbers are left."""
    count = np.sum(~np.isnan(rows), axis=-1)
    squares = np.nansum(np.square(rows - _nan_mean(rows)[:, None]), axis=-1)
    return np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), 0.0)


def token_weights(
    loss_type: str, lengths: np.ndarray, max_completion_length: int, num_items: float | None = None
) -> np.ndarray:
    """(rows,): the loss weight of each token of a row with `lengths` counted tokens, over a whole optimizer batch.

    grpo: mean over a row's tokens, then over rows (empty rows count); dr_grpo: Σ / (rows · max_completion_length);
    bnpo: Σ / tokens of this batch; dapo and cispo: Σ / num_items, the tokens of the batch on all devices (default: of
    this one). Because a weight is fixed before the batch is split, no split into micro-batches changes the gradient.
    """
    lengths = np.asarray(lengths, np.float64)
    tokens = max(float(lengths.sum()), 1.0)
    if loss_type == "grpo":
        return 1.0 / (np.maximum(lengths, 1.0) * len(lengths))
    if loss_type == "dr_grpo":
        return np.full(len(lengths), 1.0 / (len(lengths) * max_completion_length))
    if loss_type == "bnpo":
        return np.full(len(lengths), 1.0 / tokens)
    if loss_type in ("dapo", "cispo"):
        return np.full(len(lengths), 1.0 / max(tokens if num_items is None else num_items, 1.0))
    raise ValueError(f"loss_type {loss_type!r} is not known: choose grpo, bnpo, dr_grpo, dapo or cispo")


# loss_type -> the per-token formula (backend policy_loss.LOSSES)
POLICY_KINDS = {"grpo": "clip", "bnpo": "clip", "dr_grpo": "clip", "dapo": "clip", "cispo": "cispo"}
