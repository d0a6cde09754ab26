"""Options of PPO; names, defaults and meaning are those of TRL's PPOConfig where TRL has them."""

import logging
from typing import Any

from ..options import check_range, option, require, say_once
from .config import EXCLUSIVE
from .policy_config import PolicyConfig

logger = logging.getLogger(__name__)


class PPOConfig(PolicyConfig):
    """Proximal policy optimisation with a critic.

    A rollout draws per_device_train_batch_size * gradient_accumulation_steps * num_mini_batches completions, and gives
    num_ppo_epochs * num_mini_batches optimizer steps. TRL's response_length and reward_model_path are other spellings
    of max_completion_length and of a reward.
    """

    group = "loss"
    exclusive = (*EXCLUSIVE, ("max_steps", "total_episodes"), ("num_train_epochs", "total_episodes"))

    learning_rate: float = option(3e-6, "peak learning rate of AdamW", group="training")
    max_completion_length: int = option(53, "longest completion in tokens (TRL: response_length)", group="generation")
    temperature: float = option(0.7, "sampling temperature; training divides logits by it too", group="generation")
    total_episodes: int | None = option(None, "completions of the whole run, instead of max_steps", group="training")
    num_ppo_epochs: int = option(4, "passes over each rollout", group="training")
    num_mini_batches: int = option(1, "optimizer steps a pass, of about as many tokens each", group="training")
    cliprange: float = option(0.2, "the probability ratio is clipped below 1 - cliprange and above 1 + cliprange")
    cliprange_high: float | None = option(None, "and above 1 + cliprange_high instead")
    dual_clip: float | None = option(
        None, "where the advantage is below 0 the loss is at most this times its size (Ye et al. 2020: 3)"
    )
    entropy_coef: float = option(0.0, "weight of the mean entropy of a token, which the loss raises")
    kl_coef: float = option(0.05, "weight of each token's KL to the reference, taken off its reward; 0: none")
    kl_estimator: str = option("k1", "estimate of that KL", ("k1", "k3"))
    kl_target: float | None = option(
        None, "move kl_coef after each rollout towards this KL of a completion, in nats (Ziegler et al. 2019)"
    )
    kl_horizon: int = option(10000, "completions in which kl_coef changes by a factor of at most e^0.2 (1.22)")
    beta: float = option(0.0, "weight of the KL to the reference in the loss itself, estimated by k3")
    missing_eos_penalty: float | None = option(
        None, "taken off the score of a completion that no stop token ended", group="rewards"
    )
    normalize_rewards: bool = option(
        False, "scores less their running mean, divided by their running standard deviation", group="rewards"
    )
    reward_clip: float | None = option(None, "then held within plus and minus this", group="rewards")
    whiten_rewards: bool = option(False, "divide the rewards of tokens by their standard deviation", group="rewards")
    whiten_advantages: bool = option(
        True, "advantages with mean 0 and standard deviation 1 over the tokens of a rollout"
    )
    critic: str = option(
        "separate",
        "what values tokens: a model of its own, or a head on the policy's hidden states",
        ("separate", "shared"),
        "critic",
    )
    critic_model: str | None = option(
        None,
        "folder or name of the separate critic's first weights; default: the policy's",
        group="critic",
        is_place=True,
    )
    critic_learning_rate: float | None = option(None, "of the critic; default: learning_rate", group="critic")
    critic_warmup_steps: int = option(0, "first steps in which only the critic (its head) learns", group="critic")
    vf_coef: float = option(0.1, "weight of the value loss", group="critic")
    cliprange_value: float | None = option(
        0.2, "values are clipped to this distance from the old ones; null: not", group="critic"
    )
    gamma: float = option(1.0, "discount of later rewards", group="critic")
    lam: float = option(0.95, "lambda of generalised advantage estimation", group="critic")
    bootstrap_truncated: bool = option(
        False, "a completion that was cut off goes on with the critic's value, not with 0", group="critic"
    )

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = dict(super().respelled(values))
        if "response_length" in values:
            length = values.pop("response_length")
            require(
                values.get("max_completion_length", length) == length,
                f"response_length={length} and max_completion_length={values.get('max_completion_length')} are two "
                "names of one option; give only one",
            )
            values["max_completion_length"] = length
        if (path := values.pop("reward_model_path", None)) is not None:
            others = values.get("reward_funcs") or []
            values["reward_funcs"] = [*([others] if isinstance(others, str) else others), path]
        return values

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_ppo_epochs", "num_mini_batches", "total_episodes", "kl_horizon"):
            check_range(self, name, 1)
        for name in ("cliprange", "cliprange_high", "entropy_coef", "kl_coef", "beta", "vf_coef"):
            check_range(self, name, 0)
        for name in ("kl_target", "reward_clip", "cliprange_value"):
            check_range(self, name, 0, open_low=True)
        for name in ("critic_learning_rate", "critic_warmup_steps", "missing_eos_penalty"):
            check_range(self, name, 0)
        for name in ("gamma", "lam"):
            check_range(self, name, 0, 1)
        check_range(self, "dual_clip", 1, open_low=True)
        require(
            not self.max_staleness,
            "max_staleness=1 is for grpo: ppo takes completions for those of the weights that it trains; leave it out",
        )
        require(
            self.kl_target is None or self.kl_coef > 0,
            f"kl_target={self.kl_target} moves kl_coef, which must begin above 0, got {self.kl_coef}",
        )
        require(
            self.critic == "separate" or self.critic_model is None,
            f"critic_model={self.critic_model} is for critic=separate; a shared critic is a head of the policy",
        )

        if self.total_episodes is not None:
            both = ("max_steps", "total_episodes", "num_train_epochs")
            ruling, void = both[:2] if self.max_steps > 0 else both[1:]
            if {ruling, void} <= self.given:
                say_once(logger, f"{ruling}={getattr(self, ruling)} rules: {void}={getattr(self, void)} is not used")

    def ruled_out(self) -> set[str]:
        out = super().ruled_out()
        if self.total_episodes is None:
            return out | {"total_episodes"}
        return out | ({"total_episodes"} if self.max_steps > 0 else {"num_train_epochs"})

    @property
    def num_iterations(self) -> int:
        return self.num_ppo_epochs

    @property
    def num_slices(self) -> int:
        return self.num_mini_batches
