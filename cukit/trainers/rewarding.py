"""Rewards of a batch of completions, and what is logged about them under TRL's names."""

from __future__ import annotations

import numpy as np

from ..datasets.sources import is_conversational, reward_columns
from ..rewards import call_reward, load_reward, reward_name
from .advantage import combine_rewards
from .rollout import Samples


class RewardScorer:
    """Calls every reward on a batch. names: one a function, as metrics use them."""

    def __init__(self, reward_funcs, reward_weights: list[float] | None = None):
        specs = [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else list(reward_funcs or [])
        if not specs:
            raise ValueError("reward_funcs is empty: give exact, boxed, gsm8k, path/file.py:function or a function")
        if reward_weights is not None and len(reward_weights) != len(specs):
            raise ValueError(
                f"reward_weights has {len(reward_weights)} values for {len(specs)} reward_funcs; give one each"
            )
        self.functions, self.weights = [load_reward(spec) for spec in specs], reward_weights
        self.names = []
        for function in self.functions:
            name = reward_name(function)
            self.names.append(name if name not in self.names else f"{name}_{len(self.names)}")

    def __call__(self, rows: list[dict], samples: Samples) -> tuple[np.ndarray, np.ndarray]:
        """rows: the data row of each completion. Returns the weighted sums (rows,) and all values (rows, functions).

        NaN stands for None."""
        prompts = [row["prompt"] for row in rows]
        completions = [
            [{"role": "assistant", "content": text}] if is_conversational(prompt) else text
            for prompt, text in zip(prompts, samples.texts, strict=True)
        ]
        columns = reward_columns(rows)
        values = np.empty((len(rows), len(self.functions)))
        for index, (function, name) in enumerate(zip(self.functions, self.names, strict=True)):
            found = call_reward(function, name, prompts, completions, samples.completion_ids, columns)
            values[:, index] = [np.nan if value is None else value for value in found]
        return combine_rewards(values, self.weights), values

    def metrics(self, by_function: np.ndarray, rewards: np.ndarray, mean: np.ndarray, std: np.ndarray) -> dict:
        """reward, reward_std, frac_reward_zero_std (of groups), frac_reward_none (of completions), rewards/NAME/…"""
        found = {
            "reward": nan_mean(mean),
            "reward_std": float(np.mean(std)),
            "frac_reward_zero_std": float(np.mean(np.isclose(std, 0))),
            "frac_reward_none": float(np.mean(np.isnan(rewards))),
        }
        for index, name in enumerate(self.names):
            values = by_function[:, index][~np.isnan(by_function[:, index])]
            found[f"rewards/{name}/mean"] = nan_mean(values)
            found[f"rewards/{name}/std"] = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        return found


def sample_metrics(samples: Samples) -> dict:
    """Lengths of all completions and of those that ended by themselves, and the share cut off."""
    lengths, truncated = samples.lengths, samples.truncated
    terminated = lengths[~truncated] if not truncated.all() else np.zeros(1)
    found = {"completions/clipped_ratio": float(truncated.mean())}
    for name, values in (("length", lengths), ("terminated_length", terminated)):
        found |= {
            f"completions/mean_{name}": float(values.mean()),
            f"completions/min_{name}": float(values.min()),
            f"completions/max_{name}": float(values.max()),
        }
    return found


def completion_rows(
    rows: list[dict], samples: Samples, names: list[str], by_function: np.ndarray, advantages=None
) -> list[dict]:
    """Rows of completions.jsonl for the first len(rows) samples."""
    found = []
    for index, row in enumerate(rows):
        entry = {"prompt": row["prompt"], "completion": samples.texts[index]}
        entry |= {f"rewards/{name}": by_function[index, i] for i, name in enumerate(names)}
        entry |= {} if advantages is None else {"advantage": advantages[index]}
        found.append(
            entry | {"finish_reason": samples.finish_reasons[index], "length": len(samples.completion_ids[index])}
        )
    return found


def nan_mean(values) -> float:
    """Mean of what is not NaN (NaN if nothing is)."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else float("nan")
