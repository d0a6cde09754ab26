"""The reward that runs programs: what is taken out of a completion, what passes, what a program is held back from."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cukit.rewards import call_reward, load_reward, programs
from cukit.rewards.programs import last_program, same_output

ROOT = Path(__file__).parents[2]
TRUE = ["assert True"]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the means are Linux's")


def score(program, tests=TRUE, spec="code"):
    completion = f"First.\n```python\n{program}\n```\nDone."
    return call_reward(load_reward(spec), "mine", ["p"], [completion], [[1]], {"tests": [tests]})[0]


def needs(lock):
    if not programs.locks()[lock]:
        pytest.skip(f"this system can not hold a program back from: {lock}")


# ---- which program ----


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n```\n```python3\nb\n\nc\n```", "b\n\nc\n"),
        ("```python\na\n```\nprints\n```\n3\n```", "a\n"),
        ("```Python\na\n```\n```text\nb\n```", "a\n"),
        ("```python\na\n```\n```python\nb", "a\n"),  # the second was cut off
        ("  ```python title=x\na\n  ```", "a\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("```bash\na\n```", None),
        ("a", None),
        ("```python a ```", None),
    ],
)
def test_the_last_code_block(text, program):
    assert last_program(text) == program


def test_blocks_are_read_as_by_another_way():
    """Against a reader that goes line by line."""
    rng, found = random.Random(9), 0
    lines = ["```", "```python", "```py", "```text", "a", "b = 1", "", "``", "`x`"]
    for _ in range(5000):
        text = "\n".join(rng.choice(lines) for _ in range(rng.randrange(12)))
        marked, plain, block = None, None, None
        for line in text.split("\n"):
            if block is None and line.startswith("```"):
                mark, block = line[3:], []
            elif block is not None and line == "```":
                body = "".join(part + "\n" for part in block)
                if mark in ("python", "py"):
                    marked = body
                elif not mark:
                    plain = body
                block = None
            elif block is not None:
                block.append(line)
        wanted = marked if marked is not None else plain
        assert last_program(text) == wanted, text
        found += wanted is not None
    assert found > 1000


def test_outputs_may_differ_in_white_space_at_the_ends():
    assert same_output("1 2 \n3\n\n", "1 2\n3") and not same_output("1  2", "1 2") and not same_output("", "0")


# ---- what passes ----


def test_inputs_and_outputs():
    program = "n = int(input())\nprint('got')\nprint(n * 2)"
    right, wrong = {"input": "3\n", "output": "got\n6\n"}, {"input": "3\n", "output": "got\n7\n"}
    assert score(program, [right, {"input": "-1", "output": "got\n-2"}]) == 1.0
    assert score(program, [right, wrong]) == 0.0 and score(program, [right, wrong], "code(share=True)") == 0.5
    assert score(program, json.dumps([right])) == 1.0 and score(program, right) == 1.0
    assert score(program + "\nraise SystemExit(1)", [right]) == 0.0
    assert score("if __name__ == '__main__':\n    print('ü')", [{"input": "", "output": "ü"}]) == 1.0


def test_asserts():
    program = "def f(x):\n    return x + 1\n\nif __name__ == '__main__':\n    input('no test has an input')\n"
    assert score(program, ["assert f(1) == 2", "assert f(-1) == 0"]) == 1.0
    assert score(program, ["assert f(1) == 2", "assert f(1) == 3"], "code(share=True)") == 0.5
    dataclass = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1"
    assert score(dataclass, "assert A().x == 1") == 1.0
    assert score("def f(:", TRUE) == 0.0


@pytest.mark.parametrize("program", ["import os; os._exit(0)", "import sys; sys.exit(0)", "print('a' * 32)\nexit()"])
def test_a_program_that_leaves_before_the_test_has_not_passed(program):
    assert score(program, ["assert False"]) == 0.0 and score(program, TRUE) == 0.0


def test_rows_without_tests_or_program():
    rows = {"tests": [None, [], TRUE]}
    assert call_reward(load_reward("code"), "mine", ["p"] * 3, ["x"] * 3, [[1]] * 3, rows) == [None, None, 0.0]
    with pytest.raises(ValueError, match="needs a 'tests' column"):
        call_reward(load_reward("code"), "mine", ["p"], ["x"], [[1]], {"answer": ["1"]})
    with pytest.raises(ValueError, match="tests of completion 0 must be .* got 3"):
        score("x", [3])


# ---- what a program is held back from ----


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_time_is_limited(program):
    start = time.monotonic()
    assert score(program, TRUE, "code(timeout=0.5)") == 0.0
    assert time.monotonic() - start < 10


@linux
def test_memory_and_files_are_limited():
    assert score("x = bytearray(300 << 20)") == 1.0 and score("x = bytearray(1 << 30)") == 0.0
    assert score("x = bytearray(300 << 20)", TRUE, "code(memory_gb=0.25)") == 0.0
    assert score("open('a', 'w').write('a' * 100)") == 1.0 and score("open('a', 'w').write('a' * (1 << 21))") == 0.0


@linux
def test_a_program_has_no_environment_and_hashes_are_the_same_in_each_run(monkeypatch):
    monkeypatch.setenv("A_SECRET", "1")
    assert score("import os\nassert 'A_SECRET' not in os.environ and len(os.environ) < 10") == 1.0
    assert score("print(hash('a'))", [{"input": "", "output": str(hash_of_a())}]) == 1.0


def hash_of_a():
    code = [sys.executable, "-c", "print(hash('a'))"]
    return int(subprocess.run(code, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True).stdout)


@linux
def test_a_program_can_not_reach_the_network():
    needs("network")
    with __import__("socket").create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        program = f"import socket\nsocket.create_connection({address!r}, timeout=2)"
        subprocess.run([sys.executable, "-c", program], check=True)  # it could from here
        assert score(program) == 0.0


@linux
def test_a_program_can_not_reach_other_files_and_programs(tmp_path):
    needs("files")
    (tmp_path / "mine").write_text("1")
    for program in (
        f"open({str(tmp_path / 'mine')!r}).read()",
        f"open({str(tmp_path / 'mine')!r}, 'a')",
        f"import os\nos.remove({str(tmp_path / 'mine')!r})",
        f"import os\nos.mkdir({str(tmp_path / 'new')!r})",
        "open('/etc/passwd').read()",
        "import subprocess\nsubprocess.run(['/bin/true'], check=True)",
    ):
        assert score(program) == 0.0, program
    assert (tmp_path / "mine").read_text() == "1" and not (tmp_path / "new").exists()
    assert score("import os\nopen('a', 'w').write('1')\nassert open('a').read() == '1'\nos.remove('a')") == 1.0
    assert (
        score("import random, decimal, json, heapq, datetime, collections, itertools, tempfile\nrandom.random()") == 1.0
    )


@linux
def test_a_program_can_not_reach_other_processes():
    needs("other processes")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert score(f"import os\nos.kill({victim.pid}, 9)") == 0.0
        assert score("import os\nos.kill(os.getppid(), 9)") == 0.0
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


@linux
def test_a_program_can_not_start_many_processes():
    needs("many processes")
    assert score("import os, time\nfor _ in range(100):\n    os.fork() or (time.sleep(9), os._exit(0))") == 0.0


def running():
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        is_runner = "program_runner.py" in " ".join(process.info["cmdline"] or ())
        found += [process] if is_runner and process.info["status"] != psutil.STATUS_ZOMBIE else []
    return {process.pid for process in found}


def none_of(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while running() & pids and time.monotonic() < end:
        time.sleep(0.02)
    return not running() & pids


def test_what_a_program_starts_ends_with_it():
    before = running()
    score("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)")
    assert none_of(running() - before)


def test_an_interrupted_reward_leaves_no_program():
    before = running()

    def stop(number, frame):
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGALRM, stop)
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            score("import time\ntime.sleep(60)", TRUE * 20, "code(timeout=30)")
    finally:
        signal.signal(signal.SIGALRM, usual)
    assert time.monotonic() - start < 10 and none_of(running() - before)


@linux
def test_a_killed_trainer_leaves_no_program():
    code = (
        "from cukit.rewards import load_reward\n"
        "text = '```python\\nimport time\\ntime.sleep(60)\\n```'\n"
        "load_reward('code(timeout=30)')(completions=[text], tests=[['assert True'] * 4])"
    )
    before = running()
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)})
    end = time.monotonic() + 10
    while not (started := running() - before) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    started |= running() - before
    process.kill()
    process.wait()
    assert started and none_of(started)


def test_what_can_not_be_locked_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(programs, "_locks", None)
    real = programs.locks

    def fewer():
        real()
        return {"network": False, "files": True}

    monkeypatch.setattr(programs, "locks", fewer)
    assert score("x = 1") == 1.0 and score("x = 1") == 1.0
    assert [record.getMessage() for record in caplog.records] == [
        "the 'code' reward: here the programs can not be held back from: network; run it where that does no harm"
    ]
