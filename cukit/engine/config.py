"""The memory that a process may take, the engine's limits, and how the completions of a prompt are drawn."""

import re
from typing import Any

from ..options import LARGEST_SEED, Options, check_choices, check_range, option, require

QUANTIZATIONS = ("int8", "fp8")
UNITS = {"": 1} | {f"{prefix}b": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))}
UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate(("", "k", "m", "g", "t")) if prefix}
SIZE = re.compile(r"(\d+\.?\d*(?:e\+?\d+)?|\.\d+(?:e\+?\d+)?)\s*([a-z]*)", re.IGNORECASE)
LARGEST_SIZE = 1 << 50


def bytes_of(size: str | int | float, name: str = "size") -> int:
    """24GB, 22GiB, 24e9 or a number of bytes -> bytes. ValueError in one line for anything else, and for none."""
    found = SIZE.fullmatch(str(size).strip())
    unit = UNITS.get(found[2].lower()) if found else None
    nbytes = float(found[1]) * unit if found and unit else 0.0
    require(
        1 <= nbytes <= LARGEST_SIZE, f"{name} must be bytes, with a unit or without (24GB, 22GiB, 24e9), got {size!r}"
    )
    return int(nbytes)


class MemoryOptions(Options):
    """What a process may take of its device."""

    group = "device and memory"
    memory_limit: str | None = option(
        None,
        "the most that this process may take of the GPU, CUDA context and libraries included: 24GB, 22GiB, 24e9; on a "
        "CPU it bounds the plan alone",
    )

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A number as text, and `none`."""
        given = values.get("memory_limit")
        if given in ("none", "null"):
            return values | {"memory_limit": None}
        number = isinstance(given, (int, float)) and not isinstance(given, bool)
        return values | {"memory_limit": str(given)} if number else values

    def __post_init__(self) -> None:
        if self.memory_limit is not None:
            bytes_of(self.memory_limit, "memory_limit")

    @property
    def nbytes(self) -> int | None:
        """None: no limit."""
        return None if self.memory_limit is None else bytes_of(self.memory_limit, "memory_limit")


class EngineConfig(Options):
    """The rollout engine's limits."""

    group = "engine"
    max_model_len: int | None = option(None, "longest prompt + completion in tokens; default: the model's own limit")
    max_num_seqs: int = option(256, "sequences that decode together")
    max_num_batched_tokens: int = option(8192, "token budget of one engine step; long prompts are prefilled in chunks")
    block_size: int = option(16, "tokens in a block of the KV cache")
    num_kv_blocks: int | None = option(None, "blocks in the KV cache; default: what the memory allows")
    gpu_memory_utilization: float = option(
        0.9, "share of the device's whole memory that this process may use in all: weights, training states, KV cache"
    )
    enforce_eager: bool = option(False, "decode, and compute short prompts, without CUDA graphs")
    async_scheduling: bool = option(
        True, "launch a decode step before the results of the one before it are on the host (cuda)"
    )
    exact: str = option(
        "auto",
        "log-probs of decoding equal training's in every bit (cuda): auto says where that fails, true raises there, "
        "false does without",
        ("auto", "true", "false"),
    )
    quantization: str | None = option(
        None,
        "weights of linear layers in 8 bits, of the engine alone: int8 or fp8; faster for up to 16 sequences at once; "
        "default: the model's own",
        QUANTIZATIONS,
    )
    kv_cache_dtype: str = option(
        "auto",
        "numbers of the KV cache: auto: the model's dtype; fp8: E4M3, half the bytes, and slower",
        ("auto", "fp8"),
    )
    enable_prefix_caching: bool = option(True, "share the KV cache of equal prompt beginnings")
    seed: int = option(0, "seed of requests that bring none")
    enable_lora: bool = option(False, "take requests that name an adapter (LoRA); see docs/LORA.md")
    max_loras: int = option(1, "adapters in one step; further ones wait")
    max_lora_rank: int = option(16, "largest rank of such an adapter")
    max_cpu_loras: int | None = option(None, "adapters that stay in the host's memory; default: max_loras")

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks"):
            check_range(self, name, 1)
        for name in ("max_loras", "max_lora_rank"):
            check_range(self, name, 1)
        check_range(self, "max_cpu_loras", self.max_loras)
        check_range(self, "gpu_memory_utilization", 0, 1, open_low=True)
        check_range(self, "seed", 0, LARGEST_SEED)
        require(
            not (self.enable_lora and self.quantization),
            f"enable_lora multiplies with the model's own weights: leave out quantization={self.quantization}, or "
            "merge the adapters that lora_modules or requests name",
        )
        for name in self.roundings:
            require(
                self.exact != "true",
                f"exact=true cannot be kept with {name}={getattr(self, name)}, which rounds what decoding reads and "
                f"training does not: leave {name} out, or exact",
            )

    @property
    def roundings(self) -> list[str]:
        """The options in force that make sampling differ from training."""
        found = {"quantization": self.quantization is not None, "kv_cache_dtype": self.kv_cache_dtype != "auto"}
        return [name for name, rounds in found.items() if rounds]


# Options that have no use where no request names an adapter.
LORA_OPTIONS = ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras")


class SamplingOptions(Options):
    """What generation and training rollouts share; names and meaning as in vLLM."""

    group = "generation"
    top_p: float = option(1.0, "smallest set of tokens with this probability; 1 is off")
    top_k: int = option(0, "the k most probable tokens; 0 (or -1) is off")
    repetition_penalty: float = option(1.0, "above 1 makes tokens seen in prompt or completion less probable")
    min_tokens: int = option(0, "no stop before this many tokens")
    stop: list[str] | None = option(None, "texts that end a completion (cut from the text, kept in token_ids)")
    stop_token_ids: list[int] | None = option(None, "further token ids that end a completion")
    ignore_eos: bool = option(False, "go on after the end-of-text token")

    def __post_init__(self) -> None:
        if self.stop is None:
            self.stop = []
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.top_k == -1:
            self.top_k = 0
        for name in ("top_k", "min_tokens"):
            check_range(self, name, 0)
        check_range(self, "top_p", 0, 1, open_low=True)
        check_range(self, "repetition_penalty", 0, open_low=True)
        for text in self.stop or ():
            require(text != "", f"stop must hold non-empty texts, got {text!r}")
        for token in self.stop_token_ids or ():
            require(token >= 0, f"stop_token_ids must hold token ids, got {token!r}")


class SamplingParams(SamplingOptions):
    """How the completions of a prompt are drawn; names and meaning as in vLLM."""

    n: int = option(1, "completions per prompt")
    temperature: float = option(1.0, "0 is greedy")
    min_p: float = option(0.0, "tokens at least this probable relative to the best; 0 is off")
    max_tokens: int = option(512, "longest completion in tokens")
    seed: int | None = option(None, "seed of the draws; completion j uses seed + j")
    logprobs: bool = option(False, "return one log-probability per token")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low, high in (
            ("n", 1, None),
            ("temperature", 0, None),
            ("min_p", 0, 1),
            ("max_tokens", 1, None),
            ("seed", 0, LARGEST_SEED),
        ):
            check_range(self, name, low, high)
        require(
            self.min_tokens <= self.max_tokens,
            f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}",
        )

    def with_seed(self, seed: int | None) -> "SamplingParams":
        """These with another seed; what was checked is not checked again."""
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        found.seed = seed
        return found
