"""What the table of commands holds of each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..options import Options


@dataclass(frozen=True)
class Command:
    """One subcommand and where its options come from."""

    run: Callable[[dict[str, Any]], int | None]  # the values of its options -> exit code
    help: str
    parts: tuple[type[Options], ...]  # the classes of its options
    examples: tuple[str, ...] = ()
    positional: str | None = None  # the option whose value may stand first, without its name
    recipe: str | None = None  # runs without --config and --model
    bundled: dict[str, Any] = field(default_factory=dict)  # stands in for what neither options nor --config name
