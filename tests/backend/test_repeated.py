"""Rows that repeat in one piece of memory, over the stand-in for the driver that test_reservation has."""

import gc

import pytest
from backend import test_reservation
from backend.test_reservation import OUT_OF_MEMORY, UNIT, FakeDriver

cuda = test_reservation.cuda  # a fixture


def test_one_piece_of_memory_lies_behind_all_ranges(cuda):
    driver = FakeDriver(room=2 * UNIT)  # for one of the five
    cuda(driver)
    from cukit.backend.cuda.repeated import SameMemory

    same = SameMemory(2 * UNIT, 5, UNIT)
    address = same._address
    assert driver.mapped == {address + number * 2 * UNIT: 2 * UNIT for number in range(5)}
    assert driver.accessible == {(address, 10 * UNIT)} and len(driver.handles) == 1
    array = same.array((5, 2 * UNIT), "uint8")
    assert array.data.ptr == address
    del same
    gc.collect()
    assert driver.mapped, "the array keeps it"
    del array
    gc.collect()
    assert driver.holds_nothing() and driver.calls.index("wait") < driver.calls.index("cuMemUnmap")


@pytest.mark.parametrize("fail", [{"cuMemCreate": 0}, {"cuMemMap": 3}, {"cuMemSetAccess": 0}])
def test_nothing_is_left_of_the_same_memory_that_fails(cuda, fail):
    driver = FakeDriver(fail=fail, status=OUT_OF_MEMORY)
    cuda(driver)
    from cukit.backend.cuda.repeated import SameMemory

    with pytest.raises(MemoryError):
        SameMemory(UNIT, 5, UNIT)
    gc.collect()
    assert driver.holds_nothing()
