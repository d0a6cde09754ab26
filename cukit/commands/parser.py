"""A command's options, from its classes, the command line, YAML files and recipes; and where bundled files lie."""

import os
import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar

import yaml

import cukit

from ..engine.config import MemoryOptions
from ..options import Option, Options, nearest
from ..parallel.config import launched_rank
from ..rewards import BUILTIN_REWARDS
from . import help, trl_names
from .argv import from_text, option_name, parsed, split_words
from .command import Command

MadeOptions = TypeVar("MadeOptions", bound=Options)
CONFIG = Option("config", str, None, "a YAML file of options", (), "files", None)
HELP = Option("help", bool, False, "show the options", (), "files", None)


def parse(commands: dict[str, Command], argv: list[str]) -> tuple[str, dict[str, Any]]:
    """-> (name of the subcommand, the options that were given, with the types of their fields).

    --help and --version print and raise SystemExit(0).
    """
    if not argv or argv[0] in ("-h", "--help"):
        _show(help.overview(commands))
    if argv[0] == "--version":
        _show(f"cukit {cukit.__version__}")
    name, words = _command_of(commands, argv)
    command, known = commands[name], command_options(commands[name])
    accepted = known | ({"config": CONFIG} if command.parts else {}) | {"help": HELP}
    found, unknown = split_words([_canonical(word, known) for word in words], accepted, command.words)
    if found.pop("help", None):
        _show(help.of_command(name, command, known))
    config = found.pop("config", None)
    unknown = {name: True if value is None else value for name, value in unknown.items()}  # --push_to_hub alone
    given = coerce_all(command, _translated(found | unknown, known, "", "--"), "--")
    return name, given if config is None else given | {"config": config}


def _show(text: str) -> None:
    print(text)
    raise SystemExit(0)


def _command_of(commands: dict[str, Command], argv: list[str]) -> tuple[str, list[str]]:
    """(name, the words after it); a command such as `kernels build` has two words."""
    first = argv[0]
    seconds = [name.partition(" ")[2] for name in commands if name.startswith(f"{first} ")]
    if seconds:
        if len(argv) > 1 and argv[1] in ("-h", "--help"):
            _show(help.family(first, commands))
        if len(argv) < 2 or argv[1] not in seconds:
            given = f", got {argv[1]!r}" if len(argv) > 1 else ""
            raise ValueError(f"{first} must be followed by {', '.join(seconds)}{given}; each has its own --help")
        return f"{first} {argv[1]}", argv[2:]
    if first not in commands:
        hint = "the command comes first" if first.startswith("-") else f"the commands are {', '.join(commands)}"
        raise ValueError(f"unknown command {first!r}{nearest(first, commands)}; {hint}")
    return first, argv[1:]


def _canonical(word: str, known: dict[str, Option]) -> str:
    """TRL's name of an option as cukit's; everything else as it is."""
    name = option_name(word)
    if name is not None and (own := trl_names.plain_alias(name, known)):
        equals, value = word.partition("=")[1:]
        return f"--{own}{equals}{value}"
    return word


def _translated(given: dict[str, Any], known: dict[str, Option], where: str, prefix: str) -> dict[str, Any]:
    """Values of cukit's options; what TRL's names mean is taken, left out with a line that says why, or refused."""
    found = trl_names.translated(given, known, where, prefix)
    if left_out := trl_names.notice(found, where, prefix):
        say(left_out)
    return found.values


def resolve(command: Command, given: dict[str, Any]) -> dict[str, Any]:
    """All values of a run: bundled recipe or --config, then what was given, then the bundled files (said aloud).

    What is given later wins, also over an option that it excludes.
    """
    given = dict(given)
    path = given.pop("config", None)
    if path is None and given.get("resume_from_checkpoint"):
        path, given = resumed_config(command, given)
    own_data = given.get("data") is not None and not _is_bundled(given["data"])
    earlier: dict[str, Any] = {}
    if path is not None:
        earlier = read_yaml(command, path)
    elif command.recipe and "model" not in given:
        path = bundled(command.recipe)
        say(f"recipe: {path}")
        # the recipe's reward and held-out rows belong to the recipe's data
        left_out = ("reward_funcs", "reward_weights", "eval_data", "eval_steps") if own_data else ()
        earlier = {name: value for name, value in read_yaml(command, path).items() if name not in left_out}
    values = earlier | given
    for part in command.parts:
        earlier = part.merged(earlier, given)
        values = earlier
    if path and command.recipe and not values.get("model"):
        raise ValueError(f"{path} names no model; add 'model:' or give --model")
    _fill_in(command, values)
    for name in ("model", "data", "eval_data"):
        if values.get(name):
            values[name] = bundled(os.path.expanduser(values[name]))
    for name in ("model", "lora_adapter_path", "critic_model"):
        if values.get(name):
            values[name] = model_of(os.path.expanduser(values[name]), name)
    if values.get("lora_modules"):
        values["lora_modules"] = [_adapter_of(text) for text in values["lora_modules"]]
    _check_complete(command, values)
    return values


def _check_complete(command: Command, values: dict[str, Any]) -> None:
    """ValueError for an option without a default that nothing has given."""
    for name, item in command_options(command).items():
        if item.default is MISSING and name not in values:
            example = command.examples[0].partition("  #")[0].strip()
            raise ValueError(f"this command needs {name} (--{name}): {item.help}; for example: {example}")


def _fill_in(command: Command, values: dict[str, Any]) -> None:
    """The bundled files for what is not given, said aloud. A reward is never guessed for data of the user's own."""
    own_data = values.get("data") is not None and not _is_bundled(values["data"])
    for name, value in command.bundled.items():
        if values.get(name) is not None or (name == "eval_data" and (own_data or name in values)):  # none is said
            continue
        if values.get("tasks") and name in ("data", "reward_funcs"):  # a task knows its own
            continue
        if name == "reward_funcs" and own_data:
            raise ValueError(
                f"reward_funcs is not given, and a reward is never guessed for your own data ({values['data']}): "
                f"choose --reward_funcs {', '.join(BUILTIN_REWARDS)} or path/file.py:function"
            )
        values[name] = value
        say(f"{name}: {value} (bundled; choose with --{name})")


def _is_bundled(path: str) -> bool:
    """Whether these are rows of the bundled task."""
    return any(Path(bundled(path)).resolve().is_relative_to((root / "arithmetic").resolve()) for root in _data_roots())


def bundled(path: str) -> str:
    """A path that begins with data/ and is not in the working directory means cukit's own data (checkout or wheel)."""
    if path.startswith("data/") and not Path(path).exists():
        for root in _data_roots():
            if (root / path.removeprefix("data/")).exists():
                return str(root / path.removeprefix("data/"))
    return path


def _data_roots() -> tuple[Path, Path]:
    package = Path(cukit.__file__).parent
    return package.parent / "data", package / "data_files"


def model_of(path: str, option: str = "model") -> str:
    """A run folder stands for its final model or, before the run has ended, for its newest checkpoint (said aloud).
    option: the one that names it.
    """
    from ..runs.checkpoint import newest_model

    folder, newest = Path(path), newest_model(path)
    is_run = any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    if newest is None:
        if is_run:
            raise ValueError(f"{path} is a run folder without a model: its run has saved no checkpoint")
        return path
    if newest != folder:
        say(f"{option}: {newest} (the newest checkpoint of this run)")
    elif is_run:
        say(f"{option}: {path} (the final model of this run)")
    return str(newest)


def _adapter_of(text: str) -> str:
    """NAME=FOLDER with model_of() of the folder; another form stays, and is refused later."""
    name, _, path = text.partition("=")
    return f"{name}={model_of(path, f'lora_modules {name}')}" if path else text


def resumed_config(command: Command, given: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """A resumed run goes on with its own config.yaml (if it has one), in its own folder; what is given now wins. The
    checkpoint has the adapter, so the folder that it began with may be gone; the config has its rank, scale and layers.
    """
    from ..runs.checkpoint import find_checkpoint
    from ..runs.record import check_method

    run = find_checkpoint(given["resume_from_checkpoint"], given.get("output_dir")).parent
    check_method(run, command.run.__name__)
    if not (run / "config.yaml").is_file():
        return None, given
    return str(run / "config.yaml"), {"output_dir": str(run), "lora_adapter_path": None} | given


def read_yaml(command: Command, path: str) -> dict[str, Any]:
    """The options of a YAML file, with the types of their fields; one ValueError for all keys that are no option."""
    path = bundled(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none, not UTF-8
        raise ValueError(f"config {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"config {path} must hold 'option: value' lines")
    keys = [str(key.value) for key, _ in getattr(yaml.compose(text, yaml.SafeLoader), "value", ())]
    if twice := next((key for key in keys if keys.count(key) > 1), None):  # of which YAML keeps the last
        raise ValueError(f"{path}: {twice} is given twice; give only one")
    known = command_options(command)
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in found:
            raise ValueError(f"{path}: {name} is given twice, once as {key}; give only one")
        found[name] = value
    found = _translated(found, known, f" in {path}", "")
    return coerce_all(command, found, f"{path}: ")


def command_options(command: Command) -> dict[str, Option]:
    """Flat name -> option; TypeError for a name that two of the command's classes have."""
    found: dict[str, Option] = {}
    for part in command.parts:
        if both := found.keys() & part.options().keys():
            raise TypeError(f"{command.help}: two classes have the option {min(both)!r}")
        found |= part.options()
    return found


def make(cls: type[MadeOptions], values: dict[str, Any]) -> MadeOptions:
    """`cls` from those of `values` that are its options."""
    return cls(**{name: values[name] for name in cls.options() if name in values})


def coerce_all(command: Command, values: dict[str, Any], where: str) -> dict[str, Any]:
    """The values with the types of their options; one ValueError for all that have another."""
    known = command_options(command)
    if "memory_limit" in known:
        values = MemoryOptions.respelled(values)
    for part in command.parts:
        values = part.respelled({name: _as_object(known[name], value) for name, value in values.items()})
    found: dict[str, Any] = {}
    faults: list[str] = []
    for name, value in values.items():
        try:
            found[name] = parsed(known[name], value, "" if faults else where)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("; ".join(faults))
    return found


def _as_object(item: Option, value: Any) -> Any:
    """A dict that was given as JSON text: respelled() looks into it."""
    return from_text(item, value) if item.kind is dict else value


def say(text: str) -> None:
    """A line on stderr about what a command takes; of several ranks the first one says it."""
    if launched_rank() == 0:
        print(text, file=sys.stderr)
