"""metrics.jsonl and completions.jsonl, the plain progress lines, the timer."""

import json
import time

import numpy as np

from cukit.runs.metrics import MetricsLogger, Timer, read_jsonl
from cukit.runs.progress import Progress, format_seconds


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


def test_progress_without_a_terminal_is_one_line_a_step(capsys):
    with Progress(4, "grpo", live=False) as progress:
        progress.update(0, {"eval/accuracy": 0.25})
        progress.advance(1)
        progress.update(
            2, {"reward": 0.5, "completions/mean_length": 12.0, "tokens_per_second": 1234.4, "loss": float("nan")}
        )
        progress.message("[red]as it is[/red]")
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "grpo step 0/4  accuracy 0.250"
    assert second.startswith(
        "grpo step 2/4  reward 0.500  accuracy 0.250  length 12.0  tokens/s 1,234  "
    ) and second.endswith(" left")
    assert third == "[red]as it is[/red]"


def test_live_progress_draws(capsys):
    with Progress(4, "grpo", start_step=1, live=True) as progress:
        progress.update(2, {"reward": 0.5})
        progress.message("[red]as it is[/red]")
    out = capsys.readouterr().out
    assert "2/4" in out and "reward 0.500" in out and "[red]as it is[/red]" in out


def test_timer_adds_up_phases():
    timer = Timer()
    for _ in range(2):
        with timer("generate"):
            time.sleep(0.01)
    times = timer.pop()
    assert times["time/generate"] >= 0.02 and times["step_time"] >= times["time/generate"]
    assert set(timer.pop()) == {"step_time"}


def test_durations_read_well():
    assert [format_seconds(s) for s in (0.4, 59.6, 200, 7500)] == ["0 s", "1 min 00 s", "3 min 20 s", "2 h 05 min"]
