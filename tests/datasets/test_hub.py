"""Data sets by name: the real huggingface_hub against a server of this machine."""

import gzip
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from cukit.datasets.hub import parse_source
from cukit.datasets.sources import load_rows

README = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files: socratic/*
---
"""


def table(*values):
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows(*values)), buffer)
    return buffer.getvalue()


def rows(*values):
    return [{"question": f"{value}+0", "answer": f"#### {value}"} for value in values]


FILES = {
    "README.md": README,
    "main/train-00000-of-00002.parquet": table(1, 2),
    "main/train-00001-of-00002.parquet": table(3),
    "main/test-00000-of-00001.parquet": table(4),
    "socratic/train-00000-of-00001.parquet": table(5),
    "images.parquet": b"x" * 5000,
}


@pytest.fixture
def gsm8k(hub):
    hub.commit = hub.add("dataset", "openai/gsm8k", FILES)
    return hub


def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_parts_of_a_name():
    def parts(text):
        found = parse_source(text)
        return found and (found.name, found.revision, found.config, found.split)

    assert parts("openai/gsm8k") == ("openai/gsm8k", None, None, None)
    assert parts("a/b.c-d_e@refs/pr/1:main:test") == ("a/b.c-d_e", "refs/pr/1", "main", "test")
    assert parts("a/b::test") == ("a/b", None, None, "test")
    for text in ("gsm8k", "a/b/c", "./a/b", "/a/b", "a/", "a b/c", "a/b@", "a/..", "a--b/c", "é/b", ""):
        assert parts(text) is None, text


def test_only_the_wanted_split_is_fetched(gsm8k, caplog):
    with caplog.at_level(logging.INFO, "cukit"):
        assert load_rows("openai/gsm8k:main") == rows(1, 2, 3)
    assert f"openai/gsm8k: configuration main, split train, commit {gsm8k.commit[:8]}: 3 rows" in caplog.text
    asked = {path.rpartition("/resolve/")[2].partition("/")[2] for method, path in gsm8k.requests if method == "HEAD"}
    assert asked == {name for name in FILES if "train" in name and "main" in name} | {"README.md"}
    assert load_rows("openai/gsm8k:main", use="test") == rows(4) == load_rows("openai/gsm8k:main:test")
    assert load_rows("openai/gsm8k:socratic") == rows(5)
    with caplog.at_level(logging.INFO, "cukit"):
        assert load_rows("openai/gsm8k:main", limit=2) == rows(1, 2)
    assert caplog.text.endswith(": the first 2 rows\n")


def test_columns_of_the_hub_s_files(gsm8k):
    assert load_rows("openai/gsm8k:main", ["answer"]) == [{"answer": row["answer"]} for row in rows(1, 2, 3)]


def test_a_second_run_downloads_nothing(gsm8k):
    load_rows("openai/gsm8k:main")
    gsm8k.requests.clear()
    assert load_rows("openai/gsm8k:main") == rows(1, 2, 3)
    assert gsm8k.requests == [("GET", "/api/datasets/openai/gsm8k")]  # is there a new commit?


def test_a_new_commit_is_seen_and_an_old_one_can_be_pinned(gsm8k):
    assert load_rows("openai/gsm8k:main:test") == rows(4)
    gsm8k.add("dataset", "openai/gsm8k", FILES | {"main/test-00000-of-00001.parquet": table(6, 7)})
    gsm8k.add("dataset", "openai/gsm8k", FILES | {"main/test-00000-of-00001.parquet": table(8)}, "refs/pr/1")
    assert load_rows("openai/gsm8k:main:test") == rows(6, 7)
    assert load_rows(f"openai/gsm8k@{gsm8k.commit}:main:test") == rows(4)
    assert load_rows("openai/gsm8k@refs/pr/1:main:test") == rows(8)
    with pytest.raises(ValueError, match="data set 'openai/gsm8k' has no revision 'v2': give a branch, a tag or a"):
        load_rows("openai/gsm8k@v2:main")


def test_offline_the_cached_files_are_used(gsm8k, monkeypatch):
    load_rows("openai/gsm8k:main")
    offline(monkeypatch)
    gsm8k.requests.clear()
    assert load_rows("openai/gsm8k:main") == rows(1, 2, 3) == load_rows(f"openai/gsm8k@{gsm8k.commit}:main")
    for name in ("openai/gsm8k:main:test", "openai/gsm9k:main", "openai/gsm8k@v2:main"):
        with pytest.raises(ValueError, match="data set 'openai/gsm.k'.* in the cache; HF_HUB_OFFLINE is set") as caught:
            load_rows(name)
        assert "\n" not in str(caught.value)
    assert gsm8k.requests == []


def test_a_hub_that_cannot_be_reached(gsm8k, caplog):
    load_rows("openai/gsm8k:main")
    gsm8k.close()
    assert load_rows("openai/gsm8k:main") == rows(1, 2, 3)
    assert "the hub cannot be reached: the cached files of openai/gsm8k are used" in caplog.text
    with pytest.raises(ValueError, match=f"'a/b' is no file or folder here, and cannot be had from {gsm8k.url}: "):
        load_rows("a/b")


@pytest.mark.slow
def test_half_a_download_is_not_taken_for_the_whole(gsm8k, monkeypatch):
    """The first shard is in the cache, then the connection ends; offline the rest is missed, not left out."""
    load_rows("openai/gsm8k:main:test")
    gsm8k.broken_after = 100
    with pytest.raises(ValueError, match="data set 'openai/gsm8k' .*") as caught:
        load_rows("openai/gsm8k:main")
    assert "\n" not in str(caught.value)
    offline(monkeypatch)
    with pytest.raises(ValueError, match="in the cache; HF_HUB_OFFLINE is set"):
        load_rows("openai/gsm8k:main")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    gsm8k.broken_after = None
    assert load_rows("openai/gsm8k:main") == rows(1, 2, 3)


def test_what_another_program_left_in_the_cache_is_used(gsm8k, monkeypatch):
    from huggingface_hub import hf_hub_download, snapshot_download

    snapshot_download("openai/gsm8k", repo_type="dataset", allow_patterns=["README.md", "main/*"])
    hf_hub_download("openai/gsm8k", "socratic/train-00000-of-00001.parquet", repo_type="dataset")
    offline(monkeypatch)
    assert load_rows("openai/gsm8k:main") == rows(1, 2, 3) and load_rows("openai/gsm8k:socratic") == rows(5)


def test_another_programs_half_is_not_used(gsm8k, monkeypatch):
    from huggingface_hub import snapshot_download

    snapshot_download("openai/gsm8k", repo_type="dataset", allow_patterns=["README.md", "main/train-00000*"])
    offline(monkeypatch)
    with pytest.raises(ValueError, match="not wholly in the cache"):
        load_rows("openai/gsm8k:main")


def test_a_data_set_that_has_moved(gsm8k):
    gsm8k.moved["old/gsm8k"] = "openai/gsm8k"
    assert load_rows("old/gsm8k:main") == rows(1, 2, 3)


def test_refusals_of_the_hub(gsm8k):
    gsm8k.add("dataset", "meta/gated", FILES)
    gsm8k.gated.add("meta/gated")
    for name, message in (
        (
            "openai/gsm9k",
            f"'openai/gsm9k' is no file or folder here, and {gsm8k.url} has none of that name; if it is a",
        ),
        ("meta/gated:main", "'meta/gated' is gated: accept its terms on its page of the hub, then log in"),
        ("openai/gsm8k", "has several configurations, choose one as NAME:CONFIG: main, socratic"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load_rows(name)
        assert "\n" not in str(caught.value)


def test_the_hub_s_own_conversion_stands_in_for_files_that_are_not_read(hub):
    hub.add("dataset", "old/script", {"README.md": b"# x", "script.py": b"", "data.zip": b""})
    with pytest.raises(ValueError, match="holds no file with a name in .* conversion was not found"):
        load_rows("old/script")
    parts = {"default/train/0000.parquet": table(1), "default/train/0001.parquet": table(2)}
    hub.add("dataset", "old/script", parts | {"default/test/0000.parquet": table(3)}, "refs/convert/parquet")
    assert load_rows("old/script") == rows(1, 2) and load_rows("old/script::test") == rows(3)
    with pytest.raises(ValueError, match="the hub converts main alone, so leave @main out"):
        load_rows("old/script@main")


def test_other_formats_of_the_hub(hub):
    lines = "".join(json.dumps(row) + "\n" for row in rows(1, 2)).encode()
    hub.add("dataset", "a/lines", {"train.jsonl.gz": gzip.compress(lines), "test.jsonl.gz": b"", "x.py": b""})
    hub.add("dataset", "a/table", {"data/train.csv": b"question,answer\n1+0,#### 1\n"})
    assert load_rows("a/lines") == rows(1, 2) and load_rows("a/table") == rows(1)


def test_names_of_files_that_lead_out_of_the_cache(hub, tmp_path):
    (tmp_path / "secret.jsonl").write_text('{"a": 1}')
    for name in ("../../../../secret.jsonl", str(tmp_path / "secret.jsonl")):
        readme = f"---\nconfigs:\n- config_name: a\n  data_files: '{name}'\n---\n".encode()
        hub.add("dataset", "a/evil", {name: b"", "README.md": readme})
        with pytest.raises(ValueError, match="names files for the split 'train', and none is there"):
            load_rows("a/evil")


def test_without_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="'a/b' is no file or folder here, .* needs: pip install huggingface_hub"):
        load_rows("a/b")


@pytest.mark.slow
def test_rows_are_those_of_the_datasets_library(gsm8k, tmp_path, datasets_library):
    code = (
        "import datasets, json, sys; print(json.dumps([list(datasets.load_dataset('openai/gsm8k', 'main', split=s))"
        " for s in ('train', 'test')]))"
    )
    environment = os.environ | {"HF_ENDPOINT": gsm8k.url, "HF_HOME": str(tmp_path / "other")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [load_rows("openai/gsm8k:main"), load_rows("openai/gsm8k:main:test")]


@pytest.mark.slow
def test_environment_variables(gsm8k, tmp_path):
    """HF_ENDPOINT and HF_HOME as a user sets them, then HF_HUB_OFFLINE."""
    code = "from cukit.datasets.sources import load_rows; print(len(load_rows('openai/gsm8k:main')))"
    root = Path(__file__).parents[2]
    environment = os.environ | {"HF_ENDPOINT": gsm8k.url, "HF_HOME": str(tmp_path / "home")}
    for more in ({}, {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}):
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment | more, cwd=root
        )
        assert run.stdout == "3\n", run.stderr
    assert (tmp_path / "home" / "hub").is_dir()
