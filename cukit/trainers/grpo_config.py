"""Options of GRPO; names, defaults and meaning are TRL's."""

import logging
from typing import Any

from ..options import check_range, nested, option, require, say_once
from .config import EXCLUSIVE
from .loss_config import LOSS_TYPES as LOSS_TYPES
from .loss_config import AdvantageOptions, LossOptions
from .policy_config import PolicyConfig

logger = logging.getLogger(__name__)
CURRICULA = ("none", "solved", "never", "both")


class GRPOConfig(PolicyConfig):
    """Group relative policy optimisation; names, defaults and meaning as in TRL.

    The options of the loss and the advantages are nested (`args.loss_options`), flat for the user.
    """

    group = "loss"
    exclusive = (*EXCLUSIVE, ("generation_batch_size", "steps_per_generation"))

    learning_rate: float = option(1e-6, "peak learning rate of AdamW", group="training")
    advantage_options: AdvantageOptions = nested(AdvantageOptions)
    num_generations: int = option(8, "completions per prompt (the group), at least 2", group="generation")
    dynamic_sampling: bool = option(
        False, "replace groups with equal rewards, which have no gradient, by other prompts (DAPO)", group="generation"
    )
    max_num_gen_batches: int = option(
        10, "dynamic sampling draws at most this many times the prompts of a generation batch", group="generation"
    )
    curriculum: str = option(
        "none", "retire prompts that were solved, or never solved, too often", CURRICULA, "generation"
    )
    curriculum_patience: int = option(
        2, "groups in a row with equal rewards after which a prompt is retired", group="generation"
    )
    generation_batch_size: int | None = option(
        None, "completions drawn at once; or give steps_per_generation", group="generation"
    )
    steps_per_generation: int | None = option(
        None, "micro-batches a generation; default: gradient_accumulation_steps", group="generation"
    )
    num_iterations: int = option(1, "passes over each generation batch", group="training")
    loss_options: LossOptions = nested(LossOptions)
    sync_ref_model: bool = option(False, "move the reference model towards the policy")
    ref_model_mixup_alpha: float = option(0.6, "reference = alpha * policy + (1 - alpha) * reference")
    ref_model_sync_steps: int = option(512, "steps between those moves")

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        return AdvantageOptions.respelled(super().respelled(values))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not (self.sync_ref_model and self.use_peft),
            "sync_ref_model moves the reference model, which with use_peft is the frozen model itself; leave one out",
        )
        require(
            self.num_generations != 1 or self.advantage_estimator == "reinforce_plus_plus",
            "num_generations=1 leaves nothing to compare a completion with; it must be at least 2",
        )
        require(
            not (self.num_generations == 1 and self.dynamic_sampling),
            "dynamic_sampling compares the completions of a prompt: num_generations must be at least 2, got 1",
        )
        for name, low in (
            ("num_generations", 1 if self.advantage_estimator == "reinforce_plus_plus" else 2),
            ("num_iterations", 1),
            ("max_num_gen_batches", 1),
            ("curriculum_patience", 1),
            ("generation_batch_size", 1),
            ("steps_per_generation", 1),
            ("ref_model_sync_steps", 1),
        ):
            check_range(self, name, low)
        check_range(self, "ref_model_mixup_alpha", 0, 1)
        require(
            (self.overlong_buffer_len or 0) <= self.max_completion_length,
            f"overlong_buffer_len={self.overlong_buffer_len} must not exceed "
            f"max_completion_length={self.max_completion_length}",
        )
        require(
            not (self.sync_ref_model and self.beta == 0), "sync_ref_model needs a reference model: set beta above 0"
        )
        self._check_generation_size()
        self._correct_age()
        self._correct_roundings()

    def _correct_age(self) -> None:
        """Where completions come from older weights, importance correction is on unless it was given."""
        if not self.max_staleness:
            return
        name, loss = "vllm_importance_sampling_correction", self.loss_options
        require(
            not self.dynamic_sampling,
            "dynamic_sampling draws in rounds that all processes wait for, max_staleness=1 goes without: leave one out",
        )
        require(
            not self.use_kl_in_reward,
            "use_kl_in_reward takes the log-probs that were drawn with, which max_staleness=1 makes those of older "
            "weights: leave one out; beta alone puts the KL in the loss",
        )
        off = name in self.given and not loss.vllm_importance_sampling_correction
        require(
            not off or loss.loss is None,
            f"loss={loss.loss} gets completions of older weights (max_staleness=1), and {name}=false leaves their age "
            "to it: leave that out",
        )
        if name in self.given or loss.loss_type == "vespo":
            return
        loss.vllm_importance_sampling_correction = True
        if "vllm_importance_sampling_mode" not in self.given:
            loss.vllm_importance_sampling_mode = "token_truncate"
        loss.check_correction()
        say_once(
            logger,
            f"max_staleness=1: completions come from older weights, so {name} is on "
            f"({loss.vllm_importance_sampling_mode}); it costs a forward pass a generation batch",
        )

    def _correct_roundings(self) -> None:
        """Where the engine rounds what training does not, importance correction is on unless it was given."""
        name, loss = "vllm_importance_sampling_correction", self.loss_options
        if not self.engine.roundings or name in self.given or loss.loss_type == "vespo":
            return
        loss.vllm_importance_sampling_correction = True
        loss.check_correction()
        rounded = ", ".join(f"{option}={getattr(self.engine, option)}" for option in self.engine.roundings)
        say_once(
            logger,
            f"{rounded}: completions come from other numbers than training's, so {name} is on "
            f"({loss.vllm_importance_sampling_mode}); it costs a forward pass a step",
        )

    def _check_generation_size(self) -> None:
        """What must divide what."""
        size, accumulation = self.batch_of_all_ranks, self.gradient_accumulation_steps
        batch, steps = self.generation_batch_size, self.steps_per_generation
        given = f"per_device_train_batch_size={self.per_device_train_batch_size}"
        given += f" * {self.training_processes} processes" if self.training_processes > 1 else ""
        if batch is not None:
            require(
                batch % size == 0,
                f"generation_batch_size={batch} must be a multiple of {given}; {batch} % {size} = {batch % size}",
            )
            require(
                steps in (None, batch // size),
                f"generation_batch_size={batch} / {given} = {batch // size} but steps_per_generation={steps}; give "
                "only one",
            )
        batch, group = self.generation_size, self.num_generations
        steps = batch // size
        require(
            batch % group == 0,
            f"the generation batch of {batch} completions ({given} * steps_per_generation={steps}) must be a multiple "
            f"of num_generations={group}; {batch} % {group} = {batch % group}",
        )
        # An optimizer step that spanned two generation batches would average over different policies.
        require(
            steps % accumulation == 0,
            f"steps_per_generation={steps} must be a multiple of gradient_accumulation_steps={accumulation}; "
            f"{steps} % {accumulation} = {steps % accumulation}",
        )

    def ruled_out(self) -> set[str]:
        return super().ruled_out() | self.advantage_options.ruled_out()

    @property
    def generation_size(self) -> int:
        """Completions drawn at once, by all ranks together."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size
        return self.batch_of_all_ranks * (self.steps_per_generation or self.gradient_accumulation_steps)

    @property
    def num_slices(self) -> int:
        """Optimizer batches in a generation batch."""
        return self.generation_size // self.batch_of_all_ranks // self.gradient_accumulation_steps
