"""Ctrl-C and SIGTERM: a run ends soon, and with a state that can be resumed."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager, suppress

# What the second signal does where nothing else was installed.
USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
NOTICE = b"\nstopping as soon as the state can be saved; once more to stop at once\n"
EARLY_NOTICE = b"\nstopping before the first step, once models and rows are loaded; once more to stop at once\n"


class RunStopped(BaseException):
    """A phase that changes no weight was cut short, because the run was asked to stop.

    No Exception, so that `except Exception` in a reward does not swallow it.
    """


class StopSignal:
    """`with StopSignal() as stop:` turns the first Ctrl-C (or SIGTERM) into stop.requested, so that an update is never
    cut in two. The second one has its usual effect.

    Long phases look at `requested`, or call raise_if_requested() between their parts. Code that does not know of stops,
    such as a reward, runs inside `with stop.interruptible():`, where a stop raises RunStopped there and then. Signals
    reach the main thread only; in another thread nothing is installed and request() is the way to stop. Of several
    ranks (several) SIGUSR1 stops too, which mpirun passes on to all and srun --signal sends; the first one says so.

    request() before `with` counts. early: for the time before a run begins, where Ctrl-C keeps its usual effect.
    """

    def __init__(self, several: bool = False, is_first: bool = True, early: bool = False):
        self.requested = False
        self._numbers = [number for number in USUAL if not (early and number == signal.SIGINT)]
        if several and hasattr(signal, "SIGUSR1"):
            self._numbers.append(signal.SIGUSR1)
        self._notice = (EARLY_NOTICE if early else NOTICE) if is_first else b""
        self._before: dict = {}
        self._interruptible = False

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
        self.requested = False

    def request(self) -> None:
        """Stop after the current step, as the first Ctrl-C does."""
        self.requested = True

    @contextmanager
    def interruptible(self):
        """For work of others that can be thrown away wherever it is."""
        self.raise_if_requested()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def raise_if_requested(self) -> None:
        if self.requested:
            raise RunStopped

    def _handle(self, number, frame) -> None:
        self.requested = True
        for other, before in self._before.items():  # the second one; a background job of a shell ignores SIGINT
            usual = USUAL.get(other, signal.SIG_DFL)
            signal.signal(other, usual if before in (None, signal.SIG_IGN) else before)
        if self._notice:
            with suppress(OSError):
                os.write(2, self._notice)  # print() may be running already, and cannot be entered twice
        if self._interruptible:
            raise RunStopped
