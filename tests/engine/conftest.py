"""Engine tests run in both orders: a step after the results of the one before, and ahead of them."""

import pytest

from cukit.backend import numpy as backend

from .late_device import LateDevice


@pytest.fixture(params=["in turn", "ahead"])
def order(request, monkeypatch):
    """in turn: as on a CPU. ahead: as on a device that computes while the host goes on, and as late as it may; the
    fixture is that device. at once: the same order on a device that computes at once.
    """
    monkeypatch.setattr(backend, "is_asynchronous", request.param != "in turn")
    if request.param == "ahead":
        device = LateDevice()
        device.take_over(monkeypatch)
        return device
    return None
