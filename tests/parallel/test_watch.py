"""Which silence means that a rank is lost, without processes; tests/parallel/test_lost.py has real ones."""

import json
from types import SimpleNamespace

import psutil
import pytest

from cukit.parallel import watch as watch_module
from cukit.parallel.group import RankLost
from cukit.parallel.watch import SILENT, Peer, Watch


class Process:
    """A process of this host in some state."""

    def __init__(self, state=psutil.STATUS_RUNNING):
        self.state = state

    def is_running(self):
        return self.state is not None

    def status(self):
        return self.state


@pytest.fixture
def seen(tmp_path):
    """seen(process, **record) -> the Watch of rank 0, which has read rank 1's record at time 0."""

    def make(process, **record):
        watch = Watch(0)
        watch.folder, watch.peers = tmp_path, [Peer(1, "there", 99, process)]
        write(record)
        watch._read_all(1.0)
        return watch

    def write(record):
        (tmp_path / "rank-1").write_text(json.dumps({"beat": 1, "number": 4, "what": None} | record))

    make.write = write
    return make


def test_a_rank_of_another_host_that_goes_silent_is_lost(seen, capfd):
    watch = seen(None)
    watch._read_all(SILENT)
    assert watch.lost is None
    watch._read_all(SILENT + 2)
    assert "rank 1 (process 99 on there) has not been heard of for 31 s, at work after collective 4" in watch.lost
    assert capfd.readouterr().err == f"error: {watch.lost}\n"
    with pytest.raises(RankLost, match="rank 0 stops"):
        watch.check()


def test_a_beat_keeps_it(seen):
    watch = seen(None)
    seen.write({"beat": 2})
    watch._read_all(SILENT)
    watch._read_all(2 * SILENT - 1)
    assert watch.lost is None


def test_a_busy_rank_may_be_silent(seen):
    watch = seen(None, busy=True)
    watch._read_all(10 * SILENT)
    assert watch.lost is None


@pytest.mark.parametrize("state, lost", [(psutil.STATUS_RUNNING, False), (psutil.STATUS_DISK_SLEEP, False),
                                         (psutil.STATUS_STOPPED, True)])  # fmt: skip
def test_of_a_process_of_this_host_its_state_counts(state, lost, seen, capfd):
    watch = seen(Process(state), busy=True)
    watch._read_all(SILENT + 2)
    assert (watch.lost is not None) == lost
    assert not lost or "SIGSTOP" in watch.lost


@pytest.mark.parametrize("state", [psutil.STATUS_ZOMBIE, None])
def test_a_process_that_is_gone_is_lost_at_once(state, seen, capfd):
    watch = seen(Process(state), what="gradients")
    watch._look_at_processes()
    assert "was killed or has crashed, in gradients (collective 4)" in watch.lost


def test_a_rank_that_has_ended_is_missed_only_where_it_is_waited_for(seen, capfd):
    watch = seen(Process(None), ended="OSError: broken")
    watch._look_at_processes()
    watch._read_all(2.0)
    assert watch.lost is None
    for _ in range(5):
        with watch.waiting("stop"):
            watch._read_all(3.0)
    assert "rank 1 (process 99 on there) has ended: OSError: broken" in watch.lost


def test_a_wait_that_is_too_long_names_who_is_missing(seen, monkeypatch, capfd):
    watch = seen(Process())
    watch.timeout = 60.0
    times = iter([0.0, 30.0, 61.0, 61.0])
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    watch._number, watch._entered = 4, {"all": 4}
    with watch.waiting("gradients"):
        watch.check()
        with pytest.raises(RankLost, match=r"gradients \(collective 5\) has waited 60 s \(ddp_timeout\) for rank 1"):
            watch.check()


@pytest.mark.parametrize("members, entered, is_lost", [
    (None, {"all": 2, "0,1": 9}, True), (None, {"all": 3}, False), ((0, 1), {"all": 9, "0,1": 0}, True),
    ((0, 1), {"all": 0, "0,1": 1}, False), ((0, 2), {"all": 0}, False),
])  # fmt: skip
def test_a_rank_that_has_ended_is_missed_by_the_groups_that_it_is_in(seen, members, entered, is_lost):
    """Not by a group of other ranks, nor where it entered what is waited in, however many collectives of other groups
    it has entered.
    """
    watch = seen(Process(None), ended="OSError: full", entered=entered)
    watch._entered = {"all": 2}
    with watch.waiting("gradients", members):
        watch._look_at_processes()
    assert (watch.lost is not None) == is_lost


def test_a_record_of_large_groups_has_its_length(seen, tmp_path):
    """Else what a longer one leaves behind makes the next one unreadable, and the rank counts as silent."""
    watch, groups = seen(None), (tuple(range(0, 2048, 2)), tuple(range(1024)), tuple(range(1, 1025)), (0, 1), None)
    assert len({watch_module._named(members) for members in groups}) == len(groups)
    for members in groups:
        with watch.waiting("sum", members):
            watch._write()
    path = tmp_path / f"rank-{watch.rank}"
    assert path.stat().st_size == watch_module.RECORD and len(json.loads(path.read_text())["entered"]) == len(groups)


def test_a_record_that_is_half_written_is_passed_over(seen, tmp_path):
    watch = seen(None)
    (tmp_path / "rank-1").write_text('{"beat": 2, "num')
    watch._read_all(2.0)
    assert watch.peers[0].record["beat"] == 1 and watch.lost is None


@pytest.mark.parametrize("record, error, is_said", [
    ({"ended": "ValueError: bad"}, ValueError("bad"), True), ({"ended": "ValueError: bad"}, ValueError("other"), False),
    ({"ended": "ValueError: bad"}, RankLost("rank 0 failed in opening the run: ValueError: bad"), True),
    ({"ended": "RankLost: rank 1 failed in evaluation: ValueError: bad"}, ValueError("bad"), True),
    ({}, ValueError("bad"), False),
])  # fmt: skip
def test_an_error_that_the_first_rank_has_too_is_said_once(tmp_path, record, error, is_said):
    watch = Watch(1)
    watch.folder = tmp_path
    (tmp_path / "rank-0").write_text(json.dumps({"beat": 1, "ended": None} | record))
    assert watch.is_said(error, 0.02) is is_said
    assert json.loads((tmp_path / "rank-1").read_text())["ended"] == f"{type(error).__name__}: {error}"
    watch.lost = "rank 2 was killed; rank 1 stops"
    assert watch.is_said(RankLost(watch.lost), 0.0), "the watch has written it"
    watch.rank, watch.lost = 0, None
    assert not watch.is_said(error, 10.0), "the first one says it"


def test_ranks_that_wait_for_each_other_in_different_collectives_are_told(seen, capfd):
    watch = seen(Process())
    waits = {"what": "saving", "group": "all", "entered": {"all": 1}}
    with watch.waiting("stop"):
        for beat in (2, 3, 3, 3):  # the same record again says nothing new
            seen.write(waits | {"beat": beat})
            watch._read_all(2.0)
            watch._look_at_places()
        assert watch.lost is None
        seen.write(waits | {"beat": 4})
        watch._read_all(2.0)
        watch._look_at_places()
    assert "rank 1 (process 99 on there) is in saving where rank 0 is in stop: every rank must make" in watch.lost


@pytest.mark.parametrize("record", [
    {"what": "stop"}, {"what": None}, {"entered": {"all": 2}}, {"group": "0,1"}, {"number": [5, 6, 7, 8]},
])  # fmt: skip
def test_ranks_that_move_or_wait_in_order_are_not(record, seen):
    watch = seen(Process())
    with watch.waiting("stop"):
        for beat in range(4):
            moved = {name: value[beat] if isinstance(value, list) else value for name, value in record.items()}
            seen.write({"what": "saving", "group": "all", "entered": {"all": 1}, "beat": beat + 2} | moved)
            watch._read_all(2.0)
            watch._look_at_places()
    assert watch.lost is None
