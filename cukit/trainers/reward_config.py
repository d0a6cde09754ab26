"""Options of reward models' training; names, defaults and meaning are TRL's."""

from ..options import check_range, option
from .config import TrainerConfig


class RewardConfig(TrainerConfig):
    """A reward model from pairs of answers; names and defaults as in TRL."""

    group = "training"
    learning_rate: float = option(1e-4, "peak learning rate of AdamW")
    max_length: int | None = option(
        1024,
        "longest prompt with its answer, in tokens; pairs with a longer one are left out; none: the model's context",
        group="data",
    )
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON", group="data")
    center_rewards_coefficient: float | None = option(
        None, "add this times the mean of (chosen + rejected)², which keeps scores around 0 (0.01)", group="loss"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_length", 1)
        check_range(self, "center_rewards_coefficient", 0)
