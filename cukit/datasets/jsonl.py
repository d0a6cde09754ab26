"""JSON text as rows: JSON lines and lists of objects, refused with the place where they are no such thing."""

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

MAX_DIGITS = 4300  # of an integer: as many as Python reads by default


def rows_of_lines(lines: Iterable[bytes], path: object) -> Iterator[dict]:
    """The objects of JSON lines; blank lines are passed over. ValueError with the line number if a line is none."""
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start} of the line)") from error
        if text.strip():
            row = parse_json(text, where)
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__} {text.strip()[:40]!r}")
            yield row


def rows_of_list(data: bytes, path: object) -> Iterator[dict]:
    """The objects of a file that is one JSON list."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    for index, row in enumerate(parse_json(text, path)):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, entry {index}: expected a JSON object, got {type(row).__name__} {row!r:.40}")
        yield row


def parse_json(text: str, where: object) -> Any:
    """The value of a JSON text; what JSON does not allow, and numbers that Python cannot hold, are refused."""
    try:
        value = json.loads(
            text,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_refuse_constant,
            object_pairs_hook=_object,
        )
        if "\\u" in text:  # only an escape can give half a character
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(f"{where}: malformed JSON: nested too deep") from error
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"{where}: malformed JSON: {half} is half a character") from error
    except ValueError as error:  # JSONDecodeError is one
        raise ValueError(f"{where}: malformed JSON: {error}") from error
    return value


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
