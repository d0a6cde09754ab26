"""What every configuration is made of: a field with its help text, and checks that raise a one-line ValueError."""

import math
from dataclasses import MISSING, field, fields
from typing import Any


def option(default: Any = MISSING, help: str = "", choices: tuple[str, ...] | None = None):
    """A dataclass field with the text (and the allowed words) that the command line shows."""
    metadata = {"help": help} | ({"choices": choices} if choices else {})
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_range(config, name: str, low: float, high: float | None = None, open_low: bool = False) -> None:
    """Check low <= value <= high (low < value if open_low); None passes, NaN and infinity never do."""
    value = getattr(config, name)
    if value is None:
        return
    require(isinstance(value, (int, float)) and not isinstance(value, bool), f"{name} must be a number, got {value!r}")
    kind = next(f.type for f in fields(config) if f.name == name)
    require(isinstance(value, int) or kind not in (int, int | None), f"{name} must be a whole number, got {value!r}")
    inside = math.isfinite(value) and (value > low if open_low else value >= low) and (high is None or value <= high)
    limits = f"{'above' if open_low else 'at least'} {low:g}" + ("" if high is None else f" and at most {high:g}")
    require(inside, f"{name} must be {limits}, got {value!r}")


def check_choices(config) -> None:
    for item in fields(config):
        choices, value = item.metadata.get("choices"), getattr(config, item.name)
        require(
            choices is None or value in choices,
            f"{item.name} must be one of {', '.join(map(str, choices or ()))}, got {value!r}",
        )


def flat_values(config) -> dict[str, Any]:
    """Every option's value by its name."""
    return {item.name: getattr(config, item.name) for item in fields(config)}
