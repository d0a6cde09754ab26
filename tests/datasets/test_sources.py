"""Sources of rows: folders, patterns of files, objects that give rows."""

import json
import logging

import pytest

from cukit.datasets.sources import load_rows


@pytest.fixture
def folder(tmp_path):
    """write(name=rows, …) -> a folder with files of these names."""

    def write(**files):
        for name, rows in files.items():
            path = tmp_path / "set" / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / "set"

    return write


def numbers(*values):
    return [{"n": value} for value in values]


def test_a_folder_gives_the_split_that_is_wanted(folder, caplog):
    path = folder(train_jsonl=numbers(1, 2), test_jsonl=numbers(3), dev_jsonl=numbers(4))
    with caplog.at_level(logging.INFO, "cukit"):
        assert load_rows(path) == numbers(1, 2)
    assert "configuration default, split train (1 of 3 files): 2 rows" in caplog.text
    assert load_rows(path, use="test") == numbers(3)
    assert load_rows(f"{path}::validation") == numbers(4) == load_rows(f"{path}:default:validation")
    with pytest.raises(ValueError, match="data folder .*set', configuration 'default' has no split 'eval'"):
        load_rows(f"{path}::eval")
    with pytest.raises(ValueError, match="has no configuration 'test', it has: default"):
        load_rows(f"{path}:test")


def test_a_folder_without_splits_gives_all_its_files_in_order(folder):
    path = folder(b_jsonl=numbers(3), a_jsonl=numbers(1, 2), more__c_jsonl=numbers(4))
    assert load_rows(path) == numbers(1, 2, 3, 4) == load_rows(path, use="test")
    for name in ("a.jsonl", "b.jsonl", "more/c.jsonl"):
        (path / name).rename(path / f"{name}.txt")
    with pytest.raises(ValueError, match="holds no file with a name in .parquet, .jsonl, .json, .csv"):
        load_rows(path)


def test_what_other_libraries_hold_is_named(folder):
    """A folder of save_to_disk, and a data frame, which gives the names of its columns when it is iterated."""

    class DataFrame(list):
        def to_dict(self, orient):
            """As pandas names it."""

        def iterrows(self):
            """As pandas names it."""

    path = folder(state_json=[{"_data_files": []}])
    (path / "data-00000-of-00001.arrow").touch()
    with pytest.raises(ValueError, match=r"set' was written by save_to_disk of `datasets`: give load_from_disk"):
        load_rows(path)
    with pytest.raises(ValueError, match=r"the data is a data frame: give its rows, frame.to_dict\('records'\)"):
        load_rows(DataFrame(["prompt"]))


def test_a_streamed_set_need_not_know_its_columns():
    """An IterableDataset has no column_names after map(), or from a generator."""

    class Streamed(list):
        column_names = None

        def select_columns(self, names):
            raise AssertionError("it has no columns to choose from")

    assert load_rows(Streamed(numbers(1, 2)), columns=["n"]) == numbers(1, 2)


def test_a_pattern_gives_all_its_files(folder):
    path = folder(b_jsonl=numbers(3), a_jsonl=numbers(1, 2), more__c_jsonl=numbers(4))
    assert load_rows(f"{path}/*.jsonl") == numbers(1, 2, 3)
    assert load_rows(f"{path}/**/*.jsonl") == numbers(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"no file matches .*\*.csv"):
        load_rows(f"{path}/*.csv")
    (path / "odd [1].jsonl").write_text('{"n": 9}')  # a file's own name comes first
    assert load_rows(f"{path}/odd [1].jsonl") == numbers(9)


def test_paths_that_are_no_names(tmp_path):
    for source in ("x" * 5000, "a\0b", "C:\\rows", "a b/c", "../x/y", str(tmp_path / "no" / "rows"), ""):
        with pytest.raises(ValueError, match="does not exist"):
            load_rows(source)


class Table:
    """Rows as `datasets.Dataset` gives them."""

    column_names = ("a", "b", "image")

    def __init__(self, rows):
        self.rows, self.selected = rows, None

    def select_columns(self, names):
        self.selected = names
        return Table([{name: row[name] for name in names} for row in self.rows])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_objects_that_give_rows():
    rows = [{"a": 1, "b": {"c": 2}, "image": b""}] * 3
    table = Table(rows)
    assert load_rows(table) == rows == load_rows(iter(rows)) and load_rows(table, limit=2) == rows[:2]
    assert load_rows(table, ["b.c", "a"]) == [{"b": {"c": 2}, "a": 1}] * 3 and table.selected == ["b", "a"]
    with pytest.raises(ValueError, match="a dict of train, test: give one of its splits"):
        load_rows({"train": rows, "test": rows})
    with pytest.raises(ValueError, match="must be a file, a name of the hub or rows, got int"):
        load_rows(3)


def test_datasets_of_the_library(datasets_library):
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "answer": str(i), "n": i} for i in range(5)]
    found = datasets_library.Dataset.from_list(rows)
    assert load_rows(found) == rows
    assert load_rows(found, ["answer"]) == [{"answer": str(i)} for i in range(5)]
    assert load_rows(found.to_iterable_dataset()) == rows
    with pytest.raises(ValueError, match="a dict of train"):
        load_rows(datasets_library.DatasetDict({"train": found}))
