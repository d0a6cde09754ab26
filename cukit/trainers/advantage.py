"""From rewards to advantages, and from a method's name to the weight of each token. Small host arrays, NumPy only."""

from __future__ import annotations

import numpy as np

SCALE_EPS = 1e-4  # added to the standard deviation, as TRL does


def combine_rewards(rewards: np.ndarray, reward_weights: list[float] | None) -> np.ndarray:
    """(rows, functions) -> (rows,): the weighted sum over the functions that gave a number; NaN where none did."""
    weights = np.ones(rewards.shape[1]) if reward_weights is None else np.asarray(reward_weights, np.float64)
    total = np.nansum(rewards * weights, axis=1)
    return np.where(np.isnan(rewards).all(axis=1), np.nan, total)


def group_advantages(rewards: np.ndarray, group_sizes: int | np.ndarray, scale_rewards: str):
    """Rewards (rows,) of consecutive groups -> (advantages (rows,), mean (groups,), std (groups,)).

    group_sizes: completions of each group, one number for all or one a group. advantage = (r − group mean) / (std +
    1e-4), the standard deviation with n − 1 over the group ("group"), over all rows ("batch"), or without a division
    ("none": Dr. GRPO). A NaN reward is left out of the statistics and has advantage 0. Where the rewards of a group are
    equal, its std and its advantages are exactly 0.
    """
    filled, table = _by_group(rewards, group_sizes)
    mean, std = _mean_and_std(table)
    advantages = table - mean[:, None]
    if scale_rewards == "group":
        advantages = advantages / (std[:, None] + SCALE_EPS)
    elif scale_rewards == "batch":
        advantages = advantages / (_mean_and_std(rewards)[1] + SCALE_EPS)
    advantages = np.where(np.isnan(table) | (std[:, None] == 0), 0.0, advantages)
    return advantages[filled], mean, std


def _by_group(rewards, group_sizes):
    """(which places are taken, values) as tables (groups, largest group), NaN where a group has no more rows."""
    if np.ndim(group_sizes) == 0:
        group_sizes = np.full(len(rewards) // group_sizes, group_sizes)
    filled = np.arange(max(group_sizes, default=0)) < np.asarray(group_sizes)[:, None]
    table = np.full(filled.shape, np.nan)
    table[filled] = rewards
    return filled, table


def _mean_and_std(table):
    """Mean and standard deviation (with n − 1) over the last axis of what is not NaN.

    No number: NaN and 0. Equal numbers: exactly that number and 0; a sum would round (0.1 six times), or overflow.
    """
    count = np.sum(~np.isnan(table), axis=-1)
    low, high = np.fmin.reduce(table, -1, initial=np.inf), np.fmax.reduce(table, -1, initial=-np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.where(low < high, np.nansum(table, axis=-1) / np.maximum(count, 1), low)
        squares = np.nansum(np.square(table - mean[..., None]), axis=-1)
    return np.where(count > 0, mean, np.nan), np.sqrt(squares / np.maximum(count - 1, 1))


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
