"""Rows of data: files, folders, data sets of the hub, and lists; and the columns that make a prompt of a row.

Row forms (other columns are kept, rewards get them):
    {"prompt": text or messages}                        reinforcement learning
    {"prompt": ..., "completion": ...}                  both text, or both message lists
    {"messages": [...]}                                 loss on what the assistant says
    {"text": ...}                                       loss on everything
    {"prompt": ..., "chosen": ..., "rejected": ...}     pairs of answers (preferences.py)
    {"question": text} or {"problem": text}             stands for a user's message; "answer" or "solution" is the
                                                        completion where one is needed (GSM8K's and MATH's columns)
"""

import glob
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from . import hub
from .layout import choose
from .tables import format_of, read_rows

T = TypeVar("T")
logger = logging.getLogger(__name__)
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(['"])(role|content)\1\s*:.*\]\s*\Z""", re.DOTALL)
IMAGE_COLUMNS = ("image", "images")  # TRL's
QUESTION_COLUMNS = {"question": "answer", "problem": "solution"}


def load_rows(source: Any, columns: Iterable[str] | None = None, use: str = "train", limit: int | None = None) -> list:
    """All rows of a source, or the first `limit`; ValueError in one line if it cannot be read or has none.

    source: a file (.jsonl, .json, .csv, these with .gz, .parquet; other names count as JSON lines), a pattern of such
    files (data/*.parquet), a folder[:CONFIG[:SPLIT]], a name of the hub NAME[@REVISION][:CONFIG[:SPLIT]], or what
    gives dicts when iterated: a list of rows, a `datasets.Dataset`. columns: those that are wanted; whatever can leave
    the others unread does. use: "train" or "test", for a source with splits where none is named.
    """
    if isinstance(source, (str, os.PathLike)):
        files, what = _files_of(os.fspath(source), use)
        rows = list(itertools.islice(itertools.chain.from_iterable(_read(files, columns)), limit))
        if not rows:
            raise ValueError(f"{what or files[0]}: empty file; expected one JSON object a line, or a table with rows")
        if what:
            logger.info(f"{what}: {'the first ' if len(rows) == limit else ''}{len(rows):,} rows")
        return rows
    rows = list(itertools.islice(_iterated(source, columns), limit))
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"data row {index} is not an object but {type(row).__name__}: {row!r:.60}")
    if not rows:
        raise ValueError("the data has no rows")
    return rows


def _read(files: list[Path], columns: Iterable[str] | None) -> Iterator[Iterator[dict]]:
    columns = None if columns is None else list(columns)
    for file in files:
        yield read_rows(file, columns)


def _iterated(source: Any, columns: Iterable[str] | None) -> Iterator[Any]:
    if hasattr(source, "to_dict") and hasattr(source, "iterrows"):  # its iterator gives the columns' names
        raise ValueError("the data is a data frame: give its rows, frame.to_dict('records')")
    if isinstance(source, Mapping):
        raise ValueError(f"the data is a dict of {', '.join(map(str, source))[:60]}: give one of its splits, or a list")
    # Of `datasets`: the others are not decoded. A streamed one may not know its columns before it is read.
    if columns is not None and getattr(source, "column_names", None) and hasattr(source, "select_columns"):
        names = [column if column in source.column_names else column.partition(".")[0] for column in columns]
        source = source.select_columns([name for name in dict.fromkeys(names) if name in source.column_names])
    if hasattr(source, "__iter__"):
        return iter(source)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return (source[index] for index in range(len(source)))
    raise ValueError(f"the data must be a file, a name of the hub or rows, got {type(source).__name__}")


def _files_of(source: str, use: str) -> tuple[list[Path], str | None]:
    """The files of a source, and what it is in words if it was chosen from more."""
    if os.path.isfile(source):
        return [Path(source)], None
    if glob.has_magic(source):
        found = sorted(path for path in glob.glob(source, recursive=True) if os.path.isfile(path))
        if not found:
            raise ValueError(f"no file matches {source!r}")
        return list(map(Path, found)), f"{source} ({len(found)} file{'s' if len(found) > 1 else ''})"
    folder, config, split = hub.split_source(source)
    if os.path.isdir(source):
        folder, config, split = source, None, None
    if os.path.isdir(folder):
        return _files_of_folder(Path(folder), config, split, use)
    if format_of(source) is None and (named := hub.parse_source(source)):
        return hub.fetch_split(named, use)
    if os.path.exists(source):
        raise ValueError(f"data file {source!r} is no regular file")
    raise ValueError(f"data file {source!r} does not exist")


def _files_of_folder(folder: Path, config: str | None, split: str | None, use: str) -> tuple[list[Path], str | None]:
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    if any(name.endswith(".arrow") for name in names) and any(Path(name).name == "state.json" for name in names):
        raise ValueError(
            f"data folder {str(folder)!r} was written by save_to_disk of `datasets`: give load_from_disk(…) in Python, "
            "or write the rows by to_json or to_parquet"
        )
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    chosen = choose(names, text, f"data folder {str(folder)!r}", config, split, use)
    what = f"{folder}: configuration {chosen.config}, split {chosen.split} ({len(chosen.files)} of {len(names)} files)"
    return [folder / name for name in chosen.files], what


def prompt_of(row: dict) -> str | list[dict]:
    """The row's prompt: text, or a message list (also made from a "question" or "problem" column)."""
    if "prompt" in row:
        return checked_column(row["prompt"], "prompt")
    for column in QUESTION_COLUMNS:
        if column in row:
            if not isinstance(row[column], str):
                raise ValueError(f"column {column!r} must be text, got {row[column]!r:.60}")
            return [{"role": "user", "content": row[column]}]
    first = next(iter(row), "NAME")
    raise ValueError(
        f"no 'prompt' column (columns found: {column_names(row)}); name the one that holds it: columns prompt={first},…"
    )


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
    """The value; ValueError if it is neither text nor a message list, or the text that a CSV made of such a list."""
    if isinstance(value, str):
        if MESSAGES_AS_TEXT.match(value):
            raise ValueError(
                f"column {column!r} holds a message list as text, {value!r:.60}: a CSV holds no lists; write the rows "
                "as JSON lines or Parquet (to_json, to_parquet)"
            )
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
