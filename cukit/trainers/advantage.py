"""From rewards to advantages, and from a method's name to the weight of each token. Small host arrays, NumPy only."""

from __future__ import annotations

import numpy as np

from .loss_config import LOSS_TYPES

SCALE_EPS = 1e-4  # added to the standard deviation, as TRL does
WHITEN_EPS = 1e-8  # added to the variance, as verl does


def estimate(values: np.ndarray, reward_weights, group_sizes: int | np.ndarray, lengths: np.ndarray, options):
    """Rewards (rows, functions) of consecutive groups -> (advantages (rows,), rewards (rows,)); options:
    AdvantageOptions.

    A row without a reward has the advantage 0. rewards: see combine_rewards. lengths (rows,): tokens of each
    completion.
    """
    rewards = combine_rewards(values, reward_weights)
    if options.advantage_estimator == "rloo":
        advantages = leave_one_out(rewards, group_sizes, options.normalize_advantages)
    elif options.advantage_estimator == "reinforce_plus_plus":
        advantages = whitened(rewards, lengths)
    elif options.advantage_estimator == "reinforce_plus_plus_baseline":
        centred = group_advantages(rewards, group_sizes, "none")[0]
        advantages = whitened(np.where(np.isnan(rewards), np.nan, centred), lengths)
    elif options.sums_first:
        advantages = group_advantages(rewards, group_sizes, options.scale_rewards)[0]
    else:
        advantages = normalize_then_sum(values, reward_weights, group_sizes)
    return advantages, rewards


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


def leave_one_out(rewards: np.ndarray, group_sizes: int | np.ndarray, normalize: bool = False) -> np.ndarray:
    """RLOO (Ahmadian et al. 2024): the reward less the mean of the others of its group, n / (n − 1) · (r − mean).

    A reward that stands alone has 0. normalize (TRL's normalize_advantages): then less the mean of all, divided by
    their standard deviation + 1e-4; groups of equal rewards keep 0.
    """
    filled, table = _by_group(rewards, group_sizes)
    mean, std = _mean_and_std(table)
    count = np.sum(~np.isnan(table), axis=1, keepdims=True)
    advantages = np.where(count > 1, (table - mean[:, None]) * (count / np.maximum(count - 1, 1)), np.nan)
    if normalize:
        center, spread = _mean_and_std(advantages.ravel())
        advantages = (advantages - center) / (spread + SCALE_EPS)
    return np.where(np.isnan(advantages) | (std[:, None] == 0), 0.0, advantages)[filled]


def whitened(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """REINFORCE++ (Hu et al. 2025), global normalisation: (v − mean) / sqrt(variance + 1e-8) over all tokens, the
    variance with n − 1, each row's value (rows,) standing at each of its tokens. NaN: left out, 0. Equal values: 0.

    The reward of a row counts whole at each token (discount 1). So a group of equal rewards has an advantage too.
    """
    tokens = np.where(np.isnan(values), 0, lengths).astype(np.float64)
    total = tokens.sum()
    counted = values[tokens > 0]
    if total < 2 or counted.min() == counted.max():
        return np.zeros(len(values))
    mean = np.nansum(tokens * values) / total
    variance = np.nansum(tokens * np.square(values - mean)) / (total - 1)
    return np.nan_to_num((values - mean) / np.sqrt(variance + WHITEN_EPS), nan=0.0)


def normalize_then_sum(values: np.ndarray, reward_weights, group_sizes: int | np.ndarray) -> np.ndarray:
    """GDPO: each reward (rows, functions) as an advantage in its group by itself, their weighted sum, and that scaled
    by mean and standard deviation + 1e-4 of the batch. Rows without any reward, and groups without a spread, have 0.
    """
    alone = [group_advantages(column, group_sizes, "group")[0] for column in values.T]
    summed = combine_rewards(np.where(np.isnan(values), np.nan, np.stack(alone, axis=1)), reward_weights)
    center, spread = _mean_and_std(summed)
    filled, table = _by_group(summed, group_sizes)
    flat = (_mean_and_std(table)[1] == 0)[:, None] | np.zeros_like(filled)
    return np.where(np.isnan(summed) | flat[filled], 0.0, (summed - center) / (spread + SCALE_EPS))


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

    grpo and sapo: mean over a row's tokens, then over rows (empty rows count); luspo: sum over them, then mean over
    rows; dr_grpo: Σ / (rows · max_completion_length), a constant (loss_scale_factor stands for it); bnpo: Σ / tokens of
    this batch; dapo, cispo and vespo: Σ / num_items, the tokens of the batch on all devices (default: of this one).
    Because a weight is fixed before the batch is split, no split into micro-batches changes the gradient.
    """
    lengths = np.asarray(lengths, np.float64)
    tokens = max(float(lengths.sum()), 1.0)
    if loss_type in ("grpo", "sapo"):
        return 1.0 / (np.maximum(lengths, 1.0) * len(lengths))
    if loss_type == "luspo":
        return np.full(len(lengths), 1.0 / len(lengths))
    if loss_type == "dr_grpo":
        return np.full(len(lengths), 1.0 / (len(lengths) * max_completion_length))
    if loss_type == "bnpo":
        return np.full(len(lengths), 1.0 / tokens)
    if loss_type in ("dapo", "cispo", "vespo"):
        return np.full(len(lengths), 1.0 / max(tokens if num_items is None else num_items, 1.0))
    raise ValueError(f"loss_type {loss_type!r} is not known: choose one of {', '.join(LOSS_TYPES)}")
