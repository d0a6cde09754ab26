"""Groups of completions that move between ranks during a rollout: from a rank that is behind to one that waits.

Every rank says now and then how much it has to do. The first one, the dealer, answers with orders: a rank gives groups
to another one. What waits whole moves first, for it costs nothing; then running groups, of which the taker computes the
keys and values of the tokens so far anew. Messages are looked at between two steps of the engine, so no rank waits for
another. The rollout is over when all groups have ended, or at once where a rank stops or fails.

Numbers: docs/SCALING.md, "Stragglers"; `bench scale` plays by these rules.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from ..parallel.mailbox import Mailbox
from ..runs.signals import RunStopped

PERIOD = 1.0  # seconds between two rounds of orders; ranks report twice as often
ROW = 256  # keys of so many tokens take a decode step as long as a row does besides: 198 by Qwen3-0.6B, 2,100 by 8B
LEAST_GAP, LEAST_SHARE = 8192, 0.1  # tokens, and share of the heavier load, by which two ranks must differ


@dataclass(frozen=True)
class Load:
    """What a rank has to do, and has room for."""

    rows: int = 0  # completions that have begun and not ended
    tokens: int = 0  # whose keys and values a decode step of them reads
    waiting: int = 0  # groups of which nothing is computed
    room: int = 0  # groups that could begin at once, 0 where some wait
    free_rows: int = 0
    free_tokens: int = 0  # of the cache

    @property
    def weight(self) -> int:
        """How long a decode step takes, in tokens, without what no load changes."""
        return self.tokens + ROW * self.rows


@dataclass(frozen=True)
class Move:
    """An order: `giver` gives so many groups that wait, or (0) a running one of about half the gap of weights, below
    which it stays, and of at most so many tokens.
    """

    giver: int
    taker: int
    groups: int
    gap: int = 0
    tokens: int = 0


def moves(loads: dict[int, Load], group_rows: int) -> list[Move]:
    """The orders of one round for ranks with these loads. group_rows: completions of a group."""
    if any(load.waiting for load in loads.values()):
        return _waiting_moves(loads, group_rows)
    found, order = [], sorted(loads, key=lambda rank: (loads[rank].weight, rank))
    for taker, giver in zip(order[: len(order) // 2], order[::-1]):
        light, heavy = loads[taker], loads[giver]
        gap = heavy.weight - light.weight
        if gap >= max(LEAST_GAP, LEAST_SHARE * heavy.weight) and light.free_rows >= group_rows:
            found.append(Move(giver, taker, 0, gap, light.free_tokens // 2))
    return found


def _waiting_moves(loads: dict[int, Load], group_rows: int) -> list[Move]:
    """Each group to the rank with the fewest rows, as long as it can begin there at once."""
    waiting = {rank: load.waiting for rank, load in loads.items() if load.waiting}
    room = {rank: load.room for rank, load in loads.items() if load.room}
    rows = {rank: loads[rank].rows for rank in room}
    given: dict[tuple[int, int], int] = {}
    while waiting and room:
        taker, giver = min(room, key=lambda rank: (rows[rank], rank)), max(waiting, key=lambda rank: waiting[rank])
        given[giver, taker] = given.get((giver, taker), 0) + 1
        rows[taker] += group_rows
        for left, rank in ((waiting, giver), (room, taker)):
            left[rank] -= 1
            if not left[rank]:
                del left[rank]
    return [Move(giver, taker, groups) for (giver, taker), groups in given.items()]


def best_group(groups: dict[int, Load], move: Move) -> int | None:
    """Which running group to give, None if none helps. groups: name -> what it adds to a load."""
    fitting = [name for name, group in groups.items() if group.weight < move.gap and group.tokens <= move.tokens]
    return min(fitting, key=lambda name: abs(move.gap / 2 - groups[name].weight), default=None)


class Table(Protocol):
    """A rank's groups, as Deal sees them."""

    def load(self) -> Load: ...

    def give(self, move: Move) -> list:
        """Take groups off this table, to be sent."""

    def take(self, groups: list) -> None: ...

    @property
    def num_ended(self) -> int:
        """Groups that have ended here."""


class Deal:
    """A rank's part in one rollout of num_groups groups of group_rows completions.

    Call poll() between steps, until it says that the rollout is over. Call leave() where this rank ends by an error, so
    that the others end too.
    """

    def __init__(self, mailbox: Mailbox, table: Table, num_groups: int, group_rows: int):
        mailbox.num_uses += 1
        self.mailbox, self.table, self.number = mailbox, table, mailbox.num_uses
        self.num_given = 0  # groups
        self._dealer = Dealer(self, num_groups, group_rows) if mailbox.rank == 0 else None
        self._order = 0  # the newest that this rank has carried out, as giver or taker
        self._told, self._told_at = (-1, -1), 0.0
        self._ended: bool | None = None  # well, or because a rank left

    def poll(self) -> bool:
        """Look at the messages; True when the rollout is over. RunStopped where another rank has left it, RankLost
        where one is lost.
        """
        self.mailbox.check()
        self._report()
        while (found := self.mailbox.receive()) is not None:
            sender, (number, kind, *rest) = found
            if number == self.number:  # else of a rollout that was cut short
                self._take_in(sender, kind, rest)
        if self._ended is False:
            raise RunStopped
        if self._dealer is None:
            return self._ended is not None
        self._dealer.act()
        return len(self._dealer.gone) == self.mailbox.size

    def leave(self) -> None:
        if self._ended is None and self._dealer is not None:
            self._dealer.end(False)
        elif self._ended is None:
            self.send(0, "left")

    def send(self, rank: int, kind: str, *rest: Any) -> None:
        self.mailbox.send(rank, (self.number, kind, *rest))

    def _report(self) -> None:
        told, now = (self.table.num_ended, self._order), time.monotonic()
        if self._ended is None and (told != self._told or now - self._told_at >= PERIOD / 2):
            self._told, self._told_at = told, now
            self.send(0, "report", *told, self.table.load())

    def _take_in(self, sender: int, kind: str, rest: list) -> None:
        if kind == "over":
            (self._ended,) = rest
            self.send(0, "gone")
        elif kind in ("give", "groups"):
            order, given = rest
            self._order = max(self._order, order)
            if kind == "groups":
                self.table.take(given)
            elif self._ended is None:
                groups = self.table.give(given)
                self.num_given += len(groups)
                self.send(given.taker, "groups", order, groups)
        else:
            assert self._dealer is not None
            self._dealer.take_in(sender, kind, rest)


class Dealer:
    """What the first rank does besides: it gives the orders, and ends the rollout."""

    def __init__(self, deal: Deal, num_groups: int, group_rows: int):
        self._deal, self._num_groups, self._group_rows = deal, num_groups, group_rows
        self.gone: set[int] = set()  # ranks that send nothing more
        self._ended: dict[int, int] = {}  # rank -> its groups that have ended
        self._loads: dict[int, Load] = {}  # without those of ranks that have yet to carry an order out
        self._orders: dict[int, int] = {}  # rank -> the newest order that it is in
        self._num_orders, self._over, self._acted = 0, False, time.monotonic()

    def take_in(self, sender: int, kind: str, rest: list) -> None:
        if kind == "report":
            ended, order, load = rest
            self._ended[sender] = ended
            if order >= self._orders.get(sender, 0):
                self._loads[sender] = load
            if sum(self._ended.values()) == self._num_groups:
                self.end(True)
            return
        self.gone.add(sender)
        if kind == "left":
            self.end(False)

    def act(self) -> None:
        """Give a round of orders, when it is time."""
        if self._over or time.monotonic() - self._acted < PERIOD:
            return
        self._acted = time.monotonic()
        for move in moves(self._loads, self._group_rows):
            self._num_orders += 1
            for rank in (move.giver, move.taker):
                self._orders[rank] = self._num_orders
                self._loads.pop(rank, None)  # until it reports that it has carried the order out
            self._deal.send(move.giver, "give", self._num_orders, move)

    def end(self, well: bool) -> None:
        """Tell all ranks, once."""
        if not self._over:
            self._over = True
            for rank in range(self._deal.mailbox.size):
                self._deal.send(rank, "over", well)
