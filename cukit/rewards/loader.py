"""Find a reward function by its name, with parameters or without, or in a file."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from .calling import one_line
from .countdown import countdown
from .final_box import boxed, boxed_partial
from .final_number import gsm8k, gsm8k_strict
from .lengths import length, overlong
from .plain_text import exact, format
from .programs import code
from .symbolic import NEEDS_MATH_VERIFY, math

BUILTIN_REWARDS: dict[str, Callable] = {
    "exact": exact,
    "boxed": boxed,
    "gsm8k": gsm8k,
    "gsm8k_strict": gsm8k_strict,
    "boxed_partial": boxed_partial,
    "math": math,
    "format": format,
    "length": length,
    "overlong": overlong,
    "countdown": countdown,
    "code": code,
}
IN_A_PROCESS = ("math",)  # sympy may take any time and memory for what a model writes
CALL = re.compile(r"(\w+)\((.*)\)", re.DOTALL)


def load_reward(spec: str | Callable) -> Callable:
    """A built-in reward by its name, the function of "path/file.py:function", or `spec` itself if it is callable.

    A name may have parameters: "length(target=200)". The file is run as Python code in this process, with its own
    folder importable. ValueError in one line if anything is missing.
    """
    if callable(spec):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"a reward is a name, 'file.py:function' or a function, not {type(spec).__name__}")
    call = CALL.fullmatch(spec.strip())
    if spec in BUILTIN_REWARDS or (call is not None and call[1] in BUILTIN_REWARDS):
        function = BUILTIN_REWARDS[spec if call is None else call[1]]
        if function is math and importlib.util.find_spec("math_verify") is None:
            raise ValueError(NEEDS_MATH_VERIFY)
        return _with_parameters(function, spec, call[2] if call is not None else "")
    file_name, colon, function_name = spec.rpartition(":")
    if not colon or not file_name or not function_name:
        raise ValueError(
            f"unknown reward {spec!r}; use one of {', '.join(BUILTIN_REWARDS)}, or your own as 'path/file.py:function'"
        )
    path = Path(file_name)
    if not path.is_file():
        raise ValueError(f"reward {spec!r}: file {file_name!r} does not exist")
    module = _import_file(path.resolve(), spec)
    found_function = getattr(module, function_name, None)
    if found_function is None:
        found = [
            name for name, value in vars(module).items() if callable(value) and value.__module__ == module.__name__
        ]
        raise ValueError(
            f"reward {spec!r}: {file_name} has no {function_name!r} (it has: {', '.join(found) or 'nothing'})"
        )
    if not callable(found_function):
        raise ValueError(f"reward {spec!r}: {function_name!r} is {type(found_function).__name__}, not a function")
    return found_function


def runs_in_a_process(spec: str | Callable) -> bool:
    """Whether the reward runs in a worker process: those from a file, and the built-in ones in IN_A_PROCESS."""
    if not isinstance(spec, str):
        return False
    call = CALL.fullmatch(spec.strip())
    name = spec if call is None else call[1]
    return name in IN_A_PROCESS if name in BUILTIN_REWARDS else ":" in spec


def reward_name(function: Callable) -> str:
    """The name that metrics use."""
    return getattr(function, "__name__", type(function).__name__)


def _with_parameters(function: Callable, spec: str, text: str) -> Callable:
    """The function with its parameters (its keyword-only arguments) as `text` has them: `target=200`."""
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        given = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"reward {spec!r}: parameters are written as name(key=value, key=value)") from None
    for name in given:
        if name not in known:
            raise ValueError(f"reward {spec!r} has no parameter {name!r} (it has: {', '.join(known) or 'none'})")
    for name, default in known.items():
        if default is inspect.Parameter.empty and name not in given:
            needed = ", ".join(f"{key}=…" for key, value in known.items() if value is inspect.Parameter.empty)
            raise ValueError(f"reward {spec!r} needs parameters: write {function.__name__}({needed})")
    for name, value in given.items():
        kind = bool if isinstance(known[name], bool) else float
        is_bool = isinstance(value, bool)
        if is_bool != (kind is bool) or not isinstance(value, (bool, int, float)) or not 0 <= value < float("inf"):
            wanted = "True or False" if kind is bool else "a number, at least 0"
            raise ValueError(f"reward {spec!r}: {name} must be {wanted}, got {value!r:.60}")
    if not known:
        return function
    parameters = {name: given.get(name, default) for name, default in known.items()}

    @functools.wraps(function)
    def with_parameters(*arguments: object, **keywords: object) -> object:
        return function(*arguments, **(keywords | parameters))  # a column of the data may have a parameter's name

    return with_parameters


def _import_file(path: Path, spec: str) -> ModuleType:
    # Registered under a name of its own: dataclasses and pickling look their module up in sys.modules.
    module_name = f"cukit_reward_{path.stem}_{abs(hash(str(path)))}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"reward {spec!r}: {path.name} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(module_name, None)
        lines = [
            line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)
        ]
        where = f" ({path}, line {lines[-1]})" if lines else ""
        raise ValueError(
            f"reward {spec!r}: importing it raised {type(error).__name__}: {one_line(error)}{where}"
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    return module
