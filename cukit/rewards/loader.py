"""Find a reward function by name or file, call it, and check what it returns."""

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from numbers import Real
from types import CodeType
from typing import Any

import numpy as np

from ..user_code import load_function, names_a_file, one_line
from .final_box import boxed
from .final_number import gsm8k, gsm8k_strict
from .plain_text import exact, format

BUILTIN_REWARDS: dict[str, Callable] = {
    "exact": exact,
    "boxed": boxed,
    "gsm8k": gsm8k,
    "gsm8k_strict": gsm8k_strict,
    "format": format,
}


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
    if not names_a_file(spec):
        raise ValueError(
            f"unknown reward {spec!r}; use one of {', '.join(BUILTIN_REWARDS)}, or your own as 'path/file.py:function'"
        )
    return load_function(spec, "reward")


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

    `prompt_ids` and `prompt_text`, where given, go to rewards that take them by name or by **kwargs. These names and
    TRL's win over columns of the data. Whatever the reward raises comes out as a ValueError that names the reward,
    its file and line, and where it can be told the completion; the original is chained.
    """
    keywords = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    more = {"prompt_ids": prompt_ids, "prompt_text": prompt_text}
    keywords |= {key: value for key, value in more.items() if value is not None and _takes(function, key)}
    try:
        values = function(**keywords)
    except (Exception, SystemExit) as error:
        hint = "; end its signature with **kwargs" if "unexpected keyword argument" in str(error) else ""
        where = _where_it_failed(function, error, completions)
        raise ValueError(f"reward {name!r} raised {type(error).__name__}: {one_line(error)}{hint}{where}") from error
    where = _defined_at(function)
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise ValueError(
            f"reward {name!r} must return a list of numbers, one a completion, not {type(values).__name__}{where}"
        )
    if len(values) != len(completions):
        raise ValueError(f"reward {name!r} returned {len(values)} values for {len(completions)} completions{where}")
    return [_checked(value, name, index, completions, where) for index, value in enumerate(values)]


def _takes(function: Callable, keyword: str) -> bool:
    """Whether a function can be called with this keyword; what has no signature is thought to take it."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_all or keyword in parameters


def _code_of(function: Callable) -> CodeType | None:
    function = inspect.unwrap(getattr(function, "func", function))  # a partial's function
    found = function if hasattr(function, "__code__") else type(function).__call__
    return getattr(found, "__code__", None)


def _defined_at(function: Callable) -> str:
    code = _code_of(function)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code is not None else ""


def _where_it_failed(function: Callable, error: BaseException, completions: Sequence) -> str:
    """The deepest frame of the error in the reward's own file, and the completion it had."""
    code = _code_of(function)
    frames = list(traceback.walk_tb(error.__traceback__))[1:]  # without the call itself
    if code is None or not frames:
        return _defined_at(function)
    own = [(frame, line) for frame, line in frames if frame.f_code.co_filename == code.co_filename]
    frame, line = (own or frames)[-1]
    places = {id(completion): index for index, completion in enumerate(completions)}
    at_work = (id(value) for frame, _ in reversed(own) for value in list(frame.f_locals.values()))
    index = next((places[value] for value in at_work if value in places), None)
    row = "" if index is None else f", with completion {index}: {_shown(completions[index])}"
    return f" ({frame.f_code.co_filename}, line {line}{row})"


def _shown(completion: object) -> str:
    return " ".join(f"{completion!r:.60}".split())


def _checked(value: Any, name: str, index: int, completions: Sequence, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    where = f" (completion: {_shown(completions[index])}){where}"
    if not isinstance(value, (Real, np.number, np.bool_)) or isinstance(value, np.complexfloating):
        raise ValueError(
            f"reward {name!r}: value {index} must be a number or None, got {type(value).__name__} {value!r:.60}{where}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(
            f"reward {name!r}: value {index} is {number}; return None where the reward does not apply{where}"
        )
    return number
