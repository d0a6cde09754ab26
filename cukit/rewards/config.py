"""Limits of the processes that rewards from files run in."""

from ..options import Options, check_range, option


class RewardLimits(Options):
    """A `file.py:function` reward runs in a process of its own; these end it. 0: no limit."""

    group = "rewards"
    reward_timeout: float = option(
        600.0, "seconds that a call (or the import) of a path/file.py:function reward may take; 0: no limit"
    )
    reward_memory_gb: float = option(16.0, "memory in GB that the process of such a reward may take; 0: no limit")

    def __post_init__(self) -> None:
        check_range(self, "reward_timeout", 0)
        check_range(self, "reward_memory_gb", 0)
