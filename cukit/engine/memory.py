"""The memory planner: what a run will hold on its device, item by item and phase by phase.

It sizes the KV cache from what is left, says whether the cache must sleep while training runs, and refuses a run that
cannot fit. It needs shapes alone: neither weights nor a card.

Two phases share the device. In `rollout` the engine computes prompts and decodes; in `training` a forward pass keeps
its activations and the backward pass uses them up. What lasts (weights, optimizer state, the step that is captured as a
graph, the cache unless it sleeps) counts in both. Both phases take their temporary arrays from one pool, so the peak
is the larger phase, not the sum.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from ..models.config import LEVELS, ModelConfig
from ..options import changed, say_once
from .config import EngineConfig
from .shapes import (
    CONTEXT_BYTES,
    HEAD_ROWS,
    STEPS,
    WORKSPACE_BYTES,
    Item,
    ModelUse,
    block_bytes,
    cache_dtype,
    lasting_items,
    logit_columns,
    rollout_items,
    training_items,
    weight_bytes,
)
from .tensor_parallel import least_memory

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 4 << 30  # the KV cache of the CPU grows to this at most unless num_kv_blocks says otherwise
# CuPy's pool keeps what it once took, and not every array fits into its gaps. So the driver sees this share more than
# the arrays of a phase. In training it also sees one chunk of logits (its size changes with the batch) and what prompts
# took in the rollout. The numbers come from the six runs of tests/oracle/memory_plan.py.
POOL_WASTE = 0.08
# A sleeping cache costs twice 0.1 s a step. It is worth that only where it then holds this many times more.
SLEEP_GAIN = 1.4
PACKED_BYTES = 40  # of one token of a packed batch: ids, positions, mask, and float32 columns
LARGEST = 4  # items that an error names
GAPS = "gaps in the pool"
MEMORY_LIMIT = "memory_limit"


class DoesNotFit(ValueError):
    """A run that cannot fit. plan: what it would hold, with a cache or without."""

    def __init__(self, message: str, plan: Plan):
        super().__init__(message)
        self.plan = plan


@dataclass(frozen=True)
class Plan:
    """What a run will hold. limit: bytes that it may take, by the option `rule` (empty: what the device has)."""

    items: tuple[Item, ...]
    limit: int
    num_kv_blocks: int = 0
    max_model_len: int = 0
    sleeps_cache: bool = False
    kv_bytes: int = 0
    share: float | None = None  # gpu_memory_utilization; None without an engine
    rule: str = ""
    level: str = ""  # of gradient_checkpointing; "" where nothing is trained
    why: str = ""  # auto took it

    def phase_bytes(self, phase: str) -> int:
        """Bytes in "rollout" or "training", with what lasts."""
        found = sum(item.nbytes for item in self.items if item.phase in ("always", phase))
        return found + (0 if phase == "training" and self.sleeps_cache else self.kv_bytes)

    @property
    def step_bytes(self) -> int:
        """The temporary memory that captured steps share."""
        return sum(item.nbytes for item in self.items if item.name == STEPS)

    @property
    def phases(self) -> list[str]:
        return [phase for phase in ("rollout", "training") if any(item.phase == phase for item in self.items)]

    @property
    def share_option(self) -> str:
        """The option that sets the limit."""
        return MEMORY_LIMIT if self.rule == MEMORY_LIMIT else "gpu_memory_utilization"

    @property
    def peak_bytes(self) -> int:
        """What the driver will count at the most, as far as shapes tell."""
        return max(map(self.phase_bytes, self.phases), default=self.phase_bytes("rollout"))

    @property
    def least_bytes(self) -> int:
        """The peak where the pool wastes nothing."""
        return self.peak_bytes - max((item.nbytes for item in self.items if item.name == GAPS), default=0)

    @property
    def is_tight(self) -> bool:
        """Whether it fits only where the pool wastes less than is reckoned with."""
        return self.least_bytes <= self.limit < self.peak_bytes

    def table(self) -> str:
        """A line an item: phase, bytes, name; then the phases' sums and what is left."""
        items = list(self.items)
        if self.kv_bytes:
            phase = "rollout" if self.sleeps_cache else "always"
            sleeps = "; it sleeps in training" if self.sleeps_cache else ""
            items.append(Item(f"KV cache, {self.num_kv_blocks} blocks{sleeps}", self.kv_bytes, phase))
        order = {"always": 0, "rollout": 1, "training": 2}
        items.sort(key=lambda item: (order[item.phase], -item.nbytes))
        lines = [f"{item.phase:<9}{gigabytes(item.nbytes):>11}  {item.name}" for item in items if item.nbytes]
        lines += [f"{'peak':<9}{gigabytes(self.phase_bytes(phase)):>11}  {phase}" for phase in self.phases]
        if self.level:
            lines.append(f"{'level':<9}{self.level:>11}  of gradient_checkpointing{self.why}")
        rule = f" ({self.rule})" if self.rule else ""
        tight = "; it fits only with smaller gaps" if self.is_tight else ""
        left = gigabytes(self.limit - self.peak_bytes)
        lines.append(f"{'left':<9}{left:>11}  of {gigabytes(self.limit)}{rule}{tight}")
        return "\n".join(lines)


def gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if abs(nbytes) >= 1e7 else f"{nbytes / 1e6:.2f} MB"


def plan_memory(
    uses: list[ModelUse],
    engine: EngineConfig | None,
    backend,
    *,
    gradient_checkpointing: str = "full",
    quiet: bool = False,
    **sizes: Any,
) -> Plan:
    """The plan of a run with these models; the engine (None: there is none) runs the first of them.

    gradient_checkpointing: its level, or "auto" for the fastest that fits and takes nothing from the cache. quiet: no
    warning. sizes: what plan_at_level takes besides.

    DoesNotFit for a max_model_len that does not fit, and on a card for a run that does not.
    """

    def tried(level: str) -> tuple[Plan, bool]:
        try:
            return plan_at_level(uses, engine, backend, level, True, **sizes), True
        except DoesNotFit as error:
            return error.plan, False

    level, why = gradient_checkpointing, ""
    if level == "auto":
        level, why = _fastest({level: tried(level) for level in LEVELS})
    try:
        plan = plan_at_level(uses, engine, backend, level, quiet, **sizes)
    except DoesNotFit as error:
        for leaner in () if quiet else LEVELS[LEVELS.index(level) + 1 :]:
            if tried(leaner)[1]:
                raise DoesNotFit(f"{error}, or set gradient_checkpointing={leaner}", error.plan) from None
        raise
    if plan.is_tight and backend.name == "cuda" and not quiet:
        logger.warning(
            "this run may end in out-of-memory: with the usual gaps in the pool it takes %s, and it may take %s; %s",
            *(gigabytes(plan.peak_bytes), gigabytes(plan.limit), _ways_out(_largest_phase(plan), plan)),
        )
    return replace(plan, why=why) if plan.level else plan


def _fastest(plans: dict[str, tuple[Plan, bool]]) -> tuple[str, str]:
    """The first level that fits, gaps included, and leaves the cache as it is at the last level; else the last. And
    why. plans: of all levels, and whether they fit where the pool wastes nothing.
    """
    leanest, why = plans[LEVELS[-1]][0], []
    for level in LEVELS[:-1]:
        plan, fits = plans[level]
        if not fits or plan.peak_bytes > plan.limit:
            why.append(f"{level} needs {gigabytes(plan.peak_bytes)}")
        elif (plan.kv_bytes, plan.sleeps_cache) != (leanest.kv_bytes, leanest.sleeps_cache):
            why.append(f"{level} takes memory from the KV cache")
        else:
            return level, f", by auto: {'; '.join([*why, 'the fastest that fits'])}"
    return LEVELS[-1], f", by auto: {'; '.join(why)}"


def plan_at_level(
    uses: list[ModelUse],
    engine: EngineConfig | None,
    backend,
    level: str,
    quiet: bool = False,
    *,
    max_tokens_per_batch: int = 0,
    micro_batches: int = 2,
    longest_sequence: int | None = None,
    packed_tokens: int = 0,
    ranks: int = 1,
    zero_stage: int = 1,
    total_bytes: int | None = None,
    free_bytes: int | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """plan_memory() at a level of gradient_checkpointing.

    max_tokens_per_batch: of a training forward pass. micro_batches: passes an update; with one, gradients appear only
    as activations go. longest_sequence: of the run's sequences, prompt and completion together. packed_tokens: of a
    generation batch that stays on the device. ranks: processes that share optimizer states out, from zero_stage 2 on
    gradients, from 3 on weights in training. total_bytes, free_bytes: of the device, asked of the backend by default;
    free is what is not taken yet. memory_limit: bytes that this process may take in all; by default the backend's.

    The cache holds max_num_seqs sequences of max_model_len, or what is left. gpu_memory_utilization is the share of the
    device's whole memory that this process may take for everything (vLLM's meaning); on a CPU the share of the free
    memory that may be taken beyond what is loaded, with a cache of CPU_CACHE_BYTES at most. Of it and memory_limit the
    smaller rules. Where the cache is smaller than a default max_model_len, that is lowered, with a warning unless
    quiet.
    """
    if free_bytes is None or total_bytes is None:
        free_bytes, total_bytes = backend.memory_info()
    on_card, share = backend.name == "cuda", 1.0 if engine is None else engine.gpu_memory_utilization
    items = lasting_items(uses, backend, ranks, zero_stage)
    if on_card:
        items += [Item("CUDA context and kernels", CONTEXT_BYTES), Item("cuBLAS workspace", WORKSPACE_BYTES)]
    if any(use.trained for use in uses):
        tokens = backend.row_bucket(max(max_tokens_per_batch, longest_sequence or 0))
        items += training_items(uses, backend, tokens, level, micro_batches, ranks, zero_stage)
        items.append(Item("packed batch", packed_tokens * PACKED_BYTES))
    if engine is not None:
        _check_length(uses[0].config, engine)
        items += rollout_items(uses[0], engine, backend)
    items = _with_waste(items, uses, backend) if on_card else items
    taken = sum(weight_bytes(use, backend) for use in uses if use.loaded)
    if on_card:
        limit, whole = min(int(share * total_bytes), free_bytes + taken + CONTEXT_BYTES), gigabytes(total_bytes)
    else:
        limit, whole = taken + int(share * free_bytes), f"{gigabytes(free_bytes)} free"
    rule = "" if engine is None else f"gpu_memory_utilization {share:g} of {whole}"
    memory_limit = backend.memory_limit() if memory_limit is None else memory_limit
    if memory_limit is not None and memory_limit < limit:
        limit, rule = memory_limit, MEMORY_LIMIT
    level = level if any(use.trained for use in uses) else ""
    plan = Plan(tuple(items), limit, share=None if engine is None else share, rule=rule, level=level)
    plan = _checked(plan, on_card, quiet or engine is not None)  # with an engine a warning comes once, with its cache
    if engine is not None:
        plan = _checked(_with_cache(plan, uses[0], engine, backend, longest_sequence, quiet), on_card, quiet)
    return plan


def hold_memory(backend, nbytes: int | None) -> None:
    """Hold this process to memory_limit; None: no limit."""
    backend.limit_memory(nbytes)
    if nbytes is not None and backend.name == "cpu":
        say_once(logger, "memory_limit bounds the plan alone on a CPU: the system may give this process more")


def planned(config: EngineConfig, model, quiet: bool = False) -> tuple[Plan, EngineConfig]:
    """The plan of an engine alone with a loaded model, and config with max_model_len and num_kv_blocks filled in.
    quiet: no warning.
    """
    gathers = model.tensor is not None and model.tensor.invariant
    use = ModelUse("model", model.own_config, model.dtype, loaded=True, gathers=gathers)
    plan = plan_memory([use], config, model.backend, quiet=quiet, **least_memory(model.tensor, model.backend))
    return plan, changed(config, max_model_len=plan.max_model_len, num_kv_blocks=plan.num_kv_blocks)


# ---- parts ----


def _check_length(config: ModelConfig, engine: EngineConfig) -> None:
    longest = config.max_position_embeddings
    if engine.max_model_len is not None and engine.max_model_len > longest:
        raise ValueError(f"max_model_len={engine.max_model_len} exceeds the model's max_position_embeddings={longest}")


def _with_waste(items: list[Item], uses, backend) -> list[Item]:
    """The items, and in each phase the part of the pool that fits nothing."""
    pooled = [item for item in items if item.pooled]
    passing = {phase: sum(item.nbytes for item in pooled if item.phase == phase) for phase in ("rollout", "training")}
    chunks = [HEAD_ROWS * logit_columns(use.config) * backend.dtype_of(use.dtype).itemsize * use.head for use in uses]
    waste = {phase: int(nbytes * POOL_WASTE) for phase, nbytes in passing.items() if nbytes}
    if "training" in waste:
        waste["training"] += min(max(chunks), passing["training"] // 4) + passing["rollout"]
    return [*items, *(Item(GAPS, nbytes, phase) for phase, nbytes in waste.items())]


def _with_cache(plan: Plan, use: ModelUse, engine: EngineConfig, backend, longest_sequence, quiet: bool) -> Plan:
    """The plan with the cache's size, whether it sleeps, and the max_model_len that holds."""
    size, config = engine.block_size, use.config
    if engine.kv_cache_dtype == "fp8" and backend.name == "cuda" and config.head_dim % 8:
        raise ValueError(
            f"kv_cache_dtype=fp8 needs a head_dim that is a multiple of 8 on a card, got {config.head_dim}: use auto"
        )
    block = block_bytes(config, cache_dtype(engine, backend.dtype_of(use.dtype)), size)
    length = engine.max_model_len or config.max_position_embeddings
    asleep = (plan.limit - plan.phase_bytes("rollout")) // block
    awake = (plan.limit - plan.peak_bytes) // block if backend.name == "cuda" else min(asleep, CPU_CACHE_BYTES // block)
    blocks, needed, sleeps = engine.num_kv_blocks, -(-length // size), False  # needed: by one sequence
    if blocks is None:
        wanted = max(needed, engine.max_num_seqs * -(-min(length, longest_sequence or length) // size))
        if backend.name == "cuda" and awake < wanted:
            sleeps = asleep >= SLEEP_GAIN * awake or awake < needed <= asleep
        blocks = max(1, min(wanted, asleep if sleeps else awake))
    elif backend.name == "cuda":
        sleeps = awake < blocks <= asleep
    room = blocks * size
    if room < length and engine.max_model_len is not None:
        raise DoesNotFit(
            f"the KV cache has room for {room} tokens ({blocks} blocks of {size}), less than max_model_len={length}: "
            f"lower max_model_len, or raise num_kv_blocks or {plan.share_option}",
            plan,
        )
    if room < length and not quiet:
        logger.warning(
            "max_model_len is %d, not the model's own %d: the KV cache has room for %d blocks of %d tokens; "
            "free memory or raise %s for more",
            *(room, length, blocks, size, plan.share_option),
        )
    held, length = blocks * block, min(room, length)
    return replace(plan, num_kv_blocks=blocks, max_model_len=length, sleeps_cache=sleeps, kv_bytes=held)


def _checked(plan: Plan, on_card: bool, quiet: bool) -> Plan:
    """The plan; ValueError on a card, a warning elsewhere, if it does not fit even where the pool wastes nothing."""
    if plan.least_bytes <= plan.limit:
        return plan
    phase = _largest_phase(plan)
    held = [item for item in plan.items if item.phase in ("always", phase)]
    if plan.kv_bytes and not (plan.sleeps_cache and phase == "training"):
        held.append(Item("KV cache", plan.kv_bytes))
    largest = sorted(held, key=lambda item: -item.nbytes)[:LARGEST]
    message = (
        f"this run needs at least {gigabytes(plan.least_bytes)} of memory and may take {gigabytes(plan.limit)}; "
        "largest: "
        + ", ".join(f"{item.name} {gigabytes(item.nbytes)}" for item in largest)
        + f"; {_ways_out(phase, plan)}"
    )
    if on_card:
        raise DoesNotFit(message, plan)
    if not quiet:
        logger.warning("%s", message)
    return plan


def _largest_phase(plan: Plan) -> str:
    return max(plan.phases, key=plan.phase_bytes, default="rollout")


def _ways_out(phase: str, plan: Plan) -> str:
    last, ways = "take a smaller dtype", []
    if phase == "training":
        ways = ["max_tokens_per_batch"]
    if plan.share is not None:
        ways += ["max_num_seqs", "max_model_len", "num_kv_blocks"]
    if any("AdamW's moments" in item.name and item.nbytes for item in plan.items):
        last += ", a leaner optimizer_state or offload_optimizer"
    share = f", or raise {plan.share_option}" if plan.rule == MEMORY_LIMIT or plan.share not in (None, 1.0) else ""
    return f"lower {', '.join(ways)}, or {last}{share}"
