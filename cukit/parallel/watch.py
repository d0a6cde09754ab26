"""Looks after the other ranks, so that one that dies or hangs ends the run in one line and not in silence.

Each rank has a file in a folder that all of them see. A thread writes there, every second: a count that moves (the
rank lives), how many collectives of each group the rank has entered, which one it waits in, and how it ended. Another
rank's thread reads it. A process of the same host that is gone is seen within a fifth of a second: mpirun ends all
others half a second after one was killed, and the reason has to be on the screen before.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .group import SAME_CALLS, RankLost

logger = logging.getLogger(__name__)

TICK, BEAT = 0.1, 1.0  # seconds between two looks at the processes of this host, and between two at the files
SILENT = 30.0  # seconds without a beat after which a rank counts as lost, unless its process is seen to run
GRACE = 15.0  # seconds that the main thread has to end by itself, once a rank is lost
SAVING = 300.0  # seconds that the first rank has to save, once an error has ended a run
ASIDE = 3  # beats in a row of two ranks that wait for each other in different collectives
RECORD = 2048  # bytes of a file


@dataclass
class Peer:
    """What is known of another rank."""

    rank: int
    host: str
    pid: int
    process: psutil.Process | None  # where it is on this host and can be seen
    record: dict = field(default_factory=dict)  # what its file says
    heard: float = 0.0  # when that changed last, by this rank's clock

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    @property
    def gone(self) -> bool:
        """Whether its process has ended; False where that cannot be seen."""
        if self.process is None:
            return False
        try:
            return not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False

    @property
    def stopped(self) -> bool:
        with suppress(psutil.Error):
            return self.process is not None and self.process.status() == psutil.STATUS_STOPPED
        return False

    def entered(self, group: str) -> int:
        """How many collectives of a group it had entered when it wrote last."""
        return self.record.get("entered", {}).get(group, 0)

    def place(self) -> str:
        """Where it was when it wrote last."""
        number, what = self.record.get("number", 0), self.record.get("what")
        return f"in {what} (collective {number})" if what else f"at work after collective {number}"


class Watch:
    """See the module. begin() starts it; without it, nothing is watched."""

    def __init__(self, rank: int):
        self.rank = rank
        self.timeout = 1800.0  # seconds in one collective
        self.advice = ""  # the end of the line about a lost rank
        self.lost: str | None = None  # the line about the first rank that was lost
        self.folder: Path | None = None
        self.peers: list[Peer] = []
        self._number, self._since = 0, 0.0  # of the collective that was entered last
        self._members: tuple[int, ...] | None = None  # the ranks that it is of, None: all
        self._entered: dict[str, int] = {}  # collectives of each group, by its members
        self._what: str | None = None  # its name, while this rank waits in it
        self._ended: str | None = None  # why this rank enters no further collective
        self._left = False  # the process is about to end
        self._busy = True  # a library may keep this process's threads waiting for long: silence says nothing
        self._beat = 0
        self._taken = False  # the main thread knows of the loss
        self._runs = 0  # runs of which this rank has written everything
        self._lost_at = 0.0
        self._aside: tuple | None = None  # see _look_at_places
        self._aside_beats: set[int] = set()
        self._lock = threading.Lock()

    @staticmethod
    def facts() -> dict:
        """What the others have to know of this process."""
        own = psutil.Process()
        return {"host": socket.gethostname(), "pid": own.pid, "created": own.create_time()}

    def begin(self, facts: list[dict], group: Any) -> None:
        """Watch the ranks that these facts are of, in their order."""
        one_host = len({fact["host"] for fact in facts}) == 1
        made = _make_folder(one_host) if self.rank == 0 else ""
        folder = Path(group.gather_values(made, "start")[0])
        if not all(group.gather_values(folder.is_dir(), "start")):
            if self.rank == 0:
                logger.warning(
                    "the hosts share no folder %s: a rank that dies or hangs is noticed after ddp_timeout only", folder
                )
            return
        self.folder = folder
        for rank, fact in enumerate(facts):
            if rank != self.rank:
                self.peers.append(Peer(rank, fact["host"], fact["pid"], _process(fact)))
        self._write()
        group.barrier("start")
        self._busy = True  # models are loaded now
        threading.Thread(target=self._run, name="watch of ranks", daemon=True).start()

    # ---- the main thread ----

    @contextmanager
    def waiting(self, what: str, members: tuple[int, ...] | None = None) -> Iterator[None]:
        """Around a wait for all ranks, or for these."""
        group = _named(members)
        self._entered[group] = self._entered.get(group, 0) + 1
        self._members, self._ended, self._busy = members, None, False
        self._number, self._what, self._since = self._number + 1, what, time.monotonic()
        yield
        self._what = None

    def check(self) -> None:
        """RankLost if a rank is lost, or if this wait has lasted too long."""
        if self.lost is None and time.monotonic() - self._since > self.timeout:
            self._too_long()
        if self.lost is not None:
            self._taken = True
            raise RankLost(self.lost)

    def busy(self) -> None:
        """Tell the others that no beat may come until the next collective: a large file is read."""
        self._busy = True
        self._write()

    def end(self, reason: str = "") -> None:
        """Tell the others that this rank enters no further collective. The first reason that is given stays."""
        self._ended = self._ended or reason or "it has ended"
        self._write()

    def end_run(self, error: BaseException, is_first: bool) -> None:
        """At the end of a run that an error ended here: tell the others, which may wait for this rank, and let the
        first one write what it saves. mpirun kills it as soon as another one ends.
        """
        self._runs += 1
        self.end(_text_of(error))
        if is_first or self.folder is None:
            return
        first, began = self.peers[0], time.monotonic()
        while time.monotonic() - began < SAVING and not first.gone:
            if _read(self.folder, 0).get("runs", 0) >= self._runs:
                return
            time.sleep(TICK)

    def is_said(self, error: BaseException, seconds: float) -> bool:
        """Whether this error is on the screen: said by this rank, since it is that of a lost rank, or by the first one,
        which ends by the same error, or where one of the two quotes the other. Waits for that so long.
        """
        own, end = _text_of(error), time.monotonic() + seconds
        self.end(own)
        if str(error) == self.lost:
            return True
        if self.rank == 0 or self.folder is None:
            return False
        while not (said := _read(self.folder, 0).get("ended") or "") and time.monotonic() < end:
            time.sleep(TICK / 2)
        return said != "" and (said in own or own in said)

    def leave(self) -> None:
        """At the end of the process: MPI's own end would wait for a lost rank."""
        self._left = True
        self.end()
        if self.lost is not None:
            time.sleep(5 * TICK)  # mpirun ends the others at once, and a rank that failed may be saying why
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            _exit()
        if self.folder is not None and all(_read(self.folder, peer.rank).get("left") for peer in self.peers):
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- the thread ----

    def _run(self) -> None:
        beat = before = time.monotonic()
        while not self._left or self.lost is not None:
            time.sleep(TICK)
            now = time.monotonic()
            if now - before > SILENT / 6:  # this process itself was stopped: the others' silence says nothing
                for peer in self.peers:
                    peer.heard = now
            before = now
            if self.lost is not None:
                if now - self._lost_at > (SAVING if self._taken else GRACE):
                    _exit()
                continue
            self._look_at_processes()
            if now - beat >= BEAT:
                beat = now
                self._write()
                self._read_all(now)
                self._look_at_places()

    def _look_at_processes(self) -> None:
        for peer in self.peers:
            if peer.gone and self.folder is not None:
                peer.record = _read(self.folder, peer.rank) or peer.record
                if not peer.record.get("ended"):
                    self._lose(f"{peer.name} was killed or has crashed, {peer.place()}")
                elif self._misses(peer):
                    self._lose(f"{peer.name} has ended: {peer.record['ended']}")

    def _read_all(self, now: float) -> None:
        assert self.folder is not None
        for peer in self.peers:
            record = _read(self.folder, peer.rank)
            if record and record != peer.record:
                peer.record, peer.heard = record, now
            peer.heard = peer.heard or now
            if peer.record.get("ended"):
                if self._misses(peer):
                    self._lose(f"{peer.name} has ended: {peer.record['ended']}")
            elif now - peer.heard > SILENT and (peer.process is None or peer.stopped):
                # a process of this host that runs is busy; one of another host may have said that it would be
                if peer.stopped or not peer.record.get("busy"):
                    why = "its process is stopped (SIGSTOP)" if peer.stopped else "it hangs, or its host is gone"
                    self._lose(f"{peer.name} has not been heard of for {now - peer.heard:.0f} s, {peer.place()}: {why}")

    def _look_at_places(self) -> None:
        """A rank that waits in another collective at the same place of the order never comes to this one. Records are
        of different moments, so several in a row must say so.
        """
        peer = next((peer for peer in self.peers if self._is_aside(peer)), None)
        found = None if peer is None else (peer.rank, self._number, peer.record["number"])
        if found != self._aside:
            self._aside, self._aside_beats = found, set()
        if peer is None:
            return
        self._aside_beats.add(peer.record["beat"])
        if len(self._aside_beats) >= ASIDE and (what := self._what) is not None:
            self._lose(f"{peer.name} is in {peer.record['what']} where rank {self.rank} is in {what}: {SAME_CALLS}")

    def _is_aside(self, peer: Peer) -> bool:
        group, what, other = _named(self._members), self._what, peer.record.get("what")
        if what is None or other is None or what == other or peer.record.get("group") != group:
            return False
        return peer.entered(group) == self._entered.get(group, 0)

    def _misses(self, peer: Peer) -> bool:
        """Whether this rank waits in a collective that a rank which has ended did not enter."""
        if self._what is None or not self._waits_for(peer):
            return False
        group = _named(self._members)
        return peer.entered(group) < self._entered.get(group, 0)

    def _waits_for(self, peer: Peer) -> bool:
        return self._members is None or peer.rank in self._members

    def _too_long(self) -> None:
        missing = "another rank"
        if self.folder is not None:
            for peer in self.peers:
                peer.record = _read(self.folder, peer.rank) or peer.record
            absent = [peer for peer in self.peers if self._misses(peer)]
            missing = ", ".join(f"{peer.name}, which is {peer.place()}" for peer in absent) or missing
        self._lose(
            f"{self._what} (collective {self._number}) has waited {self.timeout:.0f} s (ddp_timeout) for {missing}"
        )

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self.lost is not None:
                return
            self._lost_at = time.monotonic()
            self.lost = f"{reason}; rank {self.rank} stops{self.advice}"
        with suppress(OSError):  # at once: mpirun may leave no time for anything else
            os.write(2, f"error: {self.lost}\n".encode())
        self.end(f"it stopped, because {reason}"[:300])

    def _write(self) -> None:
        self._beat += 1
        record: dict[str, Any] = {"beat": self._beat, "number": self._number, "what": self._what, "ended": self._ended}
        record |= {"runs": self._runs, "left": self._left, "busy": self._busy, "entered": dict(self._entered)}
        record["group"] = _named(self._members)
        if self.folder is not None:
            with suppress(OSError):  # a rank that cannot write counts as lost, but does not fail by this
                descriptor = os.open(self.folder / f"rank-{self.rank}", os.O_WRONLY | os.O_CREAT, 0o600)
                os.write(descriptor, json.dumps(record, ensure_ascii=False).encode("utf-8", "replace").ljust(RECORD))
                os.close(descriptor)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _named(members: tuple[int, ...] | None) -> str:
    """A group's name in the records, which have a fixed length: short for any number of ranks."""
    if members is None:
        return "all"
    text = ",".join(map(str, members))
    return text if len(text) <= 40 else f"{members[0]}..{members[-1]} {zlib.crc32(text.encode()):08x}"


def _make_folder(one_host: bool) -> str:
    """A new folder that every rank sees: of several hosts, below the home folder, which they usually share."""
    try:
        if one_host:
            return tempfile.mkdtemp(prefix="cukit-ranks-")
        base = Path.home() / ".cache" / "cukit"
        base.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix="ranks-", dir=base)
    except OSError:
        return "/no folder"


def _process(fact: dict) -> psutil.Process | None:
    """The process of these facts, if it runs where this one can see it."""
    with suppress(psutil.Error):
        found = psutil.Process(fact["pid"])
        if fact["host"] == socket.gethostname() and abs(found.create_time() - fact["created"]) < 1:
            return found
    return None


def _read(folder: Path, rank: int) -> dict:
    """A rank's record, {} if there is none or it is just being written."""
    try:
        return json.loads((folder / f"rank-{rank}").read_text())
    except (OSError, ValueError):
        return {}


def _exit() -> None:
    """End this process now: its main thread may wait in a library for a rank that never comes."""
    os._exit(1)
