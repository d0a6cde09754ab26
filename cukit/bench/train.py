"""bench train: a training step (log-prob loss on the completions of packed rows, backward, AdamW) at each level of
gradient_checkpointing, and the forward pass alone. Memory by two meters: what arrays take, and what the driver counts.
"""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..autograd import no_grad
from ..models.config import LEVELS
from ..models.logprobs import packed_logprobs, predicting_states
from ..optim import AdamW
from ..options import require
from ..parallel.config import ParallelOptions, launched_rank, num_processes
from ..parallel.group import Group
from ..trainers.batch import PackedBatch, Rows
from ..trainers.gradient_sums import GradientSums
from ..trainers.in_backward import UpdateInBackward
from ..trainers.loss import backward, first_gradient
from ..trainers.ranks import Ranks
from ..trainers.sharded_weights import ShardedWeights
from ..trainers.state import POLICY, TrainedModel, shard_weights
from ..trainers.zero import ShardedAdamW
from . import TrainBench
from .levels import level_for
from .measure import DriverPeak, memory_in_use, peak_memory, seconds_of
from .report import new_report
from .subject import Subject, build_model, check_length, choose_subject, scale_of, scaled

ROWS, TOKENS_PER_ROW, COMPLETION = 32, 712, 512
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Step:
    """The rows of one optimizer step on the device, cut into micro-batches. Of several processes: this one's rows, and
    the tokens of all.
    """

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
    sharing = options.parallel.tensor_parallel_size
    tokens = np.random.default_rng(options.seed + launched_rank() // sharing).integers(
        0, subject.config.vocab_size, (rows, length)
    )
    mask = np.tile(np.arange(length) >= length - completion, rows)
    batch = PackedBatch.build(list(tokens), mask).to(subject.backend)
    parts = batch.micro_batches(0, options.max_tokens_per_batch or rows * length)
    everyone = num_processes() // sharing
    return Step(parts, rows * length * everyone, rows * completion * everyone)


def run(options: TrainBench) -> dict:
    """The report: a row for the forward pass alone, and one each for training at the levels that are asked for."""
    subject = choose_subject(options)
    before = memory_in_use(subject.backend)
    scale = scale_of(options, subject)
    step = make_step(options, subject, scale)
    ranks = Ranks(options=options.parallel)
    model = build_model(subject, options.seed, options.lora, ranks.tensor)
    report = new_report("train", subject, options) | {"scale": scale, "micro_batches": len(step.micro_batches)}
    report["processes"] = num_processes()
    rows = report["rows"]
    # from the least memory to the most, since a CPU's process only knows its highest point
    rows.append(_row("log-probs, no gradient", None, lambda: _logprobs(model, step), subject, step, options, before))
    states = options.states
    require(
        not states.optimizer_in_bwd or len(step.micro_batches) == 1,
        f"optimizer_in_bwd=true needs one pass an update, and max_tokens_per_batch={options.max_tokens_per_batch} "
        f"makes {len(step.micro_batches)}: raise it",
    )
    require(
        not states.optimizer_in_bwd or num_processes() == 1,
        "optimizer_in_bwd=true updates a layer before the gradients of several processes are added up; leave it out",
    )
    offload = states.offload_optimizer and subject.backend.name != "cpu"
    kind: Any = AdamW
    if options.parallel.zero_stage and ranks.size > 1:
        group, stage = ranks.group, options.parallel.zero_stage
        kind = partial(ShardedAdamW, group=group.on(subject.backend), host=group, stage=stage)
    weights = shard_weights(model, options.parallel.zero_stage, ranks)
    optimizer = kind(model.trained_store, LEARNING_RATE, state_form=states.optimizer_state, offload=offload)
    tokens = options.max_tokens_per_batch or step.tokens
    given = options.gradient_checkpointing
    levels = LEVELS[::-1] if given is None else [level_for(given, [model], tokens, len(step.micro_batches))]
    for level in levels:
        model.gradient_checkpointing = level
        rows.append(
            _row(
                "forward, backward, AdamW",
                level,
                lambda: _train(model, optimizer, step, states.optimizer_in_bwd, ranks, options.parallel, weights),
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
    name: str, level: str | None, function, subject: Subject, step: Step, options: TrainBench, before: int
) -> dict:
    row = {
        "pass": name,
        "gradient_checkpointing": level,
        "tokens": step.tokens,
        "completion_tokens": step.completion_tokens,
    }
    subject.backend.free_unused_memory()  # what the row before left
    try:
        with DriverPeak(subject.backend) as driver:
            function()  # compiles kernels, tries products, fills pools
            samples = [seconds_of(subject.backend, function) for _ in range(options.repeats)]
            peak = peak_memory(subject.backend, function, before)
            driver_gb = driver.gb
    except MemoryError:  # CuPy's is one too; the rows before stay worth having
        return row | {
            "seconds": None,
            "all_seconds": [],
            "tokens_per_s": None,
            "peak_gb": None,
            "driver_gb": None,
            "note": "out of memory: lower --max_tokens_per_batch",
        }
    seconds = statistics.median(samples)
    return row | {
        "seconds": seconds,
        "all_seconds": samples,
        "tokens_per_s": step.tokens / seconds,
        "peak_gb": peak / 1e9,
        "driver_gb": driver_gb,
        "note": "peak of the process" if subject.backend.name == "cpu" else "",
    }


def _logprobs(model, step: Step) -> None:
    with no_grad():
        for rows in step.micro_batches:
            model.backend.to_numpy(packed_logprobs(model, rows.tokens)[0].data)


def _train(
    model,
    optimizer: AdamW,
    step: Step,
    in_backward: bool = False,
    ranks: Ranks | None = None,
    parallel: ParallelOptions | None = None,
    weights: ShardedWeights | None = None,
) -> None:
    def mean(logprobs, entropy, part):
        return logprobs.sum() * (-1 / step.completion_tokens), None

    update = UpdateInBackward([(optimizer, optimizer.lr)]) if in_backward else None

    def passes(gradients: GradientSums | None) -> tuple[dict, bool]:
        around = update.updating if update else gradients.summing if gradients else nullcontext
        for rows in step.micro_batches:
            upstream = first_gradient(model, optimizer.loss_scale)
            loss, *_ = model.lm_head.loss(predicting_states(model, rows.tokens), rows.targets, mean, upstream)
            with around():
                backward(loss, upstream)
            if gradients is not None:
                gradients.end_pass()
        return {}, True

    models = {POLICY: TrainedModel(POLICY, model, optimizer, weights=weights)}
    fast = parallel is not None and parallel.fast_reduction
    (ranks or Ranks(Group())).total(passes, models, models, [(POLICY,)] * len(step.micro_batches), fast)
    if model.tensor is not None:
        model.tensor.complete_gradients(model.trained_store)
    if update is None:
        optimizer.step()
    else:
        update.end()
    if model.adapter is not None:
        model.adapter.refresh()
