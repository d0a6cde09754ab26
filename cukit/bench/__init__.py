"""Measurements: each array function against the hardware's limits; generation and training workloads. This file holds
their options.
"""

from pathlib import Path
from typing import Any

from ..engine.config import LORA_OPTIONS, EngineConfig, MemoryOptions
from ..models.config import DTYPES, LEVELS, LEVELS_OF_BOOLS
from ..options import Options, check_choices, check_range, nested, option, require
from ..parallel.config import ParallelOptions
from ..trainers.lora_config import LoraOptions
from ..trainers.memory_config import StateOptions
from . import presets
from .presets import with_preset

WORKLOADS = ("N", "G", "decode")
CRITICS = ("shared", "separate")
CHECKPOINTING = "what the backward pass makes again; auto: the fastest that fits; true is full, false none"
BOOLS = (LEVELS_OF_BOOLS[False], LEVELS_OF_BOOLS[True])


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
        require(
            self.output is None or Path(self.output).absolute().parent.is_dir(),
            f"output {self.output!r} cannot be written: make its folder first",
        )


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
    engine: EngineConfig = nested(EngineConfig, without=("seed", *LORA_OPTIONS))
    lora: LoraOptions = nested(LoraOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
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
    prompts: int | None = option(None, "prompts of a step, of each process; default: 64 times scale")
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
