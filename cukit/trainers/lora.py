"""What trainers do for an adapter (LoRA): take peft's configuration, and put the adapter on the model."""

from pathlib import Path
from typing import Any

from ..models.adapter_config import AdapterConfig, chosen_targets
from ..models.adapter_files import adapter_config, fill, is_adapter
from ..models.adapters import Adapter
from ..models.decoder import Decoder
from ..models.weights import model_folder
from ..options import changed
from .lora_config import peft_options


def with_peft(args: Any, peft_config: Any, head: str = "lm_head") -> Any:
    """args with the options that a peft.LoraConfig, or the adapter of lora_adapter_path, stands for. head: of the model
    that is trained. ValueError in one line if an option that was given says something else.
    """
    if peft_config is not None:
        found = peft_options(peft_config, head)
        for name in sorted(found.keys() & args.given):
            mine, theirs = (_comparable(name, value) for value in (getattr(args, name), found[name]))
            if mine != theirs and mine is not None:
                raise ValueError(f"args has {name}={mine}, and peft_config has {theirs}: leave one of them out")
        args = changed(args, **found)
    return args if args.lora_adapter_path is None else changed(args, **_first_options(args, head))


def _comparable(name: str, value: Any) -> Any:
    """An option's value in the one form that equal choices of layers share."""
    if name != "lora_target_modules" or value is None:
        return value
    return " ".join(chosen_targets(value, name))


def _first_options(args: Any, head: str) -> dict[str, Any]:
    """What lora_adapter_path says. ValueError in one line if an option that was given says something else."""
    path = args.lora_adapter_path
    config = adapter_config(model_folder(path, False, "lora_adapter_path"))
    if config.with_score != (head == "score"):
        kind = "a reward model's" if config.with_score else "a language model's"
        raise ValueError(f"lora_adapter_path={path} is {kind} adapter, and this trains the other kind of model")
    found = {"lora_r": config.r, "lora_alpha": config.alpha, "use_rslora": config.use_rslora}
    for name, value in found.items():
        if name in args.given and getattr(args, name) != value:
            raise ValueError(
                f"{name}={getattr(args, name)}, and lora_adapter_path={path} has {value}: leave {name} out, or give "
                f"{value} where a config.yaml says otherwise"
            )
    if args.lora_target_modules is not None and args.lora.adapter(None).targets != config.targets:
        raise ValueError(
            f"lora_target_modules is another choice than that of lora_adapter_path={path}: leave it out, or give "
            f"{' '.join(config.targets)} where a config.yaml says otherwise"
        )
    return found | {"lora_target_modules": list(config.targets)}


def check_base(args: Any, folder: Path, name: Any) -> None:
    """ValueError if use_peft would put an adapter on an adapter."""
    if args.use_peft and is_adapter(folder):
        raise ValueError(
            f"model {name} is an adapter, and use_peft would put another one on it: merge it first (cukit merge {name} "
            f"--output FOLDER), train it further (its base as model, and lora_adapter_path={name}), or go on with its "
            "own run (resume_from_checkpoint)"
        )


def put_adapter(model: Decoder, args: Any, name: str | None) -> None:
    """The adapter that the options ask for, unless the model brought one. name: what was given as the model.

    The adapter's folder calls its model by a folder's whole path, or by the name on the hub.
    """
    if args.use_peft and model.adapter is None:
        base = str(Path(name).resolve()) if name is not None and Path(name).is_dir() else name
        config = args.lora.adapter(base, model.config.head)
        adapter = Adapter(model, config, args.lora_way, args.seed, args.lora_base_on_host)
        if args.lora_adapter_path is not None:
            fill(adapter, model_folder(args.lora_adapter_path, weights=False))


def adapter_of(model: Any, args: Any) -> tuple[AdapterConfig, str, bool] | None:
    """(what a run's adapter is, its way, whether the base lies on the host), None without one; the model may be a mere
    shape, as in a dry run.
    """
    adapter = getattr(model, "adapter", None)
    if adapter is not None:
        return adapter.config, adapter.way, adapter.base_on_host
    if not args.use_peft:
        return None
    return args.lora.adapter(None, model.config.head), args.lora_way, args.lora_base_on_host


def described(model: Decoder) -> str:
    """One line about a model's adapter."""
    adapter = model.adapter
    assert adapter is not None
    way = f"{adapter.way}, its base in the host's memory" if adapter.base_on_host else adapter.way
    config, frozen = adapter.config, sum(parameter.data.size for parameter in model.parameters())
    head = " and the score head" if config.with_score else ""
    return (
        f"adapter ({way}): rank {config.r}, scale {config.scale:.4g}, at {', '.join(config.targets)}{head}; "
        f"{adapter.num_parameters:,} numbers are trained, {frozen:,} are frozen"
    )
