"""The completions and rewards of several ranks whose groups move between them: shared_rollouts.py with a deal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..parallel.group import shares
from .dealt_rollout import Dealt
from .ranks import Ranks
from .rewarding import RewardScorer
from .rollout import Samples, refuse_damaged
from .shared_rollouts import Rewarded, joined


def dealt_out(
    ranks: Ranks,
    scorer: RewardScorer,
    places: Sequence[int],
    complete: Callable[[Dealt], Samples],
    score: Callable[[Sequence[int], Samples], tuple[np.ndarray, np.ndarray]],
    what: str,
) -> tuple[Rewarded, dict[str, float]]:
    """shared_rollouts.shared_out() with groups that move; and metrics of that. complete(dealt): the completions that
    ended on this rank, their groups numbers within `places`; score(places, samples): their rewards.

    Rewards are asked for where a prompt was to begin with, so that no call of them depends on what has moved.
    """
    borders = shares(len(places), ranks.size)
    first, last = borders[ranks.rank : ranks.rank + 2]
    dealt = Dealt(ranks.group.mailbox(), range(first, last), ranks.watch.timeout)
    drawn = ranks.each(lambda: (complete(dealt), dealt.num_given, dealt.idle), what)
    samples = joined([part for part, *_ in drawn if len(part)])
    refuse_damaged(samples)
    samples = samples.rows(np.argsort(samples.groups, kind="stable"))
    ends = np.searchsorted(samples.groups, borders)
    parts = [samples.rows(np.arange(a, b)) for a, b in zip(ends, ends[1:])]

    def work() -> tuple | None:
        if first == last:
            return None
        own = replace(parts[ranks.rank], groups=parts[ranks.rank].groups - np.int32(first))
        rewards = score(places[first:last], own)
        return *rewards, own.recorded, scorer.take_recorded()

    found = ranks.each(work, what)
    for part, one in zip(parts, found, strict=True):
        if one is not None:
            part.recorded = one[2]
            scorer.add_recorded(one[3])
    rewards, by_function = (np.concatenate([one[place] for one in found if one is not None]) for place in (0, 1))
    idle = [seconds for *_, seconds in drawn]
    metrics = {"balance/moved_groups": sum(given for _, given, _ in drawn), "time/rollout_wait": max(idle) - min(idle)}
    return (joined([part for part in parts if len(part)]), rewards, by_function), metrics
