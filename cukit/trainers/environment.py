"""Environments: what answers the model between its turns. See docs/ENVIRONMENTS.md."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..user_code import load_function, load_functions, one_line
from .tools import answer_call, parse_tool_calls, tool_schemas

NO_TOOLS = ("reset", "respond", "get_reward")  # methods that the model cannot call


class Environment:
    """One conversation's partner. Subclass it and pass the class as environment_factory: each completion gets an object
    of its own, so that it can hold state.

    An environment that gives rewards has a number `reward` and adds to it, or a method get_reward(): float or None,
    asked once, at the end. The reward is a column of its own, named after the class, beside the reward functions.
    """

    seed = 0  # the same for all completions of a prompt, and in a resumed run: draw from it and nothing else
    index = 0  # the completion's place among those of its prompt
    slow = False  # True: respond() runs in a thread, while other conversations go on
    tools: Sequence[Callable | dict] = ()  # functions or JSON schemas that the chat template shows the model

    def reset(self, **columns: Any) -> str | None:
        """Called before the first turn with the columns of the data row. A text is appended to the last user message;
        it must be the same for all completions of a prompt.
        """
        return None

    def respond(self, conversation: list[dict]) -> list[dict] | None:
        """The messages that follow the model's turn, none of them an assistant's; None: the episode is over.

        conversation: the messages of the prompt and of all turns, the last one {"role": "assistant", "content": what
        the model wrote}.
        """
        raise NotImplementedError(f"{type(self).__name__} needs respond(conversation)")


class ToolEnvironment(Environment):
    """Calls the tools that the model asks for; a turn without a call ends the episode.

    parser: text of a turn -> (text around the calls, ToolCalls); another form of calls is another parser.
    """

    def __init__(self, tools: Iterable[Callable], parser: Callable = parse_tool_calls):
        self.tools, self.parser = list(tools), parser
        self._by_name = {tool.__name__: tool for tool in self.tools}
        self.slow = any(inspect.iscoroutinefunction(tool) or getattr(tool, "slow", False) for tool in self.tools)
        self.num_calls = self.num_failed_calls = 0

    def respond(self, conversation: list[dict]) -> list[dict] | None:
        text, calls = self.parser(conversation[-1]["content"])
        if not calls:
            return None
        conversation[-1] |= {"content": text, "tool_calls": [call.as_message_part() for call in calls]}
        replies = []
        for call in calls:
            answer, worked = answer_call(call, self._by_name)
            self.num_calls += 1
            self.num_failed_calls += not worked
            replies.append({"role": "tool", "name": call.name, "content": answer})
        return replies


@dataclass
class Made:
    """An environment of one completion: what responds, and the user's own object (with tools= alone: the same)."""

    responder: Environment
    own: Any


class EnvironmentMaker:
    """Makes the environment of each completion, from environment_factory and tools.

    factory() gives an Environment with respond(), or as in TRL an object with reset(); its public methods are tools.
    ValueError in one line if it gives neither, or if a tool has no schema.
    """

    def __init__(self, factory: Callable[[], Any] | None, tools: Sequence[Callable] | None = None):
        self.factory, self.tools = factory, list(tools or ())
        if factory is not None and not callable(factory):
            raise ValueError(f"environment_factory must be a class or a function, got {type(factory).__name__}")
        if wrong := [tool for tool in self.tools if not (callable(tool) and hasattr(tool, "__name__"))]:
            raise ValueError(f"tools must be functions, got {wrong[0]!r:.60}")
        try:
            made = self.make(0, 0)
        except Exception as error:
            if isinstance(error, ValueError):  # make's own, or as clear
                raise
            raise ValueError(f"environment_factory() raised {type(error).__name__}: {one_line(error)}") from error
        self.name = type(made.own).__name__
        self.schemas = tool_schemas(made.responder.tools)
        self.calls_tools = isinstance(made.responder, ToolEnvironment)
        self.gives_rewards = _reward_method(made.own) is not None

    def make(self, seed: int, index: int) -> Made:
        own = self.factory() if self.factory is not None else ToolEnvironment(self.tools)
        name, is_own = type(own).__name__, isinstance(own, Environment)
        own.seed, own.index = seed, index
        if is_own and type(own).respond is not Environment.respond:
            if self.factory is not None and self.tools:
                raise ValueError(f"{name} has respond(), so it answers the model itself: give it the tools")
            return Made(own, own)
        if not is_own and hasattr(own, "respond"):
            raise ValueError(f"{name} has respond(): derive it from cukit.Environment")
        methods = _public_methods(own)
        if not callable(getattr(own, "reset", None)) or not methods + self.tools:
            raise ValueError(
                f"environment_factory gave {name}, which is no cukit.Environment with respond(conversation) and has "
                "no reset() with public methods that the model can call as tools"
            )
        return Made(ToolEnvironment([*self.tools, *methods]), own)

    def reward_function(self) -> Callable:
        """The rewards that environments give themselves, as a reward function named after the class."""

        def own_rewards(environments: Sequence[Any], **columns: Any) -> list[float | None]:
            return [_reward_method(environment)() for environment in environments]

        own_rewards.__name__ = self.name
        return own_rewards

    def with_own_reward(self, reward_funcs: Any, weights: list[float] | None = None) -> tuple[Any, list[float] | None]:
        """(reward functions, their weights) and behind them, with weight 1, what environments reward themselves."""
        if not self.gives_rewards:
            return reward_funcs, weights
        if callable(reward_funcs) or isinstance(reward_funcs, str):
            reward_funcs = [reward_funcs]
        return [*(reward_funcs or []), self.reward_function()], None if weights is None else [*weights, 1.0]

    def with_tools(self, rows: Sequence[dict]) -> list[dict]:
        """The rows that prompts are rendered from: with the tools' schemas. ValueError for a prompt that is text."""
        for index, row in enumerate(rows):
            if isinstance(row["prompt"], str):
                raise ValueError(
                    f"data row {index}: the prompt is text; with an environment or tools it must be a list of messages"
                )
        return [row | {"tools": self.schemas} for row in rows] if self.schemas else list(rows)

    def check_template(self, tokenizer: Any, template: dict | None) -> None:
        """ValueError in one line if the chat template cannot show the tools, their calls or their results."""
        chat, more, name = [{"role": "user", "content": "?"}], template or {}, tokenizer.name
        shown, plain = (tokenizer.render_chat(chat, True, tools, **more) for tools in (self.schemas or None, None))
        if self.schemas and shown == plain:
            raise ValueError(
                f"{name}: the chat template does not show tools; take a model that was taught to call them"
            )
        if self.calls_tools:
            marker = tokenizer.token_to_id("<tool_call>")
            if marker is not None and not tokenizer.shows(marker):
                raise ValueError(f"{name}: <tool_call> is a special token there, so that its text does not show calls")
            said, replies = {"role": "assistant", "content": "?"}, [{"role": "tool", "name": "?", "content": "?"}]
            tokenizer.encode_continuation([*chat, said], replies, -1, self.schemas, **more)


def _public_methods(own: Any) -> list[Callable]:
    found = inspect.getmembers(own, inspect.ismethod)
    return [method for name, method in found if not name.startswith("_") and name not in NO_TOOLS]


def _reward_method(own: Any) -> Callable | None:
    if callable(getattr(own, "get_reward", None)):
        return own.get_reward
    if isinstance(own, Environment) and hasattr(own, "reward"):
        return lambda: own.reward
    return None


def checked_replies(replies: Any, where: str) -> list[dict]:
    """What respond() returned, as a list (empty: the episode is over); ValueError if it is no list of messages."""
    found = [] if replies is None else replies
    if not isinstance(found, (list, tuple)):
        raise ValueError(
            f"{where} must return a list of messages or None, got {type(replies).__name__} {replies!r:.60}"
        )
    for message in found:
        well_formed = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not well_formed or not isinstance(message.get("role"), str) or message["role"] == "assistant":
            raise ValueError(
                f"{where} must return messages {{'role': …, 'content': text}} of others than the assistant, "
                f"got {message!r:.80}"
            )
    return list(found)


def called(what: str, row: int, function: Callable, *arguments: Any, **keywords: Any) -> Any:
    """Call a user's method; what it raises comes out as a ValueError that names it, its line and the data row."""
    try:
        return function(*arguments, **keywords)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        hint = "; end its signature with **columns" if "unexpected keyword argument" in str(error) else ""
        text = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the environment's {what} raised {type(error).__name__}: {text}{hint}{place}, prompt {row} of the batch"
        ) from error


# ---- by file ----


def make_maker(factory: Any, tools: Any) -> EnvironmentMaker | None:
    """Of a class and functions, or of their names: "path/file.py:Class" and ["path/file.py:function,function", …].
    None without either.
    """
    if isinstance(factory, str):
        factory = load_function(factory, "environment")
    found = []
    for tool in tools or ():
        found += load_functions(tool, "tools") if isinstance(tool, str) else [tool]
    return EnvironmentMaker(factory, found) if factory is not None or found else None
