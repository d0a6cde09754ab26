"""Call rewards on a batch, and check what they return."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Real
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np

from ..user_code import one_line
from .log import RewardLog, TrainerState


@dataclass
class RewardBatch:
    """What the rewards of a batch are given: lists with an entry a completion, and where the run stands."""

    prompts: Sequence
    completions: Sequence
    completion_ids: Sequence[Sequence[int]]
    columns: dict[str, list]
    prompt_ids: Sequence[Sequence[int]] | None = None
    prompt_text: Sequence[str] | None = None
    trainer_state: TrainerState | None = None

    def keywords(self, function: Callable, log: RewardLog | None) -> dict:
        """The keywords of a call, in lists of its own: a user's reward may change what it is given. The names here and
        TRL's win over columns of the data.
        """
        found: dict[str, Any] = {**self.columns, "prompts": self.prompts, "completions": self.completions}
        found, names = found if _is_built_in(function) else _own(found), _names_taken(function)
        found["completion_ids"] = [ids[:] for ids in self.completion_ids]
        more: dict[str, Any] = {
            "prompt_ids": None if self.prompt_ids is None else [ids[:] for ids in self.prompt_ids],
            "prompt_text": self.prompt_text,
            "trainer_state": self.trainer_state,
        }
        more |= {} if log is None else {"log_extra": log.extra, "log_metric": log.metric}
        more = {key: value for key, value in more.items() if value is not None}
        return found | {key: value for key, value in more.items() if names is None or key in names}


def call_reward(
    function: Callable,
    name: str,
    prompts: Sequence,
    completions: Sequence,
    completion_ids: Sequence[Sequence[int]],
    columns: dict[str, list],
    prompt_ids: Sequence[Sequence[int]] | None = None,
    prompt_text: Sequence[str] | None = None,
    trainer_state: TrainerState | None = None,
    log: RewardLog | None = None,
) -> list[float | None]:
    """Call a reward in this process and check it: as many values as completions, each None or a finite number.

    `prompt_ids`, `prompt_text`, `trainer_state` and the `log_extra` and `log_metric` of `log`, where given, go to
    rewards that take them by name or by **kwargs. These names and TRL's win over columns of the data. Whatever the
    reward raises comes out as a ValueError that names the reward, its file and line, and where it can be told the
    completion; the original is chained.
    """
    batch = RewardBatch(prompts, completions, completion_ids, columns, prompt_ids, prompt_text, trainer_state)
    return call_rewards([(function, name)], batch, log)[0]


def call_rewards(
    rewards: Sequence[tuple[Callable, str]], batch: RewardBatch, log: RewardLog | None = None
) -> list[list[float | None]]:
    """The values of each (function, name): the plain ones in turn, then the `async def` ones side by side."""
    whole = log or RewardLog(len(batch.completions))
    calls = [_Call(function, name, batch, RewardLog(whole.count) if log else None) for function, name in rewards]
    found: list = []
    try:
        for call in calls:
            found.append(call.start())
    except ValueError:
        for values in filter(inspect.iscoroutine, found):
            values.close()  # nothing awaits it any more
        raise
    waiting = [index for index, values in enumerate(found) if inspect.isawaitable(values)]
    if waiting:
        done = _gathered([calls[index].finished(found[index]) for index in waiting])
        for index, values in zip(waiting, done, strict=True):
            found[index] = values
    checked = [call.checked(values) for call, values in zip(calls, found, strict=True)]
    for call in calls:
        if call.log is not None:
            whole.add(call.log.columns, call.log.metrics)
    return checked


def _gathered(coroutines: list) -> list:
    import asyncio  # here and not above: it takes a tenth of a second, and few rewards need it
    from concurrent.futures import ThreadPoolExecutor

    async def together() -> list:
        return await asyncio.gather(*coroutines)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(together())
    with ThreadPoolExecutor(1) as other:  # a notebook's own loop runs in this thread
        return other.submit(asyncio.run, together()).result()


class _Call:
    """One reward on one batch."""

    def __init__(self, function: Callable, name: str, batch: RewardBatch, log: RewardLog | None):
        self.function, self.name, self.batch, self.log = function, name, batch, log
        self.given: list = []  # the completions as the function has them

    def start(self) -> Any:
        """What the function returns: the values, or for `async def` what they are awaited of."""
        try:
            keywords = self.batch.keywords(self.function, self.log)
            self.given = list(keywords["completions"])
            return self.function(**keywords)
        except (Exception, SystemExit) as error:
            raise self._named(error) from error

    async def finished(self, values: Awaitable) -> Any:
        try:
            return await values
        except (Exception, SystemExit) as error:
            raise self._named(error) from error

    def _named(self, error: BaseException) -> ValueError:
        hint = "; end its signature with **kwargs" if "unexpected keyword argument" in str(error) else ""
        at_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
        if at_call and isinstance(error, TypeError) and "required positional argument" in str(error):
            names = ["prompts", "completions", "completion_ids", *self.batch.columns]
            hint = f"; a reward is called by keyword, with {', '.join(dict.fromkeys(names))}"
        where = _where_it_failed(self.function, error, self.given)
        return ValueError(f"reward {self.name!r} raised {type(error).__name__}: {one_line(error)}{hint}{where}")

    def checked(self, values: Any) -> list[float | None]:
        name, completions, where = self.name, self.batch.completions, defined_at(self.function)
        if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist"):  # a tensor of any library
            values = values.tolist()
        if not isinstance(values, (list, tuple, np.ndarray)):
            raise ValueError(
                f"reward {name!r} must return a list of numbers, one a completion, not {type(values).__name__}{where}"
            )
        if len(values) != len(completions):
            raise ValueError(f"reward {name!r} returned {len(values)} values for {len(completions)} completions{where}")
        if self.log is not None:
            self.log.check(name, where)
        return [_checked(value, name, index, completions, where) for index, value in enumerate(values)]


def _own(value: Any) -> Any:
    """A copy of the lists and dicts that a value is made of."""
    if isinstance(value, dict):
        return {key: _own(part) for key, part in value.items()}
    return [_own(part) for part in value] if isinstance(value, list) else value


def _is_built_in(function: Callable) -> bool:
    """Whether the code is this package's; what wraps it is not, though it may take its name or all its attributes."""
    return type(function) is FunctionType and str(function.__globals__.get("__name__")).startswith("cukit.rewards.")


def _names_taken(function: Callable) -> Collection[str] | None:
    """The keywords that a function can be called with, None for all; what has no signature is thought to take all."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return None if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) else parameters


def _code_of(function: Callable) -> CodeType | None:
    function = inspect.unwrap(getattr(function, "func", function))  # a partial's function
    found = function if hasattr(function, "__code__") else type(function).__call__
    return getattr(found, "__code__", None)


def defined_at(function: Callable) -> str:
    """` (file, line)`, or nothing where it can not be told."""
    code = _code_of(function)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code is not None else ""


def _where_it_failed(function: Callable, error: BaseException, completions: Sequence) -> str:
    """The deepest frame of the error in the reward's own file, and the completion at work where a frame still has it.

    From Python 3.12 on a comprehension leaves nothing behind: there no completion is named.
    """
    code = _code_of(function)
    frames = list(traceback.walk_tb(error.__traceback__))[1:]  # without the call itself
    if code is None or not frames:
        return defined_at(function)
    own = [(frame, line) for frame, line in frames if frame.f_code.co_filename == code.co_filename]
    frame, line = (own or frames)[-1]
    places = {id(completion): index for index, completion in enumerate(completions)}
    at_work = [id(value) for frame, _ in reversed(own) for value in list(frame.f_locals.values())]
    at_work += _arguments_of_callee(frames, frame)
    index = next((places[value] for value in at_work if value in places), None)
    row = "" if index is None else f", with completion {index}: {_shown(completions[index])}"
    return f" ({frame.f_code.co_filename}, line {line}{row})"


def _arguments_of_callee(frames: list[tuple[FrameType, int]], caller: FrameType) -> list[int]:
    """The ids of what the frame below `caller` was called with; none where there is no such frame."""
    places = [place for place, (frame, _) in enumerate(frames[:-1]) if frame is caller]
    if not places:
        return []
    callee = frames[places[-1] + 1][0]
    names = callee.f_code.co_varnames[: callee.f_code.co_argcount]
    return [id(callee.f_locals[name]) for name in names if name in callee.f_locals]


def _shown(completion: object) -> str:
    return " ".join(f"{completion!r:.60}".split())


def _checked(value: Any, name: str, index: int, completions: Sequence, where: str) -> float | None:
    if value is None:
        return None
    if getattr(value, "ndim", None) == 0 and not isinstance(value, np.generic):  # an array or a tensor of one number
        value = value.item()
    if not isinstance(value, (Real, np.number, np.bool_)) or isinstance(value, np.complexfloating):
        raise ValueError(
            f"reward {name!r}: value {index} must be a number or None, got {type(value).__name__} {value!r:.60}"
            f" (completion: {_shown(completions[index])}){where}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(
            f"reward {name!r}: value {index} is {number}; return None where the reward does not apply"
            f" (completion: {_shown(completions[index])}){where}"
        )
    return number
