"""Find a reward function by name or file, call it, and check what it returns."""

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path

import numpy as np

from cukit.rewards.answer import boxed, exact, gsm8k, gsm8k_strict

BUILTIN_REWARDS: dict[str, Callable] = {"exact": exact, "boxed": boxed, "gsm8k": gsm8k, "gsm8k_strict": gsm8k_strict}


def load_reward(spec: str | Callable) -> Callable:
    """A built-in reward by its name, the function of "path/file.py:function", or `spec` itself if it is callable.

    The file is run as Python code, with its own folder importable. ValueError in one line if anything is missing.
    """
    if callable(spec):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"a reward is a name, 'file.py:function' or a function, not {type(spec).__name__}")
    if spec in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[spec]
    file_name, colon, function_name = spec.rpartition(":")
    if not colon or not file_name or not function_name:
        raise ValueError(
            f"unknown reward {spec!r}; use one of {', '.join(BUILTIN_REWARDS)}, or your own as 'path/file.py:function'"
        )
    path = Path(file_name)
    if not path.is_file():
        raise ValueError(f"reward {spec!r}: file {file_name!r} does not exist")
    module = _import_file(path.resolve(), spec)
    function = getattr(module, function_name, None)
    if function is None:
        found = [
            name for name, value in vars(module).items() if callable(value) and value.__module__ == module.__name__
        ]
        raise ValueError(
            f"reward {spec!r}: {file_name} has no {function_name!r} (it has: {', '.join(found) or 'nothing'})"
        )
    if not callable(function):
        raise ValueError(f"reward {spec!r}: {function_name!r} is {type(function).__name__}, not a function")
    return function


def reward_name(function: Callable) -> str:
    """The name that metrics use."""
    return getattr(function, "__name__", type(function).__name__)


def call_reward(
    function: Callable,
    name: str,
    prompts: Sequence,
    completions: Sequence,
    completion_ids: Sequence[Sequence[int]],
    columns: dict[str, list],
    prompt_ids: Sequence[Sequence[int]] | None = None,
    prompt_text: Sequence[str] | None = None,
) -> list[float | None]:
    """Call a reward and check it: as many values as completions, each None or a finite number.

    Whatever the reward raises comes out as a ValueError that names it, with the original chained.
    """
    keywords = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    keywords |= {"prompt_ids": prompt_ids, "prompt_text": prompt_text}
    try:
        values = function(**keywords)
    except Exception as error:
        hint = "; end its signature with **kwargs" if "unexpected keyword argument" in str(error) else ""
        raise ValueError(f"reward {name!r} raised {type(error).__name__}: {_one_line(error)}{hint}") from error
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise ValueError(
            f"reward {name!r} must return a list of numbers, one a completion, not {type(values).__name__}"
        )
    if len(values) != len(completions):
        raise ValueError(f"reward {name!r} returned {len(values)} values for {len(completions)} completions")
    return [_checked(value, name, index) for index, value in enumerate(values)]


def _checked(value, name: str, index: int) -> float | None:
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, (Real, np.number, np.bool_)) or isinstance(value, np.complexfloating):
        raise ValueError(
            f"reward {name!r}: value {index} must be a number or None, got {type(value).__name__} {value!r:.60}"
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"reward {name!r}: value {index} is {number}; return None where the reward does not apply")
    return number


def _import_file(path: Path, spec: str):
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
        raise ValueError(f"reward {spec!r}: importing it raised {type(error).__name__}: {_one_line(error)}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
