"""data prepare and data show: data sets as rows of JSONL, and a look at the rows of any source."""

import json
from pathlib import Path
from typing import Any

from ..datasets.config import RowOptions
from ..datasets.named import NAMED
from ..options import Options, changed, check_range, nearest, nested, option, require
from .parser import make, say

SHOWN = 200  # characters of a value


class PrepareOptions(Options):
    group = "files"
    name: str = option(help=f"the data set: {', '.join(NAMED)}")
    output: str | None = option(None, "the file to write; default: NAME.jsonl")
    split: str = option("train", "which split of it")
    revision: str | None = option(None, "a branch, tag or commit of the hub's repository; default: main")
    limit: int | None = option(None, "only the first rows")
    rows: RowOptions = nested(RowOptions)

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        return RowOptions.respelled(values)

    def __post_init__(self) -> None:
        check_range(self, "limit", 1)
        require(self.name in NAMED, f"name must be one of {', '.join(NAMED)}, got {self.name!r}{self._hint()}")

    def _hint(self) -> str:
        return nearest(self.name, NAMED) or "; any other source needs no preparing: give it to --data"


class ShowOptions(Options):
    group = "files"
    source: str = option(help="what --data takes: a file, a folder, a pattern or a name of the hub")
    limit: int = option(2, "how many rows")
    rows: RowOptions = nested(RowOptions)

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        return RowOptions.respelled(values)

    def __post_init__(self) -> None:
        check_range(self, "limit", 1)


def data_prepare(values: dict[str, Any]) -> None:
    """Rows {"prompt": [user message], "answer": text}; --columns and the prompt's options change that."""
    from ..datasets.columns import dataset_rows
    from ..runs.files import write_text

    options = make(PrepareOptions, values)
    known = NAMED[options.name]
    if not known.seen:
        say(f"{options.name}: the names of its columns are not checked yet; if they are wrong, give --columns")
    name, _, config = known.source.partition(":")
    source = f"{name}{f'@{options.revision}' if options.revision else ''}:{config}:{options.split}"
    rows = options.rows
    if rows.columns is None:
        rows = changed(rows, columns={"prompt": known.prompt, "answer": known.answer})
    if rows.chat_prompts is None:
        rows = changed(rows, chat_prompts=True)
    found = dataset_rows(source, rows, limit=options.limit)
    output = Path(options.output or f"{options.name}.jsonl")
    write_text(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
    print(f"{output}: {len(found):,} rows; train on them by --data {output} --reward_funcs {known.reward}")


def data_show(values: dict[str, Any]) -> None:
    from ..datasets.columns import dataset_rows

    options = make(ShowOptions, values)
    rows = dataset_rows(options.source, options.rows, limit=options.limit)
    names = dict.fromkeys(name for row in rows for name in row)
    print("columns: " + ", ".join(f"{name} ({_kind(rows, name)})" for name in names))
    for index, row in enumerate(rows):
        print(f"row {index}")
        for name, value in row.items():
            text = json.dumps(value, ensure_ascii=False, default=str)
            print(f"  {name}: {text[:SHOWN]}{' …' if len(text) > SHOWN else ''}")


def _kind(rows: list[dict], name: str) -> str:
    """The JSON type of a column's first value that is not null."""
    words = {str: "text", bool: "true or false", int: "number", float: "number", list: "list", dict: "object"}
    values = [row[name] for row in rows if row.get(name) is not None]
    return words.get(type(values[0]), type(values[0]).__name__) if values else "null"
