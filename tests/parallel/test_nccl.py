"""NCCL's launcher and group over a library that is made of threads: places, sizes and order of every call."""

import ctypes
import gc
import importlib.util
import os
import sys
import threading
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cukit.parallel import group as group_module
from cukit.parallel import nccl as nccl_module
from cukit.parallel.nccl import NCCLGroup
from cukit.trainers.gradient_sums import GradientSums
from cukit.trainers.state import TrainedModel

from . import run_trainer
from .threads import on_ranks

BFLOAT16 = ml_dtypes.bfloat16
ROOT = Path(__file__).parents[2]
waiting = threading.local()  # of a rank: its group of threads, and the calls of its NCCL group


class DeviceArray(np.ndarray):
    """Host memory that has CuPy's way to say where it is."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def device(array):
    return np.ascontiguousarray(array).view(DeviceArray)


class Stream:
    """An event is (its stream, how many records were before it). `with stream:` makes it this thread's current one."""

    ptr = 77

    def __init__(self, non_blocking=False):
        self.log, self.events = [], []

    def record(self):
        self.log.append("record")
        return self, self.log.count("record") - 1

    def wait_event(self, event):
        self.log.append("wait")
        self.events.append(event)

    def __enter__(self):
        waiting.streams = [*getattr(waiting, "streams", []), self]

    def __exit__(self, *_):
        waiting.streams.pop()


class Link:
    """What CuPy's NcclCommunicator offers, between threads; each has a group of threads to do it with."""

    def __init__(self, size, unique_id, rank):
        assert unique_id == b"id of rank 0"
        self.size, self.rank, self.board = size, rank, waiting.host

    def send(self, place, count, kind, peer, stream):
        assert kind == nccl.NCCL_UINT8 and stream == Stream.ptr and count
        waiting.calls.append((self, "send", place, count, peer))

    def recv(self, place, count, kind, peer, stream):
        assert kind == nccl.NCCL_UINT8 and stream == Stream.ptr and count
        waiting.calls.append((self, "recv", place, count, peer))

    def _all(self, sent):
        return self.board.gather_values(sent)

    def allGather(self, source, target, count, kind, stream):  # noqa: N802
        for rank, part in enumerate(self._all(ctypes.string_at(source, count))):
            ctypes.memmove(target + rank * count, part, count)

    def broadcast(self, source, target, count, kind, root, stream):
        ctypes.memmove(target, self._all(ctypes.string_at(source, count))[root], count)

    def allReduce(self, source, target, count, kind, op, stream):  # noqa: N802
        dtype = np.dtype({6: np.float16, 7: np.float32, 8: np.float64, 9: BFLOAT16}[kind])
        parts = [np.frombuffer(part, dtype) for part in self._all(ctypes.string_at(source, count * dtype.itemsize))]
        ctypes.memmove(target, np.sum(parts, axis=0, dtype=dtype).tobytes(), count * dtype.itemsize)


def group_start():
    waiting.calls = []


def group_end():
    if not waiting.calls:
        return
    own = waiting.calls[0][0]
    sent = {peer: ctypes.string_at(place, count) for _, kind, place, count, peer in waiting.calls if kind == "send"}
    found = own._all(sent)
    for _, kind, place, count, peer in waiting.calls:
        if kind == "recv":
            assert len(found[peer][own.rank]) == count
            ctypes.memmove(place, found[peer][own.rank], count)


nccl = SimpleNamespace(
    available=True, NCCL_SUM=0, NcclCommunicator=Link,
    NCCL_UINT8=1, NCCL_FLOAT16=6, NCCL_FLOAT32=7, NCCL_FLOAT64=8, NCCL_BFLOAT16=9,
    get_unique_id=lambda: b"id of rank %d" % waiting.host.rank, groupStart=group_start, groupEnd=group_end,
)  # fmt: skip


def current_stream():
    """Of this rank."""
    if not getattr(waiting, "streams", []):
        waiting.streams = [Stream()]
    return waiting.streams[-1]


@pytest.fixture
def library(monkeypatch):
    """cukit/backend/cuda/nccl.py over the library of threads."""
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cuda.nccl, cuda.Stream, cuda.get_current_stream = nccl, Stream, current_stream
    cuda.Device = lambda: SimpleNamespace(pci_bus_id=waiting.place)
    cupy.cuda, cupy.empty_like = cuda, lambda array: np.empty_like(array)
    cupy.empty = lambda shape, dtype: device(np.empty(shape, dtype))
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", nccl)):
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("nccl_under_test", ROOT / "cukit/backend/cuda/nccl.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(nccl_module, "nccl", lambda: module)
    return module


def on_gpus(size, work, place=lambda rank: f"0000:{rank}"):
    """What work(NCCLGroup) gives on each rank."""

    def rank(host):
        host.host_name, waiting.host, waiting.place = "here", host, place(host.rank)
        return work(NCCLGroup(host))

    found = on_ranks(size, rank)
    if errors := [one for one in found if isinstance(one, BaseException)]:
        raise errors[0]
    return found


def test_a_communicator_lasts_as_long_as_its_process(library):
    """NCCL's end of one waits for captured graphs, which Python may take apart later."""
    links = [weakref.ref(link) for link in on_gpus(2, lambda group: group._link._link)]
    gc.collect()
    assert all(link() is not None for link in links)


def test_steps_that_become_graphs_have_a_communicator_of_their_own(library, monkeypatch):
    """NCCL does not order what is captured among other calls then, which is what this mode of it is for."""
    assert os.environ["NCCL_GRAPH_MIXING_SUPPORT"] == "0"
    used = []

    def noted(old):
        def call(self, *given):
            used.append(self)
            return old(self, *given)

        return call

    for name in ("allGather", "broadcast", "allReduce", "send"):
        monkeypatch.setattr(Link, name, noted(getattr(Link, name)))

    def exchange(group):
        group.all_parts(device(np.zeros(4, np.float32)))
        group.broadcast(device(np.zeros(4)))
        group.all_reduce(device(np.zeros(4, np.float32)), fast=True)
        group.all_gather(device(np.zeros(4)), borders=[0, 1, 4])

    def work(group):
        for _ in range(2):
            group.prepare_steps()
        step = Stream()
        step.is_of_steps = True
        with step:
            exchange(group)
        in_steps = group._link._link_of_steps
        mine = [link for link in used if link.rank == group.rank]
        assert len(mine) == 4 and all(link is in_steps for link in mine)
        exchange(group)
        rest = [link for link in used if link.rank == group.rank][4:]
        assert len(rest) == 4 and all(link is group._link._link for link in rest) and rest[0] is not in_steps

    on_gpus(2, work)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 1000])
@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_is_added_in_order_of_ranks(size, count, dtype, small, library, monkeypatch):
    """Large ones by shares; small ones by one exchange; of two ranks by NCCL itself."""
    monkeypatch.setattr(group_module, "SMALL", small)
    arrays = [np.random.default_rng([rank, count]).normal(size=count).astype(dtype) for rank in range(size)]
    truth = arrays[0] + arrays[1]
    for more in arrays[2:]:
        truth = truth + more

    def work(group):
        ordered, fast = device(arrays[group.rank].copy()), device(arrays[group.rank].copy())
        group.all_reduce(ordered)
        group.all_reduce(fast, fast=True)
        return ordered, fast

    for ordered, fast in on_gpus(size, work):
        np.testing.assert_array_equal(ordered, truth)
        np.testing.assert_allclose(fast, truth, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_half_types_are_added_too(dtype, library):
    arrays = [np.array([1.5, 300, -2]).astype(dtype) * (rank + 1) for rank in range(3)]

    def work(group):
        own = device(arrays[group.rank].copy())
        group.all_reduce(own)
        return own

    for size in (2, 3):
        for found in on_gpus(size, work):
            np.testing.assert_array_equal(found, sum(x.astype(np.float32) for x in arrays[:size]).astype(dtype))


@pytest.mark.parametrize("borders", [None, [0, 4, 8, 12], [0, 0, 5, 12]])
def test_parts_are_gathered_and_arrays_broadcast(borders, library):
    def work(group):
        array, (a, b) = device(np.full(12, -1, np.int16)), (borders or [0, 4, 8, 12])[group.rank : group.rank + 2]
        array[a:b] = group.rank
        group.all_gather(array, borders)
        other = device(np.full((2, 3), group.rank, np.float16))
        group.broadcast(other, root=2)
        parts = group.all_parts(device(np.full((2, 3), group.rank, np.float16)))
        assert parts.shape == (3, 2, 3) and (parts == np.arange(3)[:, None, None]).all()
        group.barrier()
        return array.tolist(), other.min(), group.gather_values(group.rank)

    lengths = np.diff(borders or [0, 4, 8, 12])
    for found, least, ranks in on_gpus(3, work):
        assert found == np.repeat([0, 1, 2], lengths).tolist() and least == 2 and ranks == [0, 1, 2]


def test_every_call_is_after_the_work_before_it_and_before_what_follows(library):
    def work(group):
        link = group._link
        group.broadcast(device(np.zeros(4)))
        return link._stream.log

    assert on_gpus(2, work) == [["wait", "record"]] * 2


@pytest.mark.parametrize(("size", "small"), [(2, 0), (3, 1 << 20)])
def test_a_sum_of_two_ranks_or_a_small_one_is_one_launch_of_its_own(size, small, library, monkeypatch):
    """And not an exchange between each two ranks."""
    monkeypatch.setattr(group_module, "SMALL", small)
    monkeypatch.setattr(library.Communicator, "swap", None)

    def work(group):
        group.all_reduce(device(np.zeros(4, np.float32)))
        return group._link._stream.log

    assert on_gpus(size, work) == [["wait", "record"]] * size


def test_what_runs_beside_waits_for_what_was_told_and_is_waited_for_at_join(library):
    """Sums and arithmetic have a stream of their own: it waits for the computing one, which waits for it at join()."""

    def work(group):
        link, main = group._link, current_stream()
        arrays = [device(np.full(6, group.rank + 1.0, np.float32)) for _ in range(2)]
        with group.beside():
            assert current_stream() is link._side  # so that memory comes from that stream's pool
            group.all_reduce(arrays[0])
            share = group.reduce_scatter(arrays[1]) * 2
        assert current_stream() is main
        assert link._side.events[0] == (main, 0) and main.events == []
        calls = len(link._stream.events)
        assert calls and all(event[0] is link._side for event in link._stream.events)
        assert [event for event in link._side.events[1:]] == [(link._stream, at) for at in range(calls)]
        moment = group.moment()
        with group.beside():
            pass
        group.join(moment)
        assert main.events == [moment] and moment[0] is link._side
        group.join()
        assert main.events[1] == (link._side, moment[1] + 1)  # recorded now
        return arrays[0].tolist(), share.tolist()

    assert on_gpus(2, work) == [([3.0] * 6, [6.0] * 3)] * 2


def test_gradients_are_summed_beside_the_backward_pass(library):
    """No sum holds the computing stream up but in stage 2, where gradients live until their sum is joined."""

    for stage in (0, 1, 2):

        def work(group, stage=stage):
            store, main = run_trainer.model("float32").trained_store, current_stream()
            models = {"policy": TrainedModel("policy", SimpleNamespace(trained_store=store, backend=store.backend))}
            models["policy"].optimizer = SimpleNamespace(stage=stage)
            group.on = lambda backend: group
            sums = GradientSums(group, models, models, [("policy",)])
            for bucket in store.buckets:
                bucket.grad = device(np.ones(bucket.size, np.float32))
            held = [bucket.grad for bucket in store.buckets]
            sums.end_pass()
            waits = len(main.events)
            assert waits == (0 if stage < 2 else len(held) - 1)  # each waits for the one before
            assert stage < 2 or sums._in_flight[0] is held[0]
            sums.finish()
            sums.settle([sums.reached()])
            assert len(main.events) == waits + 1 and sums._in_flight is None
            return len(held)

        assert on_gpus(2, work) == [6, 6]


def test_two_ranks_on_one_gpu_are_refused(library):
    with pytest.raises(ValueError, match=r"ranks 0 and 2 use the same GPU \(0000:0 of here\): start one process a GPU"):
        on_gpus(3, lambda group: None, place=lambda rank: f"0000:{rank % 2}")


def test_without_nccl_the_way_out_is_named(library, monkeypatch):
    monkeypatch.setattr(nccl, "available", False)
    with pytest.raises(ValueError, match="NCCL, which CuPy does not find: pip install 'nvidia-nccl-cu12"):
        library.check()


def test_what_nccl_cannot_add_is_refused(library):
    def work(group):
        with pytest.raises(ValueError, match="adds up bfloat16, float16, float32, float64 here, got int32"):
            group.all_reduce(device(np.zeros(4, np.int32)), fast=True)
        with pytest.raises(ValueError, match="contiguous"):
            group.broadcast(device(np.zeros((4, 4)))[:, :2])

    on_gpus(2, work)
