"""One dataclass a trainer; names, defaults and meaning are TRL's."""

import math
from dataclasses import dataclass
from typing import Any

from ..engine.config import EngineConfig, SamplingParams
from ..models.config import DTYPES
from ..options import check_choices, check_range, option, require

SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")


@dataclass
class TrainerConfig:
    """What every trainer shares."""

    output_dir: str | None = option(None, "run folder; default: a fresh one below runs/")
    resume_from_checkpoint: str | None = option(None, "a checkpoint-N folder, or 'latest' of output_dir")
    device: str = option("auto", "where to run", ("auto", "cpu", "cuda"))
    dtype: str = option("auto", "weights and activations; auto: bfloat16 on cuda, float32 on cpu", DTYPES)
    bf16: bool | None = option(None, "true is the same as dtype=bfloat16")
    fp16: bool | None = option(None, "true is the same as dtype=float16")
    seed: int = option(42, "seed of initial weights, data order and sampling")
    learning_rate: float = option(5e-5, "peak learning rate of AdamW")
    lr_scheduler_type: str = option("linear", "learning rate after the warm-up", SCHEDULES)
    warmup_steps: int = option(0, "steps of linear warm-up; overrides warmup_ratio")
    warmup_ratio: float = option(0.0, "share of all steps for linear warm-up")
    weight_decay: float = option(0.0, "AdamW weight decay (not on norms and biases)")
    adam_beta1: float = option(0.9, "AdamW beta1")
    adam_beta2: float = option(0.999, "AdamW beta2")
    adam_epsilon: float = option(1e-8, "AdamW epsilon")
    max_grad_norm: float = option(1.0, "clip the gradient's global norm to this; 0 is off")
    num_train_epochs: float = option(3.0, "passes over the training data")
    max_steps: int = option(-1, "optimiser steps; -1: as num_train_epochs says")
    per_device_train_batch_size: int = option(8, "rows (for GRPO: completions) per micro-batch")
    gradient_accumulation_steps: int = option(1, "micro-batches per optimiser step")
    max_tokens_per_batch: int = option(16384, "most tokens in one forward pass; only splits the work")
    gradient_checkpointing: bool = option(True, "recompute activations in the backward pass to save memory")
    shuffle_dataset: bool = option(True, "new random order of the rows in every epoch")
    logging_steps: int = option(10, "steps between rows of metrics.jsonl")
    log_completions: bool = option(False, "print a sample completion at every logging step")
    save_steps: int = option(500, "steps between checkpoints; 0: only at the end")
    save_total_limit: int | None = option(None, "keep only the newest checkpoints")
    eval_strategy: str = option("no", "when to evaluate during training", ("no", "steps", "epoch"))
    eval_steps: int | None = option(None, "steps between evaluations; sets eval_strategy=steps")
    eval_on_start: bool = option(False, "evaluate before the first and after the last step")

    def __post_init__(self):
        check_choices(self)
        for name in ("max_grad_norm", "weight_decay", "warmup_steps", "seed", "save_steps"):
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
        for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")):
            if getattr(self, flag):
                require(self.dtype in ("auto", name), f"{flag}=true and dtype={self.dtype} contradict; give only one")
                self.dtype = name
        if self.eval_strategy == "no" and self.eval_steps is not None:
            self.eval_strategy = "steps"
        require(
            self.eval_strategy != "steps" or self.eval_steps is not None,
            "eval_strategy=steps needs eval_steps (steps between evaluations)",
        )

    @property
    def evaluates(self) -> str:
        """When evaluations happen: "no", "steps" (of eval_steps) or "epoch"."""
        return self.eval_strategy

    def num_warmup_steps(self, total_steps: int) -> int:
        """Steps of warm-up in a run of total_steps: warmup_steps, else warmup_ratio of them, rounded up."""
        return self.warmup_steps or math.ceil(total_steps * self.warmup_ratio)


@dataclass
class SFTConfig(TrainerConfig):
    """Supervised fine-tuning; names and defaults as in TRL."""

    learning_rate: float = option(2e-5, "peak learning rate of AdamW")
    max_length: int = option(1024, "longest row in tokens; what is longer loses its end")
    packing: bool = option(False, "fill rows of max_length tokens with whole examples (attention stays within each)")
    completion_only_loss: bool | None = option(None, "loss on completions only; default: if rows have a completion")
    dataset_text_field: str = option("text", "column of plain-text rows")
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON")
    init_from_config: bool = option(False, "start from random weights: the model folder's config.json and tokenizer")

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "max_length", 2)


LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo")


@dataclass
class GRPOConfig(TrainerConfig):
    """Group relative policy optimisation; names, defaults and meaning as in TRL.

    generation_batch_size (completions drawn at once) = per_device_train_batch_size * steps_per_generation, and
    steps_per_generation defaults to gradient_accumulation_steps; both are filled in after construction.
    """

    learning_rate: float = option(1e-6, "peak learning rate of AdamW")
    eval_on_start: bool = option(True, "evaluate before the first and after the last step")
    reward_funcs: list[str] | None = option(None, "rewards: exact, boxed, gsm8k, or path/file.py:function")
    reward_weights: list[float] | None = option(None, "weight of each reward; default: 1 each")
    scale_rewards: str = option("group", "divide advantages by the std of this", ("group", "batch", "none"))
    num_generations: int = option(8, "completions per prompt (the group), at least 2")
    num_generations_eval: int | None = option(None, "sampled completions per prompt in evaluations; default: 1, greedy")
    generation_batch_size: int | None = option(None, "completions drawn at once; or give steps_per_generation")
    steps_per_generation: int | None = option(None, "micro-batches a generation; default: gradient_accumulation_steps")
    num_iterations: int = option(1, "passes over each generation batch")
    max_completion_length: int = option(512, "longest completion in tokens")
    temperature: float = option(1.0, "sampling temperature; training divides logits by it too")
    top_p: float = option(1.0, "smallest set of tokens with this probability; 1 is off")
    top_k: int = option(0, "the k most probable tokens; 0 is off")
    min_p: float | None = option(None, "tokens at least this probable relative to the best")
    repetition_penalty: float = option(1.0, "above 1 makes tokens already seen less probable")
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON")
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
    max_model_len: int | None = option(None, "longest prompt + completion in tokens; default: the model's own limit")
    max_num_seqs: int = option(256, "sequences that decode together")
    max_num_batched_tokens: int = option(8192, "token budget of one engine step")
    gpu_memory_utilization: float = option(0.3, "share of the device's memory for the engine's KV cache")

    def __post_init__(self):
        if isinstance(self.scale_rewards, bool):  # TRL's older form
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if isinstance(self.reward_funcs, str):
            self.reward_funcs = [self.reward_funcs]
        super().__post_init__()
        self.sampling_params()
        EngineConfig(
            self.max_model_len,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            gpu_memory_utilization=self.gpu_memory_utilization,
        )
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
        check_range(self, "ref_model_mixup_alpha", 0, 1)
        for name in ("temperature", "delta"):
            check_range(self, name, 0, open_low=True)
        self.epsilon_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        require(
            not (self.sync_ref_model and self.beta == 0), "sync_ref_model needs a reference model: set beta above 0"
        )
        weights, rewards = self.reward_weights, self.reward_funcs
        require(
            weights is None or rewards is None or len(weights) == len(rewards),
            f"reward_weights has {len(weights or [])} values for {len(rewards or [])} reward_funcs; give one each",
        )
        self._resolve_generation_batch()

    def _resolve_generation_batch(self) -> None:
        """Fill in generation_batch_size and steps_per_generation, and check what must divide what."""
        size, steps = self.per_device_train_batch_size, self.steps_per_generation
        batch, accumulation = self.generation_batch_size, self.gradient_accumulation_steps
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
            steps = batch // size
        self.steps_per_generation = steps = accumulation if steps is None else steps
        self.generation_batch_size = batch = size * steps
        group = self.num_generations
        require(
            batch % group == 0,
            f"the generation batch of {batch} completions (per_device_train_batch_size={size} * "
            f"steps_per_generation={steps}) must be a multiple of num_generations={group}; "
            f"{batch} % {group} = {batch % group}",
        )
        # An optimiser step that spanned two generation batches would average over different policies.
        require(
            steps % accumulation == 0,
            f"steps_per_generation={steps} must be a multiple of gradient_accumulation_steps={accumulation}; "
            f"{steps} % {accumulation} = {steps % accumulation}",
        )

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """The training rollouts' SamplingParams (with log-probs), with `changes` applied."""
        values = dict(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_completion_length,
            logprobs=True,
        )
        return SamplingParams(**(values | changes))
