"""The group of all processes of a run."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections import Counter
from contextlib import suppress

import psutil

from ..backend import card_present
from .config import launched_rank, num_processes
from .group import Group

logger = logging.getLogger(__name__)

FEW_CORES = 4  # with fewer than that a process drives its GPU slowly
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
    if _found and _found[0].size > 1:
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
    warn_of_few_cores(group)
    return group


def warn_of_few_cores(group: Group) -> None:
    """One line by the first rank where a launcher binds a process to few cores of a host with GPUs, though it has more:
    Open MPI's mpirun takes one each for up to two processes. Every rank calls it.
    """
    facts = group.gather_values((socket.gethostname(), card_present(), *usable_cores()), "start")
    ranks = Counter(host for host, *_ in facts)
    for rank, (host, has_card, own, of_launcher) in enumerate(facts):
        each = of_launcher // ranks[host]
        if group.rank == 0 and has_card and own < FEW_CORES <= each:
            logger.warning(
                "rank %d may use %d of %d cores, which slows it: start the run with mpirun --bind-to none "
                "(srun: --cpus-per-task), so that %d processes share all of them",
                *(rank, own, of_launcher, ranks[host]),
            )
            return


def usable_cores() -> tuple[int, int]:
    """(cores that this process may use, those of its launcher on this host: the nearest ancestor's that has more)."""
    if not hasattr(os, "sched_getaffinity"):  # Linux alone tells
        cores = os.cpu_count() or 1
        return cores, cores
    own = len(os.sched_getaffinity(0))
    with suppress(psutil.Error, OSError):
        for ancestor in psutil.Process().parents():
            if (more := len(os.sched_getaffinity(ancestor.pid))) > own:
                return own, more
    return own, own


def choose_gpu(local_rank: int) -> None:
    """Let this process see one GPU, unless its launcher did that: of those that it may see, the one of its rank."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
        return
    names = [name for name in named.split(",") if name.strip()]
    if len(names) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank % len(names)]
