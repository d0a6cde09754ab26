"""Find a reward function by its name, with parameters or without, or in a file."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
from collections.abc import Callable

from ..user_code import load_function, names_a_file
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
        return _no_class(spec)
    if not isinstance(spec, str):
        raise ValueError(f"a reward is a name, 'file.py:function' or a function, not {type(spec).__name__}")
    call = CALL.fullmatch(spec.strip())
    if is_reward_name(spec):
        function = BUILTIN_REWARDS[spec if call is None else call[1]]
        if function is math and importlib.util.find_spec("math_verify") is None:
            raise ValueError(NEEDS_MATH_VERIFY)
        return _with_parameters(function, spec, call[2] if call is not None else "")
    if not names_a_file(spec):
        raise ValueError(
            f"unknown reward {spec!r}; use one of {', '.join(BUILTIN_REWARDS)}, or your own as 'path/file.py:function' "
            "(in training also a reward model's folder)"
        )
    return _no_class(load_function(spec, "reward"))


def _no_class(function: Callable) -> Callable:
    if inspect.isclass(function):
        name = function.__name__
        raise ValueError(f"reward {name!r} is a class: give an object of it, such as reward = {name}(…), or a function")
    return function


def is_reward_name(spec: str) -> bool:
    """Whether a text names a built-in reward, with parameters or without."""
    call = CALL.fullmatch(spec.strip())
    return spec in BUILTIN_REWARDS or (call is not None and call[1] in BUILTIN_REWARDS)


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
