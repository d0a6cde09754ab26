"""The best evaluation of a run so far, and whether waiting for a better one has gone on for long enough."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from ..runs import checkpoint
from .config import TrainerConfig

logger = logging.getLogger(__name__)


class BestModel:
    """Compares evaluations as transformers' load_best_model_at_end and EarlyStoppingCallback do.

    An evaluation is the best if it is better than all before it; a value that is not finite never is. It counts against
    the patience unless it is better than the best by more than early_stopping_threshold. The one before the first step
    is not compared.
    """

    def __init__(self, args: TrainerConfig):
        options, name = args.best, args.metric_for_best_model or args.default_metric
        self.metric = name if name.startswith("eval/") else "eval/" + name.removeprefix("eval_")
        greater = options.greater_is_better
        self.sign = 1.0 if (not name.endswith("loss") if greater is None else greater) else -1.0
        self.patience, self.threshold = options.early_stopping_patience, options.early_stopping_threshold
        self.value: float | None = None
        self.step: int | None = None
        self.waited = 0  # evaluations in a row that were not better by more than the threshold

    @property
    def exhausted(self) -> bool:
        """Whether the run is to end."""
        return self.patience is not None and self.waited >= self.patience

    def compare(self, step: int, metrics: dict) -> bool:
        """Look at an evaluation; True if it is the best. ValueError in one line if it has no such metric."""
        if self.metric not in metrics:
            known = ", ".join(sorted(name.removeprefix("eval/") for name in metrics))
            raise ValueError(f"metric_for_best_model={self.metric} is no metric of the evaluation; there are {known}")
        value = float(metrics[self.metric])
        if step == 0:
            return False
        gain = self.sign * (value - self.value) if self.value is not None else math.inf
        gain = gain if math.isfinite(value) else -math.inf
        self.waited = 0 if gain > self.threshold else self.waited + 1
        if gain > 0:
            self.value, self.step = value, step
        return gain > 0

    def state(self) -> dict:
        """What a checkpoint holds of it."""
        return {"metric": self.metric, "value": self.value, "step": self.step, "waited": self.waited}

    def load_state(self, state: dict) -> None:
        """Take back what state() gave; of another metric nothing is taken."""
        if state.get("metric") == self.metric:
            self.value, self.step, self.waited = state["value"], state["step"], state["waited"]

    def check_kept(self, run_folder: Path) -> None:
        """Forget the best where the checkpoint that it stands for is not there, and say so."""
        assert self.step is not None
        kept = checkpoint.checkpoint_folder(run_folder, self.step)
        problem = checkpoint.why_not_whole(kept) if kept.is_dir() else "it is missing"
        if problem:
            logger.warning("%s, the best so far, cannot be kept (%s): the best is looked for anew", kept, problem)
            self.forget()

    def forget(self) -> None:
        """As if nothing had been compared."""
        self.value = self.step = None
        self.waited = 0
