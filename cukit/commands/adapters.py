"""Adapters on the command line: NAME=FOLDER, as vLLM's --lora-modules."""

from typing import Any

from ..engine.calls import LoRARequest


def named_adapters(given: list[str]) -> list[LoRARequest]:
    """["NAME=FOLDER", …] -> what requests name. ValueError in one line for another form."""
    requests: list[LoRARequest] = []
    for number, text in enumerate(given, 1):
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ValueError(f"lora_modules must be NAME=FOLDER, got {text!r}")
        if name in [request.lora_name for request in requests]:
            raise ValueError(f"lora_modules has the name {name} twice")
        requests.append(LoRARequest(name, number, path))
    return requests


def engine_options(requests: list[LoRARequest]) -> dict[str, Any]:
    """The engine's options that they need."""
    from ..models.adapter_files import adapter_config
    from ..models.weights import model_folder

    if not requests:
        return {}
    ranks = [adapter_config(model_folder(request.lora_path, False, "lora_modules")).r for request in requests]
    return {"enable_lora": True, "max_loras": len(requests), "max_lora_rank": max(ranks)}
