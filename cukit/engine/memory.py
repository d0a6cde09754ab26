"""The planner of memory: what a run holds on its device, item by item and phase by phase, before it holds it.

It sizes the KV cache from what is left, says whether the cache must sleep while training runs, and refuses a run that
cannot fit. It needs shapes alone: neither weights nor a card.

Two phases share the device. In `rollout` the engine computes prompts and decodes; in `training` a forward pass keeps
its activations and the backward pass uses them up. What lasts (weights, optimizer state, the step that is captured as a
graph, the cache unless it sleeps) counts in both. Both phases take their passing arrays from one pool, so the peak is
the larger phase, not the sum.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import numpy as np

from ..models.config import ModelConfig
from .config import EngineConfig

logger = logging.getLogger(__name__)

MIB = 1 << 20
CPU_CACHE_BYTES = 4 << 30  # the KV cache of the CPU grows to this at most unless num_kv_blocks says otherwise
CONTEXT_BYTES = 700 * MIB  # the CUDA context, loaded kernels, cuBLAS's own memory; on an H100
WORKSPACE_BYTES = 32 * MIB  # WORKSPACE_BYTES in backend/cuda/cublas.py
SLAB_BYTES = 32 * MIB  # SLAB_BYTES of the arena that captured steps take their memory from
CHUNK_KEYS = 256  # a decode step keeps one partial result for so many keys
HEAD_ROWS = 4096  # rows of logits at a time in training: chunk_rows of ops.lm_head_logprobs
HEAD_CHUNKS = 2  # arrays of HEAD_ROWS x vocabulary that its backward pass holds at once: logits and their gradient
CHECK_ROWS = 1024  # rows at which the exactness check multiplies with a vocabulary's weight
# CuPy's pool keeps what it once took, and not every array fits into its gaps: the driver sees so much more than the
# arrays of a phase, and besides one chunk of logits, whose size changes with the batch.
POOL_WASTE = 0.03
# A cache that sleeps costs two times 0.1 s a step; it is worth that only where it then holds so many times more.
SLEEP_GAIN = 2
PACKED_BYTES = 40  # of one token of a packed batch: ids, positions, mask, and float32 columns
LARGEST = 4  # items that an error names
GAPS = "gaps in the pool"


@dataclass(frozen=True)
class ModelUse:
    """A model that a run holds: its shape, and in which dtypes.

    dtype: of the weights, a name or a dtype ("auto" is not known here). trained: it gets gradients and an optimizer.
    loaded: its weights already lie on the device. head: False for a model without a vocabulary's head (value, score).
    adapter_parameters: numbers of an adapter beside frozen weights; if there are any, only they are trained.
    """

    name: str
    config: ModelConfig
    dtype: object
    trained: bool = False
    loaded: bool = False
    head: bool = True
    adapter_parameters: int = 0
    gradient_bytes: int = 4  # of one number; likewise the next two. 0: there is none
    master_bytes: int = 4  # a float32 weight is its own master
    moment_bytes: int = 8


@dataclass(frozen=True)
class Item:
    """Something that takes memory. phase: "always", "rollout" or "training"."""

    name: str
    nbytes: int
    phase: str = "always"


@dataclass(frozen=True)
class Plan:
    """What a run will hold. limit: bytes that it may take; total: bytes of the whole device."""

    items: tuple[Item, ...]
    limit: int
    total: int
    num_kv_blocks: int = 0
    max_model_len: int = 0
    sleeps_cache: bool = False
    kv_bytes: int = 0
    share: float | None = field(default=None, compare=False)  # gpu_memory_utilization, if there is an engine

    def phase_bytes(self, phase: str) -> int:
        """Bytes in "rollout" or "training", with what lasts."""
        found = sum(item.nbytes for item in self.items if item.phase in ("always", phase))
        return found + (0 if phase == "training" and self.sleeps_cache else self.kv_bytes)

    @property
    def phases(self) -> list[str]:
        return [phase for phase in ("rollout", "training") if any(item.phase == phase for item in self.items)]

    @property
    def peak_bytes(self) -> int:
        """What the driver will count at the most, as far as shapes tell."""
        return max(map(self.phase_bytes, self.phases), default=self.phase_bytes("rollout"))

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
        share = "" if self.share is None else f" (gpu_memory_utilization {self.share:g} of {gigabytes(self.total)})"
        lines.append(f"{'left':<9}{gigabytes(self.limit - self.peak_bytes):>11}  of {gigabytes(self.limit)}{share}")
        return "\n".join(lines)


def gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if abs(nbytes) >= 1e7 else f"{nbytes / 1e6:.2f} MB"


def plan_memory(
    uses: list[ModelUse],
    engine: EngineConfig | None,
    backend,
    *,
    max_tokens_per_batch: int = 0,
    gradient_checkpointing: bool = True,
    micro_batches: int = 2,
    longest_sequence: int | None = None,
    packed_tokens: int = 0,
    ranks: int = 1,
    total_bytes: int | None = None,
    free_bytes: int | None = None,
) -> Plan:
    """The plan of a run with these models; the engine (None: there is none) runs the first of them.

    max_tokens_per_batch: of a training forward pass. micro_batches: passes an update; with one, gradients appear only
    as activations go. longest_sequence: of the run's sequences, prompt and completion together. packed_tokens: of a
    generation batch that stays on the device. ranks: processes among which gradients and optimizer states are divided.
    total_bytes, free_bytes: of the device, asked of the backend by default; free is what is not taken yet.

    The cache holds max_num_seqs sequences of max_model_len, or what is left. gpu_memory_utilization is the share of the
    device's whole memory that this process may take for everything (vLLM's meaning); on a CPU the share of the free
    memory that may be taken beyond what is loaded, with a cache of CPU_CACHE_BYTES at most. Where the cache is smaller
    than a default max_model_len, that is lowered, with a warning.

    ValueError for a max_model_len that does not fit, and on a card for a run that does not.
    """
    if total_bytes is None or free_bytes is None:
        free_bytes, total_bytes = backend.memory_info()
    on_card = backend.name == "cuda"
    items = _lasting(uses, backend, ranks)
    if on_card:
        items += [Item("CUDA context and kernels", CONTEXT_BYTES), Item("cuBLAS workspace", WORKSPACE_BYTES)]
    if any(use.trained for use in uses):
        tokens = backend.row_bucket(max(max_tokens_per_batch, longest_sequence or 0))
        items += _training(uses, backend, tokens, gradient_checkpointing, micro_batches, ranks)
        items.append(Item("packed batch", packed_tokens * PACKED_BYTES))
    if engine is not None:
        _check_length(uses[0].config, engine)
        items += _rollout(uses[0], engine, backend)
    items = _with_waste(items, uses, backend) if on_card else items
    share = 1.0 if engine is None else engine.gpu_memory_utilization
    taken = sum(_weight_bytes(use, backend) for use in uses if use.loaded)
    if on_card:
        limit = min(int(share * total_bytes), free_bytes + taken + CONTEXT_BYTES)
    else:
        limit = taken + int(share * free_bytes)
    plan = Plan(tuple(items), limit, total_bytes, share=None if engine is None else share)
    plan = _checked(plan, on_card)
    if engine is not None:
        plan = _checked(_with_cache(plan, uses[0], engine, backend, longest_sequence), on_card)
    return plan


# ---- what lasts ----


def parameter_counts(config: ModelConfig, head: bool = True) -> tuple[int, int]:
    """(numbers in the model's dtype, numbers of norm weights, which are float32 or better)."""
    hidden, heads = config.hidden_size, config.num_attention_heads + 2 * config.num_key_value_heads
    layer = hidden * heads * config.head_dim + config.num_attention_heads * config.head_dim * hidden
    layer += 3 * hidden * config.intermediate_size + config.attention_bias * heads * config.head_dim
    norms = 2 * hidden + 2 * config.qk_norm * config.head_dim
    vocabularies = 1 if config.tie_word_embeddings or not head else 2
    weights = vocabularies * config.vocab_size * hidden + config.num_hidden_layers * layer
    return weights, config.num_hidden_layers * norms + hidden


def _weight_bytes(use: ModelUse, backend) -> int:
    dtype = backend.dtype_of(use.dtype)
    weights, norms = parameter_counts(use.config, use.head)
    tables = use.config.max_position_embeddings * use.config.head_dim  # rope's cosines and sines
    precise = backend.accumulator(dtype).itemsize
    return (weights + use.adapter_parameters) * dtype.itemsize + (norms + tables) * precise


def _trained_numbers(use: ModelUse) -> int:
    return use.adapter_parameters or sum(parameter_counts(use.config, use.head))


def _lasting(uses, backend, ranks) -> list[Item]:
    items = []
    for use in uses:
        dtype = backend.dtype_of(use.dtype)
        items.append(Item(f"{use.name}: weights in {dtype.name}", _weight_bytes(use, backend)))
        if use.trained:
            numbers, wide = -(-_trained_numbers(use) // ranks), dtype.itemsize // 4 or 1
            masters = 0 if dtype.itemsize >= 4 else numbers * use.master_bytes
            items.append(Item(f"{use.name}: master weights", masters))
            items.append(Item(f"{use.name}: AdamW's moments", numbers * use.moment_bytes * wide))
    return items


# ---- training ----


@dataclass(frozen=True)
class LayerBytes:
    """Bytes a token of one layer: kept between layers with recomputation, kept without, and taken for a moment by the
    backward pass.
    """

    residual: int
    saved: int
    gradients: int

    @classmethod
    def of(cls, config: ModelConfig, dtype: np.dtype, precise: np.dtype) -> LayerBytes:
        hidden, width = config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        qkv = queries + 2 * config.num_key_value_heads * config.head_dim
        # What the rules of ops/ hold: two norms (their output, which the product after it holds, and the sum), qkv
        # before and after rope, attention's output, gate and up, and their product.
        saved = 4 * hidden + 2 * qkv + queries + 3 * width
        statistics = 2 + config.num_attention_heads  # rstd of two norms, the log-sum-exp
        if config.qk_norm:
            statistics += config.num_attention_heads + config.num_key_value_heads
        gradients = max(3 * width + 2 * hidden, 2 * qkv + queries + hidden)
        size = dtype.itemsize
        one = precise.itemsize
        return cls(hidden * size + one, saved * size + statistics * one, gradients * size)


def _training(uses, backend, tokens, gradient_checkpointing, micro_batches, ranks) -> list[Item]:
    """The items of the moment at which training holds most."""
    gradients = sum(
        -(-_trained_numbers(use) // ranks) * use.gradient_bytes * (backend.dtype_of(use.dtype).itemsize // 4 or 1)
        for use in uses
        if use.trained
    )
    moments = []
    for use in uses:
        if use.trained:
            found = _moments(use, backend, tokens, gradient_checkpointing, micro_batches > 1, gradients)
            moments += [[Item(f"{use.name}: {name}", nbytes, "training") for name, nbytes in one] for one in found]
    return max(moments, key=lambda items: sum(item.nbytes for item in items))


def _moments(use, backend, tokens, gradient_checkpointing, gradients_stay, gradients):
    """(name, bytes) of what is held at each moment that may be the peak of a forward and backward pass."""
    config, dtype = use.config, backend.dtype_of(use.dtype)
    layer = LayerBytes.of(config, dtype, backend.accumulator(dtype))
    layers, hidden = config.num_hidden_layers, tokens * config.hidden_size * dtype.itemsize
    kept = tokens * (layer.residual if gradient_checkpointing else layer.saved)
    one_layer = tokens * (layer.saved if gradient_checkpointing else 0)
    head_gradient = config.vocab_size * config.hidden_size * use.gradient_bytes * use.head
    first = gradients if gradients_stay else min(gradients, head_gradient)
    head = min(HEAD_ROWS, tokens) * config.vocab_size * dtype.itemsize * HEAD_CHUNKS * use.head
    # The embedding's output, the last norm's sum and output; the chosen rows and their gradient.
    ends = ("activations at both ends", 5 * hidden)
    recomputed, passing = ("one layer again", one_layer), ("gradients of activations", tokens * layer.gradients)
    return [
        [("activations", layers * kept), ends, ("logits", head), ("weights' gradients", first)],
        [("activations", layers * kept), ends, recomputed, passing, ("weights' gradients", first)],
        [("activations", kept), ends, recomputed, passing, ("weights' gradients", gradients)],
    ]


# ---- rollout ----


def _check_length(config: ModelConfig, engine: EngineConfig) -> None:
    longest = config.max_position_embeddings
    if engine.max_model_len is not None and engine.max_model_len > longest:
        raise ValueError(f"max_model_len={engine.max_model_len} exceeds the model's max_position_embeddings={longest}")


def _rollout(use: ModelUse, engine: EngineConfig, backend) -> list[Item]:
    """What the engine takes beside the cache."""
    config, dtype = use.config, backend.dtype_of(use.dtype)
    rows = backend.row_bucket(engine.max_num_seqs)
    prompt_tokens = backend.row_bucket(engine.max_num_batched_tokens)
    length = engine.max_model_len or config.max_position_embeddings
    logits = rows * config.vocab_size * dtype.itemsize
    tables = rows * -(-length // engine.block_size) * 4
    step = rows * _forward_bytes(config, dtype) + logits
    items = [Item("engine: block tables", tables)]
    prompts = prompt_tokens * _forward_bytes(config, dtype)
    if backend.name == "cuda":
        chunks = -(-length // CHUNK_KEYS)
        partials = rows * config.num_attention_heads * chunks * (config.head_dim + 2) * 4
        step = -(-step // SLAB_BYTES) * SLAB_BYTES
        # Captured steps keep their memory; plain ones give it back.
        phase = "rollout" if engine.enforce_eager else "always"
        items.append(Item("engine: decode step", step, phase))
        items.append(Item("engine: decode step, partial results of long rows", partials, phase))
        if dtype.itemsize == 2 and engine.exact != "false":
            check = (config.vocab_size * (config.hidden_size + 2 * CHECK_ROWS)) * dtype.itemsize
            prompts = max(prompts, check)
    else:
        items.append(Item("engine: decode step", step, "rollout"))
    items.append(Item("engine: prompts", max(prompts, logits), "rollout"))
    return items


def _forward_bytes(config: ModelConfig, dtype) -> int:
    """Bytes a token of a forward pass that keeps nothing: the residual stream, and the larger half of a layer."""
    queries = config.num_attention_heads * config.head_dim
    qkv = queries + 2 * config.num_key_value_heads * config.head_dim
    return (3 * config.hidden_size + max(2 * qkv + queries, 3 * config.intermediate_size)) * dtype.itemsize


def block_bytes(config: ModelConfig, dtype, block_size: int) -> int:
    """Bytes of one block of the KV cache, keys and values of all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize * block_size


def _with_waste(items: list[Item], uses, backend) -> list[Item]:
    """The items, and in each phase the part of the pool that fits nothing."""
    passing = {phase: sum(item.nbytes for item in items if item.phase == phase) for phase in ("rollout", "training")}
    chunks = [HEAD_ROWS * use.config.vocab_size * backend.dtype_of(use.dtype).itemsize * use.head for use in uses]
    waste = {phase: int(nbytes * POOL_WASTE) for phase, nbytes in passing.items() if nbytes}
    if "training" in waste:
        waste["training"] += min(max(chunks), passing["training"] // 4)
    return [*items, *(Item(GAPS, nbytes, phase) for phase, nbytes in waste.items())]


def _with_cache(plan: Plan, use: ModelUse, engine: EngineConfig, backend, longest_sequence) -> Plan:
    """The plan with the cache's size, whether it sleeps, and the max_model_len that holds."""
    size, config = engine.block_size, use.config
    block = block_bytes(config, backend.dtype_of(use.dtype), size)
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
        raise ValueError(
            f"the KV cache has room for {room} tokens ({blocks} blocks of {size}), less than max_model_len={length}: "
            f"lower max_model_len, or raise num_kv_blocks or gpu_memory_utilization"
        )
    if room < length:
        logger.warning(
            "max_model_len is %d, not the model's own %d: the KV cache has room for %d blocks of %d tokens; "
            "free memory or raise gpu_memory_utilization for more",
            *(room, length, blocks, size),
        )
    cache = {"num_kv_blocks": blocks, "sleeps_cache": sleeps, "kv_bytes": blocks * block}
    return replace(plan, max_model_len=min(room, length), **cache)


def _checked(plan: Plan, on_card: bool) -> Plan:
    """The plan; ValueError on a card, a warning elsewhere, if it does not fit even where the pool wastes nothing."""
    waste = max((item.nbytes for item in plan.items if item.name == GAPS), default=0)
    missing = plan.peak_bytes - waste - plan.limit
    if missing <= 0:
        return plan
    phase = max(plan.phases, key=plan.phase_bytes, default="rollout")
    held = [item for item in plan.items if item.phase in ("always", phase)]
    if plan.kv_bytes and not (plan.sleeps_cache and phase == "training"):
        held.append(Item("KV cache", plan.kv_bytes))
    largest = sorted(held, key=lambda item: -item.nbytes)[:LARGEST]
    message = (
        f"this run needs {gigabytes(plan.peak_bytes)} of memory and may take {gigabytes(plan.limit)}; largest: "
        + ", ".join(f"{item.name} {gigabytes(item.nbytes)}" for item in largest)
        + f"; {_ways_out(phase, plan)}"
    )
    if on_card:
        raise ValueError(message)
    logger.warning("%s", message)
    return plan


def _ways_out(phase: str, plan: Plan) -> str:
    first, ways = "", []
    if phase == "training":
        ways = ["max_tokens_per_batch"]
        if not any("one layer again" in item.name and item.nbytes for item in plan.items):
            first = "set gradient_checkpointing, or "
    if plan.share is not None:
        ways += ["max_num_seqs", "max_model_len", "num_kv_blocks"]
    last = "" if plan.share in (None, 1.0) else ", or raise gpu_memory_utilization"
    return f"{first}lower {', '.join(ways)}, or take a smaller dtype{last}"
