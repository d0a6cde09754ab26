"""Dynamic sampling: a group with equal rewards has no gradient, so another prompt takes its place.

DAPO: Yu et al. 2025, section 3.2. A replacement is drawn as soon as its group has ended, beside the rows that still
run, and inside one generation batch only. Which prompts are drawn does not depend on which group ends first: prompts
are taken in the sampler's order until as many groups have a spread as were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .advantage import group_advantages
from .rollout import Samples


class Replacements:
    """Rewards groups as they end, and asks for a new prompt for each that has no spread.

    wanted: groups with a spread that the batch needs. most: prompts that may be drawn in all. score(places, samples) ->
    (rewards (rows,), by function (rows, functions)) of the completions of some groups; take() -> (ids, seed) of one
    more prompt, or None where there is none.
    """

    def __init__(self, wanted: int, most: int, score: Callable, take: Callable):
        self.wanted, self.most, self.score, self.take = wanted, most, score, take
        self.num_drawn = wanted
        self.rewards: dict[int, np.ndarray] = {}
        self.by_function: dict[int, np.ndarray] = {}
        self.stds: dict[int, float] = {}
        self._recorded: dict[int, dict[str, list]] = {}

    def __call__(self, places: Sequence[int], samples: Samples) -> list:
        """Score the groups at these places, which have ended; returns what take() gave for those without a spread."""
        rewards, by_function = self.score(places, samples)
        added = []
        for number, place in enumerate(places):
            rows = samples.groups == number
            self.rewards[place], self.by_function[place] = rewards[rows], by_function[rows]
            self._recorded[place] = samples.rows(np.flatnonzero(rows)).recorded
            self.stds[place] = float(group_advantages(rewards[rows], int(rows.sum()), "none")[2][0])
            if self.stds[place] == 0 and self.num_drawn < self.most and (found := self.take()) is not None:
                self.num_drawn += 1
                added.append(found)
        return added

    def kept(self) -> np.ndarray:
        """The groups that are trained on: the first `wanted` with a spread; others in order where these are too few."""
        places = sorted(self.stds, key=lambda place: (self.stds[place] == 0, place))[: self.wanted]
        return np.array(sorted(places), np.int64)

    def scores(self) -> tuple[np.ndarray, np.ndarray]:
        """(rewards, by function) of all completions, groups in order."""
        order = sorted(self.rewards)
        return tuple(np.concatenate([found[place] for place in order]) for found in (self.rewards, self.by_function))

    def recorded(self) -> dict[str, list]:
        """What rewards recorded of all completions, groups in order: column -> a value a completion, or None."""
        found: dict[str, list] = {name: [] for columns in self._recorded.values() for name in columns}
        for place in sorted(self._recorded):
            for name, values in found.items():
                values += self._recorded[place].get(name, [None] * len(self.rewards[place]))
        return found

    def metrics(self, samples: Samples) -> dict:
        """What the replacements cost. num_gen_batches: prompts drawn, in generation batches."""
        unused = ~np.isin(samples.groups, self.kept())
        return {
            "dynamic_sampling/num_gen_batches": self.num_drawn / self.wanted,
            "dynamic_sampling/dropped_groups": self.num_drawn - self.wanted,
            "dynamic_sampling/dropped_tokens": int(samples.lengths[unused].sum()),
            "dynamic_sampling/groups_without_spread": sum(self.stds[place] == 0 for place in self.kept()),
        }
