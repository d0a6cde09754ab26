"""Prompts that teach nothing any more are retired: those that are always solved, or never."""

from __future__ import annotations

from ..datasets.sampler import EpochSampler

SOLVED, NEVER = "solved", "never"


class CurriculumSampler(EpochSampler):
    """An EpochSampler that passes over retired rows.

    For each data row the groups in a row with equal rewards are counted; `patience` of them retire it. Equal rewards of
    at least 1 are "solved", others "never" solved. Where all rows are retired, all come back.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool, retired: str, patience: int):
        super().__init__(num_rows, seed, shuffle)
        self.kinds = [name for name in (SOLVED, NEVER) if retired in (name, "both")]
        self.patience = patience
        self.counts: dict[str, dict[int, int]] = {SOLVED: {}, NEVER: {}}  # data row -> groups; without zeros

    def retired(self) -> dict[str, set[int]]:
        """The rows that are passed over, by why."""
        return {
            name: {row for row, count in self.counts[name].items() if count >= self.patience} for name in self.kinds
        }

    def take(self, count: int) -> list[int]:
        retired = set().union(*self.retired().values())
        if len(retired) == self.num_rows:
            self.counts, retired = {SOLVED: {}, NEVER: {}}, set()
        found: list[int] = []
        while not found:
            while len(found) < count:
                found += [row for row in super().take(count - len(found)) if row not in retired]
                if self.position == self.num_rows:  # the epoch has ended
                    break
        return found

    def observe(self, row: int, mean: float, std: float) -> None:
        """Take note of a group of this data row: the mean and the spread of its rewards."""
        solved = std == 0 and mean >= 1
        for name, equal in ((SOLVED, solved), (NEVER, std == 0 and not solved)):
            if equal:
                self.counts[name][row] = self.counts[name].get(row, 0) + 1
            else:
                self.counts[name].pop(row, None)

    def metrics(self) -> dict:
        return {f"curriculum/retired_{name}": len(rows) for name, rows in self.retired().items()}

    def state_dict(self) -> dict:
        counts = {name: [list(pair) for pair in sorted(found.items())] for name, found in self.counts.items()}
        return super().state_dict() | {"curriculum": counts}

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        counts = state.get("curriculum", {})  # a run may go on with a curriculum that it did not begin with
        self.counts = {name: {row: count for row, count in counts.get(name, [])} for name in (SOLVED, NEVER)}
