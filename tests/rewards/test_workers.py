"""Rewards from files run in processes of their own: same values, same words for faults, limits, and nothing left."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import running_children

from cukit.rewards import RewardBatch, RewardLog, RewardWorker, TrainerState, call_reward, load_reward
from cukit.rewards import worker as worker_module
from cukit.rewards.config import RewardLimits
from cukit.rewards.worker import WorkerError

from .test_calling import REWARDS

ROOT = Path(__file__).parents[2]
MINE = (
    REWARDS
    + """
import asyncio, ctypes, os, pathlib, re, subprocess, sys, threading, time

def right(completions, answer, prompts, completion_ids, prompt_ids, prompt_text, **kwargs):
    given = [prompts, completion_ids, prompt_ids, prompt_text]
    assert given == [["p"] * 3, [[1]] * 3, [[7]] * 3, ["q"] * 3] and "prompt" not in kwargs
    return [float(text == wanted) if wanted else None for text, wanted in zip(completions, answer)]

def records(completions, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("size", [len(text) for text in completions])
    for text in completions:
        log_metric("size", len(text))
    return [float(trainer_state.global_step)] * len(completions)

def records_too_few(completions, log_extra, **kwargs):
    log_extra("size", [1])
    return [0.0] * len(completions)

async def later(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 / len(text) for text in completions]

def sleeps(completions, **kwargs):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    time.sleep(60)

def spins(completions, **kwargs):
    return [float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))] * len(completions)

def exits(completions, **kwargs):
    os._exit(3)

def crashes(completions, **kwargs):
    ctypes.string_at(0)

def grows(completions, **kwargs):
    return [float(len(bytearray(3 << 30)))] * len(completions)

def mean(completions, **kwargs):
    return [float(len(bytearray(100 << 20)))] * len(completions)

def process(completions, **kwargs):
    return [float(os.getpid())] * len(completions)

def prints(completions, **kwargs):
    print("to the output", len(sys.argv))
    print("to the error output", file=sys.stderr)
    return [float(sys.stdin.read() == "")] * len(completions)
"""
)


@pytest.fixture
def worker(tmp_path):
    """worker(function, **limits): of a file that holds MINE."""
    path, started = tmp_path / "mine.py", []
    path.write_text(MINE)

    def start(function, **limits):
        started.append(RewardWorker(f"{path}:{function}", RewardLimits(**limits)).loaded())
        return started[-1]

    yield start
    for one in started:
        one.close()
    assert not alive(psutil.Process())


def alive(process):
    return running_children(process)


def batch(texts=("[1, 2]", "[1]", ""), state=None, **columns):
    count = len(texts)
    columns = columns or {"answer": ["[1, 2]", "2", None][:count]}
    return RewardBatch(["p"] * count, list(texts), [[1]] * count, columns, [[7]] * count, ["q"] * count, state)


def ask(worker, given=None, log=None, name="mine"):
    given = given or batch()
    worker.send(name, given)
    return worker.receive(len(given.completions), log or RewardLog(len(given.completions)))


def gone(pid, seconds=5.0):
    """Whether a process ends (a zombie has ended) within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_worker_gives_the_functions_values_and_is_used_again(worker):
    assert ask(worker("right")) == [1.0, 0.0, None]
    one = worker("process")
    assert one.__name__ == "process"
    first, second = ask(one), ask(one)
    assert first == second and first[0] not in (os.getpid(), None)
    assert worker("judge").__name__ == "Judge"


def test_a_worker_is_told_the_state_and_its_records_come_back(worker):
    log = RewardLog(3)
    assert ask(worker("records"), batch(state=TrainerState(global_step=4)), log) == [4.0] * 3
    assert log.columns == {"size": [6, 3, 0]} and log.metrics == {"size": [6.0, 3.0, 0.0]}
    assert ask(worker("later"), batch(["a", "bb"])) == [1.0, 0.5]


@pytest.mark.parametrize(
    "name", ["loop", "comprehension", "library", "whole", "leaves", "judge", "huge", "short", "records_too_few"]
)
def test_a_fault_is_reported_in_the_words_of_a_call_in_this_process(worker, tmp_path, name):
    with pytest.raises(ValueError) as here:
        call_reward(
            load_reward(f"{tmp_path}/mine.py:{name}") if (one := worker(name)) else None,
            "mine",
            *(["p"] * 3, batch().completions, [[1]] * 3, {"answer": ["1", "2", "3"]}),
            log=RewardLog(3),
        )
    with pytest.raises(ValueError) as there:
        ask(one, batch(answer=["1", "2", "3"]))
    assert str(there.value) == str(here.value)
    assert isinstance(there.value.__cause__, WorkerError) and "Traceback" in str(there.value.__cause__)
    with pytest.raises(ValueError, match="^reward 'mine'"):  # it is alive
        ask(one, batch(answer=["1", "2", "3"]))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine.py:nothing", "has no 'nothing'"),
        ("other.py:f", "does not exist"),
        ("broken.py:f", r"importing it raised ZeroDivisionError: division by zero \(.*broken.py, line 2\)$"),
        ("exits.py:f", r"^reward '.*exits.py:f': importing it ended its process \(it exited with code 5"),
        ("slow.py:f", r"importing it took longer than 1 s \(more than reward_timeout=0.5 s\); .* raise reward_timeout"),
    ],
)
def test_a_file_that_fails_to_load(tmp_path, monkeypatch, spec, message):
    if spec == "slow.py:f":
        monkeypatch.setattr(worker_module, "START_SECONDS", 1.0)
    (tmp_path / "mine.py").write_text("def f(): pass\n")
    (tmp_path / "broken.py").write_text("x = 0\nx / x\n")
    (tmp_path / "exits.py").write_text("import os\nos._exit(5)\n")
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(ValueError, match=message) as caught:
        RewardWorker(f"{tmp_path}/{spec}", RewardLimits(reward_timeout=0.5)).loaded()
    assert "\n" not in str(caught.value) and not alive(psutil.Process())


@pytest.mark.parametrize(
    ("name", "limits", "message"),
    [
        ("sleeps", {"reward_timeout": 1.0}, r"took longer than reward_timeout=1 s WHERE; .*raise reward_timeout \(0"),
        ("spins", {"reward_timeout": 1.0}, "took longer than reward_timeout=1 s WHERE; "),
        ("grows", {"reward_memory_gb": 1}, r"took more memory than reward_memory_gb=1 allows WHERE; .*\(0: no limit\)"),
        ("exits", {}, r"ended its process \(it exited with code 3; .*\) WHERE$"),
        ("crashes", {}, r"ended its process \(killed by SIGSEGV; .*\) WHERE$"),
    ],
)
def test_a_limit_or_a_crash_ends_the_call_in_one_line_and_the_next_call_works(worker, tmp_path, name, limits, message):
    one = worker(name, **limits)
    before, message = one._process.pid, message.replace("WHERE", rf"\({tmp_path}/mine.py, line \d+\)")
    with pytest.raises(ValueError, match="^reward 'mine': a call with 3 completions " + message) as caught:
        ask(one)
    assert "\n" not in str(caught.value)
    assert not alive(psutil.Process())
    one.spec = f"{tmp_path}/mine.py:process"
    assert ask(one)[0] not in (before, None)


def test_the_limits_hold_what_they_say(worker):
    assert ask(worker("mean", reward_memory_gb=1)) == [float(100 << 20)] * 3
    assert ask(worker("later", reward_timeout=0, reward_memory_gb=0), batch(["a"])) == [1.0]
    for name in ("reward_timeout", "reward_memory_gb"):
        with pytest.raises(ValueError, match=f"{name} must be at least 0"):
            RewardLimits(**{name: -1})


def test_what_a_worker_prints_reaches_the_user(worker, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert ask(worker("prints")) == [1.0] * 3
    found = capfd.readouterr()
    assert found.out == "to the output 1\n" and found.err == "to the error output\n"


def test_columns_that_can_not_be_sent_are_said(worker):
    with pytest.raises(ValueError, match="columns can not be sent there .*; or give the function itself in Python"):
        ask(worker("later"), batch(["a"], answer=[lambda: 0]))


def test_a_call_that_is_interrupted_leaves_no_process_and_no_reply(worker):
    one = worker("sleeps")

    class Stop(BaseException):
        pass

    def stop(number, frame):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Stop):
            ask(one)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not alive(psutil.Process())


def test_a_worker_that_is_forgotten_ends(worker, tmp_path):
    one = RewardWorker(f"{tmp_path}/mine.py:later") if worker("later") else None
    pid = one.loaded()._process.pid
    assert not gone(pid, 0.1)
    del one
    assert gone(pid)


# ---- the trainer's process ends, however ----

TRAINER = """
import sys
from cukit.rewards import RewardBatch, RewardLog, RewardWorker
worker = RewardWorker(sys.argv[1]).loaded()
print("ready", flush=True)
while True:
    worker.send("mine", RewardBatch(["p"], ["c"], [[1]], {}))
    worker.receive(1, RewardLog(1))
"""


def marked(mark):
    """Processes whose environment has a mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("CUKIT_MARK") == mark:
                found.append(process)
        except psutil.Error:
            pass
    return found


def kill_and_look(tmp_path, function, number, seconds):
    """Start a process with a worker, send it a signal after some time, and wait until nothing of it is left."""
    mark = str(random.random())
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, f"{tmp_path}/mine.py:{function}"],
        env=os.environ | {"CUKIT_MARK": mark, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    if seconds is None:
        process.stdout.readline()
        time.sleep(0.2)
    else:
        time.sleep(seconds)
    seen = len(marked(mark))
    process.send_signal(number)
    process.wait(10)
    process.stdout.close()
    end = time.monotonic() + 5
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    for one in left:
        one.kill()
    assert not left, f"{function}, signal {number}, after {seconds} s: {left}"
    return seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_trainer_leaves_nothing_behind(tmp_path, number):
    """The trainer, the worker, its guard and what the reward started are there before, and none after."""
    (tmp_path / "mine.py").write_text(MINE)
    assert kill_and_look(tmp_path, "sleeps", number, None) == 4


@pytest.mark.slow
def test_random_kills_leave_nothing_behind(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    rng = random.Random(11)
    for _ in range(30):
        number = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL])
        kill_and_look(tmp_path, rng.choice(["sleeps", "spins", "process"]), number, rng.uniform(0.05, 1.2))


def test_the_example_of_the_documentation(tmp_path):
    text = (ROOT / "docs" / "REWARDS.md").read_text(encoding="utf-8")
    (tmp_path / "my_rewards.py").write_text(text.split("```python\n")[1].split("```")[0])
    worker, log = RewardWorker(f"{tmp_path}/my_rewards.py:right"), RewardLog(3)
    given = batch(["it is 6", "6 or 7", ""], TrainerState(global_step=3), answer=["6"] * 3)
    assert ask(worker, given, log) == [1.0, 0.1, 0.0] and log.columns == {"said": ["6", "7", ""]}
    assert ask(worker, batch(["6 or 7"], TrainerState(global_step=101), answer=["6"]), RewardLog(1)) == [0.0]
    worker.close()
