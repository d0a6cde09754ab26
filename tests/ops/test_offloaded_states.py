"""AdamW's states in the host's memory: no bit differs, two buckets' lie on the device."""

import weakref

import numpy as np
import pytest

from cukit.autograd import Parameter
from cukit.backend import backend_for
from cukit.models.store import Bucket
from cukit.optim import _State, in_turn
from cukit.trainers.config import OPTIMIZER_STATES

from .test_optimizer_states import BF16, assert_equal, optimizer, train, weights_of


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("form", OPTIMIZER_STATES)
def test_offloaded_states_change_no_bit(form, dtype, monkeypatch):
    """They lie in buffers of the host between updates, and a checkpoint is read from there and written there."""
    here, away, resumed = optimizer(dtype, form), *(optimizer(dtype, form, offload=True) for _ in range(2))
    for one in (here, away):
        train(one, range(4), bad=(2,))
    for mine, theirs in zip(resumed.store.buckets, away.store.buckets):
        mine.data[...] = theirs.data
    resumed.load_state_dict({name: np.array(x) for name, x in away.state_dict().items()})
    for one in (here, away, resumed):
        train(one, range(4, 7))
    for one in (away, resumed):
        assert_equal(one.state_dict(), here.state_dict())
        assert_equal(weights_of(one), weights_of(here))
    seen = []

    class Noted(backend_for("cpu").SideCopies):
        def download(self, host, source):
            seen.append((host, source))

    monkeypatch.setattr(backend_for("cpu"), "SideCopies", Noted)
    train(away, [7])
    hosts = [array for state in away._states.values() for array in state.arrays.values()]
    assert [id(host) for host, _ in seen] == [id(host) for host in hosts]
    assert not any(np.shares_memory(host, source) for host, source in seen)


_alive: set[int] = set()


def counted(array, most):
    """The array; how many of those that were counted live is added to `most`."""
    _alive.add(id(array))
    weakref.finalize(array, _alive.discard, id(array))
    most.append(len(_alive))
    return array


def late(log):
    """SideCopies of a device on which a copy is there, and has read its source, only once it is joined."""

    class Late:
        def upload(self, target, host):
            log.append("up")
            return target, host

        download = upload

        def join(self, copy):
            target, source = copy
            target[...] = source
            log.append("joined")

    return Late


@pytest.mark.parametrize("form", OPTIMIZER_STATES)
def test_copies_that_are_late_change_no_bit(form, monkeypatch):
    here, away = optimizer(BF16, form), optimizer(BF16, form, offload=True)
    log = []
    monkeypatch.setattr(backend_for("cpu"), "SideCopies", late(log))
    most, empty = [], backend_for("cpu").empty
    monkeypatch.setattr(backend_for("cpu"), "empty", lambda *given: counted(empty(*given), most))
    for one in (here, away):
        train(one, range(4))
    assert_equal(away.state_dict(), here.state_dict())
    assert_equal(weights_of(away), weights_of(here))
    assert max(most) == 2 * max(len(state.arrays) for state in away._states.values()), "of two buckets"
    assert log.count("up") == log.count("joined") > 0, "all are joined, the last ones too"


def test_two_states_lie_on_the_device_and_the_next_comes_before_one_is_updated(monkeypatch):
    be, log, most = backend_for("cpu"), [], []
    monkeypatch.setattr(be, "SideCopies", late(log))
    monkeypatch.setattr(be, "empty", lambda *given: counted(np.empty(*given), most))
    held = [_State(Bucket(be, [Parameter(np.ones((300, 2), np.float32))]), "float32", True) for _ in range(5)]
    turns = in_turn(held)
    for place in range(5):
        arrays = next(turns)
        assert len(arrays) == 2 and log.count("joined") == 4 * place + 2
        assert log.count("up") == 2 * min(place + 2, 5) + 2 * place, "the next one is on its way"
        arrays["exp_avg"] += place
        del arrays
    assert next(turns, None) is None
    assert max(most) == 4, "two arrays of two states"
    assert [float(state.arrays["exp_avg"][0]) for state in held] == [0, 1, 2, 3, 4]
    assert not _alive
