"""Options of the policy loss and of the advantages; names, defaults and meaning are TRL's where TRL has them."""

import logging
from typing import Any

from ..options import Options, check_choices, check_range, option, require, say_once

logger = logging.getLogger(__name__)

# loss_type -> the per-token formula (`kind` of ops.policy_loss)
LOSS_TYPES = {
    "dapo": "clip",
    "grpo": "clip",
    "bnpo": "clip",
    "dr_grpo": "clip",
    "cispo": "cispo",
    "sapo": "sapo",
    "luspo": "clip",
    "vespo": "vespo",
}
# Losses that others have (verl's names), and why they are not here. All of TRL's are.
LATER_LOSSES = {
    "gpg": "it is -A * log p: write it as your own by --loss file.py:function",
    "geo_mean": "GMPO's geometric mean of clipped ratios; sequence is the nearest importance_sampling_level",
    "clip_cov": "it needs covariances over the whole batch",
    "kl_cov": "it needs covariances over the whole batch",
}
ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
CORRECTIONS = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")


class LossOptions(Options):
    """From log-probabilities and advantages to the loss."""

    group = "loss"

    loss: str | None = option(None, "a loss of your own, path/file.py:function(logprobs, rows, args)", is_place=True)
    loss_type: str = option(
        "dapo", "how token losses are averaged (cispo, sapo, vespo: other losses)", tuple(LOSS_TYPES)
    )
    loss_scale_factor: int | None = option(
        None, "dr_grpo divides a row's sum by this; default: max_completion_length; 1: by nothing"
    )
    beta: float = option(0.0, "weight of the KL to the reference model; 0 loads none")
    kl_estimator: str | None = option(
        None, "estimate of the KL; default: k3 in the loss, k1 in the reward", ("k1", "k2", "k3")
    )
    use_kl_in_reward: bool = option(False, "subtract beta * KL of a completion from its reward, not in the loss")
    use_bias_correction_kl: bool = option(False, "multiply the KL by the importance ratio")
    epsilon: float = option(0.2, "the probability ratio is clipped below 1 - epsilon")
    epsilon_high: float | None = option(None, "and above 1 + epsilon_high; default: epsilon (cispo: the ratio's cap)")
    delta: float | None = option(None, "upper bound of the ratio for negative advantages (two-sided clip)")
    importance_sampling_level: str = option(
        "token",
        "ratio per token, per sequence (GSPO), or that one with a gradient per token (GSPO-token)",
        ("token", "sequence", "sequence_token"),
    )
    sapo_temperature_pos: float = option(1.0, "sapo: temperature of the gate where the advantage is above 0")
    sapo_temperature_neg: float = option(1.05, "sapo: temperature of the gate elsewhere")
    vespo_k_pos: float = option(2.0, "vespo: k where the advantage is at least 0")
    vespo_lambda_pos: float = option(3.0, "vespo: lambda where the advantage is at least 0")
    vespo_k_neg: float = option(3.0, "vespo: k elsewhere")
    vespo_lambda_neg: float = option(2.0, "vespo: lambda elsewhere")
    top_entropy_quantile: float = option(
        1.0, "share of the tokens, those of the highest entropy, that learn; below 1 costs a forward pass a step"
    )
    entropy_coef: float = option(0.0, "weight of the mean entropy of a token, which the loss raises")
    use_adaptive_entropy: bool = option(False, "move entropy_coef after every step towards entropy_target")
    entropy_target: float = option(0.2, "the bonus counts while the mean entropy (nats) is at most this")
    entropy_coef_delta: float = option(0.005, "how far entropy_coef moves in a step")
    entropy_coef_min: float = option(0.0, "lowest entropy_coef")
    entropy_coef_max: float = option(1.0, "highest entropy_coef")
    off_policy_mask_threshold: float | None = option(
        None, "leave out rows with a negative advantage and a mean of log p(sampled) - log p(now) above this"
    )
    vllm_importance_sampling_correction: bool = option(
        False, "take the trainer's log-probs as old ones and weigh tokens by their ratio to the engine's (TIS, MIS)"
    )
    vllm_importance_sampling_mode: str = option("sequence_mask", "how those ratios are bounded", CORRECTIONS)
    vllm_importance_sampling_clip_max: float | None = option(3.0, "their upper bound")
    vllm_importance_sampling_clip_min: float | None = option(None, "their lower bound")
    mask_truncated_completions: bool = option(False, "leave completions cut at max_completion_length out of the loss")

    def __post_init__(self) -> None:
        why = LATER_LOSSES.get(self.loss_type)
        require(why is None, f"loss_type={self.loss_type} is not there yet ({why}); there are {', '.join(LOSS_TYPES)}")
        check_choices(self)
        for name in (
            "beta",
            "epsilon",
            "epsilon_high",
            "entropy_coef",
            "entropy_target",
            "entropy_coef_delta",
            "entropy_coef_min",
            "off_policy_mask_threshold",
            "vllm_importance_sampling_clip_min",
            "vespo_k_pos",
            "vespo_k_neg",
            "vespo_lambda_pos",
            "vespo_lambda_neg",
        ):
            check_range(self, name, 0)
        for name in ("delta", "sapo_temperature_pos", "sapo_temperature_neg", "vllm_importance_sampling_clip_max"):
            check_range(self, name, 0, open_low=True)
        check_range(self, "loss_scale_factor", 1)
        check_range(self, "top_entropy_quantile", 0, 1)
        check_range(self, "entropy_coef_max", self.entropy_coef_min)
        self._check_kl()
        self.check_correction()
        self._warn()

    def _check_kl(self) -> None:
        require(
            not (self.use_kl_in_reward and self.beta == 0), "use_kl_in_reward needs a reference model: set beta above 0"
        )
        require(
            not (self.use_kl_in_reward and self.use_bias_correction_kl),
            "use_bias_correction_kl is for the KL in the loss, and use_kl_in_reward takes it from there; give only one",
        )

    def check_correction(self) -> None:
        """The bounds of importance correction, where it is on."""
        if not self.vllm_importance_sampling_correction:
            return
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        require(
            low is None or high is None or low < high,
            f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}",
        )
        require(
            not (low is None and high is None),
            "vllm_importance_sampling_correction needs a bound: give vllm_importance_sampling_clip_max or _min",
        )
        require(
            self.loss_type != "vespo",
            "loss_type=vespo weighs rows by their whole ratio to the engine's policy already: leave "
            "vllm_importance_sampling_correction off",
        )

    def _warn(self) -> None:
        """What is allowed and most likely a mistake."""
        level = self.importance_sampling_level
        if self.loss_type == "cispo" and self.ratio_cap < 1:
            say_once(
                logger,
                f"loss_type=cispo: epsilon_high={self.ratio_cap:g} is the cap of the ratio itself, no distance from 1, "
                "so that it scales every token down; ScaleRL recommends 5.0",
            )
        if self.loss_type == "luspo" and level == "token":
            say_once(logger, "loss_type=luspo: the paper's importance_sampling_level is sequence")
        if level == "sequence" and self.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
            say_once(
                logger,
                f"importance_sampling_level=sequence with loss_type={self.loss_type} weighs a sequence by its length; "
                "GSPO's is loss_type=grpo",
            )
        if self.beta and not self.use_kl_in_reward and self.kl_estimator == "k1":
            say_once(
                logger,
                "kl_estimator=k1 in the loss has a mean gradient of 0: it belongs in the reward (use_kl_in_reward)",
            )

    @property
    def ratio_cap(self) -> float:
        """epsilon_high, or what stands for it."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def kl_in_loss(self) -> float:
        """beta, where the KL is in the loss."""
        return 0.0 if self.use_kl_in_reward else self.beta

    @property
    def estimates_kl_by(self) -> str:
        """The estimator, its default filled in."""
        return self.kl_estimator or ("k1" if self.use_kl_in_reward else "k3")

    @property
    def has_entropy_bonus(self) -> bool:
        return self.use_adaptive_entropy or self.entropy_coef != 0

    @property
    def all_rows_learn(self) -> bool:
        """Whether rows with an advantage of 0 have a gradient too."""
        return bool(self.kl_in_loss) or self.has_entropy_bonus or self.loss is not None


class AdvantageOptions(Options):
    """From rewards to advantages."""

    group = "rewards"

    advantage_estimator: str = option("grpo", "how rewards become advantages", ESTIMATORS)
    scale_rewards: str = option("group", "grpo: divide advantages by the std of this", ("group", "batch", "none"))
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        "grpo: what comes first with several rewards (GDPO: normalize_then_sum)",
        ("sum_then_normalize", "normalize_then_sum"),
    )
    normalize_advantages: bool = option(False, "rloo: advantages with mean 0 and std 1 over the generation batch")
    overlong_buffer_len: int | None = option(
        None, "soft overlong penalty (DAPO): rewards sink over the last so many tokens before max_completion_length"
    )
    overlong_penalty_factor: float = option(1.0, "the penalty of a completion of max_completion_length")
    stop_properly_penalty_coef: float | None = option(
        None, "rewards of completions cut at max_completion_length are multiplied by this; 0: they get none"
    )

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        if isinstance(values.get("scale_rewards"), bool):  # TRL's older form
            return values | {"scale_rewards": "group" if values["scale_rewards"] else "none"}
        return values

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "overlong_buffer_len", 1)
        check_range(self, "overlong_penalty_factor", 0)
        check_range(self, "stop_properly_penalty_coef", 0, 1)
        for name in self.ruled_out() & self.given:
            value, default = getattr(self, name), type(self).options()[name].default
            require(
                value == default,
                f"{name}={value} is not for advantage_estimator={self.advantage_estimator}"
                + ("" if self.sums_first else " with multi_objective_aggregation=normalize_then_sum")
                + "; leave it out",
            )

    @property
    def sums_first(self) -> bool:
        return self.multi_objective_aggregation == "sum_then_normalize"

    def ruled_out(self) -> set[str]:
        if self.advantage_estimator != "grpo":
            out = {"scale_rewards", "multi_objective_aggregation"}
            return out if self.advantage_estimator == "rloo" else out | {"normalize_advantages"}
        return {"normalize_advantages"} | (set() if self.sums_first else {"scale_rewards"})
