"""Memory that is given back while its addresses stay: on the CPU, and the CUDA shelf's book-keeping against a stand-in
for the driver. On a card: tests/gpu/test_memory.py.
"""

import ctypes
import gc
import os
import sys
from pathlib import Path

import psutil
import pytest

from cukit.backend import backend_for
from cukit.backend.numpy import memory as cpu_memory

MIB = 1 << 20


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def test_cpu_arrays_are_views_at_their_offsets():
    be = backend_for("cpu")
    reservation = be.Reservation(1000)
    first, second = reservation.array(0, (10, 5), "float32"), reservation.array(200, (400,), "float16")
    assert not first.any() and not second.any() and reservation.resident
    second[:] = 1
    first[:] = 2
    assert (second == 1).all() and reservation.array(196, (1,), "float32")[0] == 2
    assert reservation.array(1000, (0, 7), "int32").size == 0
    for offset, shape in ((-4, (1,)), (0, (251,)), (1000, (1,))):
        with pytest.raises(AssertionError, match="outside"):
            reservation.array(offset, shape, "float32")


def test_cpu_released_bytes_go_back_to_the_system_and_come_back_as_zeros():
    be = backend_for("cpu")
    reservation = be.Reservation(64 * MIB + 123)
    array = reservation.array(MIB, (63 * MIB,), "uint8")
    address = array.ctypes.data
    before = resident_bytes()
    array[:] = 7
    filled = resident_bytes()
    assert filled - before > 60 * MIB
    for _ in range(2):  # twice is once
        reservation.release()
        assert not reservation.resident
    if sys.platform == "linux":
        assert resident_bytes() - before < 8 * MIB
    reservation.restore()
    assert reservation.resident and not array.any() and array.ctypes.data == address
    array[3] = 9
    reservation.restore()  # of what is there: nothing changes
    assert array[3] == 9


def test_cpu_memory_lives_as_long_as_its_arrays():
    array = backend_for("cpu").Reservation(4096).array(0, (4096,), "uint8")
    gc.collect()
    array[:] = 5
    assert array.sum() == 5 * 4096


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_e7_other_systems_reserve_too(monkeypatch, system):
    """macOS may keep the bytes until it needs them, Windows always does; both give zeros after restore()."""
    monkeypatch.setattr(cpu_memory.sys, "platform", system)
    monkeypatch.setattr(cpu_memory, "_GIVES_BACK", None)
    if system == "win32":
        monkeypatch.setattr(cpu_memory, "_UNIX", False)
    reservation = cpu_memory.Reservation(10_000)
    array = reservation.array(0, (2500,), "float32")
    array[:] = 3
    reservation.release()
    assert not reservation.resident
    reservation.restore()
    assert reservation.resident and not array.any()


# ---- how much memory there is ----


@pytest.fixture
def no_containers(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_memory, "OWN_CGROUPS", tmp_path / "none")
    monkeypatch.setattr(cpu_memory, "CGROUPS", tmp_path / "cgroup")


def test_e7_free_memory_needs_no_name_that_only_linux_has(monkeypatch, no_containers):
    """macOS and Windows have neither os.sysconf's names nor /proc nor control groups."""

    def refuse(name):
        raise ValueError(f"unrecognized configuration name {name}")

    monkeypatch.setattr(os, "sysconf", refuse)
    free, total = backend_for("cpu").memory_info()
    assert 0 < free <= total == psutil.virtual_memory().total


def test_e7_what_the_system_only_caches_is_free(monkeypatch, no_containers):
    fields = psutil.virtual_memory()._replace(total=1000, free=10, available=700)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: fields)
    assert cpu_memory.memory_info() == (700, 1000)


def control_group(folder: Path, limit, used, cached, version):
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, usage_name, cached_name = cpu_memory._NAMES[version]
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / usage_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cached_name} {cached}\n")


@pytest.mark.parametrize(
    ("version", "line", "folders", "expected"),
    [
        ("v2", "0::/a/b", {"a/b": ("max", 0, 0), "a": (900, 500, 100)}, (500, 900)),
        ("v2", "0::/a/b", {"a/b": (600, 500, 0), "a": (900, 100, 0)}, (100, 600)),
        ("v2", "0::/", {".": (400, 600, 0)}, (0, 400)),  # over its limit
        ("v2", "0::/a", {"a": ("max", 10, 0)}, (1000, 2000)),
        ("v2", "0::/a", {}, (1000, 2000)),
        ("v1", "4:cpu,memory:/x", {"memory/x": (800, 300, 50)}, (550, 800)),
        ("v1", "4:memory:/of/the/host", {"memory": (800, 300, 0)}, (500, 800)),  # the path is not seen inside
        ("v1", "4:memory:/x", {"memory/x": (9223372036854771712, 300, 0)}, (1000, 2000)),
        ("v1", "5:cpu:/x", {"memory/x": (10, 5, 0)}, (1000, 2000)),  # another controller's path
    ],
)
def test_e7_containers_limits_are_kept(monkeypatch, tmp_path, version, line, folders, expected):
    own = tmp_path / "own"
    own.write_text(f"12:pids:/elsewhere\n{line}\n")
    monkeypatch.setattr(cpu_memory, "OWN_CGROUPS", own)
    monkeypatch.setattr(cpu_memory, "CGROUPS", tmp_path / "cgroup")
    for name, values in folders.items():
        control_group(tmp_path / "cgroup" / name, *values, version)
    fields = psutil.virtual_memory()._replace(total=2000, available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: fields)
    assert cpu_memory.memory_info() == expected


# ---- the CUDA shelf without a card ----

UNIT = 2 * MIB
OUT_OF_MEMORY = 2


class FakeDriver:
    """libcuda's memory calls over a card of `room` bytes: every rule that the driver has is asserted. fail: names of
    calls to refuse, each with the number of calls that succeed first.
    """

    def __init__(self, room=1 << 40, fail=None, status=1):
        self.room, self.fail, self.status = room, dict(fail or {}), status
        self.reserved, self.handles, self.mapped, self.accessible = {}, {}, {}, set()
        self.calls, self._next = [], 7 * UNIT

    def _refuses(self, name):
        self.calls.append(name)
        left = self.fail.get(name)
        if left is not None:
            self.fail[name] = left - 1
            return left <= 0
        return False

    def used(self):
        return sum(self.mapped.values()) + sum(size for size, open_ in self.handles.values() if open_)

    def cuMemGetAllocationGranularity(self, found, properties, option):  # noqa: N802
        assert (properties._obj.type, properties._obj.location.type, option) == (1, 1, 1)
        found._obj.value = UNIT
        return self.status if self._refuses("cuMemGetAllocationGranularity") else 0

    def cuMemAddressReserve(self, address, size, alignment, hint, flags):  # noqa: N802
        assert size.value % UNIT == 0 and alignment.value == UNIT and hint.value == flags.value == 0
        if self._refuses("cuMemAddressReserve"):
            return self.status
        address._obj.value = self._next
        self.reserved[self._next] = size.value
        self._next += size.value + UNIT
        return 0

    def cuMemAddressFree(self, address, size):  # noqa: N802
        assert self.reserved.pop(address.value) == size.value
        assert not any(address.value <= start < address.value + size.value for start in self.mapped), "still mapped"
        self._refuses("cuMemAddressFree")
        return 0

    def cuMemCreate(self, handle, size, properties, flags):  # noqa: N802
        assert size.value % UNIT == 0 and flags.value == 0
        raw = properties._obj
        assert (raw.type, raw.requested_handle_types, raw.location.type, raw.location.id) == (1, 0, 1, 0)
        assert not raw.win32_handle_meta_data and not raw.flags.usage
        if self._refuses("cuMemCreate"):
            return self.status
        if self.used() + size.value > self.room:
            return OUT_OF_MEMORY
        handle._obj.value = 1000 + len(self.handles)
        self.handles[handle._obj.value] = (size.value, True)
        return 0

    def cuMemMap(self, address, size, offset, handle, flags):  # noqa: N802
        assert offset.value == flags.value == 0
        assert self.handles[handle.value] == (size.value, True)
        assert address.value not in self.mapped
        assert any(s <= address.value and address.value + size.value <= s + n for s, n in self.reserved.items())
        if self._refuses("cuMemMap"):
            return self.status
        self.mapped[address.value] = size.value
        return 0

    def cuMemRelease(self, handle):  # noqa: N802
        size, is_open = self.handles[handle.value]
        assert is_open, "released twice"
        self.handles[handle.value] = (size, False)
        self._refuses("cuMemRelease")
        return 0

    def cuMemSetAccess(self, address, size, access, count):  # noqa: N802
        assert count.value == 1 and access._obj.flags == 3
        assert (access._obj.location.type, access._obj.location.id) == (1, 0)
        covered = sum(n for start, n in self.mapped.items() if address.value <= start < address.value + size.value)
        assert covered == size.value, "every byte must be mapped"
        if self._refuses("cuMemSetAccess"):
            return self.status
        self.accessible.add((address.value, size.value))
        return 0

    def cuMemUnmap(self, address, size):  # noqa: N802
        assert self.mapped.pop(address.value) == size.value, "a mapping goes as it came"
        self.accessible = {(start, n) for start, n in self.accessible if not start <= address.value < start + n}
        self._refuses("cuMemUnmap")
        return 0

    def holds_nothing(self):
        return not self.reserved and not self.mapped and not any(is_open for _, is_open in self.handles.values())


@pytest.fixture
def cuda(monkeypatch):
    """The CUDA shelf's memory module with a stand-in for everything that needs a card: make(driver) -> the module."""
    pytest.importorskip("cupy", reason="the module hands out CuPy's arrays")
    from cukit.backend.cuda import memory

    def make(driver):
        for name, function in (
            ("_driver", lambda: memory._Driver(driver)),
            ("_current_device", lambda: 0),
            ("_enter", lambda device: driver.calls.append("enter")),
            ("_wait", lambda: driver.calls.append("wait")),
            ("_fill_with_zeros", lambda address, nbytes: driver.calls.append(("zeros", address, nbytes))),
            ("_free_unused_memory", lambda: driver.calls.append("free unused")),
        ):
            monkeypatch.setattr(memory, name, function)
        return memory

    yield make
    gc.collect()


def test_structures_are_laid_out_as_in_cuda_h(cuda):
    memory = cuda(FakeDriver())
    properties, access = memory._AllocationProperties, memory._AccessDescription
    assert [ctypes.sizeof(kind) for kind in (memory._Location, properties, access)] == [8, 32, 12]
    offsets = [getattr(properties, name).offset for name, *_ in properties._fields_]
    assert offsets == [0, 4, 8, 16, 24] and access.flags.offset == 8


@pytest.mark.parametrize("nbytes", [0, 1, UNIT, 64 * MIB, 64 * MIB + 1, 200 * MIB + 12345])
def test_release_and_restore_map_the_same_addresses(cuda, nbytes):
    driver = FakeDriver()
    reservation = cuda(driver).Reservation(nbytes)
    size = -(-max(nbytes, 1) // UNIT) * UNIT
    address = reservation._address
    for _ in range(2):
        assert reservation.resident and driver.used() == size and driver.accessible == {(address, size)}
        assert driver.calls[-1] == ("zeros", address, size)
        assert not any(is_open for _, is_open in driver.handles.values()), "the mappings keep the memory"
        reservation.release()
        reservation.release()
        assert not reservation.resident and driver.used() == 0 and driver.reserved == {address: size}
        reservation.restore()
        reservation.restore()
    assert driver.calls.count("wait") == 2 and driver.calls.index("wait") < driver.calls.index("cuMemUnmap")
    del reservation
    assert driver.holds_nothing() and driver.calls.count("wait") == 3


def test_few_calls_for_much_memory(cuda):
    """12 GB in less than 100 ms: at most a few hundred calls of some 0.1 ms."""
    driver = FakeDriver()
    reservation = cuda(driver).Reservation(12 * 10**9)
    reservation.release()
    driver.calls.clear()
    reservation.restore()
    assert len(driver.calls) < 600


def test_an_array_keeps_the_memory(cuda):
    driver = FakeDriver()
    reservation = cuda(driver).Reservation(10_000)
    address = reservation._address
    array = reservation.array(512, (100, 3), "float32")
    assert array.data.ptr == address + 512 and array.shape == (100, 3) and array.flags.c_contiguous
    with pytest.raises(AssertionError, match="outside"):
        reservation.array(9_000, (1000,), "float32")
    del reservation
    gc.collect()
    assert driver.used() == UNIT
    del array
    gc.collect()
    assert driver.holds_nothing()


CALLS = ["cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"]


@pytest.mark.parametrize("status", [1, OUT_OF_MEMORY])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_error_of_any_call_leaves_nothing_behind(cuda, name, after, status):
    driver = FakeDriver(fail={name: after}, status=status)
    memory = cuda(driver)
    if after and name not in ("cuMemCreate", "cuMemMap"):
        return  # called once
    with pytest.raises(MemoryError if status == OUT_OF_MEMORY else RuntimeError, match="gpu_memory|" + name):
        memory.Reservation(200 * MIB)
    gc.collect()
    assert driver.holds_nothing()


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_an_error_while_waking_leaves_it_asleep_and_it_can_wake_later(cuda, name):
    driver = FakeDriver()
    reservation = cuda(driver).Reservation(200 * MIB)
    reservation.release()
    driver.fail = {name: 0 if name == "cuMemSetAccess" else 2}
    with pytest.raises(RuntimeError, match=name):
        reservation.restore()
    assert not reservation.resident and driver.used() == 0
    driver.fail = {}
    reservation.restore()
    assert reservation.resident and driver.used() == 200 * MIB


def test_where_the_card_is_full_unused_memory_of_the_pool_is_freed_first(cuda, monkeypatch):
    driver = FakeDriver(room=100 * MIB)
    memory = cuda(driver)

    def free_unused():
        driver.calls.append("free unused")
        driver.room += 200 * MIB

    monkeypatch.setattr(memory, "_free_unused_memory", free_unused)
    reservation = memory.Reservation(200 * MIB)
    assert reservation.resident and driver.calls.count("free unused") == 1
    other = FakeDriver(room=100 * MIB)
    with pytest.raises(MemoryError, match="gpu_memory_utilization"):
        cuda(other).Reservation(200 * MIB)
    assert other.holds_nothing()


def test_what_cannot_be_freed_while_a_graph_is_captured_is_freed_later(cuda, monkeypatch):
    driver = FakeDriver()
    memory = cuda(driver)

    def refuse():
        raise RuntimeError("operation not permitted when stream is capturing")

    reservation = memory.Reservation(MIB)
    monkeypatch.setattr(memory, "_wait", refuse)
    del reservation
    gc.collect()
    assert driver.used() == UNIT
    memory.Reservation(MIB)  # still capturing: no endless loop
    monkeypatch.setattr(memory, "_wait", lambda: None)
    memory.Reservation(MIB)
    gc.collect()
    assert driver.holds_nothing()
