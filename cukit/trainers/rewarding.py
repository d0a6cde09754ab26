"""Rewards of a batch of completions, and what is logged about them under TRL's names."""

from __future__ import annotations

import numpy as np

from ..datasets.sources import is_conversational, reward_columns
from ..rewards import call_reward, load_reward, reward_name
from .advantage import combine_rewards
from .environment import ToolEnvironment
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

    def __call__(self, rows: list[dict], samples: Samples, tokenizer=None) -> tuple[np.ndarray, np.ndarray]:
        """rows: the data row of each completion. Returns the weighted sums (rows,) and all values (rows, functions).

        NaN stands for None. A completion that failed is no answer: no reward is asked about it, its values are NaN.
        With a tokenizer, rewards get the prompts as rendered (prompt_text), special tokens included.
        """
        values = np.full((len(rows), len(self.functions)), np.nan)
        answered = np.flatnonzero(~samples.failed)
        if len(answered) < len(rows):
            rows, samples = [rows[i] for i in answered], samples.rows(answered)
        prompts = [row["prompt"] for row in rows]
        completions = samples.messages or [
            [{"role": "assistant", "content": text}] if is_conversational(prompt) else text
            for prompt, text in zip(prompts, samples.texts, strict=True)
        ]
        given = {"prompt_ids": samples.prompt_ids, "prompt_text": prompt_texts(samples, tokenizer)}
        columns = reward_columns(rows)
        if samples.environments is not None:
            columns["environments"] = [made.own for made in samples.environments]
        for index, (function, name) in enumerate(zip(self.functions, self.names, strict=True) if rows else ()):
            found = call_reward(function, name, prompts, completions, samples.completion_ids, columns, **given)
            values[answered, index] = np.array(found, np.float64)  # None becomes NaN
        return combine_rewards(values, self.weights), values

    def metrics(self, by_function: np.ndarray, rewards: np.ndarray, mean: np.ndarray, std: np.ndarray) -> dict:
        """reward, reward_std, frac_reward_zero_std (of groups), frac_reward_none (of completions), rewards/NAME/…"""
        found = {
            "reward": nan_mean(mean),
            "reward_std": float(np.mean(std)),
            "frac_reward_zero_std": float(np.mean(std == 0)),
            "frac_reward_none": float(np.mean(np.isnan(rewards))),
        }
        for index, name in enumerate(self.names):
            values = by_function[:, index][~np.isnan(by_function[:, index])]
            found[f"rewards/{name}/mean"] = nan_mean(values)
            found[f"rewards/{name}/std"] = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        return found


def prompt_texts(samples: Samples, tokenizer) -> list[str] | None:
    """The rendered prompt of each row, each decoded once a group; None without a tokenizer."""
    if tokenizer is None:
        return None
    texts: dict[int, str] = {}
    for group, ids in zip(samples.groups.tolist(), samples.prompt_ids, strict=True):
        if group not in texts:
            texts[group] = tokenizer.decode(ids, skip_special_tokens=False)
    return [texts[group] for group in samples.groups.tolist()]


def accuracy(first_reward: np.ndarray, failed: np.ndarray) -> tuple[float, float]:
    """(share of completions with a first reward of at least 1, share of completions left out of that).

    A completion is left out if the reward does not apply to it (NaN). A failed one counts as wrong. The first share is
    NaN where nothing is left.
    """
    applies = ~np.isnan(first_reward) | failed
    return nan_mean(np.where(failed, 0.0, first_reward >= 1)[applies]), float(np.mean(~applies))


def evaluation_metrics(names: list[str], samples: Samples, rewards: np.ndarray, by_function: np.ndarray) -> dict:
    """What an evaluation says, under eval/: training and `cukit eval` both take it from here."""
    failed = samples.failed
    share, left_out = accuracy(by_function[:, 0], failed)
    found = {"eval/accuracy": share, "eval/frac_reward_none": left_out, "eval/reward": nan_mean(rewards)}
    found |= {f"eval/rewards/{name}/mean": nan_mean(by_function[:, i]) for i, name in enumerate(names)}
    found |= {"eval/length": float(samples.lengths.mean()), "eval/clipped_ratio": float(samples.truncated.mean())}
    found |= {f"eval/{name}": value for name, value in environment_metrics(samples).items()}
    return found | ({"eval/error_rows": int(failed.sum())} if failed.any() else {})


def sample_metrics(samples: Samples) -> dict:
    """Lengths of all completions and of those that ended by themselves, the share cut off, and how many failed."""
    lengths, truncated, failed = samples.lengths, samples.truncated, samples.failed
    terminated = lengths[~truncated] if not truncated.all() else np.zeros(1)
    found = {"completions/clipped_ratio": float(truncated.mean()), "sampling/error_rows": int(failed.sum())}
    for name, values in (("length", lengths), ("terminated_length", terminated)):
        found |= {
            f"completions/mean_{name}": float(values.mean()),
            f"completions/min_{name}": float(values.min()),
            f"completions/max_{name}": float(values.max()),
        }
    return found | environment_metrics(samples)


def environment_metrics(samples: Samples) -> dict:
    """Turns of the model; tool calls a completion and the share of them that failed, under TRL's names."""
    if samples.messages is None or samples.environments is None:
        return {}
    turns = [sum(message["role"] == "assistant" for message in messages) for messages in samples.messages]
    found = {"completions/mean_turns": float(np.mean(turns)), "completions/max_turns": float(np.max(turns))}
    callers = [made.responder for made in samples.environments if isinstance(made.responder, ToolEnvironment)]
    if callers:
        calls, failed = (sum(getattr(one, name) for one in callers) for name in ("num_calls", "num_failed_calls"))
        found |= {"tools/call_frequency": calls / len(callers), "tools/failure_frequency": failed / max(calls, 1)}
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
        length = len(samples.token_ids[index]) - int(samples.prompt_lengths[index])
        found.append(entry | {"finish_reason": samples.finish_reasons[index], "length": length})
    return found


def nan_mean(values) -> float:
    """Mean of what is not NaN (NaN if nothing is)."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else float("nan")
