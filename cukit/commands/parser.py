"""Options of a command line from the fields of dataclasses: names, types, help, YAML files, one-line errors."""

import argparse
import difflib
import json
import sys
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import yaml

import cukit

from ..engine.config import EngineConfig

METAVARS = {int: "N", float: "X", bool: "true|false", dict: "JSON", list[float]: "X"}


@dataclass(frozen=True)
class Command:
    """One subcommand and where its options come from."""

    run: Callable[[dict], int | None]  # the values of its options -> exit code
    help: str
    parts: tuple[type, ...]  # the dataclasses whose fields are its options; the first to have a name wins
    without: tuple[str, ...] = ()  # fields that are no options here
    recipe: str | None = None  # runs without --config and --model
    bundled: dict[str, Any] = field(default_factory=dict)  # stands in for what neither options nor --config name


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors and, for an unknown option, the nearest known one."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(commands: dict[str, Command], argv: list[str]) -> tuple[str, dict]:
    """-> (name of the subcommand, the options that were given, with the types of their fields)."""
    parser = Parser(
        prog="cukit",
        description="Train and run language models without PyTorch.",
        allow_abbrev=False,
        usage="cukit COMMAND [--option value ...]",
        epilog="cukit COMMAND --help shows a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"cukit {cukit.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in commands.items():
        add_options(
            subparsers.add_parser(
                name,
                help=command.help,
                description=command.help.capitalize() + ".",
                usage=f"cukit {name} [--option value ...]",
                allow_abbrev=False,
            ),
            command,
        )
    argv = _joined(commands, argv)
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        raise ValueError(
            f"unknown command {argv[0]!r}{nearest(argv[0], commands)}; the commands are {', '.join(commands)}"
        )
    namespace, unknown = parser.parse_known_args([_underscored(word) for word in argv] or ["--help"])
    given = vars(namespace)
    name = given.pop("command")
    if unknown:
        word = unknown[0].partition("=")[0]
        known = [*command_fields(commands[name]), "config"]
        raise ValueError(f"unknown option {word}{nearest(word.lstrip('-'), known, '--')}")
    return name, coerce_all(commands[name], given, "--")


def _joined(commands: dict[str, Command], argv: list[str]) -> list[str]:
    """The two words of a command such as `kernels build` as one."""
    seconds = [name.partition(" ")[2] for name in commands if argv and name.startswith(f"{argv[0]} ")]
    if not seconds:
        return argv
    if len(argv) < 2 or argv[1] not in seconds:
        given = f", got {argv[1]!r}" if len(argv) > 1 else ""
        raise ValueError(f"{argv[0]} must be followed by {', '.join(seconds)}{given}; each has its own --help")
    return [f"{argv[0]} {argv[1]}", *argv[2:]]


def _underscored(word: str) -> str:
    """--max-steps=3 -> --max_steps=3"""
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if word.startswith("--") else word


def add_options(parser: argparse.ArgumentParser, command: Command) -> None:
    if command.parts:
        parser.add_argument(
            "--config",
            default=argparse.SUPPRESS,
            metavar="FILE",
            help="YAML file of options; options given here override it",
        )
    for name, item in command_fields(command).items():
        kind = without_none(item.type)
        more = {"nargs": "?", "const": "true"} if kind is bool else {"nargs": "+"} if get_origin(kind) is list else {}
        choices = item.metadata.get("choices")
        default = default_of(item)
        text = item.metadata.get("help", "") + (f" ({', '.join(choices)})" if choices else "")
        text += "" if default is None else f" [{default}]"
        parser.add_argument(
            f"--{name}",
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            metavar=METAVARS.get(kind, "TEXT"),
            **more,
        )


def resolve(command: Command, given: dict) -> dict:
    """All values of a run: bundled recipe or --config, then what was given, then the bundled files (said aloud)."""
    given = dict(given)
    path = given.pop("config", None)
    if path is None and given.get("resume_from_checkpoint"):
        path, given = resumed_config(given)
    if path is None and command.recipe and "model" not in given:
        path = bundled(command.recipe)
        print(f"recipe: {path}", file=sys.stderr)
    values = (read_yaml(command, path) if path else {}) | given
    if path and command.recipe and not values.get("model"):
        raise ValueError(f"{path} names no model; add 'model:' or give --model")
    own_data = values.get("data") is not None
    for name, value in command.bundled.items():
        if values.get(name) is None and not (name == "eval_data" and own_data):
            values[name] = value
            print(f"{name}: {value} (bundled; choose with --{name})", file=sys.stderr)
    for name in ("model", "data", "eval_data"):
        if values.get(name):
            values[name] = bundled(values[name])
    return values


def bundled(path: str) -> str:
    """A path that begins with data/ and is not in the working directory means cukit's own data (checkout or wheel)."""
    if path.startswith("data/") and not Path(path).exists():
        package = Path(cukit.__file__).parent
        for root in (package.parent / "data", package / "data_files"):
            if (root / path.removeprefix("data/")).exists():
                return str(root / path.removeprefix("data/"))
    return path


def resumed_config(given: dict) -> tuple[str | None, dict]:
    """A resumed run goes on with its own config.yaml (if it has one), in its own folder."""
    from ..runs.checkpoint import find_checkpoint

    run = find_checkpoint(given["resume_from_checkpoint"], given.get("output_dir")).parent
    if not (run / "config.yaml").is_file():
        return None, given
    return str(run / "config.yaml"), {"output_dir": str(run)} | given


def read_yaml(command: Command, path: str) -> dict:
    """The options of a YAML file, with the types of their fields; ValueError for a key that is no option."""
    path = bundled(path)
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"config {path} must hold 'option: value' lines")
    for name in values:
        if name not in command_fields(command):
            raise ValueError(f"unknown option {name!r} in {path}{nearest(str(name), command_fields(command))}")
    return coerce_all(command, values, f"{path}: ")


def command_fields(command: Command) -> dict[str, Field]:
    found: dict[str, Field] = {}
    for part in command.parts:
        for item in fields(part):
            if item.name not in command.without:
                found.setdefault(item.name, item)
    return found


def make(cls: type, values: dict):
    """`cls` from those of `values` that are its fields."""
    return cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})


def engine_options(values: dict) -> dict:
    """The EngineConfig fields among the values; `seed` is the sampling's."""
    return {
        item.name: values[item.name] for item in fields(EngineConfig) if item.name in values and item.name != "seed"
    }


def default_of(item: Field):
    return item.default_factory() if item.default_factory is not MISSING else item.default


def nearest(word: str, known, prefix: str = "") -> str:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


def without_none(kind):
    """X of `X | None`."""
    return (
        next(part for part in get_args(kind) if part is not types.NoneType)
        if isinstance(kind, types.UnionType)
        else kind
    )


def coerce_all(command: Command, values: dict, where: str) -> dict:
    known = command_fields(command)
    return {name: coerce(known[name], value, where) if name in known else value for name, value in values.items()}


def coerce(item: Field, value, where: str):
    """A command line's or YAML's value as the field's type; ValueError names the option."""
    if isinstance(item.type, types.UnionType) and (value is None or value in ("none", "null")):
        return None
    kind = without_none(item.type)
    try:
        return _convert(kind, value, item.metadata.get("choices") or ())
    except (ValueError, TypeError) as error:
        expected = {int: "a whole number", float: "a number", bool: "true or false", dict: "a JSON object"}.get(
            kind, "text"
        )
        raise ValueError(f"{where}{item.name} must be {expected}, got {value!r}") from error


def _convert(kind, value, choices=()):
    if get_origin(kind) is list:
        return [_convert(get_args(kind)[0], part) for part in (value if isinstance(value, list) else [value])]
    if kind is dict:
        value = json.loads(value) if isinstance(value, str) else value
    elif kind is bool and isinstance(value, str):
        value = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(
            value.lower(), value
        )
    elif kind is int and isinstance(value, str):
        value = int(value)
    elif kind is float and isinstance(value, (str, int)) and not isinstance(value, bool):
        value = float(value)  # YAML reads 1e-4 (without a dot) as text
    elif kind is str and value is not None:
        if value is False and "no" in choices:
            return "no"  # YAML reads a bare no as false
        return value if isinstance(value, bool) else str(value)  # GRPOConfig.scale_rewards takes a bool
    if kind is int and isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError
    return value
