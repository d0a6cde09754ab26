"""--dry_run: print the resolved options as YAML for --config, with the number of steps and the memory plan as comments.

It loads no weights and makes no engine: the model's config.json and tokenizer are enough.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

from ..engine.config import EngineConfig
from ..options import stated_values
from ..parallel.config import launched_rank
from ..trainers.config import TrainerConfig
from ..trainers.lora import with_peft


def show_training(trainer_class: Any, args: TrainerConfig, read: dict[str, str]) -> None:
    """read: the files: model, data, eval_data."""
    args = with_peft(args, None, trainer_class.head)
    trainer = without_weights(trainer_class, args, read)
    _print_options(read | stated_values(args))
    print(f"# steps: {trainer.count_steps()}")
    shown = trainer.model, trainer.plan_memory, trainer.search_options, args.memory.nbytes is not None
    if args.training_processes == args.num_processes:
        _show_plan(*shown)
        return
    for draws, what in ((False, "trains"), (True, "draws")):
        trainer.ranks = SimpleNamespace(draws=draws, trains=not draws)
        print(f"# a process that {what}:")
        _show_plan(*shown)


def show_engine(options: Any, model: str, config: EngineConfig) -> None:
    """For commands that only generate; of several processes the first one prints. config: the engine's options, with
    what the command adds to them.
    """
    from ..engine.fitting import GENERATION, search
    from ..engine.memory import plan_memory
    from ..engine.shapes import ModelUse

    if launched_rank():
        return
    limit, ranks = options.memory.nbytes, options.tensor_parallel_size
    shape = model_shape(model, options.device, options.dtype, limit)
    _print_options(stated_values(options))

    def plan(engine: EngineConfig, quiet: bool = False) -> Any:
        gathers = options.tensor_parallel_invariant
        uses = [ModelUse("model", shape.config.part_of(ranks), shape.dtype, gathers=gathers)]
        return plan_memory(uses, engine, shape.backend, memory_limit=limit, quiet=quiet)

    def tried() -> Any:
        return search(config, lambda engine: plan(engine, quiet=True), GENERATION)

    _show_plan(shape, lambda: plan(config), tried, limit is not None)


def without_weights(trainer_class: Any, args: TrainerConfig, read: dict[str, str]) -> Any:
    """A trainer that can prepare rows, count steps and plan memory, and nothing else: its model is a shape."""
    from ..models.weights import model_folder, tokenizer_folders
    from ..tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(*tokenizer_folders(model_folder(read["model"], weights=False)))
    shape = model_shape(read["model"], args.device, args.dtype, args.memory.nbytes, trainer_class.head)
    shape.vocab_size = min(shape.vocab_size, tokenizer.vocab_size)
    policy = SimpleNamespace(name="policy", model=shape, optimizer=None)
    does_both = SimpleNamespace(draws=True, trains=True)
    parts = {
        "args": args,
        "ranks": does_both,
        "model": shape,
        "models": {"policy": policy},
        "tokenizer": tokenizer,
        "progress": None,
    }
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


def _show_plan(shape: Any, plan: Callable[[], Any], tried: Callable[[], Any], with_options: bool) -> None:
    """The plan; where it does not fit, or with_options, which options would make it fit. DoesNotFit comes through."""
    from ..engine.memory import DoesNotFit

    if not isinstance(shape.backend, ModuleType):
        print(f"# memory on a GPU that is not here, with weights in {shape.dtype.name}:")
    try:
        found, fault = plan(), None
    except DoesNotFit as error:
        found, fault = error.plan, error
    _print_comment(found.table())
    if shape.backend.name != "cpu" and (fault or with_options):
        search = tried()
        _print_comment(search.table())
        if fault:
            raise DoesNotFit(f"{fault}; {search.line()}", found)


def _print_comment(text: str) -> None:
    for line in text.splitlines():
        print(f"# {line}".rstrip())
