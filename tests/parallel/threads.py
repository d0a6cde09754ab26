"""A group whose ranks are threads of this process: for tests that need no MPI."""

import pickle
import threading
from collections import deque
from types import SimpleNamespace

import numpy as np

from cukit.parallel.group import RankedGroup
from cukit.parallel.mailbox import Mailbox


class ThreadGroup(RankedGroup):
    """One rank; ranks of a group share a barrier and a table of what they send."""

    def __init__(self, rank, size, barrier, table):
        self.rank = self.local_rank = rank
        self.size, self._barrier, self._table = size, barrier, table
        self.watch = SimpleNamespace(timeout=0.0, advice="", end_run=lambda error, is_first: None, busy=lambda: None)

    def barrier(self, what="barrier"):
        self._barrier.wait()

    def gather_values(self, value, what="gather_values"):
        self._table[self.rank] = value
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found

    def part(self, ranks):
        first = self.rank == ranks[0]
        made = (threading.Barrier(len(ranks), timeout=60), [None] * len(ranks)) if first else None
        made = self.gather_values(made)[ranks[0]]
        return ThreadGroup(ranks.index(self.rank), len(ranks), *made) if self.rank in ranks else None

    def mailbox(self):
        return ThreadMailbox(self.rank, self.gather_values(deque()))

    def broadcast(self, array, root=0, what="broadcast"):
        array[...] = self.gather_values(array.copy(), what)[root]

    def _swap(self, outgoing, incoming, what):
        sent = self.gather_values([np.array(x) for x in outgoing], what)
        for rank, array in enumerate(incoming):
            if rank != self.rank:
                array[...] = sent[rank][self.rank]

    def _add_up(self, array, what):
        array[...] = np.sum(self.gather_values(array.copy(), what), axis=0)

    def _empty_like(self, array):
        return np.empty_like(array)


class ThreadMailbox(Mailbox):
    """One rank's of a list of queues."""

    def __init__(self, rank, boxes):
        self.rank, self.size, self._boxes = rank, len(boxes), boxes

    def send(self, rank, value):
        self._boxes[rank].append((self.rank, pickle.dumps(value)))

    def receive(self):
        if not self._boxes[self.rank]:
            return None
        sender, value = self._boxes[self.rank].popleft()
        return sender, pickle.loads(value)

    def check(self):
        pass


def on_ranks(size, work, timeout=60):
    """[work(group) of each rank]; the first rank's exception is raised, or the only one."""
    barrier, table, found = threading.Barrier(size, timeout=timeout), [None] * size, [None] * size

    def rank_of(rank):
        try:
            found[rank] = work(ThreadGroup(rank, size, barrier, table))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def together(size, work, timeout=60):
    """on_ranks(…), of which none may fail."""
    found = on_ranks(size, work, timeout)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found
