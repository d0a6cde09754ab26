"""metrics.jsonl and completions.jsonl, means over steps, the timer."""

import errno
import json
import time

import numpy as np

from cukit.runs.metrics import MetricsLogger, MetricsWindow, Timer, read_jsonl


def test_rows_hold_plain_json(tmp_path):
    logger = MetricsLogger(tmp_path / "run")
    logger.log(1, {"loss": np.float32(0.5), "grad_norm": float("nan"), "kl": float("inf"), "list": np.arange(2)})
    logger.log_completions(
        1, [{"prompt": [{"role": "user", "content": "é"}], "completion": "1", "reward": np.float64(1)}]
    )
    logger.close()
    line = (tmp_path / "run/metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 1, "loss": 0.5, "grad_norm": None, "kl": None, "list": [0, 1]}
    assert "é" in (tmp_path / "run/completions.jsonl").read_text(encoding="utf-8")


def test_resumed_run_writes_each_step_once(tmp_path):
    logger = MetricsLogger(tmp_path)
    for step in range(1, 6):
        logger.log(step, {"loss": step})
    logger.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # cut off by a crash
    logger = MetricsLogger(tmp_path, resume_step=3)
    logger.log(4, {"loss": 40})
    logger.close()
    assert [(row["step"], row["loss"]) for row in read_jsonl(tmp_path / "metrics.jsonl")] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
    ]


def test_a_resumed_run_writes_a_partial_mean_anew(tmp_path):
    """The row of the steps before a stop is dropped; the evaluation of that step is not."""
    logger = MetricsLogger(tmp_path)
    logger.log(2, {"loss": 1})
    logger.log(3, {"loss": 1})
    logger.log(3, {"eval/loss": 1})
    logger.close()
    MetricsLogger(tmp_path, resume_step=3, redo_last=True)
    assert [list(row) for row in read_jsonl(tmp_path / "metrics.jsonl")] == [["step", "loss"], ["step", "eval/loss"]]
    MetricsLogger(tmp_path, resume_step=-1)
    assert not list(tmp_path.iterdir())


def test_c8_rows_wait_until_there_is_room(tmp_path, monkeypatch, caplog):
    """A full disk: no half line, one warning, nothing lost once there is room."""
    logger, append = MetricsLogger(tmp_path), MetricsLogger._append

    def full(self, name, line):
        append(self, name, line[:5])  # the system wrote a part
        self._files[name].truncate(self._files[name].tell() - 5)
        raise OSError(errno.ENOSPC, "No space left on device")

    logger.log(1, {"loss": 1})
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLogger, "_append", full)
        logger.log(2, {"loss": 2})
        logger.log_completions(2, [{"completion": "x"}])
        logger.log(3, {"loss": 3})
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1 and len(caplog.messages) == 2
    logger.log(4, {"loss": 4})
    logger.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert "1 rows could not be written to" in caplog.text  # the completion, for which no room was tried again


def test_a_line_is_whole_or_not_there(tmp_path):
    class Short:
        """A file on a disk with room for three bytes."""

        def __init__(self, file):
            self.file = file

        def write(self, line):
            return self.file.write(line[:3])

        def __getattr__(self, name):
            return getattr(self.file, name)

    logger = MetricsLogger(tmp_path)
    logger.log(1, {"loss": 1})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    logger._files["metrics.jsonl"] = Short(logger._files["metrics.jsonl"])
    logger.log(2, {"loss": 2})
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    logger.close()


def test_half_a_surrogate_pair_is_logged_as_its_escape(tmp_path):
    logger = MetricsLogger(tmp_path)
    logger.log_completions(1, [{"completion": "a\ud83d"}])
    logger.close()
    assert read_jsonl(tmp_path / "completions.jsonl")[0]["completion"] == "a\ud83d"
    MetricsLogger(tmp_path, resume_step=1)
    assert read_jsonl(tmp_path / "completions.jsonl")[0]["completion"] == "a\ud83d"


def test_the_window_is_a_mean_and_survives_json(tmp_path):
    window = MetricsWindow()
    window.add({"loss": 0.1, "num_tokens": 3, "kl": float("nan"), "reward": None})
    window.add({"loss": 0.2, "num_tokens": 7})
    again = MetricsWindow(json.loads(json.dumps(window.values)))
    assert again and again.row() == window.row() == {"loss": (0.1 + 0.2) / 2, "num_tokens": 7.0}
    assert window.pop() and not window and MetricsWindow().pop() == {}


def test_timer_adds_up_phases():
    timer = Timer()
    for _ in range(2):
        with timer("generate"):
            time.sleep(0.01)
    times = timer.pop()
    assert times["time/generate"] >= 0.02 and times["step_time"] >= times["time/generate"]
    assert set(timer.pop()) == {"step_time"}
