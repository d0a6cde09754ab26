"""JSONL rows and their columns.

Row forms (other columns are kept, rewards get them):
    {"prompt": text or messages}                        reinforcement learning
    {"prompt": ..., "completion": ...}                  both text, or both message lists
    {"messages": [...]}                                 loss on what the assistant says
    {"text": ...}                                       loss on everything
    {"question": text} or {"problem": text}             stands for a user's message; "answer" or "solution" is the
                                                        completion where one is needed (GSM8K's and MATH's columns)
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

MAX_DIGITS = 4300  # of an integer: as many as Python reads by default
QUESTION_COLUMNS = {"question": "answer", "problem": "solution"}


def load_rows(source: str | os.PathLike | Sequence[dict]) -> list[dict]:
    """Rows of a JSONL file, or a list of rows as it is; ValueError with the line number if a line is no JSON object."""
    if not isinstance(source, (str, os.PathLike)):
        rows = list(source)
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ValueError(f"data row {index} is not an object but {type(row).__name__}: {row!r:.60}")
        if not rows:
            raise ValueError("the data has no rows")
        return rows
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"data file {str(path)!r} does not exist")
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{where}: not UTF-8 text ({error.reason} at byte {error.start} of the line)"
                ) from error
            if text.strip():
                rows.append(_parse_line(text, where))
    if not rows:
        raise ValueError(f"{path}: empty file; expected one JSON object a line")
    return rows


def _parse_line(line: str, where: str) -> dict:
    try:
        row = json.loads(
            line,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_refuse_constant,
            object_pairs_hook=_object,
        )
        if "\\u" in line:  # only an escape can give half a character
            json.dumps(row, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(f"{where}: malformed JSON: nested too deep") from error
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"{where}: malformed JSON: {half} is half a character") from error
    except ValueError as error:  # JSONDecodeError is one
        raise ValueError(f"{where}: malformed JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__} {line.strip()[:40]!r}")
    return row


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text.lstrip('-'))} digits is too long; write it as text")
    return int(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON; write null, or the number as text")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text:.60} is too large; write it as text")
    return number


def _object(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.60} stands twice in one object")
    return found


def prompt_of(row: dict) -> str | list[dict]:
    """The row's prompt: text, or a message list (also made from a "question" or "problem" column)."""
    if "prompt" in row:
        return checked_column(row["prompt"], "prompt")
    for column in QUESTION_COLUMNS:
        if column in row:
            if not isinstance(row[column], str):
                raise ValueError(f"column {column!r} must be text, got {row[column]!r:.60}")
            return [{"role": "user", "content": row[column]}]
    raise ValueError(f"no 'prompt' column (columns found: {column_names(row)})")


def prompt_rows(rows: Sequence[dict]) -> list[dict]:
    """Copies of the rows with a checked "prompt" column; ValueError that names the row if one has none."""
    return [{**row, "prompt": located(prompt_of, index, row)} for index, row in enumerate(rows)]


def reward_columns(rows: Sequence[dict]) -> dict[str, list]:
    """A reward's keywords: each column but prompt and completion as a list over the rows, None where a row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names if name not in ("prompt", "completion")}


def is_conversational(prompt: str | list[dict]) -> bool:
    return not isinstance(prompt, str)


def checked_column(value: Any, column: str) -> str | list[dict]:
    if isinstance(value, str):
        return value
    well_formed = isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value)
    if not well_formed:
        raise ValueError(f"column {column!r} must be text or a list of {{role, content}} messages, got {value!r:.60}")
    return value


def column_names(row: dict) -> str:
    return ", ".join(map(str, row)) or "none"


def located(function: Callable[..., T], index: int, row: object, *arguments: object) -> T:
    """function(row, *arguments); its ValueError names the data row."""
    try:
        return function(row, *arguments)
    except ValueError as error:
        raise ValueError(f"data row {index}: {error}") from error
