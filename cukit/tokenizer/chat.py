"""Chats as text: a model's chat templates, rendered as transformers renders them. What would be lost is refused."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Roles of other formats, and what templates call them.
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant", "model": "assistant"}
MAX_CHECKED_SHAPES = 1000


class ChatTemplates:
    """The templates of a model by name: "default", and maybe "tool_use" for chats with tools, or others."""

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str]):
        self.templates, self._special_tokens = templates, special_tokens
        self._compiled: dict[str, jinja2.Template] = {}
        self._checked: set = set()

    def render(
        self, messages: Sequence[dict], add_generation_prompt: bool, tools: list[dict] | None, arguments: dict
    ) -> str:
        """The text of a chat. ValueError if the template raises or leaves out what a message says."""
        for index, message in enumerate(messages):
            _check_message(index, message)
        if tools is not None and not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("tools must be JSON schemas (objects); describe a Python function by its schema")
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ValueError(f"none of its chat templates ({', '.join(self.templates)}) is named 'default'")
        variables = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        variables |= self._special_tokens | arguments
        shape = (name, *map(_shape, messages), repr(variables))
        if shape not in self._checked:
            self._check_nothing_is_lost(name, messages, variables)
            if len(self._checked) >= MAX_CHECKED_SHAPES:
                self._checked.clear()
            self._checked.add(shape)
        return self._render(name, messages, variables)

    def render_continuation(
        self, messages: Sequence[dict], replies: Sequence[dict], tools: list[dict] | None, arguments: dict
    ) -> str:
        """What a chat that ends with an assistant message gains by `replies` and the next generation prompt.

        It begins right behind the assistant's last word, with what the template ends an answer with. The chat is
        rendered with a mark for that answer, and what follows the mark is taken: how the template renders anew what
        came before (Qwen3's drops earlier thoughts) does not matter. ValueError if the mark cannot be found, or a
        reply stands before it.
        """
        said = [str(message.get("content")) for message in (*messages, *replies)]
        mark = next(mark for mark in map(_mark, range(MAX_CHECKED_SHAPES, 10**5)) if not any(mark in x for x in said))
        chat = [*messages[:-1], {"role": "assistant", "content": mark}]
        text = self.render([*chat, *replies], True, tools, arguments)
        shape = ("continuation", len(messages), *map(_shape, replies))
        if shape not in self._checked:
            marks = [_mark(MAX_CHECKED_SHAPES - 1 - index) for index in range(len(replies))]
            marked = [_with_text(reply, found) for reply, found in zip(replies, marks, strict=True)]
            after = self.render([*chat, *marked], True, tools, arguments).partition(mark)[2]
            if text.count(mark) != 1 or any(
                found not in after for reply, found in zip(replies, marks, strict=True) if _has_text(reply)
            ):
                raise ValueError(
                    "the chat template does not show an assistant's answer and what follows it one after the other, "
                    "as they are: a chat with it cannot go on from the tokens that were sampled"
                )
            self._checked.add(shape)
        return text.rpartition(mark)[2]

    def _render(self, name: str, messages: Sequence[dict], variables: dict) -> str:
        try:
            if name not in self._compiled:
                self._compiled[name] = _environment().from_string(self.templates[name])
            return self._compiled[name].render(messages=list(messages), **variables)
        except Exception as error:  # a template is a program: any exception may come out of it
            text = " ".join(str(error).split())[:300]
            raise ValueError(f"the chat template failed: {text or type(error).__name__}") from error

    def _check_nothing_is_lost(self, name: str, messages: Sequence[dict], variables: dict) -> None:
        """Render the chat with a number in place of each text: each must come out, and not as a Python object.

        Templates skip roles that they do not know, and some skip content in parts. They may change a text that they
        do show (Qwen3's drops earlier thoughts), so the texts themselves are not looked for.
        """
        marked = [_with_text(message, _mark(index)) for index, message in enumerate(messages)]
        wheres = [f"message {index} (role {message['role']!r})" for index, message in enumerate(messages)]
        in_parts = [
            i for i, message in enumerate(messages) if message.get("content") and isinstance(message["content"], list)
        ]
        advice = "the chat template does not take content in parts; give its text as one string"
        try:
            text = self._render(name, marked, variables)
        except ValueError as error:
            if in_parts:
                raise ValueError(f"{wheres[in_parts[0]]}: {advice} ({error})") from error.__cause__
            return  # the template wants more of a text than a number has; what it raises for the chat itself counts
        for index, message in enumerate(messages):
            if index in in_parts and (_mark(index) not in text or f"'text': '{_mark(index)}" in text):
                raise ValueError(f"{wheres[index]}: {advice}")
            if _has_text(message) and _mark(index) not in text:
                known = OTHER_ROLES.get(message["role"].lower())
                hint = f"write the role {known!r}" if known else "it knows no such role there"
                raise ValueError(f"{wheres[index]}: the chat template leaves out what it says; {hint}")


def _check_message(index: int, message: object) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {index} must be an object with a 'role', got {message!r:.80}")
    where, content = f"message {index} (role {message['role']!r})", message.get("content")
    if isinstance(content, list) and content:
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"{where}: a part of its content must be {{'type': 'text', 'text': …}}, got {part!r:.80}"
                )
    elif content is None or content == []:
        more = [key for key, value in message.items() if key not in ("role", "content", "name") and value]
        if not more:  # tool_calls, reasoning_content, …
            raise ValueError(f"{where} has no content")
    elif not isinstance(content, str):
        raise ValueError(f"{where}: its content must be text, got {type(content).__name__} {content!r:.60}")


def _has_text(message: dict) -> bool:
    content = message.get("content") or ""
    return bool(content.strip() if isinstance(content, str) else any(part["text"].strip() for part in content))


def _mark(index: int) -> str:
    return f"31415926{index:05d}53589793"


def _with_text(message: dict, text: str) -> dict:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [{**part, "text": text} for part in content[:1]]}
    return {**message, "content": text} if _has_text(message) else message


def _shape(message: dict) -> tuple:
    """What decides whether a template shows a message: all but the text."""
    others = {key: value for key, value in message.items() if key != "content"}
    return (_has_text(message), type(message.get("content")), repr(others))


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote in training templates; rendered as is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment transformers renders chat templates in: no loader, no attributes that begin with _."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda text_format: datetime.now().strftime(text_format)
    return environment
