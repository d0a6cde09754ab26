"""Which rows come next: whole rows packed into bins, and an order for each epoch."""

import bisect
from collections.abc import Sequence

import numpy as np


def pack_bins(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `max_tokens`: best fit decreasing, deterministic, nothing is padded."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        length = lengths[index]
        if length > max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, more than max_tokens_per_batch={max_tokens}; raise it"
            )
        slot = bisect.bisect_left(room, (length, -1))
        if slot < len(room):
            left, chosen = room.pop(slot)
        else:
            left, chosen = max_tokens, len(bins)
            bins.append([])
        bins[chosen].append(index)
        bisect.insort(room, (left - length, chosen))
    return [sorted(bin_) for bin_ in bins]


def batches_an_epoch(num_rows: int, count: int) -> int:
    """How many batches of at most `count` rows an epoch has: the calls of EpochSampler.take(count) it lasts."""
    return -(-num_rows // count)


class EpochSampler:
    """Row indices, each exactly once an epoch, in an order that depends on (seed, epoch) only.

    `take(count)` gives `count` of them, fewer where an epoch ends: the next call begins the next epoch. `state_dict`
    and `load_state` resume exactly.
    """

    def __init__(self, num_rows: int, seed: int = 0, shuffle: bool = True):
        if num_rows < 1:
            raise ValueError("the data has no rows")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self.epoch, self.position = 0, 0
        self._order = self._permutation()

    @property
    def epochs_done(self) -> float:
        return self.epoch + self.position / self.num_rows

    def take(self, count: int) -> list[int]:
        if self.position == self.num_rows:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._permutation()
        taken = self._order[self.position : self.position + count]
        self.position += len(taken)
        return taken

    def state_dict(self) -> dict:
        names = ("num_rows", "seed", "shuffle", "epoch", "position")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict) -> None:
        for name in ("num_rows", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the checkpoint was written with {name}={state[name]}, this run has {getattr(self, name)}; "
                    "resume with the same data and seed"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_rows))
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows).tolist()
