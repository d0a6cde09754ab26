"""Options of GRPO; names, defaults and meaning are TRL's."""

from typing import Any, ClassVar

from ..datasets.config import PromptOptions
from ..engine.config import EngineConfig, SamplingOptions, SamplingParams
from ..options import check_range, flat_values, nearest, nested, option, require
from ..rewards.config import RewardLimits
from .config import EXCLUSIVE, TrainerConfig
from .evaluation_config import pass_at_k_values
from .loss_config import LOSS_TYPES as LOSS_TYPES
from .loss_config import AdvantageOptions, LossOptions

CURRICULA = ("none", "solved", "never", "both")
GENERATION_KWARGS = {"stop_strings": "stop", "eos_token_id": "stop_token_ids"}  # generate()'s name -> vLLM's


class GRPOConfig(TrainerConfig):
    """Group relative policy optimisation; names, defaults and meaning as in TRL.

    The options of the engine, the loss and the advantages are nested (`args.engine`, flat for the user), so are the
    sampling options beyond TRL's own names. TRL's generation_kwargs is another spelling of these options.
    """

    group = "loss"
    exclusive = (*EXCLUSIVE, ("generation_batch_size", "steps_per_generation"))
    default_metric: ClassVar[str] = "eval/reward"

    learning_rate: float = option(1e-6, "peak learning rate of AdamW", group="training")
    eval_on_start: bool = option(True, "evaluate before the first and after the last step", group="evaluation")
    reward_funcs: list[str] | None = option(
        None, "rewards by name (exact, boxed, gsm8k, …) or path/file.py:function", group="rewards"
    )
    reward_weights: list[float] | None = option(None, "weight of each reward; default: 1 each", group="rewards")
    reward_limits: RewardLimits = nested(RewardLimits)
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
    num_generations_eval: int | None = option(
        None, "sampled completions per prompt in evaluations; default: 1, greedy", group="evaluation"
    )
    pass_at_k: list[int] | None = option(
        None, "the k of eval/pass@k; default: powers of two up to num_generations_eval", group="evaluation"
    )
    eval_reward_funcs: list[str] | None = option(
        None, "rewards of evaluations; default: those of the training", group="evaluation"
    )
    generation_batch_size: int | None = option(
        None, "completions drawn at once; or give steps_per_generation", group="generation"
    )
    steps_per_generation: int | None = option(
        None, "micro-batches a generation; default: gradient_accumulation_steps", group="generation"
    )
    num_iterations: int = option(1, "passes over each generation batch", group="training")
    max_completion_length: int = option(512, "longest completion in tokens", group="generation")
    temperature: float = option(1.0, "sampling temperature; training divides logits by it too", group="generation")
    min_p: float | None = option(
        None, "tokens at least this probable relative to the best; default: off", group="generation"
    )
    sampling: SamplingOptions = nested(SamplingOptions)
    generation_kwargs: dict | None = option(None, "sampling options as JSON (TRL's spelling)", group="generation")
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON", group="generation")
    environment: str | None = option(
        None,
        "what answers the model between its turns: path/file.py:Class (TRL's environment_factory)",
        group="environment",
    )
    tools: list[str] | None = option(
        None, "functions that the model may call: path/file.py:function,function", group="environment"
    )
    max_tool_calling_iterations: int | None = option(
        None,
        "most answers of an environment (or turns with tool calls) in a completion; default: no limit",
        group="environment",
    )
    loss_options: LossOptions = nested(LossOptions)
    sync_ref_model: bool = option(False, "move the reference model towards the policy")
    ref_model_mixup_alpha: float = option(0.6, "reference = alpha * policy + (1 - alpha) * reference")
    ref_model_sync_steps: int = option(512, "steps between those moves")
    prompts: PromptOptions = nested(PromptOptions)
    engine: EngineConfig = nested(EngineConfig, without=("seed",))

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = AdvantageOptions.respelled(super().respelled(values))
        if isinstance(values.get("generation_kwargs"), dict):
            values = dict(values)
            values |= _generation_kwargs(values.pop("generation_kwargs"), values)
        return values

    def __post_init__(self) -> None:
        super().__post_init__()
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
            ("num_generations_eval", 1),
            ("num_iterations", 1),
            ("max_num_gen_batches", 1),
            ("curriculum_patience", 1),
            ("max_completion_length", 1),
            ("generation_batch_size", 1),
            ("steps_per_generation", 1),
            ("ref_model_sync_steps", 1),
            ("max_tool_calling_iterations", 1),
        ):
            check_range(self, name, low)
        for name in ("min_p", "ref_model_mixup_alpha"):
            check_range(self, name, 0, 1)
        check_range(self, "temperature", 0, open_low=True)
        require(
            (self.overlong_buffer_len or 0) <= self.max_completion_length,
            f"overlong_buffer_len={self.overlong_buffer_len} must not exceed "
            f"max_completion_length={self.max_completion_length}",
        )
        require(
            self.min_tokens <= self.max_completion_length,
            f"min_tokens={self.min_tokens} must not exceed max_completion_length={self.max_completion_length}",
        )
        require(
            not (self.sync_ref_model and self.beta == 0), "sync_ref_model needs a reference model: set beta above 0"
        )
        weights, rewards = self.reward_weights, self.reward_funcs
        require(
            weights is None or rewards is None or len(weights) == len(rewards),
            f"reward_weights has {len(weights or [])} values for {len(rewards or [])} reward_funcs; give one each",
        )
        pass_at_k_values(self.pass_at_k, self.num_generations_eval or 1, "num_generations_eval")
        self._check_generation_size()

    def _check_generation_size(self) -> None:
        """What must divide what."""
        size, accumulation = self.per_device_train_batch_size, self.gradient_accumulation_steps
        batch, steps = self.generation_batch_size, self.steps_per_generation
        if batch is not None:
            require(
                batch % size == 0,
                f"generation_batch_size={batch} must be a multiple of "
                f"per_device_train_batch_size={size}; {batch} % {size} = {batch % size}",
            )
            require(
                steps in (None, batch // size),
                f"generation_batch_size={batch} / per_device_train_batch_size={size} = {batch // size} but "
                f"steps_per_generation={steps}; give only one",
            )
        batch, group = self.generation_size, self.num_generations
        steps = batch // size
        require(
            batch % group == 0,
            f"the generation batch of {batch} completions (per_device_train_batch_size={size} * "
            f"steps_per_generation={steps}) must be a multiple of num_generations={group}; "
            f"{batch} % {group} = {batch % group}",
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
        """Completions drawn at once."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size
        return self.per_device_train_batch_size * (self.steps_per_generation or self.gradient_accumulation_steps)

    @property
    def prompts_a_generation(self) -> int:
        """Prompts of a generation batch."""
        return self.generation_size // self.num_generations

    @property
    def num_slices(self) -> int:
        """Optimizer batches in a generation batch."""
        return self.generation_size // self.per_device_train_batch_size // self.gradient_accumulation_steps

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
