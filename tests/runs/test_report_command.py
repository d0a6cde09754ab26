"""The command `report`: its words, and mistakes in one line."""

import pytest

import cukit_cli

from .report_page import Page


def test_report_takes_runs_as_words(make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run("a", text="one"), make_run("b", text="two")
    for words, written in (
        (["a"], "a/report.html"),
        (["a", "b"], "report.html"),
        (["a", "--output", "x.html", "b"], "x.html"),
        (["--output", "y.html", "--runs", "a", "b"], "y.html"),
    ):
        assert cukit_cli.main(["report", *words]) == 0
        assert capsys.readouterr().out == f"report: {written}\n"
        runs = len(Page((tmp_path / written).read_text()).data["runs"])
        assert runs == len({"a", "b"} & set(words))


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "report needs a run folder: cukit report RUN"),
        (["nothing"], "run folder nothing does not exist"),
        (["a/config.yaml"], "run folder a/config.yaml is a file"),
        (["empty"], "empty is no run folder: it has none of config.yaml, metrics.jsonl"),
        (["a", "--output", "empty"], "output empty is a folder; give a file, for example empty/report.html"),
        (["a", "--output", "no/x.html"], "output no/x.html: the folder no does not exist"),
    ],
)
def test_mistakes_are_one_line(make_run, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    make_run("a"), (tmp_path / "empty").mkdir()
    assert cukit_cli.main(["report", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_words_of_no_option_are_refused_elsewhere(capsys):
    assert cukit_cli.main(["doctor", "word"]) == 2
    assert "unexpected word 'word'" in capsys.readouterr().err
