"""Options of every trainer that draws completions and rewards them; names, defaults and meaning are TRL's."""

import math
from typing import Any, ClassVar

from ..datasets.config import PromptOptions
from ..engine.config import LORA_OPTIONS, EngineConfig, SamplingOptions, SamplingParams
from ..options import check_range, flat_values, nearest, nested, option, require
from ..rewards.config import RewardLimits
from .config import TrainerConfig
from .evaluation_config import pass_at_k_values
from .rollout_config import RolloutOptions

GENERATION_KWARGS = {"stop_strings": "stop", "eos_token_id": "stop_token_ids"}  # generate()'s name -> vLLM's


class PolicyConfig(TrainerConfig):
    """Rewards, completions, environments, evaluation.

    The options of the engine are nested (`args.engine`, flat for the user), so are the sampling options beyond TRL's
    own names. TRL's generation_kwargs is another spelling of these options.
    """

    group = "generation"
    default_metric: ClassVar[str] = "eval/reward"

    eval_on_start: bool = option(True, "evaluate before the first and after the last step", group="evaluation")
    reward_funcs: list[str] | None = option(
        None,
        "rewards by name (exact, boxed, gsm8k, …), path/file.py:function, or a reward model: its folder or name",
        group="rewards",
    )
    reward_weights: list[float] | None = option(None, "weight of each reward; default: 1 each", group="rewards")
    reward_limits: RewardLimits = nested(RewardLimits)
    num_generations_eval: int | None = option(
        None, "sampled completions per prompt in evaluations; default: 1, greedy", group="evaluation"
    )
    pass_at_k: list[int] | None = option(
        None, "the k of eval/pass@k; default: powers of two up to num_generations_eval", group="evaluation"
    )
    eval_reward_funcs: list[str] | None = option(
        None, "rewards of evaluations; default: those of the training", group="evaluation"
    )
    max_completion_length: int = option(512, "longest completion in tokens")
    temperature: float = option(1.0, "sampling temperature; training divides logits by it too")
    min_p: float | None = option(None, "tokens at least this probable relative to the best; default: off")
    sampling: SamplingOptions = nested(SamplingOptions)
    generation_kwargs: dict | None = option(None, "sampling options as JSON (TRL's spelling)")
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON")
    environment: str | None = option(
        None,
        "what answers the model between its turns: path/file.py:Class (TRL's environment_factory)",
        group="environment",
        is_place=True,
    )
    tools: list[str] | None = option(
        None, "functions that the model may call: path/file.py:function,function", group="environment"
    )
    max_tool_calling_iterations: int | None = option(
        None,
        "most answers of an environment (or turns with tool calls) in a completion; default: no limit",
        group="environment",
    )
    rollouts: RolloutOptions = nested(RolloutOptions)
    prompts: PromptOptions = nested(PromptOptions)
    engine: EngineConfig = nested(EngineConfig, without=("seed", *LORA_OPTIONS))

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = super().respelled(values)
        if isinstance(values.get("generation_kwargs"), dict):
            values = dict(values)
            values |= _generation_kwargs(values.pop("generation_kwargs"), values)
        off = values.get("top_k", 0) in (None, "none", "null")  # TRL's before 1.0
        return values | {"top_k": 0} if off else values

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_generations_eval", "max_completion_length", "max_tool_calling_iterations"):
            check_range(self, name, 1)
        require(
            self.balance_rollouts != "true" or self.tensor_parallel_size == 1,
            f"balance_rollouts=true moves groups by the clock, which the {self.tensor_parallel_size} processes of "
            "tensor_parallel_size would read apart: leave it out",
        )
        check_range(self, "min_p", 0, 1)
        check_range(self, "temperature", 0, open_low=True)
        require(
            self.min_tokens <= self.max_completion_length,
            f"min_tokens={self.min_tokens} must not exceed max_completion_length={self.max_completion_length}",
        )
        weights, rewards = self.reward_weights, self.reward_funcs
        require(
            weights is None or rewards is None or len(weights) == len(rewards),
            f"reward_weights has {len(weights or [])} values for {len(rewards or [])} reward_funcs; give one each",
        )
        require(all(math.isfinite(weight) for weight in weights or ()), f"reward_weights must be finite, got {weights}")
        pass_at_k_values(self.pass_at_k, self.num_generations_eval or 1, "num_generations_eval")
        self._check_apart()

    def _check_apart(self) -> None:
        count, processes = self.rollout_gpus, self.num_processes
        require(
            not count or self.tensor_parallel_size == 1,
            f"rollout_gpus={count} sends weights to ranks that hold whole models, and tensor_parallel_size="
            f"{self.tensor_parallel_size} shares them out: leave one of them out",
        )
        require(
            not count or processes > 1,
            f"rollout_gpus={count} takes some of several processes, and this is the only one: start it by mpirun -n "
            f"{count + 1} or more, or give rollout_gpus=0",
        )
        require(
            not count or count < processes,
            f"rollout_gpus={count} leaves none of {processes} processes to train: give at most {processes - 1}",
        )
        require(
            not count or self.balance_rollouts != "true",
            "balance_rollouts=true moves groups between processes that both draw and train, and rollout_gpus sets them "
            "apart: leave one of them out",
        )
        require(
            not self.max_staleness or count > 0,
            "max_staleness=1 draws completions while others are trained on: give rollout_gpus, the processes that draw",
        )

    # ---- the generation batch; a method's own options say how large it is ----

    @property
    def num_generations(self) -> int:
        """Completions of a prompt."""
        return 1

    @property
    def num_iterations(self) -> int:
        """Passes over a generation batch."""
        return 1

    @property
    def num_slices(self) -> int:
        """Optimizer batches in a generation batch."""
        return 1

    @property
    def generation_size(self) -> int:
        """Completions drawn at once, by all ranks together."""
        return self.batch_of_all_ranks * self.gradient_accumulation_steps * self.num_slices

    @property
    def batch_of_all_ranks(self) -> int:
        """per_device_train_batch_size of each rank that trains together."""
        return self.per_device_train_batch_size * self.training_processes

    @property
    def training_processes(self) -> int:
        return self.num_processes - self.rollout_gpus

    @property
    def prompts_a_generation(self) -> int:
        """Prompts of a generation batch."""
        return self.generation_size // self.num_generations

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """The training rollouts' SamplingParams (with log-probs), with `changes` applied."""
        values = flat_values(self.sampling) | {
            "temperature": self.temperature,
            "min_p": self.min_p or 0.0,
            "max_tokens": self.max_completion_length,
            "logprobs": True,
        }
        return SamplingParams(**(values | changes))


def _generation_kwargs(kwargs: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """TRL's generation_kwargs as options; ValueError for a name that is none, or that contradicts its option."""
    known = [*SamplingOptions.options(), "temperature", "min_p"]
    found: dict[str, Any] = {}
    for key, value in kwargs.items():
        name = GENERATION_KWARGS.get(key, key)
        if name in ("max_tokens", "max_new_tokens"):
            name = "max_completion_length"
        elif name not in known:
            raise ValueError(
                f"generation_kwargs has {key!r}, which is no sampling option{nearest(str(key), known)}; there are "
                f"{', '.join(known)}"
            )
        require(
            name not in values or values[name] == value,
            f"generation_kwargs has {key}={value!r} but {name}={values.get(name)!r}; give only one",
        )
        found[name] = value
    return found
