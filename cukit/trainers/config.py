"""One options class a trainer; names, defaults and meaning are TRL's.

Values stay as they were given (None stays None). A value that follows from several of them is a property.
"""

import logging
import math
from typing import Any

from ..datasets.config import PromptOptions, RowOptions
from ..engine.config import EngineConfig, SamplingOptions, SamplingParams
from ..models.config import DTYPES
from ..options import (
    LARGEST_SEED,
    Options,
    check_choices,
    check_range,
    flat_values,
    nearest,
    nested,
    option,
    require,
    say_once,
)

logger = logging.getLogger(__name__)
EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("max_steps", "num_train_epochs"),
    ("warmup_steps", "warmup_ratio"),
    ("eval_strategy", "eval_steps"),
    ("dtype", "bf16", "fp16"),
)
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")


class TrainerConfig(Options):
    """What every trainer shares.

    Of two options that exclude each other the one given later wins (command line over YAML over recipe). Both in one
    place: max_steps rules num_train_epochs, warmup_steps above 0 rules warmup_ratio, eval_strategy rules eval_steps, as
    in transformers. eval_steps alone means eval_strategy=steps.
    """

    group = "training"
    exclusive = EXCLUSIVE

    output_dir: str | None = option(None, "run folder; default: a fresh one below runs/", group="files")
    resume_from_checkpoint: str | None = option(
        None, "a checkpoint-N or run folder, or 'latest' of output_dir", group="files"
    )
    device: str = option("auto", "where to run", ("auto", "cpu", "cuda"), "device and memory")
    dtype: str = option(
        "auto", "weights and activations; auto: bfloat16 on cuda, float32 on cpu", DTYPES, "device and memory"
    )
    bf16: bool | None = option(None, "true is the same as dtype=bfloat16; false: float32", group="device and memory")
    fp16: bool | None = option(None, "true is the same as dtype=float16", group="device and memory")
    max_tokens_per_batch: int = option(
        16384, "most tokens in one forward pass; only splits the work", group="device and memory"
    )
    gradient_checkpointing: bool = option(
        True, "recompute activations in the backward pass to save memory", group="device and memory"
    )
    seed: int = option(42, "seed of initial weights, data order and sampling")
    learning_rate: float = option(5e-5, "peak learning rate of AdamW")
    lr_scheduler_type: str = option("linear", "learning rate after the warm-up", SCHEDULES)
    warmup_steps: int = option(0, "steps of linear warm-up")
    warmup_ratio: float = option(0.0, "share of all steps for linear warm-up, rounded up")
    weight_decay: float = option(0.0, "AdamW weight decay (not on norms and biases)")
    adam_beta1: float = option(0.9, "AdamW beta1")
    adam_beta2: float = option(0.999, "AdamW beta2")
    adam_epsilon: float = option(1e-8, "AdamW epsilon")
    max_grad_norm: float = option(1.0, "clip the gradient's global norm to this; 0 is off")
    num_train_epochs: float = option(3.0, "passes over the training data")
    max_steps: int = option(-1, "optimizer steps; -1: as num_train_epochs says")
    per_device_train_batch_size: int = option(8, "rows (for GRPO: completions) per micro-batch")
    gradient_accumulation_steps: int = option(1, "micro-batches per optimizer step")
    shuffle_dataset: bool = option(True, "new random order of the rows in every epoch")
    logging_steps: int = option(10, "steps between rows of metrics.jsonl", group="log and checkpoints")
    log_completions: bool = option(
        False, "print a sample completion at every logging step", group="log and checkpoints"
    )
    save_steps: int = option(500, "steps between checkpoints; 0: only at the end", group="log and checkpoints")
    save_total_limit: int | None = option(None, "keep only the newest checkpoints", group="log and checkpoints")
    eval_strategy: str = option("no", "when to evaluate during training", ("no", "steps", "epoch"), "evaluation")
    eval_steps: int | None = option(None, "steps between evaluations (eval_strategy=steps)", group="evaluation")
    eval_on_start: bool = option(False, "evaluate before the first and after the last step", group="evaluation")
    rows: RowOptions = nested(RowOptions)

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = RowOptions.respelled(values)
        resume = values.get("resume_from_checkpoint")
        if isinstance(resume, bool):  # TRL's: the latest of output_dir
            return values | {"resume_from_checkpoint": "latest" if resume else None}
        return values

    @classmethod
    def merged(cls, earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
        found = super().merged(earlier, later)
        if later.get("eval_strategy") == "steps" and "eval_steps" in earlier:  # these two belong together
            found.setdefault("eval_steps", earlier["eval_steps"])
        return found

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "seed", 0, LARGEST_SEED)
        for name in ("max_grad_norm", "weight_decay", "warmup_steps", "save_steps"):
            check_range(self, name, 0)
        for name in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "max_tokens_per_batch",
            "logging_steps",
            "save_total_limit",
            "eval_steps",
        ):
            check_range(self, name, 1)
        for name in ("learning_rate", "adam_epsilon", "num_train_epochs"):
            check_range(self, name, 0, open_low=name != "learning_rate")
        for name in ("adam_beta1", "adam_beta2"):
            check_range(self, name, 0, 1)
            require(getattr(self, name) < 1, f"{name} must be below 1, got {getattr(self, name)}")
        check_range(self, "warmup_ratio", 0, 1)
        check_range(self, "max_steps", -1)
        require(self.max_steps != 0, "max_steps must be -1 (off) or at least 1, got 0")
        self._resolve_dtype()
        require(
            self.evaluates != "steps" or self.eval_steps is not None,
            "eval_strategy=steps needs eval_steps (steps between evaluations)",
        )
        for ruling, void in EXCLUSIVE[:3]:
            if void in self.ruled_out() and {ruling, void} <= self.given and getattr(self, void):
                value = getattr(self, ruling)
                say_once(logger, f"{ruling}={value} rules: {void}={getattr(self, void)} is not used")

    def _resolve_dtype(self) -> None:
        """bf16 and fp16 are other spellings of dtype; bf16=false alone is TRL's way to ask for float32."""
        require(not (self.bf16 and self.fp16), "bf16=true and fp16=true contradict; give only one")
        for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")):
            if getattr(self, flag):
                require(self.dtype in ("auto", name), f"{flag}=true and dtype={self.dtype} contradict; give only one")
                self.dtype = name
            elif getattr(self, flag) is False:
                require(self.dtype != name, f"{flag}=false and dtype={self.dtype} contradict; give only one")
        if self.bf16 is False and self.dtype == "auto" and not self.fp16:
            self.dtype = "float32"

    @property
    def evaluates(self) -> str:
        """When evaluations happen: "no", "steps" (of eval_steps) or "epoch"."""
        if self.eval_steps is not None and "eval_strategy" not in self.given and self.eval_strategy == "no":
            return "steps"
        return self.eval_strategy

    def num_warmup_steps(self, total_steps: int) -> int:
        """Steps of warm-up in a run of total_steps: warmup_steps, else warmup_ratio of them rounded up."""
        return self.warmup_steps or math.ceil(total_steps * self.warmup_ratio)

    def ruled_out(self) -> set[str]:
        return {
            "num_train_epochs" if self.max_steps > 0 else "max_steps",
            "warmup_ratio" if self.warmup_steps else "warmup_steps",
            "eval_strategy" if self.evaluates == "steps" else "eval_steps",
        }


class SFTConfig(TrainerConfig):
    """Supervised fine-tuning; names and defaults as in TRL."""

    group = "training"
    learning_rate: float = option(2e-5, "peak learning rate of AdamW")
    max_length: int = option(1024, "longest row in tokens; what is longer loses its end", group="demonstrations")
    packing: bool = option(
        False,
        "fill rows of max_length tokens with whole examples (each attends to itself)",
        group="demonstrations",
    )
    completion_only_loss: bool | None = option(
        None, "loss on completions only; default: if rows have a completion", group="demonstrations"
    )
    dataset_text_field: str = option("text", "column of plain-text rows", group="demonstrations")
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON", group="demonstrations")
    init_from_config: bool = option(
        False, "start from random weights: the model folder's config.json and tokenizer", group="files"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_length", 2)


LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo")
GENERATION_KWARGS = {"stop_strings": "stop", "eos_token_id": "stop_token_ids"}  # generate()'s name -> vLLM's


class GRPOConfig(TrainerConfig):
    """Group relative policy optimisation; names, defaults and meaning as in TRL.

    The engine's options are nested (`args.engine`, flat for the user), so are the sampling options beyond TRL's own
    names. TRL's generation_kwargs is another spelling of these options.
    """

    group = "loss"
    exclusive = (*EXCLUSIVE, ("generation_batch_size", "steps_per_generation"))

    learning_rate: float = option(1e-6, "peak learning rate of AdamW", group="training")
    eval_on_start: bool = option(True, "evaluate before the first and after the last step", group="evaluation")
    reward_funcs: list[str] | None = option(
        None, "rewards by name (exact, boxed, gsm8k, …) or path/file.py:function", group="rewards"
    )
    reward_weights: list[float] | None = option(None, "weight of each reward; default: 1 each", group="rewards")
    scale_rewards: str = option(
        "group", "divide advantages by the std of this", ("group", "batch", "none"), group="rewards"
    )
    num_generations: int = option(8, "completions per prompt (the group), at least 2", group="generation")
    num_generations_eval: int | None = option(
        None, "sampled completions per prompt in evaluations; default: 1, greedy", group="evaluation"
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
    loss_type: str = option("dapo", "how token losses are averaged (cispo: other loss)", LOSS_TYPES)
    beta: float = option(0.0, "weight of the KL to the reference model; 0 loads none")
    epsilon: float = option(0.2, "the probability ratio is clipped below 1 - epsilon")
    epsilon_high: float | None = option(None, "and above 1 + epsilon_high; default: epsilon (cispo: the ratio's cap)")
    delta: float | None = option(None, "upper bound of the ratio for negative advantages (two-sided clip)")
    importance_sampling_level: str = option("token", "ratio per token, or per sequence (GSPO)", ("token", "sequence"))
    use_bias_correction_kl: bool = option(False, "multiply the KL by the importance ratio")
    mask_truncated_completions: bool = option(False, "leave completions cut at max_completion_length out of the loss")
    sync_ref_model: bool = option(False, "move the reference model towards the policy")
    ref_model_mixup_alpha: float = option(0.6, "reference = alpha * policy + (1 - alpha) * reference")
    ref_model_sync_steps: int = option(512, "steps between those moves")
    prompts: PromptOptions = nested(PromptOptions)
    engine: EngineConfig = nested(EngineConfig, without=("seed",))

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = super().respelled(values)
        if isinstance(values.get("scale_rewards"), bool):  # TRL's older form
            values = values | {"scale_rewards": "group" if values["scale_rewards"] else "none"}
        if isinstance(values.get("generation_kwargs"), dict):
            values = dict(values)
            values |= _generation_kwargs(values.pop("generation_kwargs"), values)
        return values

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_generations != 1,
            "num_generations=1 leaves nothing to compare a completion with; it must be at least 2",
        )
        for name, low in (
            ("num_generations", 2),
            ("num_generations_eval", 1),
            ("num_iterations", 1),
            ("max_completion_length", 1),
            ("generation_batch_size", 1),
            ("steps_per_generation", 1),
            ("ref_model_sync_steps", 1),
            ("beta", 0),
            ("epsilon", 0),
            ("epsilon_high", 0),
        ):
            check_range(self, name, low)
        for name in ("min_p", "ref_model_mixup_alpha"):
            check_range(self, name, 0, 1)
        for name in ("temperature", "delta"):
            check_range(self, name, 0, open_low=True)
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

    @property
    def generation_size(self) -> int:
        """Completions drawn at once."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size
        return self.per_device_train_batch_size * (self.steps_per_generation or self.gradient_accumulation_steps)

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
