"""How long one GPU takes for the parts of a GRPO step: fitted to rows of docs/BENCHMARKS.md, or to reports of bench."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ..engine.shapes import parameter_counts
from ..models.config import ModelConfig
from ..options import require
from .presets import GRPO, TRAIN

# Fitted to Qwen3-0.6B's shape in bfloat16 on an H200. docs/BENCHMARKS.md: T1 with full recompute, 105,932 tok/s, and
# log-probs without gradient, 396,842 tok/s (eighth section); G without an adapter, 62,057 and 61,757 tok/s (seventh);
# N, 22,731 and 22,616 tok/s (fourth); the generation of a step under 32 GB, 5.13 s, and decoding of one and of eight
# sequences of Qwen3-4B, 4.23 and 4.25 ms (eighth), of one and of 64 of Qwen3-8B, 6.27 and 6.70 ms (ninth). docs/LOG.md:
# decoding of one and of eight sequences, 1.791 and 1.672 ms. tests/bench/test_scale.py says how well these come back;
# form and constants were chosen by it, so it is no check of them. The figures of two GPUs there are one.
LAUNCH = 47.85e-6  # seconds a layer of a decode step that no size changes
WEIGHT_BYTES_PER_SECOND = 3.28e12  # at which a decode step reads the weights
ROW = 115e-9  # seconds a row and layer of a decode step, beside products and keys
KEY_BYTES_PER_SECOND = 4.03e12  # at which a decode step reads keys and values
PREFILL_TOKENS_PER_SECOND = 396_842.0
TRAIN_TOKENS_PER_SECOND = 107_900.0  # T1's without the update
FITTED_LENGTH = 712  # tokens of T1's rows
FITTED_PARAMETERS = 596_049_920
FITTED_WORK = 2 * FITTED_PARAMETERS + 2 * 28 * 2048 * FITTED_LENGTH  # FLOPs of a token's forward pass in T1
UPDATE_BYTES = 28  # a parameter: bfloat16 weight, remainder, two moments read and written, gradient read (adamw_step)
UPDATE_BYTES_PER_SECOND = 4.26e12  # what an H200 copies; AdamW reaches 93 to 99 % of that on an H100
PASS_PER_LAYER = 1.2e-3  # seconds that the host needs to launch a layer's training: 36 ms of SmolLM2's 30 (seventh)
OTHER = 0.04 / 512  # seconds a completion: what is neither generation nor training in the step of 64 x 8 (eighth)
BACKWARD = 0.75  # of a pass with full recompute: forward, then forward again and gradients of inputs and weights


@dataclass(frozen=True)
class Shape:
    """A model's sizes. Numbers, but for key_bytes: keys and values of one token in bfloat16."""

    name: str
    parameters: int
    layers: int
    hidden: int
    queries: int
    vocabulary: int  # of one matrix of vocabulary x hidden
    vocabularies: int
    key_bytes: int

    @classmethod
    def of(cls, name: str, config: ModelConfig) -> Shape:
        return cls(
            name,
            sum(parameter_counts(config)),
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads * config.head_dim,
            config.vocab_size * config.hidden_size,
            1 if config.tie_word_embeddings else 2,
            2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2,
        )

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with: an embedding beside a head of its own is looked up."""
        return self.parameters - (self.vocabularies - 1) * self.vocabulary

    def work(self, length: float) -> float:
        """FLOPs of a token's forward pass in a row of this length; half of all pairs are seen."""
        return 2 * self.multiplied + 2 * self.layers * self.queries * length

    @property
    def buckets(self) -> list[int]:
        """Numbers of the gradient's buckets in the order in which the backward pass completes them."""
        layer = (self.parameters - self.vocabularies * self.vocabulary) // self.layers
        return [self.vocabulary] * (self.vocabularies - 1) + [layer] * self.layers + [self.vocabulary]


@dataclass(frozen=True)
class Times:
    """Seconds of one GPU. A decode step takes launch + about the longer of weights and product · rows + row · rows
    + key · keys: few rows are multiplied while the weights come. A prompt's and a training token take what their FLOPs
    do.
    """

    launch: float
    weights: float
    product: float  # a row's FLOPs, at the rate of prompts
    row: float
    key: float
    prefill_flops: float  # a second, forward
    train_flops: float  # a second, counted as those of the forward pass alone
    pass_floor: float
    update: float
    other: float  # a completion
    token_waits: float = 0.0  # a token of a forward pass, for GPUs that share its layers
    pass_waits: float = 0.0  # a training pass, likewise

    def step(self, rows: float = 0) -> float:
        """Seconds of a decode step but for its keys. Where weights and products take as long, neither hides the other
        wholly: the fourth root of the sum of fourth powers, 19 % more than either there.
        """
        return self.launch + (self.weights**4 + (rows * self.product) ** 4) ** 0.25 + rows * self.row

    @classmethod
    def fitted(cls, shape: Shape) -> Times:
        """Those of Qwen3-0.6B's shape, scaled: per layer, per parameter, per byte, per FLOP."""
        return cls(
            launch=LAUNCH * shape.layers,
            weights=2 * shape.multiplied / WEIGHT_BYTES_PER_SECOND,
            product=2 * shape.multiplied / (PREFILL_TOKENS_PER_SECOND * FITTED_WORK),
            row=ROW * shape.layers,
            key=shape.key_bytes / KEY_BYTES_PER_SECOND,
            prefill_flops=PREFILL_TOKENS_PER_SECOND * FITTED_WORK,
            train_flops=TRAIN_TOKENS_PER_SECOND * FITTED_WORK,
            pass_floor=PASS_PER_LAYER * shape.layers,
            update=UPDATE_BYTES * shape.parameters / UPDATE_BYTES_PER_SECOND,
            other=OTHER,
        )

    def decoding(self, factor: float) -> Times:
        """A decode step takes `factor` times as long."""
        return replace(
            self,
            launch=self.launch * factor,
            weights=self.weights * factor,
            product=self.product * factor,
            row=self.row * factor,
            key=self.key * factor,
        )


@dataclass(frozen=True)
class Rollout:
    """A measured generation of one GPU: prompts, completions of each, tokens of both, seconds."""

    prompts: int
    samples: int
    prompt: int
    completion: int
    seconds: float


def read_report(path: str, name: str) -> dict:
    """The report of bench grpo, generate or train at `path`; ValueError in one line for anything else."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"measured {path!r} cannot be read: {reason}") from None
    kinds = ("grpo", "generate", "train")
    if not isinstance(report, dict) or report.get("benchmark") not in kinds or not report.get("rows"):
        raise ValueError(f"measured {path!r} has no rows of bench {', '.join(kinds)}: give the file of their --output")
    model = report["model"]
    require(model == name, f"measured {path!r} is about {model}, not {name}: give --model {model}")
    processes = report.get("processes", 1)
    require(processes == 1, f"measured {path!r} is of {processes} processes: give a report of one")
    if report["benchmark"] == "generate":
        kind = report["rows"][0]["workload"]
        require(kind == "G", f"measured {path!r} is of workload {kind}, which is no rollout of groups: measure G")
    return report


def with_report(times: Times, shape: Shape, report: dict) -> tuple[Times, Rollout | None]:
    """The times with what a report knows better; and its rollout, if it has one, which decoding is to be fitted to."""
    if report["benchmark"] == "train":
        return _with_training(times, shape, report), None
    row = report["rows"][0]
    if report["benchmark"] == "generate":
        prompts, seconds = row["requests"], _mean(report, "seconds")
        samples, prompt = row["samples"] // prompts, row["prompt_tokens"] // prompts
        return times, Rollout(prompts, samples, prompt, row["output_tokens"] // row["samples"], seconds)
    return _with_step(times, shape, report)


def _with_training(times: Times, shape: Shape, report: dict) -> Times:
    """The rates without a gradient, and at the first level of recomputation that was measured."""
    length = report["options"]["tokens_per_row"] or max(2, round(TRAIN["T1"]["tokens_per_row"] * report["scale"]))
    rows = [row for row in report["rows"] if row["seconds"]]
    trained = [row for row in rows if row["gradient_checkpointing"] is not None]
    for row in rows:
        if row not in trained:
            times = replace(times, prefill_flops=row["tokens"] * shape.work(length) / row["seconds"])
    if trained:
        seconds = _without_update(trained[0]["seconds"], times)
        times = replace(times, train_flops=trained[0]["tokens"] * shape.work(length) / seconds)
    return times


def _with_step(times: Times, shape: Shape, report: dict) -> tuple[Times, Rollout]:
    options, samples, tokens = report["options"], report["rows"][0]["samples"], report["rows"][0]["tokens"]
    prompt = options["prompt_length"] or max(1, round(GRPO["64x8x512"]["prompt_length"] * report["scale"]))
    length, each = tokens // samples, options["num_generations"]
    generate, train = _mean(report, "generate_seconds"), _mean(report, "train_seconds")
    times = replace(
        times,
        train_flops=tokens * shape.work(length) / _without_update(train, times),
        other=max(_mean(report, "seconds") - generate - train, 0) / samples,
    )
    return times, Rollout(samples // each, each, prompt, length - prompt, generate)


def _without_update(seconds: float, times: Times) -> float:
    """Of a step; an update that is estimated longer than half of it is taken as half."""
    return max(seconds - times.update, seconds / 2)


def _mean(report: dict, key: str) -> float:
    return sum(row[key] for row in report["rows"]) / len(report["rows"])
