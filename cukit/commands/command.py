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
    recipe: str | None = None  # runs without --config and --model
    alone: bool = False  # one process does it; of several that share no model the others end at once
    words: str | None = None  # the option (a list, or of one word) that takes words without a --name: `report RUN …`
    bundled: dict[str, Any] = field(default_factory=dict)  # stands in for what neither options nor --config name
