"""A reward in a process of its own: started once, asked for every batch, ended when it exceeds a limit.

The process leads a session and a process group of its own: Ctrl-C does not reach it, and whatever it started ends with
it. A guard, a bare process forked before anything else, waits for the end of its standard input. This process holds the
other end: however it ends, the whole group is killed.

What goes to the worker is pickled; what comes back is JSON, so that nothing of the user's is unpickled here.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from typing import TYPE_CHECKING

from ..user_code import one_line
from .calling import RewardBatch
from .config import RewardLimits
from .log import RewardLog

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

logger = logging.getLogger(__name__)

# argv: the connection's descriptor, then sys.path. The guard comes before imports: it stays small and has one thread.
BOOT = """
import os, signal, sys
if os.fork() == 0:
    os.closerange(1, int(sys.argv[1]) + 1)
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
nothing = os.open(os.devnull, os.O_RDONLY)
os.dup2(nothing, 0)
os.close(nothing)
descriptor, sys.path[:], sys.argv[1:] = int(sys.argv[1]), sys.argv[2:], []
from cukit.rewards.worker_process import serve
serve(descriptor)
"""
START_SECONDS = 60.0  # a process may take as long to start and to import its file, even if its calls are to be short
IN_PROCESS = "; or give the function itself in Python, which runs in the trainer's process"


def workers_are_possible() -> bool:
    """Whether this system has process groups and fork()."""
    return os.name == "posix"


class RewardWorker:
    """The process of one reward. The constructor starts it; loaded() waits until it is ready.

    send() and receive() are a call. A worker that exceeded a limit, died or was left in the middle of a call is
    killed; the next call starts another.
    """

    def __init__(self, spec: str, limits: RewardLimits | None = None):
        self.spec, self.limits = spec, limits or RewardLimits()
        self.__name__ = self.where = ""
        self._ready = False
        self._kill: weakref.finalize | None = None
        self._start()

    def loaded(self) -> RewardWorker:
        """Wait until the worker has imported the reward; ValueError in one line if it can not."""
        if not self._ready:
            try:
                reply = self._reply(f"reward {self.spec!r}: importing it")
            except BaseException:
                self.close()
                raise
            self.__name__, self.where, self._ready = reply["name"], reply["where"], True
        return self

    def send(self, name: str, batch: RewardBatch) -> None:
        """Begin a call. name: as metrics have it."""
        if self._kill is None:
            self._start()
        self.loaded()
        self._name = name
        try:
            message = pickle.dumps((name, batch))
        except Exception as error:
            raise ValueError(
                f"reward {name!r} runs in a process of its own, and the data's columns can not be sent there "
                f"({type(error).__name__}: {one_line(error)}){IN_PROCESS}"
            ) from error
        self._set_limit(self.limits.reward_timeout, f"reward_timeout={self.limits.reward_timeout:g} s")
        try:
            self._connection.send_bytes(message)
        except OSError:  # it died since the last call: the reply says how
            pass
        except BaseException:
            self.close()
            raise

    def receive(self, count: int, log: RewardLog) -> list[float | None]:
        """The values of the call that was begun, with `count` completions; what it recorded is added to `log`."""
        reply = self._reply(f"reward {self._name!r}: a call with {count} completions")
        log.add(reply["columns"], reply["metrics"])
        return reply["values"]

    def close(self) -> None:
        """Kill the process and all that it started."""
        if self._kill is not None:
            self._kill()
            self._kill = None

    # ---- the process ----

    def _start(self) -> None:
        from multiprocessing.connection import Pipe  # only where it is needed: importing it takes time

        ours, theirs = Pipe()
        self._connection: Connection = ours
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(theirs.fileno()), *sys.path],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        self._kill = weakref.finalize(self, _kill, self._process, ours, os.getpid())
        theirs.close()
        self._ready, seconds = False, self.limits.reward_timeout
        if seconds and seconds < START_SECONDS:
            self._set_limit(START_SECONDS, f"{START_SECONDS:g} s (more than reward_timeout={seconds:g} s)")
        else:
            self._set_limit(seconds, f"reward_timeout={seconds:g} s")
        ours.send((self.spec, self.limits.reward_memory_gb))

    def _set_limit(self, seconds: float, words: str) -> None:
        """From now on; 0: none."""
        self._deadline, self._limit = time.monotonic() + seconds if seconds else None, words

    def _reply(self, what: str) -> dict:
        """The next message; ValueError that begins with `what` if there is none, or if it tells of an error."""
        try:
            wait = None if self._deadline is None else max(self._deadline - time.monotonic(), 0)
            if not self._connection.poll(wait):
                self.close()
                raise ValueError(
                    f"{what} took longer than {self._limit}{self.where}; make it faster, or raise reward_timeout "
                    "(0: no limit)"
                )
            reply = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self.close()
            raise ValueError(f"{what} ended its process ({self._how_it_ended()}){self.where}") from None
        except BaseException:  # also a stop of the run: the call goes on there, and its reply would be the next call's
            self.close()
            raise
        if reply.get("memory"):
            self.close()
            raise ValueError(
                f"{what} took more memory than reward_memory_gb={self.limits.reward_memory_gb:g} allows{self.where}; "
                "make it leaner, or raise reward_memory_gb (0: no limit)"
            )
        if "error" in reply:
            raise ValueError(reply["error"]) from WorkerError(reply["traceback"])
        return reply

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        if code >= 0:
            return f"it exited with code {code}; a reward must return or raise"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if -code == signal.SIGKILL:
            return f"killed by {name}; the system may have run out of memory"
        return f"killed by {name}; a library crashed, or was refused memory beyond reward_memory_gb"


class WorkerError(Exception):
    """What a reward raised in its process, as text: the traceback there."""


def _kill(process: subprocess.Popen, connection: Connection, owner: int) -> None:
    if os.getpid() != owner:  # a fork of this process ends; the worker is not its own
        return
    # Not reaped so far, so the group's number is its own. If the worker is dead already its own exit code stays.
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the latter: macOS, where all that is left is a zombie
            pass
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
    connection.close()
