"""What a user may hook into a run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ..models.decoder import Decoder
from ..tokenizer import Tokenizer
from .config import TrainerConfig


class RunningTrainer(Protocol):
    """What a hook may count on of any trainer; `isinstance(trainer, GRPOTrainer)` opens the rest to a type checker."""

    global_step: int  # finished steps
    num_tokens: int
    total_steps: int

    @property
    def model(self) -> Decoder: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def args(self) -> TrainerConfig: ...
    @property
    def run_folder(self) -> Path | None: ...
    def stop(self) -> None: ...
    def say(self, text: str) -> None: ...
    def save_model(self, folder: str | os.PathLike) -> None: ...
    def save_checkpoint(self) -> Path: ...


class TrainerCallback:
    """Hooks of a run; override those you need. `trainer` has model, tokenizer, args, global_step, run_folder, and
    stop(), which ends the run as Ctrl-C does.
    """

    def on_train_begin(self, trainer: RunningTrainer) -> None:
        """Before the first step (and the first evaluation), after a resume."""

    def on_step_end(self, trainer: RunningTrainer, metrics: dict) -> None:
        """After every optimizer step, with that step's metrics."""

    def on_log(self, trainer: RunningTrainer, row: dict) -> None:
        """After a row was written to metrics.jsonl."""

    def on_evaluate(self, trainer: RunningTrainer, metrics: dict) -> None:
        """After an evaluation, with its eval/ metrics."""

    def on_save(self, trainer: RunningTrainer, folder: Path) -> None:
        """After a checkpoint was written to `folder`."""

    def on_train_end(self, trainer: RunningTrainer) -> None:
        """After the last step and the last checkpoint."""


# What each hook is called with besides the trainer.
HOOKS = {
    "on_train_begin": (),
    "on_step_end": ("metrics",),
    "on_log": ("row",),
    "on_evaluate": ("metrics",),
    "on_save": ("folder",),
    "on_train_end": (),
}


def checked_callbacks(callbacks: Iterable[TrainerCallback]) -> list[TrainerCallback]:
    """The callbacks; ValueError in one line for a hook that takes other arguments, such as one of transformers'."""
    found = list(callbacks)
    for callback in found:
        for event, arguments in HOOKS.items():
            hook = getattr(callback, event, None)
            if hook is None:
                continue
            try:
                inspect.signature(hook).bind("trainer", *arguments)
            except TypeError as error:
                name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
                raise ValueError(
                    f"callbacks: {name}.{event} is called with ({', '.join(('trainer', *arguments))}), which it does "
                    f"not take ({error}): give objects with hooks as cukit.TrainerCallback has them"
                ) from None
            except ValueError:  # what has no signature is called as it is
                continue
    return found


def call_callbacks(
    callbacks: Iterable[TrainerCallback], event: str, trainer: RunningTrainer, *arguments: object
) -> None:
    """Call the hook `event` of every callback that has it; an exception gets a note that names callback and hook."""
    for callback in callbacks:
        hook = getattr(callback, event, None)
        if hook is None:
            continue
        try:
            hook(trainer, *arguments)
        except Exception as error:
            error.add_note(f"raised by the callback {type(callback).__name__}.{event}")
            raise
