"""Tools: Python functions that a model may call. Their JSON schemas, the calls in a model's text, and the answers."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
SECTION = re.compile(r"(Args|Arguments|Raises|Yields|Example|Examples):\s*|(Returns):\s*(.*)")


@dataclass
class ToolCall:
    """A call as the model wrote it. error: what is wrong with it, "" for one that can be made."""

    name: str = ""
    arguments: dict | None = None
    error: str = ""

    def as_message_part(self) -> dict:
        """As chat templates and rewards have it."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments or {}}}


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """(the text around the calls, the calls) of Hermes' and Qwen's form: <tool_call>{"name": …, "arguments": {…}}
    </tool_call>. What stands in thoughts (before the last </think>) is no call. A call that is not closed ends with
    the text.
    """
    thoughts, end, answer = text.rpartition("</think>")
    calls = [_call_of(found) for found in CALL.findall(answer)]
    return thoughts + end + CALL.sub("", answer).rstrip() if calls else text, calls


def _call_of(text: str) -> ToolCall:
    try:
        found = json.loads(text)
        if isinstance(found, dict) and isinstance(found.get("arguments"), str):
            found["arguments"] = json.loads(found["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the tool call is not JSON: {_one_line(error)}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(error='a tool call must be an object with a "name" and "arguments"')
    arguments = found.get("arguments")
    if not isinstance(arguments, (dict, type(None))):
        return ToolCall(found["name"], error='the "arguments" of a tool call must be an object')
    return ToolCall(found["name"], arguments or {})


def answer_call(call: ToolCall, tools: dict[str, Callable]) -> tuple[str, bool]:
    """(what the model reads, did it work): the tool's result as text or JSON, or {"error": …} of what went wrong."""
    try:
        if call.error:
            raise ValueError(call.error)
        if call.name not in tools:
            raise ValueError(f"there is no tool {call.name!r}; there are {', '.join(tools)}")
        result = tools[call.name](**call.arguments or {})
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return _plain(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)), True
    except (Exception, SystemExit) as error:  # a tool may raise anything, and the model may learn from it
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        return _plain(json.dumps({"error": kind + _one_line(error)}, ensure_ascii=False)), False


async def _awaited(result: Any) -> Any:
    return await result


def _plain(text: str) -> str:
    """Half characters, which a model can write as JSON escapes, become "?": no tokenizer takes them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# ---- schemas ----


def tool_schemas(tools: Sequence[Callable | dict]) -> list[dict]:
    """One JSON schema a tool; what is a schema already stays."""
    return [tool if isinstance(tool, dict) else json_schema(tool) for tool in tools]


def json_schema(function: Callable) -> dict:
    """The schema that chat templates show of a function, as transformers' get_json_schema makes it: from type hints
    and a Google-style docstring. ValueError in one line if a hint or the description of an argument is missing.
    """
    name = getattr(function, "__name__", type(function).__name__)
    text = inspect.getdoc(function)
    if not text:
        raise ValueError(f"tool {name!r} needs a docstring that says what it does, with its arguments under 'Args:'")
    description, arguments, returned = _docstring(text)
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ValueError(f"tool {name!r}: a type hint cannot be read: {error}") from None
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"tool {name!r}: {parameter} cannot be given by name; a model names every argument")
        if parameter.name not in hints:
            raise ValueError(f"tool {name!r}: the argument {parameter.name!r} needs a type hint")
        if parameter.name not in arguments:
            raise ValueError(f"tool {name!r}: its docstring does not describe {parameter.name!r} under 'Args:'")
        properties[parameter.name] = _described(
            _type_schema(hints[parameter.name], f"tool {name!r}: {parameter.name}"), arguments[parameter.name]
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    found = {"name": name, "description": description, "parameters": parameters}
    if "return" in hints:
        found["return"] = _type_schema(hints["return"], f"tool {name!r}: its result")
        found["return"] |= {"description": returned} if returned else {}
    return {"type": "function", "function": found}


def _described(schema: dict, text: str) -> dict:
    """With the description, and the choices that it may end with: (choices: ["a", "b"])."""
    choices = re.search(r"\(choices:\s*(\[.*?\])\)\s*$", text, re.IGNORECASE)
    if choices:
        schema, text = schema | {"enum": json.loads(choices[1])}, text[: choices.start()].strip()
    return schema | {"description": text}


def _type_schema(hint: Any, where: str) -> dict:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if origin is Literal:
        kinds = {JSON_TYPES.get(type(value)) for value in arguments}
        if None not in kinds and len(kinds) == 1:
            return {"type": kinds.pop(), "enum": list(arguments)}
    elif origin in (Union, types.UnionType):
        return _union_schema(arguments, where)
    elif list in (hint, origin):
        return {"type": "array"} | ({"items": _type_schema(arguments[0], where)} if arguments else {})
    elif dict in (hint, origin):
        return {"type": "object"} | ({"additionalProperties": _type_schema(arguments[1], where)} if arguments else {})
    shown = hint.__name__ if isinstance(hint, type) else str(hint)
    raise ValueError(f"{where} has the type {shown}; use int, float, str, bool, list, dict, Literal, Any, or unions")


def _union_schema(members: tuple, where: str) -> dict:
    schemas = [_type_schema(member, where) for member in members if member is not type(None)]
    if len(schemas) == 1:
        found = schemas[0]
    elif all(schema.keys() == {"type"} for schema in schemas):
        found = {"type": sorted(schema["type"] for schema in schemas)}
    else:
        found = {"anyOf": schemas}
    return found | ({"nullable": True} if type(None) in members else {})


def _docstring(text: str) -> tuple[str, dict[str, str], str]:
    """(description, argument -> its description, what is returned) of a Google-style docstring, each in one line."""
    sections: dict[str, list[str]] = {"": []}
    current = sections[""]
    for line in text.splitlines():
        heading = SECTION.fullmatch(line)
        if heading:
            current = sections.setdefault((heading[1] or heading[2]).replace("Arguments", "Args"), [])
            current.append(heading[3] or "")
        else:
            current.append(line)
    arguments: dict[str, str] = {}
    name, lines = None, [line for line in sections.get("Args", []) if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    for line in lines:
        started = re.match(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)", line.strip())
        if started and len(line) - len(line.lstrip()) == indent:
            name, arguments[started[1]] = started[1], started[2].strip()
        elif name is not None:
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    description, returned = "\n".join(sections[""]).strip(), " ".join(" ".join(sections.get("Returns", [])).split())
    return description, arguments, returned
