"""Options of which processes draw completions, and when."""

from ..options import Options, check_choices, check_range, option
from ..parallel.config import ParallelOptions


class RolloutOptions(Options):
    """For a run of several processes. What they need of it is checked by PolicyConfig."""

    group = ParallelOptions.group
    balance_rollouts: str = option(
        "false",
        "groups of completions move from a process that is behind to one that waits: auto where that changes no bit "
        "(cuda, exact), true, false; not with environments",
        ("auto", "true", "false"),
    )
    rollout_gpus: int = option(
        0, "this many of the processes only draw, reward and evaluate, the others train; 0: all do both"
    )
    max_staleness: int = option(
        0, "1: the next generation batch is drawn while this one is trained on, by the weights of before (off-policy)"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "rollout_gpus", 0)
        check_range(self, "max_staleness", 0, 1)
