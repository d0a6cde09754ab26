"""What --help prints: the table of commands, and a command's options by their groups, with examples."""

import shutil
import textwrap
from dataclasses import MISSING
from typing import Any

from ..options import Option
from .command import Command

METAVARS: dict[Any, str] = {int: "N", float: "X", bool: "true|false", dict: "JSON"}
MANY: dict[Any, str] = {list[int]: "N …", list[float]: "X …", list[str]: "TEXT …"}
GROUPS = ("files", "data", "rewards", "demonstrations", "training", "loss", "generation", "engine", "evaluation")
COLUMN = 26


def overview(commands: dict[str, Command]) -> str:
    """Every command in a line."""
    lines = ["usage: cukit COMMAND [--option value ...]", "", "Train and run language models without PyTorch.", ""]
    lines += [f"  {name:<16} {command.help}" for name, command in commands.items()]
    return "\n".join([*lines, "", "cukit COMMAND --help shows a command's options; cukit --version the version."])


def family(first: str, commands: dict[str, Command]) -> str:
    """The commands of two words that begin with `first`."""
    mine = {name: command for name, command in commands.items() if name.startswith(f"{first} ")}
    lines = [f"usage: cukit {first} COMMAND [--option value ...]", ""]
    lines += [f"  {name:<16} {command.help}" for name, command in mine.items()]
    return "\n".join([*lines, "", f"cukit {next(iter(mine))} --help shows its options."])


def of_command(name: str, command: Command, options: dict[str, Option]) -> str:
    """A command's help."""
    words = f" {command.words.removesuffix('s').upper()} ..." if command.words else ""
    lines = [
        f"usage: cukit {name}{words} [--option value ...]",
        "",
        f"{command.help[0].upper()}{command.help[1:]}.",
        "",
    ]
    if command.examples:
        lines += ["Examples:", *(f"  {example}" for example in command.examples), ""]
    found = dict.fromkeys(item.group for item in options.values())
    for place, group in enumerate(sorted(found, key=lambda group: GROUPS.index(group) if group in GROUPS else 99)):
        lines.append(f"{group[0].upper()}{group[1:]}:")
        if place == 0:
            lines += entry("--config FILE", "YAML file of options; options given here override it")
        for item in options.values():
            if item.group == group:
                lines += entry(f"--{item.name} {_metavar(item)}", _text(item))
        lines.append("")
    return "\n".join(lines).rstrip()


def entry(left: str, text: str) -> list[str]:
    """An option and its help, wrapped to the terminal."""
    width = max(60, min(shutil.get_terminal_size().columns, 120)) - COLUMN - 2
    wrapped = textwrap.wrap(text, width) or [""]
    gap = f"\n{'':<{COLUMN + 1}}" if len(left) > COLUMN - 2 else f"{'':<{COLUMN - 1 - len(left)}}"
    return [f"  {left}{gap}{wrapped[0]}", *(f"{'':<{COLUMN + 1}}{line}" for line in wrapped[1:])]


def _metavar(item: Option) -> str:
    return (METAVARS | MANY).get(item.kind, "WORD" if item.choices else "TEXT")


def _text(item: Option) -> str:
    choices = f" ({', '.join(item.choices)})" if item.choices else ""
    default = str(item.default).lower() if isinstance(item.default, bool) else item.default
    default = " ".join(map(str, default)) if isinstance(default, list) else default
    shown = "" if default is None or default is MISSING else f" [{default}]"
    return f"{item.help}{choices}{shown}"
