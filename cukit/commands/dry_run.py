"""--dry_run: print the resolved options as YAML for --config, with the number of steps and the memory plan as comments.

It loads no weights and makes no engine: the model's config.json and tokenizer are enough.
"""

from types import SimpleNamespace
from typing import Any

import yaml

from ..engine.config import EngineConfig
from ..options import Options, stated_values
from ..trainers.config import TrainerConfig
from ..trainers.lora import with_peft


def show_training(trainer_class: Any, args: TrainerConfig, read: dict[str, str]) -> None:
    """read: the files: model, data, eval_data."""
    args = with_peft(args, None, trainer_class.head)
    trainer = without_weights(trainer_class, args, read)
    _print_options(read | stated_values(args))
    print(f"# steps: {trainer.count_steps()}")
    _print_plan(trainer.plan_memory())


def show_engine(options: Options, model: str, device: str, dtype: str, engine: EngineConfig) -> None:
    """For commands that only generate."""
    from ..engine.memory import plan_memory
    from ..engine.shapes import ModelUse

    shape = model_shape(model, device, dtype)
    _print_options(stated_values(options))
    _print_plan(plan_memory([ModelUse("model", shape.config, shape.dtype)], engine, shape.backend))


def without_weights(trainer_class: Any, args: TrainerConfig, read: dict[str, str]) -> Any:
    """A trainer that can prepare rows, count steps and plan memory, and nothing else: its model is a shape."""
    from ..models.weights import model_folder, tokenizer_folders
    from ..tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(*tokenizer_folders(model_folder(read["model"], weights=False)))
    shape = model_shape(read["model"], args.device, args.dtype, trainer_class.head)
    shape.vocab_size = min(shape.vocab_size, tokenizer.vocab_size)
    policy = SimpleNamespace(name="policy", model=shape, optimizer=None)
    parts = {"args": args, "model": shape, "models": {"policy": policy}, "tokenizer": tokenizer, "progress": None}
    made: Any = type(f"{trainer_class.__name__}WithoutWeights", (trainer_class,), parts)
    trainer = object.__new__(made)
    trainer.train_rows = trainer.read_rows(read["data"], "train_dataset")
    trainer.eval_rows = []
    return trainer


def model_shape(model: str, device: str, dtype: str, head: str = "lm_head") -> SimpleNamespace:
    """What planning needs of a Decoder: config, vocab_size, backend, dtype."""
    from ..backend import backend_for
    from ..models.weights import load_config

    config, backend = load_config(model, head), backend_for(device)
    return SimpleNamespace(config=config, vocab_size=config.vocab_size, backend=backend, dtype=backend.dtype_of(dtype))


def _print_options(values: dict[str, Any]) -> None:
    given = {name: value for name, value in values.items() if name != "dry_run"}
    print(yaml.safe_dump(given, sort_keys=False, allow_unicode=True), end="")


def _print_plan(plan: Any) -> None:
    for line in plan.table().splitlines():
        print(f"# {line}".rstrip())
