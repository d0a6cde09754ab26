"""A device that does what it is told in order, but not before the host waits for it. What the host writes, reads or
gives back too early shows in the results.
"""

import threading
from collections import deque

import numpy as np

from cukit.backend import numpy as backend
from cukit.engine.prefill import Prefill
from cukit.engine.runner import ModelRunner


class PageLocked(np.ndarray):
    """What host_buffer() gives."""


class LateDevice:
    def __init__(self):
        self._orders, self._lock = deque(), threading.RLock()
        self._num_given = self._num_done = 0

    def take_over(self, monkeypatch):
        """The CPU's functions that only tell a device what to do come late, those that give the host values wait."""
        plain = {name: getattr(backend, name) for name in LATE + WAITING}
        device = self

        class Event:
            moment = 0

            def record(self):
                self.moment = device._num_given

            def wait(self):
                device.go_on(self.moment)

        def upload(target, host):
            if isinstance(host, PageLocked):  # else weights
                self.tell(plain["upload"], target, host)
            else:
                plain["upload"](target, host)

        def download(host, source):
            host[...] = -7  # until it arrives
            self.tell(plain["download"], host, source)

        late = {"Event": Event, "download": download, "upload": upload}
        late["host_buffer"] = lambda nbytes: plain["host_buffer"](nbytes).view(PageLocked)
        for name in ("newest_tokens", "update_block_tables"):
            late[name] = lambda *args, name=name: self.tell(plain[name], *args)
        late |= {name: self._waiting(plain[name]) for name in WAITING}
        for name, function in late.items():
            monkeypatch.setattr(backend, name, function)
        make_step = ModelRunner._make_step
        monkeypatch.setattr(ModelRunner, "_make_step", lambda runner, *key: self._late_step(*make_step(runner, *key)))
        # a prompt's pass and its draw wait for their inputs
        pass_of = Prefill._pass_of
        monkeypatch.setattr(Prefill, "_pass_of", lambda prefill, spans: self._late_pass(*pass_of(prefill, spans)))
        monkeypatch.setattr(Prefill, "_sample", self._waiting(Prefill._sample))

    @property
    def num_waiting(self):
        """Of what it was told, how much it has not done."""
        return len(self._orders)

    def _late_step(self, device, step):
        rows = len(device.tokens)
        results = np.empty(rows, np.int32), np.empty(rows, device.temperature.dtype)

        def compute():
            for result, value in zip(results, step(), strict=True):
                result[...] = value

        def late():
            self.tell(compute)
            return results

        return device, late

    def _late_pass(self, block, places, step):
        return block, places, self._waiting(step)

    def _waiting(self, function):
        return lambda *args: (self.go_on(self._num_given), function(*args))[1]

    def tell(self, function, *args):
        with self._lock:
            self._orders.append((function, args))
            self._num_given += 1

    def go_on(self, moment):
        """Do what was told before the moment."""
        with self._lock:
            while self._num_done < moment:
                self._num_done += 1
                function, args = self._orders.popleft()
                function(*args)


LATE = ("download", "host_buffer", "newest_tokens", "update_block_tables", "upload")
WAITING = ("array", "copy_blocks", "synchronize", "to_numpy")
