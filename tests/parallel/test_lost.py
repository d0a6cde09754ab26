"""What becomes of a run when a rank dies, hangs, fails or is asked to stop."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from processes import running_children

from cukit.runs.checkpoint import latest_checkpoint

from .launch import command, environment, needs_mpi, run, start

pytestmark = [pytest.mark.mpi, needs_mpi]
# a checkpoint holds no float64; the large epsilon keeps Adam from making rounding as large as the learning rate
CASE = {"method": "sft", "dtype": "float32", "adam_epsilon": 1e-3, "per_device_train_batch_size": 3, "max_steps": 6,
        "save_steps": 1}  # fmt: skip


def lost(ranks, folder, **case):
    """(output, seconds from the fault to the end) of a run that a rank's fault ends."""
    process = start(ranks, folder, {"run": CASE | case})
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    ended = time.time()
    assert process.returncode != 0, output
    assert (acts := re.search(r"rank 1 acts at ([\d.]+)", output)), output
    return output, ended - float(acts[1])


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_is_named_and_the_last_checkpoint_goes_on(ranks, tmp_path):
    """mpirun ends the others half a second after a rank was killed; the reason is on the screen before."""
    output, seconds = lost(ranks, tmp_path, does="kill", per_device_train_batch_size=6 // ranks)
    lines = re.findall(r"error: rank 1 \(process \d+ on \S+\) was killed or has crashed, (.*); rank (\d) stops", output)
    assert {rank for _, rank in lines} == {"0", "2"} - ({"2"} if ranks == 2 else set()), output
    assert "--resume_from_checkpoint latest" in output
    assert seconds < 30
    checkpoint = latest_checkpoint(tmp_path / "run" / "run")
    assert checkpoint is not None and checkpoint.name == "checkpoint-2"
    whole = CASE | {"per_device_train_batch_size": 6}
    on = whole | {"resume": str(checkpoint), "output_dir": str(tmp_path / "goes on")}
    found, _ = run(1, tmp_path, {"on": on, "through": whole})
    (told, resumed), (_, truth) = found["on"][0], found["through"][0]
    assert told["step"] == 6
    for name, array in truth.items():
        if name.startswith("weights/"):
            np.testing.assert_allclose(resumed[name], array, atol=1e-5, err_msg=name)


def test_a_stopped_rank_is_named(tmp_path):
    """SIGSTOP; the rank is not heard of for SILENT seconds, of which this run has 4 in place of 30."""
    output, seconds = lost(2, tmp_path, does="stop", silent=4)
    assert re.search(
        r"rank 1 \(process \d+ on \S+\) has not been heard of for \d+ s, .*SIGSTOP.*; rank 0 stops", output
    )
    assert seconds < 50


def test_a_rank_that_does_not_come_is_named_with_the_collective(tmp_path):
    output, seconds = lost(2, tmp_path, does="linger", ddp_timeout=3)
    wanted = r"error: stop \(collective \d+\) has waited 3 s \(ddp_timeout\) for rank 1 \(.*\), which is at work after"
    assert re.search(wanted, output), output
    assert seconds < 50


def test_a_rank_that_fails_is_quoted(tmp_path):
    """An error of one rank, outside of what the ranks agree on."""
    output, seconds = lost(2, tmp_path, does="fail")
    assert re.search(r"error: rank 1 .* has ended: OSError: the disk of this rank is broken; rank 0 stops", output)
    assert "Traceback" in output
    assert seconds < 50


DEALT = {"method": "grpo", "balance_rollouts": "true", "slow": 1, "max_num_seqs": 8, "max_completion_length": 24,
         "per_device_train_batch_size": 8}  # fmt: skip


@pytest.mark.parametrize("does, case, places", [
    ("save alone", {"method": "grpo", "per_device_train_batch_size": 12}, r"0 is in \w+ where rank 1 is in saving"),
    ("ask alone", {}, r"rank [01] .*is in (gradients|stop) where rank [01] is in (gradients|stop)"),
])  # fmt: skip
def test_a_call_of_one_rank_alone_is_named_at_once(does, case, places, tmp_path):
    """What all ranks take part in, called by one: not a wait of ddp_timeout, and no value of another call."""
    output, seconds = lost(2, tmp_path, does=does, **case)
    assert re.search(places, output) and "every rank must make the same calls" in output, output
    assert not re.search("TypeError|EOFError|UnpicklingError", output), output
    assert seconds < 30


def test_a_rank_killed_in_a_rollout_whose_groups_move_is_named(tmp_path):
    output, seconds = lost(3, tmp_path, **DEALT, does="kill in rollout")
    lines = re.findall(r"error: rank 1 \(process \d+ on \S+\) was killed or has crashed, (.*); rank (\d) stops", output)
    assert {rank for _, rank in lines} == {"0", "2"}, output
    assert seconds < 30 and latest_checkpoint(tmp_path / "run" / "run").name == "checkpoint-2"


def test_a_stop_in_a_rollout_whose_groups_move_stops_all_in_order(tmp_path):
    found, output = run(2, tmp_path, {"run": CASE | DEALT | {"does": "term in rollout", "save_steps": 0}})
    assert [told["step"] for told, _ in found["run"]] == [2, 2]
    assert "stopped at step 2 of 6" in output


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_fails_within_its_passes_is_quoted(stage, tmp_path):
    """The others are at their sums of gradients, and in stage 3 at gathers of weights too."""
    case = dict(does="pass", zero_stage=stage, max_tokens_per_batch=2)  # a pass a row
    output, seconds = lost(2, tmp_path, **case)
    assert "RankLost: rank 1 failed in training: OSError: this rank cannot compute" in output, output
    assert "OSError: this rank cannot compute" in output
    assert seconds < 30
    saved = latest_checkpoint(tmp_path / "run" / "run")
    assert saved is not None and saved.name == "checkpoint-3"  # the third batch has a row for each rank


def test_an_error_in_a_reward_ends_all_ranks_and_saves(tmp_path):
    """One that the ranks agree on: the finished steps are saved by the first rank before any of them ends."""
    process = start(2, tmp_path, {"run": {"method": "grpo", "per_device_train_batch_size": 12, "does": "reward"}})
    output, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    assert "rank 1 failed in rollout" in output and "no such answer" in output, output
    assert latest_checkpoint(tmp_path / "run" / "run").name == "checkpoint-2"
    record = json.loads((tmp_path / "run" / "run" / "run.json").read_text())
    assert record["starts"][-1]["status"].startswith("error: ")


def test_a_sigterm_at_one_rank_stops_all_in_order(tmp_path):
    found, output = run(2, tmp_path, {"run": CASE | {"does": "term", "save_steps": 0}})
    assert [told["step"] for told, _ in found["run"]] == [2, 2]
    assert "stopped at step 2 of 6" in output and output.count("stopping as soon") == 0  # rank 1 has no screen
    assert latest_checkpoint(tmp_path / "run" / "run").name == "checkpoint-2"


def test_sigusr1_at_mpirun_stops_all_in_order(tmp_path):
    """mpirun passes it on; at a Ctrl-C or SIGTERM of its own it kills its processes at once."""
    process = start(2, tmp_path, {"run": CASE | {"max_steps": 100_000, "save_steps": 0}})
    first = process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert "sft step" in first and process.returncode == 0, first + output
    assert output.count("stopping as soon as the state can be saved") == 1
    steps = [json.loads((tmp_path / "run" / f"rank-{rank}.json").read_text())["step"] for rank in (0, 1)]
    assert steps[0] == steps[1] == int(latest_checkpoint(tmp_path / "run" / "run").name.split("-")[1])


EARLY = """
import os, signal, sys
import cukit.datasets.sources as sources
import cukit_cli
load, numbers = sources.load_rows, [signal.SIGUSR1]
def signalled(*given):
    if numbers:
        os.kill(os.getpid(), numbers.pop())
    return load(*given)
sources.load_rows = signalled
sys.exit(cukit_cli.main())
"""


def test_sigusr1_while_rows_load_stops_before_the_first_step(tmp_path):
    """As mpirun passes it on to all: each rank keeps it, and the run ends in one line."""
    sizes = ["--per_device_train_batch_size", "2", "--max_steps", "100000", "--zero_stage", "3"]
    called = command(2, "-c", EARLY, "sft", "--output_dir", tmp_path / "run", "--device", "cpu", *sizes)
    done = subprocess.run(called, capture_output=True, text=True, env=environment(), timeout=240)
    output = done.stdout + done.stderr
    assert done.returncode == 130, output
    assert output.count("stopped before the first step; nothing was saved") == 1, output
    assert output.count("once models and rows are loaded; once more to stop at once") == 1
    assert "error: " not in output and not (tmp_path / "run").exists()


def test_benchmarks_report_once(tmp_path):
    """bench train and bench grpo count the tokens of all processes."""
    for name, sizes, key in (
        ("train", ("--rows", "2", "--tokens_per_row", "16", "--completion", "8", "--zero_stage", "3"), "tokens"),
        ("grpo", ("--prompts", "2", "--num_generations", "2", "--prompt_length", "4", "--max_completion_length", "4"),
         "samples"),
    ):  # fmt: skip
        words = ["-m", "cukit", "bench", name, "--model", "tiny", "--device", "cpu", "--repeats", "1", *sizes]
        output = tmp_path / f"{name}.json"
        done = subprocess.run(command(2, *words, "--output", output), capture_output=True, text=True, timeout=240,
                              env=environment())  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("rows:") == 1
        report = json.loads(output.read_text())
        assert report["processes"] == 2 and {row[key] for row in report["rows"]} == {64 if key == "tokens" else 8}


def test_nothing_is_left_behind(tmp_path):
    """No process, and no folder of the watch, after a run that went well."""
    process = start(2, tmp_path, {"run": CASE}, TMPDIR=str(tmp_path))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert not list(tmp_path.glob("cukit-ranks-*"))
    assert not running_children(psutil.Process(os.getpid()), str(tmp_path))


def test_the_command_line_speaks_once(tmp_path):
    """One rank prints; a mistake of the user's ends all ranks in one line, without a traceback."""
    program = [sys.executable, "-m", "cukit"]
    options = ["sft", "--max_steps", "2", "--output_dir", str(tmp_path / "run"), "--per_device_train_batch_size", "2"]
    called = command(2, *program[1:], *options, "--device", "cpu", "--learning_rate", "0.001")
    done = subprocess.run(called, capture_output=True, text=True, env=environment(), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("run folder:") == 1 and done.stdout.count("step 2/2") == 1
    assert done.stderr.count("run folder") == 1  # of the log
    called = command(2, *program[1:], *options, "--device", "cpu")
    done = subprocess.run(called, capture_output=True, text=True, env=environment(), timeout=240)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == done.stderr.count("already holds a run") == 1, done.stderr
