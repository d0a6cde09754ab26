"""The memory of the machine: how much a process may take, and memory that is given back while its addresses stay."""

import math
import mmap
import sys
from pathlib import Path

import numpy as np
import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
# The names of a control group's files: limit, use, and the entry of memory.stat that counts what is only cached.
_NAMES = {
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "v2": ("memory.max", "memory.current", "inactive_file"),
}


def memory_info() -> tuple[int, int]:
    """(free, total) bytes: what this process may still take without swapping, and the most it could ever have.

    Free is what the system calls available (caches count as free) or, in a container, what its limit leaves.
    """
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for limit, used in _container_limits():
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def memory_taken() -> int:
    """Bytes that this process holds."""
    return psutil.Process().memory_info().rss


def free_unused_memory() -> None:
    """Nothing to do: the system has what is freed."""


def limit_memory(nbytes: int | None) -> None:
    """Plans count on `nbytes` at most from now on; None: on all that there is. The system may give more than that."""
    global _limit
    _limit = nbytes


def memory_limit() -> int | None:
    """What limit_memory() said."""
    return _limit


_limit: int | None = None


def _container_limits():
    """(limit, bytes in use) of this process's control groups and those above them; none outside Linux."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names, root = (_NAMES["v1"], CGROUPS / "memory") if controllers else (_NAMES["v2"], CGROUPS)
        own = root / path.lstrip("/")  # in a container the path may be the host's; then only the root is there
        for folder in (own, *own.parents):
            if folder.is_relative_to(root) and (found := _limit_of(folder, *names)):
                yield found


def _limit_of(folder, limit_name, usage_name, cached_name):
    """(limit, bytes in use but for cached files) of one control group, None if it has no limit."""
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit), used - int(stat.get(cached_name, 0))
    except (OSError, ValueError):
        return None


class Reservation:
    """Memory for arrays at fixed addresses; its bytes can be given back to the system and taken again.

    Zeros at first and after restore(). Where the system cannot take pages back without losing their addresses
    (Windows), they stay with the process, and release() only says that their contents may go.
    """

    def __init__(self, nbytes: int):
        self.nbytes, self.resident = nbytes, True
        arguments = (-1, max(nbytes, 1))
        # private pages: shared ones would stay although they were given back
        self._pages = (
            mmap.mmap(*arguments, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if _UNIX else mmap.mmap(*arguments)
        )

    def array(self, offset: int, shape: tuple[int, ...], dtype) -> np.ndarray:
        """The array of this shape that begins `offset` bytes from the start. To be used only while resident."""
        dtype = np.dtype(dtype)
        assert 0 <= offset <= self.nbytes - math.prod(shape) * dtype.itemsize, "an array outside of its reservation"
        return np.ndarray(shape, dtype, self._pages, offset)

    def release(self) -> None:
        """Give the bytes back to the system."""
        if self.resident:
            self.resident = False
            if _GIVES_BACK is not None:
                self._pages.madvise(_GIVES_BACK)

    def restore(self) -> None:
        """Take bytes for the same addresses again: zeros."""
        if not self.resident:
            self.resident = True
            if sys.platform != "linux":  # only Linux promises that pages come back as zeros
                np.frombuffer(self._pages, np.uint8)[:] = 0


_UNIX = hasattr(mmap, "MAP_PRIVATE")
_GIVES_BACK = getattr(mmap, "MADV_DONTNEED" if sys.platform == "linux" else "MADV_FREE", None)
