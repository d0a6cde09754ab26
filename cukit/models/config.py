"""The shape of a decoder, read from a Hugging Face config.json."""

import logging
import math
from dataclasses import dataclass, field, replace
from typing import Any

from ..options import require
from .fp8_config import FP8_KEYS, Fp8Files, read_fp8

logger = logging.getLogger(__name__)
DTYPES = ("auto", "float32", "bfloat16", "float16")
# How much of a forward pass the backward pass makes again, from the fastest to the leanest.
LEVELS = ("none", "selective", "full")
LEVELS_OF_BOOLS = {False: "none", True: "full"}  # as TRL and transformers say it
ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
# Reward models and critics: the decoder with a head of one number in place of the language model's.
CLASSIFIERS = {name.replace("CausalLM", "SequenceClassification"): kind for name, kind in ARCHITECTURES.items()}
HEADS = ("lm_head", "score")
LLAMA3_ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

# ---- every key of transformers' Qwen3, Qwen2 and Llama configurations ------------------------------------------------

USED = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "tie_word_embeddings"),
    *("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id"),
    *("id2label", "num_labels"),  # of classifiers
    *FP8_KEYS,
    # looked at, and refused where they ask for what the decoder does not compute
    *("hidden_act", "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window", "layer_types"),
    *("partial_rotary_factor",),
)
# These change no number here: how outputs are returned or cached, how sums are cut, dropout (which cukit never
# applies), what belongs to other heads, and generation's defaults (generation_config.json is read, not these).
IGNORED = (
    *(
        "initializer_range",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "return_dict_in_generate",
    ),
    *("torchscript", "use_bfloat16", "chunk_size_feed_forward", "pretraining_tp", "attention_dropout"),
    *("max_window_layers", "transformers_version", "_name_or_path", "name_or_path", "auto_map", "tokenizer_class"),
    *("_attn_implementation", "attn_implementation", "label2id", "problem_type"),
    *("finetuning_task", "task_specific_params", "prefix", "sep_token_id", "decoder_start_token_id", "is_decoder"),
    *("tie_encoder_decoder", "tf_legacy_loss", "max_length", "min_length", "do_sample", "temperature", "top_k"),
    *("top_p", "typical_p", "repetition_penalty", "length_penalty", "num_beams", "num_return_sequences"),
)
# Refused unless neutral: key -> (values that ask for nothing, what it would ask for). The last group is of relatives of
# these architectures; a file that sets one was made for another computation, whatever its `architectures` says.
REFUSED: dict[str, tuple[tuple, str]] = {
    "is_causal": ((True,), "attention in both directions is"),
    "use_bidirectional_attention": ((False,), "attention in both directions is"),
    "is_encoder_decoder": ((False,), "an encoder is"),
    "add_cross_attention": ((False,), "cross attention is"),
    "pruned_heads": (({}, []), "a model with heads left out is"),
    "dual_chunk_attention_config": ((), "attention in two chunks is"),
    "num_experts": ((0,), "mixture of experts is"),
    "num_local_experts": ((0,), "mixture of experts is"),
    "n_routed_experts": ((0,), "mixture of experts is"),
    "rope_interleaved": ((False,), "rotation of neighbouring pairs is"),
    "no_rope_layers": (([],), "layers without rotation are"),
    "no_rope_layer_interval": ((0,), "layers without rotation are"),
    "attention_chunk_size": ((), "attention within chunks is"),
    "attn_logit_softcapping": ((), "capped logits are"),
    "final_logit_softcapping": ((), "capped logits are"),
    "query_pre_attn_scalar": ((), "another scale of attention is"),
    "attention_multiplier": ((), "another scale of attention is"),
    "embedding_multiplier": ((1,), "a scaled embedding is"),
    "residual_multiplier": ((1,), "a scaled residual is"),
    "logits_scaling": ((1,), "scaled logits are"),
    "logit_scale": ((1,), "scaled logits are"),
    "scale_emb": ((1,), "a scaled embedding is"),
    "scale_depth": ((), "a scaled residual is"),
    "dim_model_base": ((), "scaled logits are"),
}


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
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    fp8: Fp8Files | None = field(
        default=None, compare=False
    )  # how the folder's weights are stored; a model's are plain
    raw: dict = field(default_factory=dict, repr=False, compare=False)
    vocab_parts: int = 1  # ranks among which the rows of embedding and head are shared out (part_of)

    def __post_init__(self) -> None:
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
            require(
                isinstance(value, int) and not isinstance(value, bool) and value >= 1,
                f"config.json: {name} must be a whole number of at least 1, got {value!r}",
            )
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            require(
                isinstance(value, (int, float)) and math.isfinite(value) and value > 0,
                f"config.json: {name} must be a number above 0, got {value!r}",
            )
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        require(
            heads % kv_heads == 0,
            f"config.json: num_attention_heads={heads} must be a multiple of "
            f"num_key_value_heads={kv_heads}; {heads} % {kv_heads} = {heads % kv_heads}",
        )
        require(self.head_dim % 2 == 0, f"config.json: head_dim must be even (rotary embeddings), got {self.head_dim}")

    @property
    def head(self) -> str:
        """What the folder's model has after the last norm: lm_head, or score (a classifier of one label)."""
        return "score" if self.architecture in CLASSIFIERS else "lm_head"

    def as_classifier(self) -> "ModelConfig":
        """This shape with a score head: ...ForSequenceClassification with one label, as transformers writes it."""
        if self.head == "score":
            return self
        name = self.architecture.replace("CausalLM", "SequenceClassification")
        raw = {key: value for key, value in self.raw.items() if key not in ("num_labels", "auto_map")}
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return replace(self, architecture=name, raw=raw | {"architectures": [name]} | labels)

    def part_of(self, ranks: int) -> "ModelConfig":
        """The shape of one of so many ranks' parts (models/tensor_parallel.py); ValueError where they do not divide
        it.
        """
        for name in ("num_key_value_heads", "intermediate_size"):
            require(
                getattr(self, name) % ranks == 0,
                f"tensor_parallel_size={ranks} does not divide the model's {name}={getattr(self, name)}: take a size "
                "that divides it",
            )
        shares = {name: getattr(self, name) // ranks for name in ("num_key_value_heads", "intermediate_size")}
        heads = self.num_attention_heads // ranks
        return replace(self, num_attention_heads=heads, vocab_parts=self.vocab_parts * ranks, **shares)

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head: the whole vocabulary's, or the most that a rank has."""
        return -(-self.vocab_size // self.vocab_parts)

    @classmethod
    def from_json(cls, config: dict) -> "ModelConfig":
        """Read hub style (rope_theta, rope_scaling, torch_dtype) or transformers 5 style (rope_parameters, dtype)."""
        require(isinstance(config, dict), f"config.json must hold an object, got {type(config).__name__}")
        architecture = _read_architecture(config)
        model_type = (ARCHITECTURES | CLASSIFIERS)[architecture]
        _refuse_unsupported(config, architecture, model_type)
        fp8 = read_fp8(config)
        if unknown := sorted(set(config) - {*USED, *IGNORED, *REFUSED}):
            logger.info("config.json: not used here, nor by transformers' %s: %s", architecture, ", ".join(unknown))
        required = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        )
        missing = [name for name in required if config.get(name) is None]
        require(not missing, f"config.json lacks {', '.join(missing)}")
        values = {name: config[name] for name in required}
        for name in (
            "rms_norm_eps",
            "tie_word_embeddings",
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
            model_type=model_type,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            attention_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
            torch_dtype=_read_dtype(config),
            num_key_value_heads=values["num_attention_heads"] if kv_heads is None else kv_heads,
            head_dim=_read_head_dim(config, model_type),
            fp8=fp8,
            raw={name: value for name, value in config.items() if name not in FP8_KEYS},
            **values,
        )


def _read_architecture(config: dict) -> str:
    by_type = {model_type: name for name, model_type in ARCHITECTURES.items()}
    names = config.get("architectures") or [by_type.get(str(config.get("model_type")), config.get("model_type"))]
    require(
        isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES | CLASSIFIERS,
        f"config.json: architectures={names!r} is not supported; cukit runs {', '.join(ARCHITECTURES)} and, as reward "
        f"models, {', '.join(CLASSIFIERS)}",
    )
    return names[0]


def _refuse_unsupported(config: dict, architecture: str, model_type: str) -> None:
    """Name the one key that asks for something the decoder does not compute."""
    if architecture in CLASSIFIERS:
        labels = config.get("id2label")  # it rules num_labels in transformers; without either, a model has 2
        number = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
        require(
            number == 1,
            f"config.json: num_labels={number!r} is not supported for {architecture}; a reward model has 1",
        )
    for name, (neutral, what) in REFUSED.items():
        value = config.get(name)
        require(
            value is None or value in neutral,
            f"config.json: {name}={value!r:.80}: {what} not supported",
        )
    window = config.get("use_sliding_window", model_type == "llama" and config.get("sliding_window"))
    require(
        not window,
        f"config.json: use_sliding_window={config.get('use_sliding_window')!r}, "
        f"sliding_window={config.get('sliding_window')!r}: sliding windows are not supported",
    )
    other = sorted(set(map(str, config.get("layer_types") or [])) - {"full_attention"})
    require(not other, f"config.json: layer_types has {', '.join(other)}; only full_attention is supported")
    activation = config.get("hidden_act", "silu")
    require(activation == "silu", f"config.json: hidden_act={activation!r} is not supported; only silu is")
    for name in ("attention_bias", "mlp_bias"):
        require(
            model_type == "qwen2" or not config.get(name),
            f"config.json: {name}=true is not supported for {architecture}",
        )


def _read_rope(config: dict) -> tuple[float, dict | None]:
    """-> (rope_theta, None or the llama3 scaling with its rope_type).

    transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters. Where a file has several of them,
    versions differ in which one they take, so they must agree.
    """
    found = {key: _read_rope_dict(config, key) for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    require(
        len(found) < 2 or found["rope_parameters"] == found["rope_scaling"],
        f"config.json: rope_parameters={config.get('rope_parameters')!r} and rope_scaling="
        f"{config.get('rope_scaling')!r} disagree; keep one of them",
    )
    fraction = config.get("partial_rotary_factor")
    require(fraction in (None, 1), f"config.json: partial_rotary_factor={fraction!r} is not supported")
    if found:
        return next(iter(found.values()))
    theta = config.get("rope_theta")
    return (10000.0 if theta is None else theta), None


def _read_rope_dict(config: dict, key: str) -> tuple[float, dict | None]:
    rope = config[key]
    require(
        isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()),
        f"config.json: {key} must be one flat object (rope per layer type is not supported), got {rope!r}",
    )

    def one(name: str, first: Any, second: Any, default: Any = None) -> Any:
        """Two places of one value, which must agree."""
        require(
            first is None or second is None or first == second,
            f"config.json: {name} is {first!r} in {key} and {second!r} beside it; they must agree",
        )
        return default if first is None and second is None else second if first is None else first

    theta = one("rope_theta", rope.get("rope_theta"), config.get("rope_theta"), 10000.0)
    kind = one("rope_type", rope.get("rope_type"), rope.get("type"), "default")
    require(
        kind in ("default", "llama3"),
        f"config.json: {key} has rope_type={kind!r}; only default and llama3 are supported",
    )
    fraction = rope.get("partial_rotary_factor")
    require(fraction in (None, 1), f"config.json: partial_rotary_factor={fraction!r} is not supported")
    if kind == "default":
        factor = rope.get("factor")
        require(factor in (None, 1), f"config.json: {key} has factor={factor!r} without a rope_type that uses it")
        return theta, None
    context = "original_max_position_embeddings"
    rope = rope | {context: one(context, rope.get(context), config.get(context))}
    for name in LLAMA3_ROPE_KEYS:
        require(
            isinstance(rope.get(name), (int, float)) and rope[name] > 0,
            f"config.json: {key} of type llama3 needs {name} above 0, got {rope.get(name)!r}",
        )
    require(
        rope["high_freq_factor"] > rope["low_freq_factor"],
        f"config.json: {key} needs high_freq_factor ({rope['high_freq_factor']}) above low_freq_factor "
        f"({rope['low_freq_factor']})",
    )
    return theta, {"rope_type": "llama3"} | {name: rope[name] for name in LLAMA3_ROPE_KEYS}


def _read_dtype(config: dict) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    require(name in DTYPES[1:], f"config.json: dtype={name!r} is not supported; only {', '.join(DTYPES[1:])} are")
    return name


def _read_head_dim(config: dict, model_type: str) -> int:
    if config.get("head_dim") is not None:
        return config["head_dim"]
    if model_type == "qwen3" and "head_dim" not in config:
        return 128  # transformers' default for Qwen3, whatever the hidden size
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    require(
        isinstance(hidden, int) and isinstance(heads, int) and heads >= 1 and hidden % heads == 0,
        f"config.json: without head_dim, hidden_size={hidden} must be a multiple of num_attention_heads={heads}",
    )
    return hidden // heads
