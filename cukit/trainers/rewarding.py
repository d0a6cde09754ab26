"""Rewards of a batch of completions, and what is logged about them under TRL's names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np

from ..datasets.sources import is_conversational, reward_columns
from ..options import say_once
from ..rewards import (
    RewardBatch,
    RewardLog,
    RewardWorker,
    TrainerState,
    call_rewards,
    load_reward,
    reward_name,
    runs_in_a_process,
    workers_are_possible,
)
from ..rewards.config import RewardLimits
from ..tokenizer.streaming import token_texts
from .advantage import combine_rewards
from .environment import ToolEnvironment
from .rollout import Samples

logger = logging.getLogger(__name__)


class RewardScorer:
    """Calls every reward on a batch. names: one a function, as metrics use them.

    limits: of the processes of rewards from files. state: tells where the run stands, for rewards that ask. in_process:
    without such processes, since rewards get live objects (environments).
    """

    def __init__(
        self,
        reward_funcs,
        reward_weights: list[float] | None = None,
        limits: RewardLimits | None = None,
        state: Callable[[], TrainerState] = TrainerState,
        in_process: bool = False,
    ):
        specs = [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else list(reward_funcs or [])
        if not specs:
            raise ValueError("reward_funcs is empty: give exact, boxed, gsm8k, path/file.py:function or a function")
        if reward_weights is not None and len(reward_weights) != len(specs):
            raise ValueError(
                f"reward_weights has {len(reward_weights)} values for {len(specs)} reward_funcs; give one each"
            )
        self.weights, self.state = reward_weights, state
        self._metrics: dict[str, list[float]] = {}
        started = [_reward(spec, limits, in_process) for spec in specs]  # processes load side by side
        self.functions = [one.loaded() if isinstance(one, RewardWorker) else one for one in started]
        self.names: list[str] = []
        for function in self.functions:
            name = reward_name(function)
            self.names.append(name if name not in self.names else f"{name}_{len(self.names)}")

    def __call__(self, rows: list[dict], samples: Samples, tokenizer=None) -> tuple[np.ndarray, np.ndarray]:
        """rows: the data row of each completion. Returns the weighted sums (rows,) and all values (rows, functions).

        NaN stands for None. A completion that failed is no answer: no reward is asked about it, its values are NaN.
        With a tokenizer, rewards get the prompts as rendered (prompt_text), special tokens included. What they record
        of each completion goes into samples.recorded.
        """
        whole = samples
        values = np.full((len(rows), len(self.functions)), np.nan)
        answered = np.flatnonzero(~samples.failed)
        if len(answered) < len(rows):
            rows, samples = [rows[i] for i in answered], samples.rows(answered)
        prompts = [row["prompt"] for row in rows]
        completions = samples.messages or [
            [{"role": "assistant", "content": text}] if is_conversational(prompt) else text
            for prompt, text in zip(prompts, samples.texts, strict=True)
        ]
        if rows:
            columns = reward_columns(rows)
            if samples.environments is not None:
                columns["environments"] = [made.own for made in samples.environments]
            batch = RewardBatch(
                prompts,
                completions,
                samples.completion_ids,
                columns,
                samples.prompt_ids,
                prompt_texts(samples, tokenizer),
                self.state(),
            )
            log = RewardLog(len(rows))
            values[answered] = np.array(self._values(batch, log), np.float64).T  # None becomes NaN
            whole.recorded = {name: _spread(found, answered, len(values)) for name, found in log.columns.items()}
            self.add_recorded(log.metrics)
        return combine_rewards(values, self.weights), values

    def _values(self, batch: RewardBatch, log: RewardLog) -> list[list[float | None]]:
        """What each reward gives. Those in processes work while those in this one are called."""
        workers, functions = [], []
        for one, name in zip(self.functions, self.names, strict=True):
            (workers if isinstance(one, RewardWorker) else functions).append((one, name))
        try:
            for worker, name in workers:
                worker.send(name, batch)
            here = iter(call_rewards(functions, batch, log))
            there = {name: worker.receive(len(batch.completions), log) for worker, name in workers}
            log.check(", ".join(self.names))
        except BaseException:  # a call that goes on would answer the next one
            for worker, _ in workers:
                worker.close()
            raise
        return [there[name] if name in there else next(here) for name in self.names]

    def recorded_metrics(self) -> dict[str, float]:
        """The mean of what rewards recorded (log_metric) under each name since this was asked last."""
        return {name: sum(values) / len(values) for name, values in self.take_recorded().items()}

    def take_recorded(self) -> dict[str, list[float]]:
        """Every value that rewards recorded under each name since this was asked last."""
        found, self._metrics = self._metrics, {}
        return found

    def add_recorded(self, found: dict[str, list[float]]) -> None:
        """Take note of what rewards recorded on another rank."""
        for name, values in found.items():
            self._metrics.setdefault(name, []).extend(values)

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
        recorded = self.recorded_metrics()
        _refuse_taken("log_metric", recorded, {"step", "loss", *found})
        return found | recorded


def _reward(spec, limits: RewardLimits | None, in_process: bool) -> Callable | RewardWorker:
    if in_process or not runs_in_a_process(spec):
        return load_reward(spec)
    if workers_are_possible():
        return RewardWorker(spec, limits)
    say_once(logger, f"reward {spec!r} runs in this process, without limits: this system knows no process groups")
    return load_reward(spec)


def _spread(found: list, places: np.ndarray, count: int) -> list:
    """A list with an entry a row, None for those that no reward was asked about."""
    spread = [None] * count
    for place, value in zip(places.tolist(), found, strict=True):
        spread[place] = value
    return spread


def trainer_state(trainer) -> TrainerState:
    """Where the run of a trainer stands, as rewards are told."""
    return TrainerState(
        global_step=trainer.global_step,
        max_steps=trainer.total_steps,
        epoch=trainer.sampler.epochs_done,
        num_train_epochs=trainer.args.num_train_epochs,
        num_input_tokens_seen=trainer.num_tokens,
    )


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
    rows: list[dict], samples: Samples, names: list[str], by_function: np.ndarray, advantages=None, tokenizer=None
) -> list[dict]:
    """Rows of completions.jsonl for the first len(rows) samples.

    With a tokenizer, and where the samples have log-probabilities, also `tokens` (the text of each token, special ones
    included) and `logprobs` (one a token, rounded to 4 decimals).
    """
    found = []
    for index, row in enumerate(rows):
        entry = {"prompt": row["prompt"], "completion": samples.texts[index]}
        entry |= {f"rewards/{name}": by_function[index, i] for i, name in enumerate(names)}
        entry |= {} if advantages is None else {"advantage": advantages[index]}
        ids = samples.token_ids[index][samples.prompt_lengths[index] :]
        entry |= {"finish_reason": samples.finish_reasons[index], "length": len(ids)}
        if tokenizer is not None and len(samples.logprobs[index]):
            logprobs = np.full(len(ids), np.nan)  # null for what an environment said
            drawn = slice(None) if samples.masks is None else samples.masks[index]
            logprobs[drawn] = np.asarray(samples.logprobs[index], np.float64).round(4)
            entry |= {"tokens": token_texts(tokenizer, ids.tolist()), "logprobs": logprobs}
        _refuse_taken("log_extra", samples.recorded, {"step", *entry})
        found.append(entry | {name: values[index] for name, values in samples.recorded.items()})
    return found


def _refuse_taken(call: str, recorded: dict, taken: Iterable[str]) -> None:
    if clash := recorded.keys() & set(taken):
        raise ValueError(f"{call}({min(clash)!r}): the run writes something of that name itself; choose another")


def nan_mean(values) -> float:
    """Mean of what is not NaN (NaN if nothing is)."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else float("nan")
