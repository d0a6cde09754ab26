"""CuPy's pool of memory, and the limit on what this process takes of the card.

The limit holds for the pool and for reservations (memory.py) together: what these map is taken off the pool's own
limit. CuPy's pool refuses at its limit although blocks of it are unused; malloc() gives those back first.
"""

import contextlib
import gc

import cupy as cp

from ..card import Room

_room: Room | None = None  # None: no limit
_reserved = 0  # bytes that reservations map


def set_limit(nbytes: int | None) -> None:
    """From now on this process takes at most `nbytes` of the card, CUDA context and libraries included."""
    global _room
    pool, before = cp.get_default_memory_pool(), _room
    if nbytes is not None:
        _room = Room(nbytes, *_used())
        cp.cuda.set_allocator(malloc)
        hold()
    elif before is not None:
        _room = None
        pool.set_limit(size=0)
        cp.cuda.set_allocator(pool.malloc)


def limit() -> int | None:
    """What set_limit() said."""
    return None if _room is None else _room.limit


def malloc(size: int):
    """`size` bytes of CuPy's pool. At a limit, blocks that nothing uses go back to the driver first."""
    pool = cp.get_default_memory_pool()
    if _room is None:  # where the card is full, CuPy does as much
        return pool.malloc(size)
    for collect in (lambda: None, gc.collect):
        with contextlib.suppress(MemoryError):
            return pool.malloc(size)
        collect()
        pool.free_all_blocks()
    return pool.malloc(size)


def count_reserved(nbytes: int) -> None:
    """Reservations map so many bytes more, or less."""
    global _reserved
    _reserved += nbytes


def hold(coming: int = 0) -> None:
    """Leave the pool what the limit leaves beside all reservations and `coming` bytes more of them. MemoryError where
    the pool uses too much for that.
    """
    if _room is None:
        return
    _room.measure(*_used())
    pool, left = cp.get_default_memory_pool(), _room.nbytes - _reserved - coming
    if pool.total_bytes() > left:
        pool.free_all_blocks()
    if coming and pool.total_bytes() > left:
        raise MemoryError(
            f"memory_limit {_room.limit:,} leaves no room for {coming:,} bytes of the KV cache beside "
            f"{pool.total_bytes():,} of arrays and {_room.outside:,} of CUDA context and libraries"
        )
    pool.set_limit(size=max(left, 1))  # 0 would be no limit


def _used() -> tuple[int, int]:
    """Bytes of the card that are taken by the driver's count, and those among them of this process's arrays."""
    free, total = cp.cuda.runtime.memGetInfo()
    return total - free, cp.get_default_memory_pool().total_bytes() + _reserved
