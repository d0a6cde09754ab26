"""The reward that runs a Python program which the model wrote. Read what program_runner.py can hold it from first."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from .columns import Column, Completion, completion_text

logger = logging.getLogger(__name__)

RUNNER = Path(__file__).with_name("program_runner.py")
FENCE = re.compile(r"^[ \t]*```+[ \t]*([\w+.-]*)[^\n`]*\n(.*?)^[ \t]*```+[ \t]*$", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")
MAX_OUTPUT = 2**20  # bytes that a program may write to a file, its output included
MAX_PROGRAM = 100_000  # characters
MOST_AT_ONCE = 16  # programs, each of which may take memory_gb
# As `python -I`, but with hashes that are the same in every run: -I would not read PYTHONHASHSEED.
FLAGS = ("-s", "-P", "-B")
_locks: dict | None = None


def code(
    completions: Sequence[Completion],
    tests: Column = None,
    *,
    timeout: float = 5.0,
    memory_gb: float = 1.0,
    share: bool = False,
    **kwargs: object,
) -> list[float | None]:
    """1.0 if the program in the completion's last code block passes all tests of its row, else 0.0.

    A row of `tests` is a list, or JSON text of one: {"input": text, "output": text} (the program gets the input and
    must print the output; white space at the ends of lines does not count), or `assert …` texts, which run behind the
    program. None for a row without tests. `share=True`: the share of the tests that pass. A test may take `timeout`
    seconds of processor time (twice that, and one, on the clock) and `memory_gb`.

    The program runs as a process without environment, network and other files as far as the system lets a user without
    rights lock it up (said once where it does not). That is no sandbox: run it where nothing of value can be reached.
    """
    if tests is None:
        raise ValueError("the 'code' reward needs a 'tests' column in the data")
    rows = [_tests_of(row, index) for index, row in enumerate(tests)]
    _warn_of_missing_locks()
    jobs = [
        (index, program, test)
        for index, (completion, row) in enumerate(zip(completions, rows, strict=True))
        if (program := last_program(completion_text(completion))) is not None
        for test in row
    ]
    passed = [0] * len(rows)
    runs = _Runs(math.ceil(timeout), 2 * timeout + 1, int(memory_gb * 2**30))
    for (index, _, _), good in zip(jobs, runs.all([job[1:] for job in jobs]), strict=True):
        passed[index] += good
    shares = [count / len(row) if row else None for count, row in zip(passed, rows, strict=True)]
    return shares if share else [None if value is None else float(value == 1) for value in shares]


def last_program(text: str) -> str | None:
    """The last closed code block that is marked as Python, or else the last without a mark; None without either."""
    blocks = [(match[1].lower(), match[2]) for match in FENCE.finditer(text)]
    for marks in (PYTHON, ("",)):
        for mark, program in reversed(blocks):
            if mark in marks:
                return program if len(program) <= MAX_PROGRAM else None
    return None


def same_output(given: str, wanted: str) -> bool:
    """Equal but for white space at the ends of lines and of the text."""
    first, second = ([line.rstrip() for line in text.strip().splitlines()] for text in (given, wanted))
    return first == second


def _tests_of(row: Any, index: int) -> list[str | dict]:
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except ValueError:
            row = [row]
    row = [] if row is None else [row] if isinstance(row, dict) else list(row)
    for test in row:
        pair = isinstance(test, dict) and all(isinstance(test.get(key), str) for key in ("input", "output"))
        if not pair and not (isinstance(test, str) and test.strip()):
            raise ValueError(
                f"the 'code' reward: tests of completion {index} must be {{'input': text, 'output': text}} or "
                f"'assert …' texts, got {test!r:.60}"
            )
    return row


class _Runs:
    """Runs (program, test) pairs side by side, one process a test; an interruption kills all of them."""

    def __init__(self, cpu_seconds: int, seconds: float, memory: int):
        self.cpu_seconds, self.seconds, self.memory = cpu_seconds, seconds, memory
        self.alive: set[subprocess.Popen] = set()
        self.lock, self.stopped = threading.Lock(), False

    def all(self, jobs: list[tuple[str, str | dict]]) -> list[bool]:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_AT_ONCE)) as pool:
            try:
                return list(pool.map(lambda job: self.passes(*job), jobs))
            except BaseException:
                with self.lock:
                    self.stopped = True
                    for process in self.alive:
                        _kill(process)
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def passes(self, program: str, test: str | dict) -> bool:
        with tempfile.TemporaryDirectory(prefix="cukit-code-", ignore_cleanup_errors=True) as folder:
            (Path(folder) / "program.py").write_text(program, "utf-8", "backslashreplace")
            if isinstance(test, dict):
                finished, output = self._run(folder, "input", test["input"])
                return finished and same_output(output, test["output"])
            # The program may end before the test does: only the end of the test knows to say this word.
            word = secrets.token_hex(16)
            finished, output = self._run(folder, "assert", json.dumps({"test": test, "word": word}))
            return finished and word in output

    def _run(self, folder: str, mode: str, given: str) -> tuple[bool, str]:
        """(it ended by itself and well, what it printed)."""
        with tempfile.TemporaryFile() as output:
            with self.lock:
                if self.stopped:
                    return False, ""
                process = start(folder, mode, self.cpu_seconds, self.memory, output)
                self.alive.add(process)
            try:
                process.communicate(given.encode("utf-8", "backslashreplace"), self.seconds)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with self.lock:
                    _kill(process)  # what it started too
                    self.alive.discard(process)
                process.communicate()
            output.seek(0)
            return process.returncode == 0, output.read(MAX_OUTPUT + 1).decode("utf-8", "replace")


def start(folder: str, mode: str, cpu_seconds: int, memory: int, output: IO[bytes]) -> subprocess.Popen:
    """The runner's process, in `folder`, with next to nothing in its environment."""
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder}
    environment |= {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8", "OPENBLAS_NUM_THREADS": "1"}
    limits = (str(cpu_seconds), str(memory), str(MAX_OUTPUT), str(os.getpid()))
    return subprocess.Popen(
        [sys.executable, *FLAGS, str(RUNNER), mode, *limits],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen) -> None:
    """End the process group, as long as its number is its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def locks() -> dict[str, bool]:
    """What a program is held back from here: {"network": …, "files": …, …}. Tried once a process."""
    global _locks
    if _locks is None:
        if os.name != "posix":
            raise ValueError("the 'code' reward needs Linux or macOS: this system can not limit what a program takes")
        with tempfile.TemporaryDirectory(prefix="cukit-code-") as folder, tempfile.TemporaryFile() as output:
            start(folder, "locks", 5, 2**30, output).communicate()
            output.seek(0)
            _locks = json.loads(output.read())
    return _locks


def _warn_of_missing_locks() -> None:
    first = _locks is None
    missing = [name for name, held in locks().items() if not held]
    if first and missing:
        logger.warning(
            "the 'code' reward: here the programs can not be held back from: %s; run it where that does no harm",
            ", ".join(missing),
        )
