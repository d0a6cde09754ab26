"""Learning-rate schedules."""

import math


def learning_rate_factor(schedule: str, step: int, num_steps: int, warmup_steps: int = 0) -> float:
    """What the peak learning rate is multiplied with in update `step` (from 0) of `num_steps`.

    Shapes as in transformers (constant, constant_with_warmup, linear, cosine), except that warm-up is (step + 1) /
    warmup_steps: their first update has a learning rate of 0 and is lost.
    """
    if schedule == "constant":
        return 1.0
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(1, num_steps - warmup_steps), 1.0)
    if schedule == "constant_with_warmup":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(
        f"lr_scheduler_type {schedule!r} is not known: choose constant, constant_with_warmup, linear or cosine"
    )
