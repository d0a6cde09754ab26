"""A user's own functions and classes: rewards, losses, tools, environments, as "path/file.py:function"."""

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def names_a_file(spec: str) -> bool:
    """Whether a text has the form path:function."""
    file_name, colon, function_name = spec.rpartition(":")
    return bool(colon and file_name and function_name)


def load_function(spec: str, what: str) -> Callable[..., Any]:
    """The function of "path/file.py:function". what: "reward", "loss", …, for messages.

    The file is run as Python code, with its own folder importable. ValueError in one line if anything is missing.
    """
    return _loaded(spec, what, [spec.rpartition(":")[2]])[0]


def load_functions(spec: str, what: str) -> list[Callable[..., Any]]:
    """The functions or classes of "path/file.py:name,name", out of one run of the file; see load_function."""
    return _loaded(spec, what, [name.strip() for name in spec.rpartition(":")[2].split(",")])


def _loaded(spec: str, what: str, names: list[str]) -> list[Callable[..., Any]]:
    if not names_a_file(spec):
        raise ValueError(f"{what} {spec!r}: give it as 'path/file.py:function'")
    file_name = spec.rpartition(":")[0]
    path = Path(file_name).expanduser()
    if not path.is_file():
        raise ValueError(f"{what} {spec!r}: file {file_name!r} does not exist")
    module = _import_file(path.resolve(), f"{what} {spec!r}", f"cukit_{what}")
    return [_callable(module, name, f"{what} {spec!r}", file_name) for name in names]


def _callable(module: ModuleType, name: str, where: str, file_name: str) -> Callable[..., Any]:
    value = getattr(module, name, None)
    if value is None:
        found = [key for key, one in vars(module).items() if callable(one) and one.__module__ == module.__name__]
        raise ValueError(f"{where}: {file_name} has no {name!r} (it has: {', '.join(found) or 'nothing'})")
    if not callable(value):
        raise ValueError(f"{where}: {name!r} is {type(value).__name__}, not a function")
    return value


def one_line(error: BaseException) -> str:
    """An error's text for the end of a message."""
    return " ".join(str(error).split())[:300]


def line_in(path: str, error: BaseException) -> str:
    """Where an error came from: the deepest line of this file, as (path, line 3); nothing if it has no part in it."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == path]
    return f" ({path}, line {lines[-1]})" if lines else ""


def _import_file(path: Path, what: str, prefix: str) -> ModuleType:
    # Registered under a name of its own: dataclasses and pickling look their module up in sys.modules.
    module_name = f"{prefix}_{path.stem}_{abs(hash(str(path)))}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"{what}: {path.name} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(module_name, None)
        where = line_in(str(path), error)
        raise ValueError(f"{what}: importing it raised {type(error).__name__}: {one_line(error)}{where}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module
