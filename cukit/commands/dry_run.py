"""--dry_run: the resolved options as YAML that --config takes, and as comments the number of steps and the memory plan.

Neither weights nor an engine are made: the model's config.json and tokenizer are enough.
"""

from types import SimpleNamespace
from typing import Any

import yaml

from ..engine.config import EngineConfig
from ..models.config import ModelConfig
from ..options import Options, flat_values
from ..trainers.config import TrainerConfig


def show_training(trainer_class: Any, args: TrainerConfig, read: dict[str, str]) -> None:
    """read: the files: model, data, eval_data."""
    from ..engine.memory import ModelUse

    config = _model_config(read["model"])
    _print_options(read | flat_values(args))
    print(f"# steps: {count_steps(trainer_class, args, read, config)}")
    backend, dtype = _backend_and_dtype(args.device, args.dtype)
    uses = [ModelUse("policy", config, dtype, True)]
    if getattr(args, "beta", 0):
        uses.append(ModelUse("reference", config, dtype, False))
    _print_plan(
        uses,
        getattr(args, "engine", None),
        backend,
        max_tokens_per_batch=args.max_tokens_per_batch,
        gradient_checkpointing=args.gradient_checkpointing,
    )


def show_engine(options: Options, model: str, device: str, dtype: str, engine: EngineConfig) -> None:
    """For commands that only generate."""
    from ..engine.memory import ModelUse

    config = _model_config(model)
    _print_options(flat_values(options))
    backend, dtype = _backend_and_dtype(device, dtype)
    _print_plan([ModelUse("model", config, dtype, False)], engine, backend)


def count_steps(trainer_class: Any, args: TrainerConfig, read: dict[str, str], config: ModelConfig) -> int:
    """Optimizer steps of the run, counted by the trainer's own hooks on its rows; they need no weights."""
    from ..datasets.sources import load_rows
    from ..models.weights import model_folder
    from ..tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(model_folder(read["model"]))
    shape = SimpleNamespace(config=config, vocab_size=min(config.vocab_size, tokenizer.vocab_size))
    parts = {"args": args, "model": shape, "tokenizer": tokenizer, "progress": None}
    without_weights: Any = type(f"{trainer_class.__name__}WithoutWeights", (trainer_class,), parts)
    trainer = object.__new__(without_weights)
    trainer.train_rows = trainer.prepare_rows(load_rows(read["data"]), "train_dataset")
    return trainer.count_steps()


def _model_config(model: str) -> ModelConfig:
    from ..models.weights import load_config

    return load_config(model)


def _backend_and_dtype(device: str, dtype: str) -> tuple[Any, Any]:
    from ..backend import backend_for

    backend = backend_for(device)
    return backend, backend.dtype_of(dtype)


def _print_options(values: dict[str, Any]) -> None:
    given = {name: value for name, value in values.items() if value is not None and name != "dry_run"}
    print(yaml.safe_dump(given, sort_keys=False, allow_unicode=True), end="")


def _print_plan(uses: list[Any], engine: EngineConfig | None, backend: Any, **training: Any) -> None:
    from ..engine.memory import plan_memory

    for line in plan_memory(uses, engine, backend, **training).table().splitlines():
        print(f"# {line}".rstrip())
