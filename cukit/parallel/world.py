"""The group of all processes of a run."""

from __future__ import annotations

import atexit
import logging
import os
import time

from .config import launched_rank, num_processes
from .group import Group

PAUSE = 1.5  # seconds that a rank which fails leaves to the first one, to say it for all
_found: list[Group] = []


def world() -> Group:
    """All processes that mpirun or srun started as this run; the group of one without them, which needs no MPI.

    The first call starts MPI and chooses this process's GPU, so it comes before anything of CUDA. Ranks beyond 0 log
    errors alone from then on. ValueError in one line where mpi4py is missing, or does not fit the launcher.
    """
    if not _found:
        _found.append(_start() if num_processes() > 1 else Group())
    return _found[0]


def is_said(error: Exception) -> bool:
    """Whether another rank, or the watch, prints this error: all ranks do the same, and the first one says it. Called
    by every rank that an error ends.
    """
    if _found and num_processes() > 1:
        return _found[0].watch.is_said(error, PAUSE)  # type: ignore[attr-defined]
    if launched_rank():
        time.sleep(PAUSE)  # mpirun ends this process, if the first one has failed too
    return False


def _start() -> Group:
    from .mpi import start_mpi

    group = start_mpi()
    choose_gpu(group.local_rank)
    if group.rank:
        logging.getLogger("cukit").setLevel(logging.ERROR)
    atexit.register(group.watch.leave)  # before MPI's own end
    return group


def choose_gpu(local_rank: int) -> None:
    """Let this process see one GPU, unless its launcher did that: of those that it may see, the one of its rank."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
        return
    names = [name for name in named.split(",") if name.strip()]
    if len(names) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank % len(names)]
