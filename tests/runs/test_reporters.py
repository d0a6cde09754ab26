"""Dashboards: what each real package has written, read back from its files; names, tables, failures."""

import importlib.util
import json
import logging
import struct
import time

import pytest

from cukit.runs import reporters
from cukit.runs.metrics import MetricsLogger
from cukit.runs.reporters import REPORTERS, ReportedRun, Reporter, Reporters, check_packages, dashboard_metrics
from cukit.trainers.config import DASHBOARDS

CHAT = [{"role": "user", "content": "1+1 = <b>?</b>"}]
ROW = {"prompt": CHAT, "completion": "2\n\n猫", "rewards/exact": 1.0, "advantage": 0.5, "token_ids": [1, 2]}


def reported(folder, dashboard: str, first_step: int, resume_step: int | None = None, **keywords) -> None:
    """Log two steps, each with a completion, and an evaluation to one dashboard."""
    folder.mkdir(exist_ok=True)
    run = ReportedRun(folder, {"learning_rate": 0.5, "stop": ["x"]}, resume_step=resume_step, **keywords)
    logger = MetricsLogger(folder, resume_step)
    logger.reporters = Reporters([dashboard], run, tables=True)
    for step in (first_step, first_step + 1):
        logger.log_completions(step, [ROW, ROW | {"rewards/exact": None}])
        logger.log(step, {"loss": step / 4, "rewards/exact/mean": 0.5, "kl": float("nan")})
    logger.log_completions(first_step + 1, [{"prompt": "p", "completion": "c", "rewards/exact": 0.0}])
    logger.log(first_step + 1, {"eval/accuracy": 0.25})
    logger.close()


# ---- tensorboard -----------------------------------------------------------------------------------------------------


def events_of(folder) -> list:
    """The events of every file in a folder, in order: a length (8 bytes) and its checksum (4), the event, its own."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, place = path.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            event = Event()
            event.ParseFromString(data[place + 12 : place + 12 + length])
            found.append(event)
            place += 16 + length
    return found


def test_tensorboard_holds_numbers_and_texts_and_a_resumed_run_hides_what_it_runs_again(tmp_path):
    reported(tmp_path / "run", "tensorboard", 1)
    reported(tmp_path / "run", "tensorboard", 2, resume_step=1)
    events = events_of(tmp_path / "run" / "tensorboard")
    values = [(value.tag, event.step, value) for event in events for value in event.summary.value]
    scalars = [(tag, step, value.simple_value) for tag, step, value in values if not value.HasField("tensor")]
    assert [row for row in scalars if row[0] in ("train/loss", "eval/accuracy")] == [
        ("train/loss", 1, 0.25),
        ("train/loss", 2, 0.5),
        ("eval/accuracy", 2, 0.25),
        ("train/loss", 2, 0.5),
        ("train/loss", 3, 0.75),
        ("eval/accuracy", 3, 0.25),
    ]
    assert {tag for tag, _, _ in scalars} == {
        "train/loss",
        "train/rewards/exact/mean",
        "train/global_step",
        "eval/accuracy",
    }
    starts = [event.step for event in events if event.HasField("session_log")]
    assert starts == [2]  # what older files say of steps from 2 on is not shown
    texts = {(tag.removesuffix("/text_summary"), step): v.tensor.string_val[0].decode() for tag, step, v in values
             if v.HasField("tensor")}  # fmt: skip
    assert '"learning_rate": 0.5' in texts["args", 0]
    assert "    user: 1+1 = <b>?</b>" in texts["completions", 1] and "    猫" in texts["completions", 1]
    assert "exact 1.0, advantage 0.5" in texts["completions", 1] and "token_ids" not in texts["completions", 1]
    assert "    c" in texts["eval/completions", 2]


# ---- wandb -----------------------------------------------------------------------------------------------------------


def finished_records(path) -> list:
    """The records of a .wandb file. wandb's own process writes it, and may be behind: the last one is "exit"."""
    deadline = time.monotonic() + 60
    while not (found := wandb_records(path)) or not found[-1].HasField("exit"):
        assert time.monotonic() < deadline, f"{path} is not finished"
        time.sleep(0.1)
    return found


def wandb_records(path) -> list:
    """The whole records so far: after 7 bytes, LevelDB's log of 32 KiB blocks (checksum, length, type, part)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if len(data) < place + 7 + length:
            break
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def test_wandb_offline_has_rows_config_tables_and_one_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_PROJECT", "of the environment")
    reported(tmp_path / "run", "wandb", 1)
    reported(tmp_path / "run", "wandb", 3, resume_step=2, name="its name", project="mine")
    identity = json.loads((tmp_path / "run" / reporters.IDS).read_text())["wandb"]
    folders = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{identity}"))
    assert len(folders) == 2
    rows, runs, config = [], [], {}
    for folder in folders:
        for record in finished_records(folder / f"run-{identity}.wandb"):
            if record.HasField("history"):
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                rows.append(items)
            if record.HasField("run"):
                runs.append((record.run.run_id, record.run.project, record.run.display_name))
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    losses = [(row["train/global_step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert [row["eval/accuracy"] for row in rows if "eval/accuracy" in row] == [0.25, 0.25]
    assert not any("kl" in name for row in rows for name in row)
    assert {run[0] for run in runs} == {identity}
    assert {run[1:] for run in runs} == {("of the environment", "run"), ("mine", "its name")}
    assert config["learning_rate"] == 0.5 and config["stop"] == ["x"]
    (table,) = folders[0].glob("files/media/table/completions_1_*.table.json")
    assert json.loads(table.read_text()) == {
        "columns": ["step", "prompt", "completion", "exact", "advantage"],
        "data": [[1, "user: 1+1 = <b>?</b>", "2\n\n猫", 1.0, 0.5], [1, "user: 1+1 = <b>?</b>", "2\n\n猫", None, 0.5]],
    }
    assert len(list(folders[0].glob("files/media/table/eval/completions_2_*.table.json"))) == 1


# ---- trackio ---------------------------------------------------------------------------------------------------------


def test_trackio_holds_rows_config_and_tables_in_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    reported(tmp_path / "run", "trackio", 1)
    reported(tmp_path / "run", "trackio", 3, resume_step=2)
    name = json.loads((tmp_path / "run" / reporters.IDS).read_text())["trackio"]
    assert name.startswith("run-")
    reported(tmp_path / "other", "trackio", 1, name="its name", project="mine")
    logs = SQLiteStorage.get_logs("cukit", name)
    losses = [(row["step"], row["train/global_step"], row["train/loss"]) for row in logs if "train/loss" in row]
    assert losses == [(1, 1, 0.25), (2, 2, 0.5), (3, 3, 0.75), (4, 4, 1.0)]
    tables = [row["completions"]["_value"] for row in logs if "completions" in row]
    assert len(tables) == 4 and tables[0][0] == {
        "step": 1, "prompt": "user: 1+1 = <b>?</b>", "completion": "2\n\n猫", "exact": 1.0, "advantage": 0.5,
    }  # fmt: skip
    assert sum("eval/completions" in row for row in logs) == 2
    assert SQLiteStorage.get_run_config("cukit", name)["learning_rate"] == 0.5
    assert [run if isinstance(run, str) else run["name"] for run in SQLiteStorage.get_runs("mine")] == ["its name"]


# ---- all of them -----------------------------------------------------------------------------------------------------


class Recorder(Reporter):
    """Keeps what it gets; fails where it is told to."""

    package = "json"
    fails_at: str | None = None
    calls: list

    def __init__(self, run, former):
        self.id = "one"
        type(self).calls = [("open", run, former)]
        self._do("open")

    def _do(self, what, *details):
        if self.fails_at == what:
            raise RuntimeError("the network\nis gone")
        type(self).calls.append((what, *details))

    def log(self, step, metrics):
        self._do("log", step, metrics)

    def log_completions(self, step, rows, name="completions"):
        self._do(name, step, rows)

    def close(self):
        self._do("close")


@pytest.fixture
def two(monkeypatch):
    """Two dashboards, Good and Bad."""
    good, bad = (type(name, (Recorder,), {}) for name in ("Good", "Bad"))
    monkeypatch.setitem(REPORTERS, "good", good)
    monkeypatch.setitem(REPORTERS, "bad", bad)
    return good, bad


@pytest.mark.parametrize("moment", ["open", "log", "completions", "close"])
def test_a_dashboard_that_fails_gets_one_warning_and_ends_nothing(tmp_path, caplog, two, moment):
    good, bad = two
    bad.fails_at = moment
    opened = Reporters(["bad", "good"], ReportedRun(tmp_path, {}), tables=True)
    for step in (1, 2, 3):
        opened.log_completions(step, [{"step": step, "prompt": "p", "completion": "c"}])
        opened.log(step, {"loss": 1.0})
    opened.close()
    opened.close()
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "bad failed" in warning.getMessage() and "the network is gone" in warning.getMessage()
    assert [call[:2] for call in good.calls if call[0] in ("log", "completions")] == [
        (what, step) for step in (1, 2, 3) for what in ("log", "completions")
    ]
    assert good.calls[-1] == ("close",) and good.calls.count(("close",)) == 1
    assert (
        len([call for call in bad.calls if call[0] == "log"])
        == {"open": 0, "log": 0, "completions": 1, "close": 3}[moment]
    )


def test_completions_go_along_with_rows_and_only_if_they_are_wanted(tmp_path, two):
    for wanted in (True, False):
        opened = Reporters(["good"], ReportedRun(tmp_path, {}), tables=wanted)
        for step in (1, 2, 3):  # a row of metrics is logged at every third step
            opened.log_completions(step, [{"step": step, "prompt": "p", "completion": str(step)}])
        opened.log(3, {"loss": 1.0})
        opened.log(4, {"loss": 1.0})
        tables = [call for call in two[0].calls if call[0] == "completions"]
        assert tables == ([("completions", 3, [{"step": 3, "prompt": "p", "completion": "3"}])] if wanted else [])


def test_ids_are_kept_for_the_next_resume_and_a_new_run_has_new_ones(tmp_path, two):
    good, _ = two
    Reporters(["good"], ReportedRun(tmp_path, {}))
    assert good.calls[0][2] is None
    Reporters(["bad"], ReportedRun(tmp_path, {}, resume_step=3))  # this time another one
    Reporters(["good"], ReportedRun(tmp_path, {}, resume_step=5))
    assert good.calls[0][2] == "one"
    Reporters(["good"], ReportedRun(tmp_path, {}))
    assert good.calls[0][2] is None
    (tmp_path / reporters.IDS).write_text("no JSON")
    Reporters(["good"], ReportedRun(tmp_path, {}, resume_step=5))
    assert good.calls[0][2] is None


def test_names_are_those_of_transformers_callbacks():
    metrics = {"loss": 1.5, "completions/mean_length": 3, "eval/loss": 2.0, "eval_loss": 2.5, "kl": None, "note": "x"}
    assert dashboard_metrics(metrics) == {"train/loss": 1.5, "train/completions/mean_length": 3, "eval/loss": 2.5}
    assert dashboard_metrics({"evaluation": 1.0}) == {"train/evaluation": 1.0}


def test_a_missing_package_is_said_with_its_install_command(monkeypatch):
    assert set(REPORTERS) == set(DASHBOARDS)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboardX" else object())
    check_packages(["wandb", "trackio"])
    with pytest.raises(ValueError, match=r"tensorboard needs tensorboardX, .*: pip install 'cukit\[tensorboard\]'"):
        check_packages(["wandb", "tensorboard"])
