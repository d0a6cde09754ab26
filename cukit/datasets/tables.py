"""Files of rows: .jsonl, .json, .csv (each also with .gz) and .parquet.

A row is a dict. A CSV's values are all text. A Parquet file is read in batches, only the columns that are wanted; its
times and decimals become text, a NaN becomes None.
"""

import csv
import datetime
import decimal
import gzip
import math
import uuid
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .jsonl import rows_of_lines, rows_of_list

FORMATS = (".parquet", ".jsonl", ".json", ".csv")
BATCH_ROWS = 1024  # of a Parquet file, decoded at once
MAX_FIELD = 2**31 - 1  # characters of a CSV field; Python's own limit is 131072
AS_TEXT = (datetime.date, datetime.time, decimal.Decimal, datetime.timedelta, uuid.UUID)


def format_of(name: str) -> str | None:
    """The format of a file by its name, None for another: ".jsonl" of "rows.jsonl.gz"."""
    plain = name.lower().removesuffix(".gz")
    found = next((suffix for suffix in FORMATS if plain.endswith(suffix)), None)
    return None if found == ".parquet" and plain != name.lower() else found


def read_rows(path: str | Path, columns: Iterable[str] | None = None) -> Iterator[dict]:
    """The rows of one file; a name of no known format counts as JSON lines. `columns`: those read of Parquet.

    ValueError in one line with the file's name for whatever it holds that cannot be read.
    """
    path = Path(path)
    kind = format_of(path.name) or ".jsonl"
    if kind == ".parquet":
        yield from _read_parquet(path, columns)
        return
    try:
        with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb") as file:
            if kind == ".csv":
                yield from _read_csv(file, path)
            elif kind == ".json" and _begins_with(file, b"["):
                yield from rows_of_list(file.read(), path)
            else:
                yield from rows_of_lines(file, path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged, or not compressed by gzip: {error}") from None


def _begins_with(file: IO[bytes] | gzip.GzipFile, first: bytes) -> bool:
    """Whether this is the first byte that is neither a byte order mark nor blank."""
    start = file.read(4096)
    file.seek(0)
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(first)


# ---- CSV -------------------------------------------------------------------------------------------------------------


def _read_csv(file: Iterable[bytes], path: Path) -> Iterator[dict]:
    reader = csv.reader(_decoded(file, path), strict=True)
    header = next(_records(reader, path), None)
    if header is None:
        return
    if "" in header or len(set(header)) != len(header):
        hint = " (pandas: to_csv(…, index=False))" if header[0] == "" else ""
        raise ValueError(f"{path}: the first line must name the columns, each once{hint}: {', '.join(header):.100}")
    for record in _records(reader, path):
        if len(record) != len(header):
            raise ValueError(
                f"{path}, line {reader.line_num}: {len(record)} values for {len(header)} columns; "
                'a value with a comma or a line break stands in "quotes"'
            )
        yield dict(zip(header, record, strict=True))


def _records(reader: Any, path: Path) -> Iterator[list[str]]:
    """The records that are not blank. Python's limit of a field is raised for as long as one is read."""
    while True:
        limit = csv.field_size_limit(MAX_FIELD)
        try:
            record = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: not CSV: {error}") from None
        finally:
            csv.field_size_limit(limit)
        if record is None:
            return
        if record:
            yield record


def _decoded(file: Iterable[bytes], path: Path) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 text ({error.reason} at byte {error.start})") from None


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def _read_parquet(path: Path, columns: Iterable[str] | None) -> Iterator[dict]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: reading Parquet needs: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if len(set(schema.names)) != len(schema.names):
                raise ValueError("two columns have one name")
            wanted = None if columns is None else _present(list(columns), schema.names)
            for batch in file.iter_batches(BATCH_ROWS, columns=wanted):
                yield from _batch_rows(batch, pyarrow.types)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"{path}: not readable as Parquet: {reason:.300}") from None


def _present(columns: list[str], names: list[str]) -> list[str]:
    """The file's columns among `columns`, of which `a.b` may mean the entry b of a column a."""
    found = [name if name in names else name.partition(".")[0] for name in columns]
    if missing := [name for name in found if name not in names]:
        raise ValueError(f"it has no column {missing[0]!r} (columns found: {', '.join(names)})")
    return list(dict.fromkeys(found))


def _batch_rows(batch: Any, types: Any) -> Iterator[dict]:
    values = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        plain = types.is_string(field.type) or types.is_large_string(field.type) or types.is_integer(field.type)
        found = column.to_pylist()
        values.append(found if plain else [_plain(value, field.name) for value in found])
    if not values:
        yield from ({} for _ in range(batch.num_rows))
        return
    for row in zip(*values, strict=True):
        yield dict(zip(batch.schema.names, row, strict=True))


def _plain(value: Any, column: str) -> Any:
    """A value as JSON can hold it."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError(f"column {column!r} holds an infinite number; leave it out by columns")
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {str(key): _plain(part, column) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part, column) for part in value]
    if isinstance(value, AS_TEXT):
        return value.isoformat() if hasattr(value, "isoformat") else str(value)
    kind = type(value).__name__
    raise ValueError(f"column {column!r} holds {kind}, which is no text or number; leave it out by columns")
