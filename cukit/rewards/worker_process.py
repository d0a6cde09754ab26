"""What runs in the process of a reward (see worker.py)."""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from .calling import call_reward, defined_at
from .loader import load_reward, reward_name
from .log import RewardLog


def serve(descriptor: int) -> None:
    """Load the reward, then answer batches until the connection is closed."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    spec, memory_gb = connection.recv()
    _limit_memory(memory_gb)
    function: Callable

    def load() -> dict:
        nonlocal function
        function = load_reward(spec)
        return {"name": reward_name(function), "where": defined_at(function)}

    def score() -> dict:
        name, batch = pickle.loads(message)
        log = RewardLog(len(batch.completions))
        values = call_reward(function, name, **vars(batch), log=log)
        return {"values": values, "columns": log.columns, "metrics": log.metrics}

    work = load
    while True:
        reply = _answer(work)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or not there
                stream.flush()
        try:
            connection.send_bytes(json.dumps(reply).encode())
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        work = score


def _answer(work: Callable[[], dict]) -> dict:
    try:
        return work()
    except MemoryError:
        return {"memory": True}
    except Exception as error:
        if isinstance(error.__cause__, MemoryError):
            return {"memory": True}
        return {"error": str(error), "traceback": traceback.format_exc()}


def _limit_memory(gigabytes: float) -> None:
    """Linux refuses memory beyond it (a MemoryError); other systems may not. Address space that is only reserved, as a
    CUDA context does by the terabyte, is free."""
    if gigabytes:
        import resource

        limit, (_, most) = int(gigabytes * 2**30), resource.getrlimit(resource.RLIMIT_DATA)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
