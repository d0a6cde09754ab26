"""What changes rewards before advantages: penalties of long and of cut completions, and of the KL to the reference."""

from __future__ import annotations

import numpy as np

from .rollout import Samples

# kl_estimator -> estimate of KL(policy || reference) from x = reference − policy
KL_ESTIMATES = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: np.expm1(x) - x}


def overlong_penalty(lengths: np.ndarray, max_completion_length: int, buffer: int, factor: float) -> np.ndarray:
    """(rows,): DAPO's soft overlong punishment (equation 13), from 0 at max_completion_length − buffer tokens down to
    −factor at max_completion_length.
    """
    over = np.clip(np.asarray(lengths, np.float64) - (max_completion_length - buffer), 0, buffer)
    return -factor * over / buffer


def kl_of_rows(samples: Samples, reference: list[np.ndarray], estimator: str) -> np.ndarray:
    """(rows,): the sum over a completion's tokens; reference: the reference's log-probabilities of each completion."""
    kl = KL_ESTIMATES[estimator]
    pairs = zip(samples.logprobs, reference, strict=True)
    return np.array([kl(np.asarray(ref, np.float64) - sampled).sum() for sampled, ref in pairs])


def shaped(values: np.ndarray, reward_weights, samples: Samples, args, kl: np.ndarray | None = None):
    """(values (rows, columns), weights): the rewards of the functions, cut completions' changed, and a column for each
    penalty, which counts as a reward of weight 1. args: GRPOConfig; kl (rows,): what beta weighs, if it is in the
    reward. A row without any reward gets no penalty.
    """
    if args.stop_properly_penalty_coef is not None:
        values = np.where(samples.truncated[:, None], values * args.stop_properly_penalty_coef, values)
    columns = []
    if args.overlong_buffer_len:
        columns.append(
            overlong_penalty(
                samples.lengths, args.max_completion_length, args.overlong_buffer_len, args.overlong_penalty_factor
            )
        )
    if kl is not None:
        columns.append(-args.beta * kl)
    if not columns:
        return values, reward_weights
    weights = [1.0] * values.shape[1] if reward_weights is None else list(reward_weights)
    penalties = np.where(np.isnan(values).all(axis=1)[:, None], np.nan, np.stack(columns, axis=1))
    return np.concatenate([values, penalties], axis=1), weights + [1.0] * len(columns)
