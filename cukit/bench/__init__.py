"""Measurements: each array function against the hardware's limits, generation and training workloads. Here: their
options.
"""

from dataclasses import dataclass
from pathlib import Path

from ..models.config import DTYPES
from ..options import option

WORKLOADS = ("N", "G", "decode")


def _check_at_least(options, low: int, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}")


def _check_scale(scale: float | None) -> None:
    if scale is not None and not 0 < scale <= 1:
        raise ValueError(f"scale must be above 0 and at most 1, got {scale}")


@dataclass
class BenchOptions:
    """What every measurement takes."""

    model: str | None = option(
        None,
        "a shape with random weights (qwen3-0.6b, smollm2-135m, tiny) or a model folder; default: qwen3-0.6b on cuda, "
        "tiny on cpu",
    )
    device: str = option("auto", "where to run", ("auto", "cpu", "cuda"))
    dtype: str = option("auto", "weights and activations; auto: bfloat16 on cuda, float32 on cpu", DTYPES)
    seed: int = option(0, "seed of weights, tokens and lengths")
    output: str | None = option(None, "write all rows to this JSON file")

    def __post_init__(self):
        _check_at_least(self, 0, "seed")
        if self.output is not None and not Path(self.output).absolute().parent.is_dir():
            raise ValueError(f"output {self.output!r} cannot be written: make its folder first")


@dataclass
class KernelsBench(BenchOptions):
    tokens: int = option(16384, "rows of a training or prefill pass")
    sequences: int = option(32, "how many sequences these tokens are")
    context: int = option(800, "keys of each sequence in decoding")
    batch: int = option(256, "sequences that decode together")
    only: list[str] | None = option(None, "only these array functions, for example attention_forward")
    repeats: int = option(5, "batches of calls; the median counts")
    batch_milliseconds: float = option(20.0, "a batch holds as many calls as last this long")

    def __post_init__(self):
        super().__post_init__()
        _check_at_least(self, 1, "tokens", "sequences", "context", "batch", "repeats")
        if self.sequences > self.tokens:
            raise ValueError(
                f"sequences={self.sequences} must not exceed tokens={self.tokens}: each holds at least one token"
            )
        if not self.batch_milliseconds > 0:
            raise ValueError(f"batch_milliseconds must be above 0, got {self.batch_milliseconds}")


@dataclass
class GenerateBench(BenchOptions):
    workload: str = option(
        "N",
        "N: 256 requests, prompts and outputs of 100 to 1,024 tokens, temperature 0.6; G: 64 prompts of 200, 8 "
        "samples of 512, "
        "temperature 1; decode: 1 and 8 sequences, prompt 128, 256 tokens",
        WORKLOADS,
    )
    scale: float | None = option(None, "multiplies counts and lengths; default: 1 on cuda, 0.1 on cpu")
    repeats: int = option(2, "measured runs, after two that are not")

    def __post_init__(self):
        super().__post_init__()
        if self.workload not in WORKLOADS:
            raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {self.workload!r}")
        _check_at_least(self, 1, "repeats")
        _check_scale(self.scale)


@dataclass
class TrainBench(BenchOptions):
    rows: int | None = option(None, "sequences of a step; default: 32 times scale")
    tokens_per_row: int | None = option(None, "length of each; default: 712 times scale")
    completion: int | None = option(None, "last tokens of each, which the loss is taken on; default: 512 times scale")
    scale: float | None = option(None, "multiplies these defaults; default: 1 on cuda, 0.1 on cpu")
    max_tokens_per_batch: int | None = option(None, "most tokens in one forward pass; default: the whole step")
    repeats: int = option(3, "measured steps, after one that is not; the median counts")

    def __post_init__(self):
        super().__post_init__()
        _check_at_least(self, 1, "rows", "completion", "max_tokens_per_batch", "repeats")
        _check_at_least(self, 2, "tokens_per_row")
        _check_scale(self.scale)
