"""bench train: a training step (log-prob loss on the completions of packed rows, backward, AdamW) with and without
recomputation, and the forward pass alone.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from ..autograd import no_grad
from ..models.logprobs import packed_logprobs, predicting_states
from ..optim import AdamW
from ..trainers.batch import PackedBatch, Rows
from ..trainers.loss import backward, first_gradient
from . import TrainBench
from .measure import memory_in_use, peak_memory, seconds_of
from .report import new_report
from .subject import Subject, build_model, check_length, choose_subject, scale_of, scaled

ROWS, TOKENS_PER_ROW, COMPLETION = 32, 712, 512
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Step:
    """The rows of one optimizer step on the device, cut into micro-batches."""

    micro_batches: list[Rows]
    tokens: int
    completion_tokens: int


def make_step(options: TrainBench, subject: Subject, scale: float) -> Step:
    """Random tokens; the loss is taken on the last `completion` of each row."""
    rows = options.rows or scaled(ROWS, scale)
    length = options.tokens_per_row or max(2, scaled(TOKENS_PER_ROW, scale))
    completion = options.completion or scaled(COMPLETION, scale)
    if completion >= length:
        raise ValueError(
            f"completion={completion} must be below tokens_per_row={length}: nothing precedes a row's first token"
        )
    check_length(subject, length, "lower --tokens_per_row or --scale")
    tokens = np.random.default_rng(options.seed).integers(0, subject.config.vocab_size, (rows, length))
    mask = np.tile(np.arange(length) >= length - completion, rows)
    batch = PackedBatch.build(list(tokens), mask).to(subject.backend)
    parts = batch.micro_batches(0, options.max_tokens_per_batch or rows * length)
    return Step(parts, rows * length, rows * completion)


def run(options: TrainBench) -> dict:
    """The report: a row for the forward pass alone, and one each for training with and without recomputation."""
    subject = choose_subject(options)
    before = memory_in_use(subject.backend)
    scale = scale_of(options, subject)
    step = make_step(options, subject, scale)
    model = build_model(subject, options.seed, options.lora)
    report = new_report("train", subject, options) | {"scale": scale, "micro_batches": len(step.micro_batches)}
    rows = report["rows"]
    # from the least memory to the most, since a CPU's process only knows its highest point
    rows.append(_row("log-probs, no gradient", None, lambda: _logprobs(model, step), subject, step, options, before))
    optimizer = AdamW(model.trained_store, LEARNING_RATE)
    for recompute in (True, False):
        model.gradient_checkpointing = recompute
        rows.append(
            _row(
                "forward, backward, AdamW",
                recompute,
                lambda: _train(model, optimizer, step),
                subject,
                step,
                options,
                before,
            )
        )
        if optimizer.skipped:  # an update that was skipped took less time
            rows[-1]["note"] = f"{optimizer.skipped} updates skipped: gradient not finite"
    return report


def _row(
    name: str, recompute: bool | None, function, subject: Subject, step: Step, options: TrainBench, before: int
) -> dict:
    row = {
        "pass": name,
        "gradient_checkpointing": recompute,
        "tokens": step.tokens,
        "completion_tokens": step.completion_tokens,
    }
    try:
        function()  # compiles kernels, tries products, fills pools
        samples = [seconds_of(subject.backend, function) for _ in range(options.repeats)]
        peak = peak_memory(subject.backend, function, before)
    except MemoryError:  # CuPy's is one too; the rows before stay worth having
        return row | {
            "seconds": None,
            "all_seconds": [],
            "tokens_per_s": None,
            "peak_gb": None,
            "note": "out of memory: lower --max_tokens_per_batch",
        }
    seconds = statistics.median(samples)
    return row | {
        "seconds": seconds,
        "all_seconds": samples,
        "tokens_per_s": step.tokens / seconds,
        "peak_gb": peak / 1e9,
        "note": "peak of the process" if subject.backend.name == "cpu" else "",
    }


def _logprobs(model, step: Step) -> None:
    with no_grad():
        for rows in step.micro_batches:
            model.backend.to_numpy(packed_logprobs(model, rows.tokens)[0].data)


def _train(model, optimizer: AdamW, step: Step) -> None:
    def mean(logprobs, entropy, part):
        return logprobs.sum() * (-1 / step.completion_tokens), None

    for rows in step.micro_batches:
        upstream = first_gradient(model, optimizer.loss_scale)
        loss, *_ = model.lm_head.loss(predicting_states(model, rows.tokens), rows.targets, mean, upstream)
        backward(loss, upstream)
    optimizer.step()
    if model.adapter is not None:
        model.adapter.refresh()
