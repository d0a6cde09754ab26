"""Options about evaluations: the best model and the early stop (names and meaning: transformers'), the k of pass@k."""

from ..options import Options, check_range, option, require


class BestModelOptions(Options):
    """Which evaluation was the best, and what follows from it."""

    group = "evaluation"
    load_best_model_at_end: bool = option(
        False, "the final model is the best one evaluated: its checkpoint is written at once and kept"
    )
    metric_for_best_model: str | None = option(
        None, "what best means, with or without eval/ (accuracy, pass@4); default: reward (grpo), loss (sft)"
    )
    greater_is_better: bool | None = option(None, "default: true unless the metric's name ends with loss")
    early_stopping_patience: int | None = option(
        None, "end the run after this many evaluations in a row that were not better than the best"
    )
    early_stopping_threshold: float = option(0.0, "for early_stopping_patience, better means by more than this")

    def __post_init__(self) -> None:
        check_range(self, "early_stopping_patience", 1)
        check_range(self, "early_stopping_threshold", 0)
        if not self.tracks:
            for name in ("metric_for_best_model", "greater_is_better", "early_stopping_threshold"):
                require(
                    name not in self.given or getattr(self, name) in (None, False, 0.0),
                    f"{name}={getattr(self, name)} does nothing without load_best_model_at_end or "
                    "early_stopping_patience; give one of them",
                )

    @property
    def tracks(self) -> bool:
        """Whether evaluations are compared at all."""
        return self.load_best_model_at_end or self.early_stopping_patience is not None


def pass_at_k_values(chosen: list[int] | None, n: int, where: str) -> list[int]:
    """The k of pass@k for n completions a prompt: the chosen ones, else the powers of two up to n and n itself.

    where: the option that says n, for the one-line ValueError.
    """
    if chosen is None:
        return sorted({n, *(2**power for power in range(n.bit_length()))}) if n > 1 else []
    for k in chosen:
        require(1 <= k <= n, f"pass_at_k={k} needs at least that many completions a prompt: raise {where}={n}")
    return sorted(set(chosen))
