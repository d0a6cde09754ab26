"""Adapter folders in PEFT's format: adapter_config.json and adapter_model.safetensors <-> an Adapter, every key
accounted for.
"""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from .adapter_config import TARGETS, AdapterConfig
from .adapters import SCORE_PART, Adapter, adapted_linears, check_head, peft_name
from .hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, parse_name

logger = logging.getLogger(__name__)


def is_adapter(folder) -> bool:
    """Whether a folder holds an adapter and no model of its own."""
    folder = Path(folder)
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def adapter_config(folder) -> AdapterConfig:
    """What adapter_config.json says. ValueError in one line if it cannot be read or asks for what is not there."""
    path = Path(folder) / ADAPTER_CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} is no adapter folder: it needs {ADAPTER_CONFIG}, as PEFT writes it") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object")
    names = values.get("target_modules")
    if isinstance(names, str) or not set(names or ()) <= set(TARGETS) or values.get("exclude_modules"):
        # a pattern, paths of modules, or some left out: the tensors say what it meant
        values = values | {"target_modules": _targets_of(folder), "exclude_modules": None}
    config = AdapterConfig.from_peft(values, str(path))
    revision = values.get("revision")
    if revision and config.base and parse_name(config.base) and "@" not in config.base:
        config = replace(config, base=f"{config.base}@{revision}")
    return config


def base_of(folder) -> str:
    """The model that an adapter folder belongs to: a folder, or a name of the hub."""
    folder, base = Path(folder), adapter_config(folder).base
    if not base:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} does not say which model it belongs to: set base_model_name_or_path"
        )
    for path in (Path(base), folder / base):
        if path.is_dir():
            if path.resolve() == folder.resolve():
                raise ValueError(f"{folder / ADAPTER_CONFIG} names its own folder as base_model_name_or_path")
            return str(path)
    if parse_name(base) is None or Path(base).is_absolute():
        raise ValueError(
            f"the base model of {folder}, {base!r}, is not there: set base_model_name_or_path in its {ADAPTER_CONFIG}"
        )
    return base


def read_factors(folder) -> dict[str, np.ndarray]:
    """PEFT's tensor names -> arrays on the host; ValueError in one line for a file that cannot be read."""
    path = Path(folder) / ADAPTER_WEIGHTS
    if not path.is_file():
        hint = "; .bin adapters are not read" if list(Path(folder).glob("adapter_model.bin")) else ""
        raise ValueError(f"{folder} holds no {ADAPTER_WEIGHTS}{hint}")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read (truncated or not safetensors): {error}") from None


def save_adapter(adapter: Adapter, folder) -> None:
    """Write an adapter folder that PEFT loads, replacing an older one: float32 factors, then the configuration."""
    folder, be = Path(folder), adapter.backend
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(be.to_numpy(view)) for name, view in adapter.parts().items()}
    config, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    new_config, new_weights = (path.with_name(path.name + ".tmp") for path in (config, weights))
    save_file(tensors, new_weights, metadata={"format": "pt"})
    new_weights.chmod(0o644)  # safetensors makes it readable by the owner alone
    new_config.write_text(json.dumps(adapter.config.to_peft(), indent=2) + "\n", encoding="utf-8")
    if config.is_file() and config.read_bytes() != new_config.read_bytes():
        config.unlink()  # without it nothing loads: the old one would give the new factors another meaning
    os.replace(new_weights, weights)
    os.replace(new_config, config)


def load_adapter(model, folder, way: str = "beside") -> Adapter:
    """Put the adapter of a folder on a model, to be trained on or used as it is."""
    adapter = Adapter(model, adapter_config(folder), way)
    fill(adapter, folder)
    return adapter


def fill(adapter: Adapter, folder) -> None:
    """Take the factors of a folder into an adapter of the same kind; ValueError in one line for one of another."""
    theirs, ours = adapter_config(folder), adapter.config
    for name, read in _KIND.items():
        if read(theirs) != read(ours):
            raise ValueError(
                f"{folder} holds another adapter: its {name} is {read(theirs)}, this run's is {read(ours)}; give the "
                "options of that run"
            )
    if theirs.base and ours.base and _place(folder, theirs.base) != _place(folder, ours.base):
        logger.warning("the adapter of %s was trained on %s, and this model is %s", folder, theirs.base, ours.base)
    stored, parts = read_factors(folder), adapter.parts()
    _check_names(folder, stored, {name: view.shape for name, view in parts.items()})
    for name, view in parts.items():
        view[...] = adapter.backend.array(stored[name].astype(view.dtype, copy=False))
    adapter.refresh()


def _place(folder, base: str) -> str:
    """A model's name, or its folder's whole path; as base_of() looks for it."""
    found = (path for path in (Path(base), Path(folder) / base) if path.is_dir())
    return next((str(path.resolve()) for path in found), base)


FACTOR_DTYPES = ("float32", "float16", "bfloat16", "float64")
_KIND = {
    "lora_r": lambda config: config.r,
    "lora_alpha": lambda config: config.alpha,
    "use_rslora": lambda config: config.use_rslora,
    "lora_target_modules": lambda config: list(config.targets),
    "score head": lambda config: config.with_score,
}


def merge_into(model, folder) -> None:
    """weights = round(W + s·B·A), in place: the model is then a plain one, of the base's size and speed. A reward
    model gets the score head that was trained.
    """
    config, factors, be = adapter_config(folder), read_factors(folder), model.backend
    found = check_factors(folder, factors, model, config)
    for stem, weight in found.items():
        wide = be.accumulator(weight.dtype)
        a, b = (be.array(factors[f"{stem}.lora_{kind}.weight"].astype(wide)) for kind in "AB")
        be.merge_adapter(weight, weight, a, b, config.scale)
    if config.with_score:
        head = model.score.weight.data
        head[...] = be.array(factors[SCORE_PART].astype(head.dtype))
    if wrong := model.store.non_finite():
        raise ValueError(f"{folder}: merged weights are not finite in {model.dtype}: {'; '.join(wrong)}")


def check_factors(folder, factors: dict[str, Any], model, config: AdapterConfig) -> dict[str, Any]:
    """What PEFT's tensors of each adapted part begin with -> its weight. ValueError in one line for tensors that do not
    fit the model.
    """
    try:
        check_head(model, config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    found = {
        peft_name(name, part): linear.weight.data[rows]
        for name, linear in adapted_linears(model, config)
        for part, rows in linear.part_rows.items()
        if part in config.targets
    }
    shapes = {f"{stem}.lora_A.weight": (config.r, weight.shape[1]) for stem, weight in found.items()}
    shapes |= {f"{stem}.lora_B.weight": (weight.shape[0], config.r) for stem, weight in found.items()}
    _check_names(folder, factors, shapes | ({SCORE_PART: model.score.weight.shape} if config.with_score else {}))
    return found


def _check_names(folder, stored: dict[str, Any], shapes: dict[str, tuple]) -> None:
    problems = []
    for kind, names in (("missing", shapes.keys() - stored.keys()), ("unexpected", stored.keys() - shapes.keys())):
        if names:
            shown = sorted(names)
            more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
            problems.append(f"{kind}: {', '.join(shown[:3])}{more}")
    for name in sorted(shapes.keys() & stored.keys()):
        if tuple(stored[name].shape) != tuple(shapes[name]):
            problems.append(f"{name} has shape {list(stored[name].shape)}, this model needs {list(shapes[name])}")
        elif stored[name].dtype.name not in FACTOR_DTYPES:
            problems.append(f"{name} is stored as {stored[name].dtype}; {', '.join(FACTOR_DTYPES)} are read")
        elif not np.isfinite(stored[name].astype(np.float32)).all():
            problems.append(f"{name} is not finite")
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(f"{folder}: the adapter does not fit its model: {'; '.join(problems[:4])}{more}")


def _targets_of(folder) -> list[str]:
    """The parts that have factors, by their tensors' names."""
    found = {
        name.split(".")[-3] for name in read_factors(folder) if name.endswith((".lora_A.weight", ".lora_B.weight"))
    }
    return sorted(found) or ["no tensor of an adapter"]
