"""grpo, ppo, sft and reward: train, and say how to use the result."""

import shlex
import sys
from pathlib import Path
from typing import Any

from ..options import Options, option
from ..parallel.config import launched_rank, num_processes
from ..parallel.world import world
from ..trainers.config import SFTConfig, TrainerConfig
from ..trainers.grpo_config import GRPOConfig
from ..trainers.ppo_config import PPOConfig
from ..trainers.reward_config import RewardConfig
from .dry_run import show_training
from .parser import make


class TrainFiles(Options):
    """What a training command reads."""

    group = "files"
    model: str | None = option(
        None, "model folder (Hugging Face format), a run folder, or a name of the hub (owner/name[@revision])"
    )
    data: str | None = option(
        None,
        "training rows: a file (jsonl, json, csv, parquet), a folder or pattern of files, or a name of the hub "
        "(owner/name[@revision][:configuration[:split]])",
    )
    eval_data: str | None = option(
        None, "held-out rows: as data; of the hub the split test where none is named", is_place=True
    )
    dry_run: bool = option(False, "print the resolved options, the number of steps and the plan of memory, then end")


def grpo(values: dict[str, Any]) -> int:
    from ..trainers.grpo import GRPOTrainer

    args = make(GRPOConfig, values)
    return _train(values, args, GRPOTrainer, reward_funcs=args.reward_funcs)


def ppo(values: dict[str, Any]) -> int:
    from ..trainers.ppo import PPOTrainer

    args = make(PPOConfig, values)
    return _train(values, args, PPOTrainer, reward_funcs=args.reward_funcs)


def sft(values: dict[str, Any]) -> int:
    from ..trainers.sft import SFTTrainer

    return _train(values, make(SFTConfig, values), SFTTrainer)


def reward(values: dict[str, Any]) -> int:
    from ..trainers.reward import RewardTrainer

    return _train(values, make(RewardConfig, values), RewardTrainer)


def _train(values: dict[str, Any], args: TrainerConfig, trainer_class: Any, **more: Any) -> int:
    from ..datasets.sources import load_rows
    from ..runs.signals import StopSignal

    files = make(TrainFiles, values)
    read = {name: value for name in ("model", "data", "eval_data") if (value := getattr(files, name))}
    if files.dry_run:
        if launched_rank() == 0:
            show_training(trainer_class, args, read)
        return 0

    class CommandLineTrainer(trainer_class):
        def run_config(self) -> dict[str, Any]:
            """The trainer's own with the files it reads, so that --config takes it."""
            return super().run_config() | read

    with StopSignal(num_processes() > 1, launched_rank() == 0, early=True) as stop:
        if num_processes() > 1:
            world()  # before anything of CUDA
        trainer = CommandLineTrainer(
            model=files.model,
            args=args,
            train_dataset=load_rows(read["data"], args.rows.wanted),
            eval_dataset=load_rows(files.eval_data, args.rows.wanted, "test") if files.eval_data else None,
            **more,
        )
        if stop.requested:
            trainer.stop()
    trainer.train()
    if trainer.is_world_process_zero():
        _say_what_is_there(trainer, args)
    return 0 if trainer.finished else 130


def _say_what_is_there(trainer: Any, args: TrainerConfig) -> None:
    """The result, and how to use it."""
    from ..runs.checkpoint import newest_model

    found = [(step, metrics["eval/accuracy"]) for step, metrics in trainer.evaluations if "eval/accuracy" in metrics]
    if len(found) > 1:
        final = trainer.best.step if args.load_best_model_at_end else None  # None: the last one
        print(f"held-out accuracy: {found[0][1]:.3f} before, {dict(found).get(final, found[-1][1]):.3f} after")
    if Path(trainer.run_folder).is_dir():  # a run that was stopped before its first step leaves none
        print(f"run folder: {trainer.run_folder}")
    if newest_model(trainer.run_folder):
        is_reward = trainer.head == "score"
        use = (
            f"train with it: {program()} grpo --reward_funcs" if is_reward else f"talk to it: {program()} chat --model"
        )
        print(f"{use} {shlex.quote(str(trainer.run_folder))}")


def program() -> str:
    """How this program was called, for a command that is to be copied."""
    called = Path(sys.argv[0])
    if called.stem == "cukit":
        return "cukit"
    if called.name == "__main__.py" and called.parent.name == "cukit":
        return "python -m cukit"
    return f"python {shlex.quote(sys.argv[0]) if called.name == 'cukit_cli.py' else 'cukit_cli.py'}"
