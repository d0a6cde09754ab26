"""What trainers do for an adapter (LoRA): take peft's configuration, and put the adapter on the model."""

from pathlib import Path
from typing import Any

from ..models.adapter_files import is_adapter
from ..models.adapters import Adapter
from ..models.decoder import Decoder
from ..options import changed
from .lora_config import peft_options


def with_peft(args: Any, peft_config: Any) -> Any:
    """args with the options that a peft.LoraConfig stands for."""
    return args if peft_config is None else changed(args, **peft_options(peft_config))


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
        Adapter(model, args.lora.adapter(base), args.lora_way, args.seed)
