"""--dry_run: print the resolved options as YAML for --config, with the number of steps and the memory plan as comments.

It loads no weights and makes no engine: the model's config.json and tokenizer are enough.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

from ..options import stated_values
from ..trainers.config import TrainerConfig


def show_training(trainer_class: Any, args: TrainerConfig, read: dict[str, str]) -> None:
    """read: the files: model, data, eval_data."""
    trainer = without_weights(trainer_class, args, read)
    _print_options(read | stated_values(args))
    print(f"# steps: {trainer.count_steps()}")
    _print_plan(trainer.plan_memory(), trainer.model)


def show_engine(options: Any, model: str) -> None:
    """For commands that only generate."""
    from ..engine.memory import plan_memory
    from ..engine.shapes import ModelUse

    limit = options.memory.nbytes
    shape = model_shape(model, options.device, options.dtype, limit)
    _print_options(stated_values(options))
    uses = [ModelUse("model", shape.config, shape.dtype)]
    _print_plan(plan_memory(uses, options.engine, shape.backend, memory_limit=limit), shape)


def without_weights(trainer_class: Any, args: TrainerConfig, read: dict[str, str]) -> Any:
    """A trainer that can prepare rows, count steps and plan memory, and nothing else: its model is a shape."""
    from ..models.weights import model_folder, tokenizer_folders
    from ..tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(*tokenizer_folders(model_folder(read["model"], weights=False)))
    shape = model_shape(read["model"], args.device, args.dtype, args.memory.nbytes, trainer_class.head)
    shape.vocab_size = min(shape.vocab_size, tokenizer.vocab_size)
    policy = SimpleNamespace(name="policy", model=shape, optimizer=None)
    parts = {"args": args, "model": shape, "models": {"policy": policy}, "tokenizer": tokenizer, "progress": None}
    made: Any = type(f"{trainer_class.__name__}WithoutWeights", (trainer_class,), parts)
    trainer = object.__new__(made)
    trainer.train_rows = trainer.read_rows(read["data"], "train_dataset")
    trainer.eval_rows = []
    return trainer


def model_shape(
    model: str, device: str, dtype: str, limit: int | None = None, head: str = "lm_head"
) -> SimpleNamespace:
    """What planning needs of a Decoder: config, vocab_size, backend, dtype. limit: memory_limit."""
    from ..models.weights import load_config

    config, backend = load_config(model, head), planning_backend(device, limit)
    return SimpleNamespace(config=config, vocab_size=config.vocab_size, backend=backend, dtype=backend.dtype_of(dtype))


def planning_backend(device: str, limit: int | None) -> Any:
    """The device's shelf. With memory_limit, and without a GPU here, a card of numbers unless the CPU is asked for."""
    from ..backend import backend_for
    from ..backend.card import Card

    here = backend_for("auto" if limit is not None and device == "cuda" else device)
    return Card(limit) if limit is not None and device != "cpu" and here.name == "cpu" else here


def _print_options(values: dict[str, Any]) -> None:
    given = {name: value for name, value in values.items() if name != "dry_run"}
    print(yaml.safe_dump(given, sort_keys=False, allow_unicode=True), end="")


def _print_plan(plan: Any, shape: Any) -> None:
    if not isinstance(shape.backend, ModuleType):
        print(f"# memory on a GPU that is not here, with weights in {shape.dtype.name}:")
    for line in plan.table().splitlines():
        print(f"# {line}".rstrip())
