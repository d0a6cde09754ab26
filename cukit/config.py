"""Every configuration of cukit: model, engine, sampling, and one dataclass per trainer.

Field names and defaults are those of Hugging Face, vLLM and TRL. The command line and YAML files are made from these
fields (`metadata["help"]`, `metadata["choices"]`). Every check raises a one-line ValueError. Imports nothing of cukit.
"""

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any


def option(default: Any = MISSING, help: str = "", choices: tuple[str, ...] | None = None):
    """A dataclass field with the text (and the allowed words) that the command line shows."""
    metadata = {"help": help} | ({"choices": choices} if choices else {})
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_range(config, name: str, low: float, high: float | None = None, open_low: bool = False) -> None:
    """Check low <= value <= high (low < value if open_low); None passes, NaN and infinity never do."""
    value = getattr(config, name)
    if value is None:
        return
    _require(isinstance(value, (int, float)) and not isinstance(value, bool), f"{name} must be a number, got {value!r}")
    kind = next(f.type for f in fields(config) if f.name == name)
    _require(isinstance(value, int) or kind not in (int, int | None), f"{name} must be a whole number, got {value!r}")
    inside = math.isfinite(value) and (value > low if open_low else value >= low) and (high is None or value <= high)
    limits = f"{'above' if open_low else 'at least'} {low:g}" + ("" if high is None else f" and at most {high:g}")
    _require(inside, f"{name} must be {limits}, got {value!r}")


def _check_choices(config) -> None:
    for item in fields(config):
        choices, value = item.metadata.get("choices"), getattr(config, item.name)
        _require(
            choices is None or value in choices,
            f"{item.name} must be one of {', '.join(map(str, choices or ()))}, got {value!r}",
        )


# ---- model -----------------------------------------------------------------------------------------------------------

DTYPES = ("auto", "float32", "bfloat16", "float16")
ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
LLAMA3_ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, read from a Hugging Face config.json. `raw` keeps the file's own dict for saving."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # None, or {"rope_type": "llama3", + the four LLAMA3_ROPE_KEYS}
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v; never on the output projection
    qk_norm: bool = False
    torch_dtype: str = "float32"
    initializer_range: float = 0.02
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    raw: dict = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            _require(
                isinstance(value, int) and not isinstance(value, bool) and value >= 1,
                f"config.json: {name} must be a whole number of at least 1, got {value!r}",
            )
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            _require(
                isinstance(value, (int, float)) and math.isfinite(value) and value > 0,
                f"config.json: {name} must be a number above 0, got {value!r}",
            )
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        _require(
            heads % kv_heads == 0,
            f"config.json: num_attention_heads={heads} must be a multiple of "
            f"num_key_value_heads={kv_heads}; {heads} % {kv_heads} = {heads % kv_heads}",
        )
        _require(self.head_dim % 2 == 0, f"config.json: head_dim must be even (rotary embeddings), got {self.head_dim}")

    @classmethod
    def from_json(cls, config: dict) -> "ModelConfig":
        """Read hub style (rope_theta, rope_scaling, torch_dtype) or transformers 5 style (rope_parameters, dtype)."""
        _require(isinstance(config, dict), f"config.json must hold an object, got {type(config).__name__}")
        architecture = _read_architecture(config)
        _refuse_unsupported(config, architecture)
        required = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        )
        missing = [name for name in required if config.get(name) is None]
        _require(not missing, f"config.json lacks {', '.join(missing)}")
        values = {name: config[name] for name in required}
        for name in (
            "rms_norm_eps",
            "tie_word_embeddings",
            "initializer_range",
            "eos_token_id",
            "bos_token_id",
            "pad_token_id",
        ):
            if config.get(name) is not None:
                values[name] = config[name]
        rope_theta, rope_scaling = _read_rope(config)
        kv_heads = config.get("num_key_value_heads")
        return cls(
            architecture=architecture,
            model_type=ARCHITECTURES[architecture],
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            attention_bias=architecture == "Qwen2ForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
            torch_dtype=_read_dtype(config),
            num_key_value_heads=values["num_attention_heads"] if kv_heads is None else kv_heads,
            head_dim=_read_head_dim(config, architecture),
            raw=dict(config),
            **values,
        )


def _read_architecture(config: dict) -> str:
    by_type = {model_type: name for name, model_type in ARCHITECTURES.items()}
    names = config.get("architectures") or [by_type.get(config.get("model_type"), config.get("model_type"))]
    _require(
        isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES,
        f"config.json: architectures={names!r} is not supported; cukit runs {', '.join(ARCHITECTURES)}",
    )
    return names[0]


def _refuse_unsupported(config: dict, architecture: str) -> None:
    """Name the one key that asks for something the decoder does not compute."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        _require(not config.get(name), f"config.json: {name}={config.get(name)!r}: mixture of experts is not supported")
    window = config.get("use_sliding_window", architecture == "LlamaForCausalLM" and config.get("sliding_window"))
    _require(
        not window,
        f"config.json: use_sliding_window={config.get('use_sliding_window')!r}, "
        f"sliding_window={config.get('sliding_window')!r}: sliding windows are not supported",
    )
    other = sorted(set(config.get("layer_types") or []) - {"full_attention"})
    _require(not other, f"config.json: layer_types has {', '.join(other)}; only full_attention is supported")
    _require(
        config.get("quantization_config") is None,
        "config.json: quantization_config is set; quantised checkpoints are not supported",
    )
    activation = config.get("hidden_act", "silu")
    _require(activation == "silu", f"config.json: hidden_act={activation!r} is not supported; only silu is")
    for name in ("attention_bias", "mlp_bias"):
        _require(
            architecture == "Qwen2ForCausalLM" or not config.get(name),
            f"config.json: {name}=true is not supported for {architecture}",
        )


def _read_rope(config: dict) -> tuple[float, dict | None]:
    """-> (rope_theta, None or the llama3 scaling with its rope_type)."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = config.get(key) or {}
    _require(
        isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()),
        f"config.json: {key} must be one flat object (rope per layer type is not supported), got {rope!r}",
    )
    theta = rope.get("rope_theta", config.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    _require(
        kind in ("default", "llama3"),
        f"config.json: {key} has rope_type={kind!r}; only default and llama3 are supported",
    )
    for place in (config, rope):
        fraction = place.get("partial_rotary_factor")
        _require(fraction in (None, 1, 1.0), f"config.json: partial_rotary_factor={fraction!r} is not supported")
    theta = 10000.0 if theta is None else theta
    if kind == "default":
        return theta, None
    for name in LLAMA3_ROPE_KEYS:
        _require(
            isinstance(rope.get(name), (int, float)) and rope[name] > 0,
            f"config.json: {key} of type llama3 needs {name} above 0, got {rope.get(name)!r}",
        )
    _require(
        rope["high_freq_factor"] > rope["low_freq_factor"],
        f"config.json: {key} needs high_freq_factor ({rope['high_freq_factor']}) above low_freq_factor "
        f"({rope['low_freq_factor']})",
    )
    return theta, {"rope_type": "llama3"} | {name: rope[name] for name in LLAMA3_ROPE_KEYS}


def _read_dtype(config: dict) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    _require(name in DTYPES[1:], f"config.json: dtype={name!r} is not supported; only {', '.join(DTYPES[1:])} are")
    return name


def _read_head_dim(config: dict, architecture: str) -> int:
    if config.get("head_dim") is not None:
        return config["head_dim"]
    if architecture == "Qwen3ForCausalLM" and "head_dim" not in config:
        return 128  # transformers' default for Qwen3, whatever the hidden size
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    _require(
        isinstance(hidden, int) and isinstance(heads, int) and heads >= 1 and hidden % heads == 0,
        f"config.json: without head_dim, hidden_size={hidden} must be a multiple of num_attention_heads={heads}",
    )
    return hidden // heads


# ---- engine ----------------------------------------------------------------------------------------------------------


@dataclass
class EngineConfig:
    """The rollout engine's limits."""

    max_model_len: int | None = option(None, "longest prompt + completion in tokens; default: the model's own limit")
    max_num_seqs: int = option(256, "sequences that decode together")
    max_num_batched_tokens: int = option(8192, "token budget of one engine step; long prompts are prefilled in chunks")
    block_size: int = option(16, "tokens in a block of the KV cache")
    num_kv_blocks: int | None = option(None, "blocks in the KV cache; default: what the memory allows")
    gpu_memory_utilization: float = option(0.9, "share of the device's memory that the engine may use")
    enforce_eager: bool = option(False, "decode without CUDA graphs")
    exact: str = option(
        "auto",
        "log-probs of decoding equal training's in every bit (cuda): auto says where that fails, true raises, "
        "false does not "
        "care",
        ("auto", "true", "false"),
    )
    enable_prefix_caching: bool = option(True, "share the KV cache of equal prompt beginnings")
    seed: int = option(0, "seed of requests that bring none")

    def __post_init__(self):
        if isinstance(self.exact, bool):
            self.exact = str(self.exact).lower()
        _check_choices(self)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks"):
            _check_range(self, name, 1)
        _check_range(self, "gpu_memory_utilization", 0, 1, open_low=True)
        _check_range(self, "seed", 0)


@dataclass
class SamplingParams:
    """How the completions of a prompt are drawn; names and meaning as in vLLM."""

    n: int = option(1, "completions per prompt")
    temperature: float = option(1.0, "0 is greedy")
    top_p: float = option(1.0, "smallest set of tokens with this probability; 1 is off")
    top_k: int = option(0, "the k most probable tokens; 0 (or -1) is off")
    min_p: float = option(0.0, "tokens at least this probable relative to the best; 0 is off")
    repetition_penalty: float = option(1.0, "above 1 makes tokens seen in prompt or completion less probable")
    max_tokens: int = option(512, "longest completion in tokens")
    min_tokens: int = option(0, "no stop before this many tokens")
    stop: list[str] | None = option(None, "texts that end a completion (cut from the text, kept in token_ids)")
    stop_token_ids: list[int] | None = option(None, "further token ids that end a completion")
    ignore_eos: bool = option(False, "go on after the end-of-text token")
    seed: int | None = option(None, "seed of the draws; completion j uses seed + j")
    logprobs: bool = option(False, "return one log-probability per token")

    def __post_init__(self):
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.top_k = 0 if self.top_k == -1 else self.top_k
        for name, low, high in (
            ("n", 1, None),
            ("temperature", 0, None),
            ("top_k", 0, None),
            ("min_p", 0, 1),
            ("max_tokens", 1, None),
            ("min_tokens", 0, None),
            ("seed", 0, 2**64 - 1),
        ):
            _check_range(self, name, low, high)
        _check_range(self, "top_p", 0, 1, open_low=True)
        _check_range(self, "repetition_penalty", 0, open_low=True)
        _require(
            self.min_tokens <= self.max_tokens,
            f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}",
        )
        for text in self.stop:
            _require(isinstance(text, str) and text != "", f"stop must hold non-empty texts, got {text!r}")
        for token in self.stop_token_ids:
            _require(isinstance(token, int) and token >= 0, f"stop_token_ids must hold token ids, got {token!r}")


# ---- trainers --------------------------------------------------------------------------------------------------------

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
        _check_choices(self)
        for name in ("max_grad_norm", "weight_decay", "warmup_steps", "seed", "save_steps"):
            _check_range(self, name, 0)
        for name in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "max_tokens_per_batch",
            "logging_steps",
            "save_total_limit",
            "eval_steps",
        ):
            _check_range(self, name, 1)
        for name in ("learning_rate", "adam_epsilon", "num_train_epochs"):
            _check_range(self, name, 0, open_low=name != "learning_rate")
        for name in ("adam_beta1", "adam_beta2"):
            _check_range(self, name, 0, 1)
            _require(getattr(self, name) < 1, f"{name} must be below 1, got {getattr(self, name)}")
        _check_range(self, "warmup_ratio", 0, 1)
        _check_range(self, "max_steps", -1)
        _require(self.max_steps != 0, "max_steps must be -1 (off) or at least 1, got 0")
        for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")):
            if getattr(self, flag):
                _require(self.dtype in ("auto", name), f"{flag}=true and dtype={self.dtype} contradict; give only one")
                self.dtype = name
        if self.eval_strategy == "no" and self.eval_steps is not None:
            self.eval_strategy = "steps"
        _require(
            self.eval_strategy != "steps" or self.eval_steps is not None,
            "eval_strategy=steps needs eval_steps (steps between evaluations)",
        )


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
        _check_range(self, "max_length", 2)


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
        _require(
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
            _check_range(self, name, low)
        _check_range(self, "ref_model_mixup_alpha", 0, 1)
        for name in ("temperature", "delta"):
            _check_range(self, name, 0, open_low=True)
        self.epsilon_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        _require(
            not (self.sync_ref_model and self.beta == 0), "sync_ref_model needs a reference model: set beta above 0"
        )
        weights, rewards = self.reward_weights, self.reward_funcs
        _require(
            weights is None or rewards is None or len(weights) == len(rewards),
            f"reward_weights has {len(weights or [])} values for {len(rewards or [])} reward_funcs; give one each",
        )
        self._resolve_generation_batch()

    def _resolve_generation_batch(self) -> None:
        """Fill in generation_batch_size and steps_per_generation, and check what must divide what."""
        size, steps = self.per_device_train_batch_size, self.steps_per_generation
        batch, accumulation = self.generation_batch_size, self.gradient_accumulation_steps
        if batch is not None:
            _require(
                batch % size == 0,
                f"generation_batch_size={batch} must be a multiple of "
                f"per_device_train_batch_size={size}; {batch} % {size} = {batch % size}",
            )
            _require(
                steps in (None, batch // size),
                f"generation_batch_size={batch} / per_device_train_batch_size={size} = {batch // size} but "
                f"steps_per_generation={steps}; give only one",
            )
            steps = batch // size
        self.steps_per_generation = steps = accumulation if steps is None else steps
        self.generation_batch_size = batch = size * steps
        group = self.num_generations
        _require(
            batch % group == 0,
            f"the generation batch of {batch} completions (per_device_train_batch_size={size} * "
            f"steps_per_generation={steps}) must be a multiple of num_generations={group}; "
            f"{batch} % {group} = {batch % group}",
        )
        # An optimiser step that spanned two generation batches would average over different policies.
        _require(
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
