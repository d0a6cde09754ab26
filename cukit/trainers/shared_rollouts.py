"""Completions that are drawn and rewarded by several ranks, each its share of the prompts, and are then one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from .environment import Environment, Made, ToolEnvironment
from .ranks import Ranks
from .rewarding import RewardScorer
from .rollout import Samples

Rewarded = tuple[Samples, np.ndarray, np.ndarray]  # completions, rewards (rows,), by function (rows, functions)


def shared_out(
    ranks: Ranks,
    scorer: RewardScorer,
    places: Sequence[int],
    draw: Callable[[Sequence[int]], Rewarded],
    what: str,
    part: Callable[[], tuple | None] | None = None,
) -> Rewarded:
    """draw(places) of all places; each rank draws a run of them, and gets the whole. The samples' groups are numbers
    within the places that are given. part: gives what own_part() does, which may have been called before.

    A prompt's completions are always one rank's. What rewards record as metrics is put together in the scorer.
    """
    if not ranks.several:
        return draw(places)
    parts = ranks.each(part or partial(own_part, ranks, scorer, places, draw), what)
    found = [one for one in parts if one is not None]
    for *_, recorded in found:
        scorer.add_recorded(recorded)
    rewards, by_function = (np.concatenate([one[place] for one in found]) for place in (1, 2))
    return joined([one[0] for one in found]), rewards, by_function


def own_part(
    ranks: Ranks, scorer: RewardScorer, places: Sequence[int], draw: Callable[[Sequence[int]], Rewarded]
) -> tuple | None:
    """This rank's run of the places, as it is sent to the others; None if it has none."""
    own = ranks.drawn_here(len(places))
    if not own:
        return None
    samples, rewards, by_function = draw(places[own.start : own.stop])
    samples = replace(samples, groups=samples.groups + own.start, environments=_counts(samples.environments))
    return samples, rewards, by_function, scorer.take_recorded()


def joined(parts: Sequence[Samples]) -> Samples:
    """The rows of several Samples, in order. Their groups are numbers of one counting already."""
    names = dict.fromkeys(name for part in parts for name in part.recorded)
    recorded = {
        name: [value for part in parts for value in part.recorded.get(name, [None] * len(part))] for name in names
    }
    found: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in ("prompt_lengths", "groups")
    }
    lists = {item.name: _chained(parts, item.name) for item in fields(Samples) if item.name not in found}
    return Samples(**found | lists | {"recorded": recorded})


def _chained(parts: Sequence[Samples], name: str) -> list | None:
    if getattr(parts[0], name) is None:
        return None
    return [value for part in parts for value in getattr(part, name)]


def _counts(environments: list[Made] | None) -> list[Made] | None:
    """What metrics ask of environments; the objects themselves stay where they are."""
    if environments is None:
        return None
    found = []
    for made in environments:
        stands_in = Environment()
        if isinstance(made.responder, ToolEnvironment):
            stands_in = ToolEnvironment([])
            stands_in.num_calls, stands_in.num_failed_calls = made.responder.num_calls, made.responder.num_failed_calls
        found.append(Made(stands_in, stands_in))
    return found
