"""The limit on a process's memory over a stand-in for CuPy's pool and the driver: what the pool may take, what a
reservation takes off it, and what is given back before anything is refused.
"""

import pytest

from cukit.backend.card import CONTEXT_BYTES, Room

GIB, MIB = 1 << 30, 1 << 20
TOTAL = 80 * GIB


class FakePool:
    """CuPy's pool as it is at a limit: it refuses although blocks of it are unused."""

    def __init__(self):
        self.used, self.unused, self.limit, self.gone = 0, 0, 0, []

    def total_bytes(self):
        return self.used + self.unused

    def set_limit(self, size):
        assert size >= 0
        self.limit = size

    def free_all_blocks(self):
        self.unused = 0

    def malloc(self, size):
        if self.limit and self.total_bytes() + size > self.limit:
            raise MemoryError(f"Out of memory allocating {size} bytes (limit set to: {self.limit} bytes)")
        self.used += size
        return size


@pytest.fixture
def pool(monkeypatch):
    """The module over a fake pool: pool.fake; pool.outside: what context and libraries take by the driver."""
    pytest.importorskip("cupy", reason="the module asks CuPy")
    from types import SimpleNamespace

    from cukit.backend.cuda import pool as module

    fake = FakePool()
    state = SimpleNamespace(module=module, fake=fake, outside=500 * MIB, allocator=None)

    def mem_get_info():
        return TOTAL - state.outside - fake.total_bytes() - module._reserved, TOTAL

    cuda = SimpleNamespace(
        runtime=SimpleNamespace(memGetInfo=mem_get_info),
        set_allocator=lambda function: setattr(state, "allocator", function),
    )
    monkeypatch.setattr(module, "cp", SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: fake))
    monkeypatch.setattr(module, "_reserved", 0)
    yield state
    module._room = None


def test_the_pool_gets_what_context_and_libraries_leave(pool):
    pool.outside = 900 * MIB
    pool.module.set_limit(24 * GIB)
    assert pool.module.limit() == 24 * GIB and pool.fake.limit == 24 * GIB - 900 * MIB
    assert pool.allocator is pool.module.malloc
    pool.module.set_limit(None)
    assert pool.module.limit() is None and pool.fake.limit == 0 and pool.allocator == pool.fake.malloc


def test_no_limit_changes_nothing(pool):
    pool.module.set_limit(None)
    pool.module.hold(10 * GIB)
    assert pool.allocator is None and pool.fake.limit == 0
    assert pool.module.malloc(5) == 5


def test_a_small_context_counts_as_what_it_will_be(pool):
    pool.module.set_limit(24 * GIB)
    assert pool.fake.limit == 24 * GIB - CONTEXT_BYTES
    pool.outside = CONTEXT_BYTES + 100 * MIB  # kernels were loaded
    pool.module.hold()
    assert pool.fake.limit == 24 * GIB - CONTEXT_BYTES - 100 * MIB
    pool.outside = 0
    pool.module.hold()
    assert pool.fake.limit == 24 * GIB - CONTEXT_BYTES - 100 * MIB, "what they once took counts on"


def test_what_another_process_holds_is_not_ours(pool):
    pool.outside = 30 * GIB
    pool.module.set_limit(24 * GIB)
    assert pool.fake.limit == 24 * GIB - CONTEXT_BYTES
    pool.outside = 50 * GIB
    pool.module.hold()
    assert pool.fake.limit == 24 * GIB - CONTEXT_BYTES


def test_unused_blocks_are_given_back_before_an_array_is_refused(pool):
    pool.module.set_limit(4 * GIB)
    pool.fake.used, pool.fake.unused = GIB, 2 * GIB
    assert pool.module.malloc(2 * GIB) == 2 * GIB and pool.fake.unused == 0
    with pytest.raises(MemoryError, match="limit set to"):
        pool.module.malloc(2 * GIB)


def test_a_reservation_takes_its_bytes_off_the_pool(pool):
    pool.module.set_limit(10 * GIB)
    room = 10 * GIB - CONTEXT_BYTES
    pool.fake.used, pool.fake.unused = 2 * GIB, 5 * GIB
    pool.module.hold(6 * GIB)
    assert pool.fake.unused == 0 and pool.fake.limit == room - 6 * GIB
    pool.module.count_reserved(6 * GIB)
    with pytest.raises(MemoryError, match=r"memory_limit 10,737,418,240 leaves no room for 4,294,967,296 bytes"):
        pool.module.hold(4 * GIB)
    assert pool.fake.limit == room - 6 * GIB
    pool.module.count_reserved(-6 * GIB)
    pool.module.hold()
    assert pool.fake.limit == room, "a sleeping cache leaves its bytes to training"


def test_a_limit_below_the_context_leaves_no_array(pool):
    pool.module.set_limit(100 * MIB)
    assert pool.fake.limit == 1, "0 would be no limit"
    with pytest.raises(MemoryError):
        pool.module.malloc(512)


def test_room_is_never_negative():
    assert Room(5, 100, 0).nbytes == 0


def test_reservations_are_counted_as_they_map_and_unmap(pool, monkeypatch):
    from backend.test_reservation import FakeDriver

    from cukit.backend.cuda import memory

    driver = FakeDriver()
    for name, function in (
        ("_driver", lambda: memory._Driver(driver)),
        ("_current_device", lambda: 0),
        ("_enter", lambda device: None),
        ("_wait", lambda: None),
        ("_fill_with_zeros", lambda address, nbytes: None),
    ):
        monkeypatch.setattr(memory, name, function)
    memory.limit_memory(2 * GIB)
    room = 2 * GIB - CONTEXT_BYTES
    assert memory.memory_limit() == 2 * GIB
    reservation = memory.Reservation(200 * MIB)
    assert pool.module._reserved == 200 * MIB and pool.fake.limit == room - 200 * MIB
    reservation.release()
    assert pool.module._reserved == 0 and pool.fake.limit == room
    pool.fake.used = room - 100 * MIB
    with pytest.raises(MemoryError, match="memory_limit"):
        reservation.restore()
    assert not reservation.resident and driver.used() == 0
    pool.fake.used = 0
    reservation.restore()
    assert reservation.resident
    del reservation
    assert pool.module._reserved == 0 and driver.holds_nothing()
    memory.limit_memory(None)
