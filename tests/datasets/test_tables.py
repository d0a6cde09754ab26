"""Files of rows: what goes in comes out, and whatever cannot be read is one line with the file's name."""

import csv
import datetime
import decimal
import gzip
import json
import random
import sys

import pyarrow
import pytest
from pyarrow import parquet

from cukit.datasets import tables
from cukit.datasets.sources import load_rows
from cukit.datasets.tables import format_of, read_rows

ALPHABET = "aZ09 ,;\"'\\\n\r\t{}[]é猫🙂\u2028\u00a0\ufeff"


def write_jsonl(rows, path):
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))


def write_json(rows, path):
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")


def write_csv(rows, path):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(rows, path):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)


WRITERS = {".jsonl": write_jsonl, ".json": write_json, ".csv": write_csv, ".parquet": write_parquet}


def write(rows, path):
    """Rows in the format of the path's name."""
    plain = path.with_name(path.name.removesuffix(".gz"))
    WRITERS[plain.suffix](rows, plain)
    if plain != path:
        path.write_bytes(gzip.compress(plain.read_bytes()))


def random_text(draw):
    return "".join(draw.choice(ALPHABET) for _ in range(draw.randrange(12)))


def random_rows(draw, texts_only):
    def value():
        kinds = ["text"] if texts_only else ["text", "number", "whole", "truth", "none", "messages"]
        kind = draw.choice(kinds)
        return {
            "text": lambda: random_text(draw),
            "number": lambda: draw.choice([0.5, -1e300, 1e-9, 3.0]),
            "whole": lambda: draw.randrange(-(2**62), 2**62),
            "truth": lambda: draw.random() < 0.5,
            "none": lambda: None,
            "messages": lambda: [{"role": "user", "content": random_text(draw)} for _ in range(draw.randrange(3))],
        }[kind]

    makers = {f"column {i}{draw.choice('é,x')}": value() for i in range(draw.randrange(1, 5))}
    return [{name: make() for name, make in makers.items()} for _ in range(draw.randrange(1, 30))]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz"])
def test_random_rows_survive_each_format(tmp_path, suffix):
    draw = random.Random(suffix)
    for number in range(40):
        rows = random_rows(draw, texts_only=".csv" in suffix)
        path = tmp_path / f"{number}{suffix}"
        write(rows, path)
        assert load_rows(path) == rows


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".csv.gz", ""])
def test_random_bytes_are_refused_in_one_line(tmp_path, suffix):
    """Noise, and whole files with some bytes changed or cut off: rows or one ValueError, never another exception."""
    draw, refused = random.Random(f"bytes {suffix}"), 0
    whole = tmp_path / f"whole{suffix or '.jsonl'}"
    write([{"prompt": "1 + 1 = é", "answer": str(i)} for i in range(20)], whole)
    for number in range(150):
        data = bytearray(whole.read_bytes())
        if number % 3 == 0:
            data = bytearray(draw.randbytes(draw.randrange(200)))
        elif number % 3 == 1:
            del data[draw.randrange(len(data)) :]
        else:
            for _ in range(draw.randrange(1, 6)):
                data[draw.randrange(len(data))] = draw.randrange(256)
        path = tmp_path / f"noise{suffix}"
        path.write_bytes(bytes(data))
        try:
            assert all(isinstance(row, dict) for row in load_rows(path))
        except ValueError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 600
    assert refused > 50


def test_a_format_is_known_by_its_name():
    names = {"a.jsonl.gz": ".jsonl", "A.CSV": ".csv", "a.parquet": ".parquet", "a.json": ".json", "x.json.gz": ".json"}
    assert {name: format_of(name) for name in names} == names
    assert format_of("a.txt") is format_of("a.parquet.gz") is format_of("parquet") is format_of("a.arrow") is None


def test_json_is_a_list_or_lines(tmp_path):
    path = tmp_path / "rows.json"
    for text in ('\ufeff [{"a": 1}, {"a": 2}]', '{"a": 1}\n{"a": 2}\n'):
        path.write_text(text, encoding="utf-8")
        assert load_rows(path) == [{"a": 1}, {"a": 2}]
    for text, message in (
        ('[{"a": 1}, 2]', "entry 1: expected a JSON object, got int 2"),
        ('[{"a": NaN}]', "NaN is no JSON"),
        ("[]", "empty file"),
        ('{\n "a": 1\n}', "line 1: malformed JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_rows(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a,b\n1\n", "line 2: 1 values for 2 columns"),
        (b"a,b\n1,2\n1,2,3\n", "line 3: 3 values for 2 columns"),
        (b"a,a\n1,2\n", "name the columns, each once: a, a"),
        (b"a,\n1,2\n", "name the columns"),
        (b'a\n"1\n', "line 2: not CSV: unexpected end of data"),
        (b'a\n"1"2\n', "line 2: not CSV"),
        (b"a\n\xff\n", "line 2: not UTF-8"),
        (b"a,b\n", "empty file"),
        (b"", "empty file"),
    ],
)
def test_odd_csv_is_refused_with_file_and_line(tmp_path, data, message):
    path = tmp_path / "rows.csv"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"rows.csv.*{message}"):
        load_rows(path)


def test_csv_long_fields_and_blank_lines(tmp_path):
    path, limit = tmp_path / "rows.csv", 131072
    csv.field_size_limit(limit)
    path.write_text(f'\ufeffprompt,answer\r\n\r\n"{"x" * 200_000}","1\r\n2"\r\n,\r\n', encoding="utf-8", newline="")
    assert load_rows(path) == [{"prompt": "x" * 200_000, "answer": "1\r\n2"}, {"prompt": "", "answer": ""}]
    assert csv.field_size_limit() == limit


def test_only_the_wanted_columns_of_parquet_are_decoded(tmp_path):
    path = tmp_path / "rows.parquet"
    write([{"a": str(i), "b": {"c": i, "d": "x"}, "image": b"\xff"} for i in range(20)], path)
    assert load_rows(path, ["a", "b.c"])[3] == {"a": "3", "b": {"c": 3, "d": "x"}}
    with pytest.raises(ValueError, match="rows.parquet: .*column 'image' holds bytes, .* leave it out by columns"):
        load_rows(path)
    with pytest.raises(ValueError, match=r"no column 'q' \(columns found: a, b, image\)"):
        load_rows(path, ["q"])


def test_parquet_is_read_in_batches(tmp_path, monkeypatch):
    """Only as much is decoded as is asked for: a file of any size can be shown."""
    path, decoded = tmp_path / "rows.parquet", []
    write([{"a": i} for i in range(100)], path)
    monkeypatch.setattr(tables, "BATCH_ROWS", 10)
    own = tables._batch_rows
    monkeypatch.setattr(tables, "_batch_rows", lambda batch, types: decoded.append(batch.num_rows) or own(batch, types))
    assert load_rows(path, limit=12) == [{"a": i} for i in range(12)] and sum(decoded) <= 20
    assert len(list(read_rows(path))) == 100


def test_parquet_values_become_what_json_holds(tmp_path):
    path = tmp_path / "rows.parquet"
    when = datetime.datetime(2024, 2, 29, 12, 30)
    table = {
        "time": [when],
        "day": [when.date()],
        "price": [decimal.Decimal("1.50")],
        "nan": [float("nan")],
        "word": pyarrow.array(["x"]).dictionary_encode(),
        "many": [[{"n": 1.5, "t": when}]],
    }
    parquet.write_table(pyarrow.table(table), path)
    (row,) = load_rows(path)
    assert row == {
        "time": "2024-02-29T12:30:00",
        "day": "2024-02-29",
        "price": "1.50",
        "nan": None,
        "word": "x",
        "many": [{"n": 1.5, "t": "2024-02-29T12:30:00"}],
    }
    json.dumps(row, allow_nan=False)
    parquet.write_table(pyarrow.table({"x": [float("inf")]}), path)
    with pytest.raises(ValueError, match="rows.parquet: .*'x' holds an infinite number"):
        load_rows(path)


def test_a_plain_file_named_gz(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    for data in (b'{"a": 1}\n', gzip.compress(b'{"a": 1}\n' * 1000)[:-9]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="rows.jsonl.gz: damaged, or not compressed by gzip"):
            load_rows(path)


def test_without_pyarrow(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    write([{"a": 1}], path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="rows.parquet: reading Parquet needs: pip install pyarrow"):
        load_rows(path)


def test_the_index_that_pandas_writes_is_named(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(",prompt,answer\n0,1+1,2\n")
    with pytest.raises(ValueError, match=r"each once \(pandas: to_csv\(…, index=False\)\): , prompt, answer$"):
        list(read_rows(path))
    path.write_text("prompt,prompt\n1,2\n")
    with pytest.raises(ValueError, match="each once: prompt, prompt$"):
        list(read_rows(path))
