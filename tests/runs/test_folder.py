"""Run folders: which are free, which are refused and with what advice, config.yaml, the lock."""

import os
import subprocess
import sys

import pytest
import yaml

from cukit.models.weights import load_model
from cukit.runs.checkpoint import save_checkpoint
from cukit.runs.files import write_text
from cukit.runs.folder import RunLock, leave_run_folder, open_run_folder, write_run_config
from cukit.runs.metrics import MetricsLogger


def test_a_run_folder_is_fresh_or_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [str(open_run_folder(None, "grpo tiny/x")) for _ in range(2)] == [
        "runs/grpo-tiny-x-001",
        "runs/grpo-tiny-x-002",
    ]
    named = open_run_folder("mine", "grpo")
    write_run_config(named, {"learning_rate": 1e-4, "reward_funcs": ["gsm8k"]})
    assert yaml.safe_load((named / "config.yaml").read_text()) == {"learning_rate": 1e-4, "reward_funcs": ["gsm8k"]}
    assert open_run_folder("mine", "grpo") == named  # nothing to protect yet


def log_step(folder, step):
    logger = MetricsLogger(folder)
    logger.log(step, {"loss": 1.0})
    logger.close()


def test_c7_what_claims_a_folder(tmp_path, golden):
    """A logged step or a checkpoint; the advice fits what is there."""
    run = tmp_path / "run"
    log_step(run, 0)  # an evaluation before the first step
    assert open_run_folder(run, "grpo") == run
    log_step(run, 3)
    with pytest.raises(ValueError, match="delete it .it logged 3 steps and has no checkpoint"):
        open_run_folder(run, "grpo")
    save_checkpoint(run / "checkpoint-3", load_model(golden / "qwen3_tiny"), None, {}, {})
    with pytest.raises(ValueError, match="already holds a run.*--resume_from_checkpoint latest"):
        open_run_folder(run, "grpo")
    assert open_run_folder(run, "grpo", resume=True) == run
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="already holds a run"):
        open_run_folder(run, "grpo")
    with pytest.raises(ValueError, match="holds a model"):
        open_run_folder(golden / "qwen3_tiny", "grpo")


def test_c7_only_an_empty_folder_is_left(tmp_path):
    run = open_run_folder(tmp_path / "run", "grpo")
    write_run_config(run, {"seed": 1})
    leave_run_folder(run)
    assert not run.exists()
    log_step(run, 0)
    leave_run_folder(run)
    assert run.exists()


@pytest.mark.parametrize("below", ["file", "file/run", "file/run/deep"])
def test_c8_a_folder_below_a_file(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file") as error:
        open_run_folder(tmp_path / below, "grpo")
    assert str(tmp_path / below) in str(error.value) and "is a file" in str(error.value)


def test_c8_other_folders_that_cannot_be_made(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="cannot be made: File name too long"):
        open_run_folder(tmp_path / ("n" * 300), "grpo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with pytest.raises(ValueError, match="runs is a file"):
        open_run_folder(None, "grpo")


# ---- config.yaml -----------------------------------------------------------------------------------------------------


def test_c6_the_options_before_are_kept(tmp_path):
    def configs():
        return {path.name: yaml.safe_load(path.read_text()) for path in sorted(tmp_path.iterdir())}

    write_run_config(tmp_path, {"lr": 1, "output_dir": "a"})
    write_run_config(tmp_path, {"lr": 2, "output_dir": "a"})  # a fresh start
    assert configs() == {"config.yaml": {"lr": 2, "output_dir": "a"}}
    write_run_config(tmp_path, {"lr": 2, "output_dir": "b"}, resume_step=5)  # the folder was moved
    assert configs() == {"config.yaml": {"lr": 2, "output_dir": "b"}}
    for rate in (3, 4):
        write_run_config(tmp_path, {"lr": rate, "output_dir": "b"}, resume_step=5)
    rates = {name: config["lr"] for name, config in configs().items()}
    assert rates == {"config.step-5.yaml": 2, "config.step-5-2.yaml": 3, "config.yaml": 4}


def test_c6_a_resume_says_which_options_are_others(tmp_path, caplog):
    caplog.set_level("INFO", "cukit.runs.folder")
    first = {"data": "a.jsonl", "lr": 1, "seed": 3, "loss": "mine.py:loss", "output_dir": "a"}
    write_run_config(tmp_path, first)
    write_run_config(tmp_path, first | {"output_dir": "b"}, resume_step=5)
    assert not caplog.messages
    write_run_config(tmp_path, {"data": "b.jsonl", "lr": 1, "seed": 4, "beta": 0.1, "output_dir": "b"}, resume_step=5)
    assert caplog.messages == [
        "other options from here on, the former ones are in config.step-5.yaml: "
        "data 'a.jsonl' -> 'b.jsonl', seed 3 -> 4, loss 'mine.py:loss' -> None, beta None -> 0.1"
    ]
    (tmp_path / "config.yaml").write_text("- 1")
    write_run_config(tmp_path, {"seed": 4, "\x1b\ud83d": "\ud83d"}, resume_step=6)
    assert caplog.messages[1].endswith(r"config.step-6.yaml: seed None -> 4, \x1b\ud83d None -> '\ud83d'")


def test_c8_a_small_file_is_whole_or_as_before(tmp_path, monkeypatch):
    write_text(tmp_path / "config.yaml", "before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError):
        write_text(tmp_path / "config.yaml", "after")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


# ---- the lock --------------------------------------------------------------------------------------------------------


def test_c7_one_run_at_a_time(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(ValueError, match=rf"in use by another run \(process {os.getpid()}\)"):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_c7_the_lock_of_a_killed_process_is_stale(tmp_path):
    code = "import sys, time; from pathlib import Path; from cukit.runs.folder import RunLock\n"
    code += "lock = RunLock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"locked\n"
    with pytest.raises(ValueError, match=rf"process {process.pid}\)"):
        RunLock(tmp_path)
    process.kill()
    process.communicate()
    assert (tmp_path / ".lock").exists()
    RunLock(tmp_path).release()


def test_c8_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match="cannot be written to: Permission denied"):
        RunLock(tmp_path)
