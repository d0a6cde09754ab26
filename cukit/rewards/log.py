"""What a reward is told about the run, and what it may record beside its values. Names and meaning are TRL's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TrainerState:
    """Where the run stands; all 0 outside a run."""

    global_step: int = 0  # finished optimizer steps
    max_steps: int = 0  # of the whole run
    epoch: float = 0.0  # passes over the training rows, those of this batch included
    num_train_epochs: float = 0.0  # as the options have it
    num_input_tokens_seen: int = 0


@dataclass
class RewardLog:
    """What the rewards of a batch of `count` completions recorded.

    columns: values a completion, for completions.jsonl. metrics: the values of each metric, for metrics.jsonl.
    """

    count: int
    columns: dict[str, list] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def extra(self, column: Any, values: Any) -> None:
        """`log_extra`: a column of completions.jsonl, one value a completion; several calls add up to one column."""
        if not isinstance(column, str) or not isinstance(values, (list, tuple, np.ndarray)):
            raise TypeError("log_extra takes the name of a column and a list of values, one a completion")
        found = [_plain(value, f"log_extra({column!r})") for value in values]
        self.columns.setdefault(column, []).extend(found)

    def metric(self, name: Any, value: Any) -> None:
        """`log_metric`: a number of metrics.jsonl; several of one name in a batch become their mean."""
        if not isinstance(name, str):
            raise TypeError(f"log_metric takes a name and a number, got the name {name!r:.60}")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}): a metric is a finite number, got {value!r:.60}")
        self.metrics.setdefault(name, []).append(number)

    def check(self, name: str, where: str = "") -> None:
        """ValueError, with the reward's name, if a column has not one value a completion."""
        for column, values in self.columns.items():
            if len(values) != self.count:
                raise ValueError(
                    f"reward {name!r}: log_extra({column!r}) has {len(values)} values for {self.count} completions; "
                    f"give one a completion, and each column from one reward only{where}"
                )

    def add(self, columns: dict[str, list], metrics: dict[str, list[float]]) -> None:
        """What another process recorded."""
        for column, values in columns.items():
            self.columns.setdefault(column, []).extend(values)
        for name, values in metrics.items():
            self.metrics.setdefault(name, []).extend(values)


def _plain(value: object, where: str) -> object:
    """The value as JSON can hold it; TypeError if it can not."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item, where) for key, item in value.items()}
    raise TypeError(f"{where}: values are texts, numbers, lists or dicts, got {type(value).__name__}")
