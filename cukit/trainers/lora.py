"""What trainers do for an adapter (LoRA): take peft's configuration, and put the adapter on the model."""

from pathlib import Path
from typing import Any

from ..models.adapter_config import AdapterConfig
from ..models.adapter_files import is_adapter
from ..models.adapters import Adapter
from ..models.decoder import Decoder
from ..options import changed
from .lora_config import peft_options


def with_peft(args: Any, peft_config: Any, head: str = "lm_head") -> Any:
    """args with the options that a peft.LoraConfig stands for. head: of the model that is trained."""
    return args if peft_config is None else changed(args, **peft_options(peft_config, head))


def check_base(args: Any, folder: Path, name: Any) -> None:
    """ValueError if use_peft would put an adapter on an adapter."""
    if args.use_peft and is_adapter(folder):
        raise ValueError(
            f"model {name} is an adapter, and use_peft would put another one on it: merge it first (cukit merge {name} "
            "--output FOLDER), or go on with its own run (resume_from_checkpoint)"
        )


def put_adapter(model: Decoder, args: Any, name: str | None) -> None:
    """The adapter that the options ask for, unless the model brought one. name: what was given as the model.

    The adapter's folder calls its model by a folder's whole path, or by the name on the hub.
    """
    if args.use_peft and model.adapter is None:
        base = str(Path(name).resolve()) if name is not None and Path(name).is_dir() else name
        Adapter(model, args.lora.adapter(base, model.config.head), args.lora_way, args.seed)


def adapter_of(model: Any, args: Any) -> tuple[AdapterConfig, str] | None:
    """(what a run's adapter is, its way), None without one; the model may be a mere shape, as in a dry run."""
    adapter = getattr(model, "adapter", None)
    if adapter is not None:
        return adapter.config, adapter.way
    return (args.lora.adapter(None, model.config.head), args.lora_way) if args.use_peft else None


def described(model: Decoder) -> str:
    """One line about a model's adapter."""
    adapter = model.adapter
    assert adapter is not None
    config, frozen = adapter.config, sum(parameter.data.size for parameter in model.parameters())
    head = " and the score head" if config.with_score else ""
    return (
        f"adapter ({adapter.way}): rank {config.r}, scale {config.scale:.4g}, at {', '.join(config.targets)}{head}; "
        f"{adapter.num_parameters:,} numbers are trained, {frozen:,} are frozen"
    )
