"""Measurements: each array function against the hardware's limits; generation and training workloads. This file holds
their options.
"""

from pathlib import Path
from typing import Any

from ..engine.config import LORA_OPTIONS, EngineConfig, MemoryOptions
from ..models.config import DTYPES, LEVELS, LEVELS_OF_BOOLS
from ..options import Options, check_choices, check_range, nested, option, require
from ..parallel.config import ParallelOptions, TensorOptions
from ..trainers.lora_config import LoraOptions
from ..trainers.memory_config import StateOptions
from ..trainers.rollout_config import RolloutOptions
from . import presets
from .presets import with_preset

WORKLOADS = ("N", "G", "decode")
CRITICS = ("shared", "separate")
LENGTHS = ("fixed", "uniform", "lognormal")
BALANCES = ("none", "waiting", "running")
CHECKPOINTING = "what the backward pass makes again; auto: the fastest that fits; true is full, false none"
BOOLS = (LEVELS_OF_BOOLS[False], LEVELS_OF_BOOLS[True])


def check_output(path: str | None) -> None:
    require(
        path is None or Path(path).absolute().parent.is_dir(),
        f"output {path!r} cannot be written: make its folder first",
    )


class BenchOptions(Options):
    """What every measurement takes."""

    group = "measurement"
    model: str | None = option(
        None,
        "a shape with random weights (qwen3-0.6b, smollm2-135m, tiny) or a model folder; default: qwen3-0.6b on cuda, "
        "tiny on cpu",
        group="files",
    )
    output: str | None = option(None, "write all rows to this JSON file", group="files")
    device: str = option("auto", "where to run", ("auto", "cpu", "cuda"))
    dtype: str = option("auto", "weights and activations; auto: bfloat16 on cuda, float32 on cpu", DTYPES)
    seed: int = option(0, "seed of weights, tokens and lengths")
    memory: MemoryOptions = nested(MemoryOptions)

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "seed", 0, 2**63 - 1)  # requests use seed + 1000 times their number
        check_output(self.output)


class KernelsBench(BenchOptions):
    tokens: int = option(16384, "rows of a training or prefill pass")
    sequences: int = option(32, "how many sequences these tokens are")
    context: int = option(800, "keys of each sequence in decoding")
    batch: int = option(256, "sequences that decode together")
    only: list[str] | None = option(None, "only these array functions, for example attention_forward")
    repeats: int = option(5, "batches of calls; the median counts")
    batch_milliseconds: float = option(20.0, "a batch holds as many calls as last this long")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokens", "sequences", "context", "batch", "repeats"):
            check_range(self, name, 1)
        check_range(self, "batch_milliseconds", 0, open_low=True)
        require(
            self.sequences <= self.tokens,
            f"sequences={self.sequences} must not exceed tokens={self.tokens}: each holds at least one token",
        )


class GenerateBench(BenchOptions):
    workload: str = option(
        "N",
        "N: 256 requests, prompts and outputs of 100 to 1,024 tokens, temperature 0.6; G: 64 prompts of 200, 8 "
        "samples of 512, temperature 1; decode: 1 and 8 sequences, prompt 128, 256 tokens",
        WORKLOADS,
    )
    scale: float | None = option(None, "multiplies counts and lengths; default: 1 on cuda, 0.1 on cpu")
    repeats: int = option(2, "measured runs, after two that are not")
    batches: list[int] | None = option(None, "sequences of each decode workload; default: 1 and 8")
    engine: EngineConfig = nested(EngineConfig, without=("seed", *LORA_OPTIONS))
    lora: LoraOptions = nested(LoraOptions)
    tensor: TensorOptions = nested(TensorOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        for batch in self.batches or ():
            require(batch >= 1, f"batches must be at least 1, got {batch}")
        check_range(self, "repeats", 1)
        check_range(self, "scale", 0, 1, open_low=True)


class TrainBench(BenchOptions):
    preset: str | None = option(
        None, "named sizes: T1 (the default at scale 1) is 32 rows of 712 tokens, T2 is 16 of 2,048, all in the loss"
    )
    rows: int | None = option(None, "sequences of a step, of each process; default: 32 times scale")
    tokens_per_row: int | None = option(None, "length of each; default: 712 times scale")
    completion: int | None = option(None, "last tokens of each, which the loss is taken on; default: 512 times scale")
    scale: float | None = option(None, "multiplies these defaults; default: 1 on cuda, 0.1 on cpu")
    max_tokens_per_batch: int | None = option(None, "most tokens in one forward pass; default: the whole step")
    gradient_checkpointing: str | None = option(
        None, f"{CHECKPOINTING}; default: full, selective and none, one after the other", (*LEVELS, "auto"), bools=BOOLS
    )
    repeats: int = option(3, "measured steps, after one that is not; the median counts")
    states: StateOptions = nested(StateOptions)
    parallel: ParallelOptions = nested(ParallelOptions)
    lora: LoraOptions = nested(LoraOptions)

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        return with_preset(values, presets.TRAIN)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rows", "completion", "max_tokens_per_batch", "repeats"):
            check_range(self, name, 1)
        check_range(self, "tokens_per_row", 2)
        check_range(self, "scale", 0, 1, open_low=True)


class GRPOBench(BenchOptions):
    preset: str | None = option(
        None,
        "named sizes: 64x8x512 (the default at scale 1) is 64 prompts of 200 tokens with 8 completions of 512, "
        "16x8x1024 is 16 prompts of 512 with 8 of 1,024",
    )
    prompts: int | None = option(None, "prompts of a step, of each process that trains; default: 64 times scale")
    num_generations: int = option(8, "completions of each prompt")
    prompt_length: int | None = option(None, "tokens of a prompt; default: 200 times scale")
    max_completion_length: int | None = option(None, "tokens of a completion; default: 512 times scale")
    scale: float | None = option(None, "multiplies these defaults; default: 1 on cuda, 0.05 on cpu")
    gradient_checkpointing: str = option("full", CHECKPOINTING, (*LEVELS, "auto"), bools=BOOLS)
    max_tokens_per_batch: int = option(16384, "most tokens in one forward pass")
    beta: float = option(0.0, "weight of the KL to a reference model; 0 loads none")
    repeats: int = option(3, "measured steps, after two that are not")
    steps: int | None = option(None, "steps in all, the two that are not measured included; in place of repeats")
    states: StateOptions = nested(StateOptions)
    parallel: ParallelOptions = nested(ParallelOptions)
    rollouts: RolloutOptions = nested(RolloutOptions)
    engine: EngineConfig = nested(EngineConfig, without=("seed", *LORA_OPTIONS))
    lora: LoraOptions = nested(LoraOptions)

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        return with_preset(values, presets.GRPO)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompts", "prompt_length", "max_completion_length", "repeats"):
            check_range(self, name, 1)
        check_range(self, "steps", 3)
        check_range(self, "num_generations", 2)
        check_range(self, "scale", 0, 1, open_low=True)


class PPOBench(BenchOptions):
    critic: str = option("shared", "shared: a value head on the policy; separate: a model of its own", CRITICS)
    rows: int | None = option(None, "sequences of an update; default: 64 times scale")
    tokens_per_row: int | None = option(None, "length of each; default: 2,048 times scale")
    completion: int | None = option(None, "last tokens of each, which are learnt; default: 1,536 times scale")
    scale: float | None = option(None, "multiplies these defaults; default: 1 on cuda, 0.1 on cpu")
    gradient_checkpointing: str = option("none", CHECKPOINTING, (*LEVELS, "auto"), bools=BOOLS)
    max_tokens_per_batch: int = option(16384, "most tokens in one forward pass")
    repeats: int = option(5, "measured updates, after two that are not; the median counts")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rows", "completion", "max_tokens_per_batch", "repeats"):
            check_range(self, name, 1)
        check_range(self, "tokens_per_row", 2)
        check_range(self, "scale", 0, 1, open_low=True)


class ScaleBench(Options):
    """What a step of GRPO would take on many GPUs: simulated from the times of one."""

    group = "measurement"
    model: str = option("qwen3-0.6b", "a shape (qwen3-0.6b, qwen3-8b, qwen3-32b, …) or a model folder", group="files")
    measured: list[str] | None = option(
        None,
        "reports of bench train, generate (G) and grpo on one GPU that replace what docs/BENCHMARKS.md has",
        group="files",
    )
    output: str | None = option(None, "write all rows to this JSON file", group="files")
    seed: int = option(0, "seed of the completions' lengths")
    gpus: list[int] = option([8, 64, 1024], "numbers of GPUs, a row each")
    gpus_per_host: int = option(8, "GPUs that NVLink connects")
    prompts: int | None = option(None, "prompts of a step in all; default: prompts_per_gpu times gpus")
    prompts_per_gpu: int | None = option(None, "prompts of a step for each GPU; default: 64")
    num_generations: int = option(8, "completions of each prompt")
    prompt_length: int = option(200, "tokens of a prompt")
    max_completion_length: int = option(512, "most tokens of a completion")
    completions: str = option(
        "fixed", "their lengths: all the longest; uniform from 1 to it; lognormal, cut off there", LENGTHS
    )
    mean_completion_length: float | None = option(
        None, "of lognormal lengths before they are cut off; default: a third of max_completion_length"
    )
    completion_spread: float = option(1.0, "standard deviation of the logarithm of lognormal lengths")
    completion_correlation: float = option(
        0.0, "of the logarithms of lognormal lengths of a prompt's completions: 0 to 1"
    )
    balance: str = option(
        "none",
        "groups that move from a rank that is behind to one that waits: none, waiting ones, or running ones too",
        BALANCES,
    )
    max_num_seqs: int = option(512, "sequences that decode together on a rank, which is tensor_parallel_size GPUs")
    max_tokens_per_batch: int = option(16384, "most tokens in one forward pass of training")
    gpu_memory_gb: float = option(141.0, "memory of a GPU; 0.9 of it without weights and states holds the KV cache")
    kv_cache_gb: float | None = option(None, "the KV cache of a GPU; default: what is left")
    nvlink_gb_per_s: float = option(360.0, "what a GPU sends by NVLink; default: 0.8 of the 450 of an H100 or H200")
    network_gb_per_s: float = option(40.0, "what a GPU sends by the network; default: 0.8 of 400 Gbit/s InfiniBand")
    nvlink_latency: float = option(5.0, "microseconds of a message by NVLink")
    network_latency: float = option(15.0, "microseconds of a message by the network")
    tensor_parallel_size: int = option(1, "GPUs that share each layer, in generation and in training")
    zero_stage: int = option(
        0, "0: every GPU holds all; 1: a share of AdamW's states; 2: of gradients too; 3: of weights too"
    )
    fast_reduction: bool = option(False, "gradients are added up in rings; default: in order of ranks")
    overlap: bool = option(True, "a bucket's gradients are added up while the last pass goes on; false: after it")
    rollout_share: float | None = option(None, "share of the GPUs that only generate; default: all do both, in turns")
    off_policy_steps: int = option(
        1, "with rollout_share: 1 trains on the rollout before while the next is drawn; 0: not"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "seed", 0, 2**63 - 1)
        check_range(self, "num_generations", 2)
        for name in ("gpus_per_host", "prompts", "prompts_per_gpu", "prompt_length", "max_completion_length"):
            check_range(self, name, 1)
        for name in ("max_num_seqs", "max_tokens_per_batch", "tensor_parallel_size"):
            check_range(self, name, 1)
        for name in ("gpu_memory_gb", "kv_cache_gb", "nvlink_gb_per_s", "network_gb_per_s", "mean_completion_length"):
            check_range(self, name, 0, open_low=True)
        for name in ("nvlink_latency", "network_latency", "completion_spread"):
            check_range(self, name, 0)
        check_range(self, "completion_correlation", 0, 1)
        check_range(self, "rollout_share", 0, 0.99, open_low=True)
        check_range(self, "off_policy_steps", 0, 1)
        check_range(self, "zero_stage", 0, 3)
        require(
            self.prompts is None or self.prompts_per_gpu is None,
            f"prompts={self.prompts} and prompts_per_gpu={self.prompts_per_gpu} say two things: give one of them",
        )
        self._check_places()
        check_output(self.output)

    def _check_places(self) -> None:
        host, share = self.gpus_per_host, self.tensor_parallel_size
        require(
            host % share == 0,
            f"tensor_parallel_size={share} must divide gpus_per_host={host}: layers are shared by NVLink",
        )
        require(self.gpus, "gpus must name at least one number")
        for number in self.gpus:
            fits = number > 0 and (number <= host or number % host == 0)
            require(fits, f"gpus must be 1 to gpus_per_host={host} or a multiple of that, got {number}")
            require(number % share == 0, f"tensor_parallel_size={share} must divide gpus, got {number}")
