"""Rows as the options want them: columns renamed and left out, prompts by a template, a system message in front."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from ..options import say_once
from .config import PLACE, RowOptions
from .sources import IMAGE_COLUMNS, QUESTION_COLUMNS, checked_column, column_names, load_rows, located, prompt_of

logger = logging.getLogger(__name__)


def dataset_rows(source: Any, options: RowOptions, use: str = "train", limit: int | None = None) -> list[dict]:
    """The rows of a source (see `load_rows`) as the options want them."""
    rows = shaped_rows(load_rows(source, options.wanted, use, limit), options)
    if unseen := [name for name in IMAGE_COLUMNS if any(row.get(name) is not None for row in rows)]:
        say_once(logger, f"the data has a column {unseen[0]!r}: models see text alone here, and rewards get the column")
    return rows


def shaped_rows(rows: Sequence[dict], options: RowOptions) -> list[dict]:
    """Copies of the rows as the options want them; ValueError that names the row."""
    return [located(shaped_row, index, row, options) for index, row in enumerate(rows)]


def shaped_row(row: dict, options: RowOptions) -> dict:
    """One row. A row's completion follows its prompt: a message where the prompt is one, else text."""
    if options.columns is not None:
        row = {name: _picked(row, column) for name, column in options.columns.items()}
    template, system, chat = options.prompt_template, options.system_prompt, options.chat_prompts
    if template is None and system is None and chat is None:
        return row
    if "messages" in row and "prompt" not in row and template is None:
        messages = checked_column(row["messages"], "messages")
        return row if system is None else {**row, "messages": _with_system(messages, system)}
    prompt = prompt_of(row) if template is None else _from_template(template, row)
    if chat is not None:
        prompt = _as_messages(prompt) if chat else _as_text(prompt)
    if system is not None:
        prompt = _with_system(prompt, system)
    completion = _completion(row, isinstance(prompt, str))
    return {**row, "prompt": prompt} | ({} if completion is None else {"completion": completion})


def filled(template: str, row: dict) -> str:
    """The template with the row's columns in its {places}."""

    def value(match: re.Match) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        name = match[2]
        if name not in row:
            raise ValueError(
                f"prompt_template has the place {{{name}}}, and there is no such column (columns found: "
                f"{column_names(row)}); write {{{{{name}}}}} for the word in braces"
            )
        if isinstance(row[name], bool) or not isinstance(row[name], (str, int, float)):
            raise ValueError(f"prompt_template: column {name!r} must be text or a number, got {row[name]!r:.60}")
        return str(row[name])

    return PLACE.sub(value, template)


def _from_template(template: str, row: dict) -> str | list[dict]:
    """Text where the row's own prompt is text, else a user's message."""
    text = filled(template, row)
    return text if isinstance(row.get("prompt"), str) else _as_messages(text)


def _picked(row: dict, column: str) -> Any:
    if column in row:
        return row[column]
    first, dot, rest = column.partition(".")
    if dot and isinstance(row.get(first), dict):
        return _picked(row[first], rest)
    raise ValueError(f"columns asks for {column!r}, which is not there (columns found: {column_names(row)})")


def _as_messages(prompt: str | list[dict]) -> list[dict]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _as_text(prompt: str | list[dict]) -> str:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0]["role"] == "user" and isinstance(prompt[0].get("content"), str):
        return prompt[0]["content"]
    raise ValueError(f"chat_prompts=false needs a prompt of one user's message, got {len(prompt)} messages")


def _with_system(prompt: str | list[dict], system: str) -> list[dict]:
    if isinstance(prompt, str):
        raise ValueError("system_prompt needs a conversational prompt, and this one is text; add chat_prompts=true")
    return [{"role": "system", "content": system}, *(m for m in prompt if m["role"] != "system")]


def _completion(row: dict, is_text: bool) -> str | list[dict] | None:
    """The row's completion in its prompt's form; of a question's row its answer. None if there is none that is text."""
    completion = row.get("completion")
    if "completion" not in row and "prompt" not in row:
        answers = [row.get(answer) for question, answer in QUESTION_COLUMNS.items() if question in row]
        completion = next(iter(answers), None)
    if isinstance(completion, str) and not is_text:
        return [{"role": "assistant", "content": completion}]
    if isinstance(completion, list) and is_text:
        spoken = [m for m in completion if isinstance(m, dict) and isinstance(m.get("content"), str)]
        return spoken[0]["content"] if len(completion) == len(spoken) == 1 else completion
    return completion if isinstance(completion, (str, list)) else None
