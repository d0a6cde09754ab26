"""What a model takes on its device, in bytes, from its shape alone: weights, states, activations, engine steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..backend import backend_for
from ..models.adapter_config import TARGETS, AdapterConfig
from ..models.adapters import BESIDE, adapter_sizes
from ..models.config import ModelConfig
from ..models.decoder import Layer
from .config import EngineConfig

MIB = 1 << 20
CONTEXT_BYTES = 700 * MIB  # the CUDA context, loaded kernels, cuBLAS's own memory; on an H100
WORKSPACE_BYTES = 32 * MIB  # WORKSPACE_BYTES in backend/cuda/cublas.py
SLAB_BYTES = 32 * MIB  # SLAB_BYTES of the arena that captured steps take their memory from
CHUNK_KEYS = 256  # a decode step keeps one partial result for so many keys
HEAD_ROWS = 4096  # rows of logits at a time in training: chunk_rows of ops.lm_head_logprobs
HEAD_CHUNKS = 2  # arrays of HEAD_ROWS x vocabulary that its backward pass holds at once: logits and their gradient
CHECK_ROWS = 1024  # rows at which the exactness check multiplies with a vocabulary's weight


@dataclass(frozen=True)
class ModelUse:
    """A model that a run holds: its shape, and in which dtypes.

    dtype: of the weights, a name or a dtype ("auto" is not known here). trained: it gets gradients and an optimizer.
    loaded: its weights already lie on the device. head: False for a model without a vocabulary's head (value, score).
    adapter_parameters: numbers of an adapter beside frozen weights; if there are any, only they are trained.
    copied_parameters: numbers of what else an adapter's products take (merged copies of weights, zeros), in dtype.
    """

    name: str
    config: ModelConfig
    dtype: object
    trained: bool = False
    loaded: bool = False
    head: bool = True
    adapter_parameters: int = 0
    copied_parameters: int = 0
    gradient_bytes: int = 4  # of one number; likewise the next two. 0: there is none
    master_bytes: int | None = None  # None: 2 beside bfloat16 (the remainder), 4 beside float16; float32 is its own
    moment_bytes: float = 8  # of both
    offloaded: bool = False  # master and moments lie on the host but for those of the layer that is updated


@dataclass(frozen=True)
class Item:
    """Something that takes memory. phase: "always", "rollout" or "training"."""

    name: str
    nbytes: int
    phase: str = "always"


# ---- what lasts ----


def parameter_counts(config: ModelConfig, head: bool = True) -> tuple[int, int]:
    """(numbers in the model's dtype, numbers of norm weights, which are float32 or better), as the modules declare."""
    vocabularies = 1 if config.tie_word_embeddings or not head or config.head == "score" else 2
    layer = Layer(config, backend_for("cpu"), "float16", 0).parameters()
    sizes = [sum(math.prod(x.shape) for x in layer if x.dtype == dtype) for dtype in (np.float16, np.float32)]
    weights, norms = (config.num_hidden_layers * size for size in sizes)
    ends = config.hidden_size * (2 if config.head == "score" else 1)  # the final norm, and a score head
    return weights + vocabularies * config.vocab_size * config.hidden_size, norms + ends


def weight_bytes(use: ModelUse, backend) -> int:
    dtype = backend.dtype_of(use.dtype)
    weights, norms = parameter_counts(use.config, use.head)
    tables = use.config.max_position_embeddings * use.config.head_dim  # rope's cosines and sines
    precise = backend.accumulator(dtype).itemsize
    adapter = use.adapter_parameters + use.copied_parameters
    return (weights + adapter) * dtype.itemsize + (norms + tables) * precise


def adapted(use: ModelUse, adapter: AdapterConfig, way: str) -> ModelUse:
    """The same model with an adapter that is trained in place of its weights."""
    layer = Layer(use.config, backend_for("cpu"), "float16", 0)
    factors, copies = (use.config.num_hidden_layers * count for count in adapter_sizes(layer, adapter, way))
    head = use.config.hidden_size if adapter.with_score else 0  # a score head of its own
    return replace(use, adapter_parameters=factors + head, copied_parameters=copies)


def _trained_numbers(use: ModelUse) -> int:
    return use.adapter_parameters or sum(parameter_counts(use.config, use.head))


def _largest_bucket(use: ModelUse) -> int:
    """Numbers of the layer or vocabulary that has most; an adapter is taken as one."""
    config = use.config
    if use.adapter_parameters:
        return use.adapter_parameters
    layer = Layer(config, backend_for("cpu"), "float16", 0).parameters()
    return max(sum(math.prod(x.shape) for x in layer), config.vocab_size * config.hidden_size)


def lasting_items(uses, backend, ranks) -> list[Item]:
    items = []
    for use in uses:
        dtype = backend.dtype_of(use.dtype)
        items.append(Item(f"{use.name}: weights in {dtype.name}", weight_bytes(use, backend)))
        if use.trained:
            numbers, wide = -(-_trained_numbers(use) // ranks), dtype.itemsize // 4 or 1
            master = use.master_bytes if use.master_bytes is not None else 2 if dtype.name == "bfloat16" else 4
            masters = 0 if dtype.itemsize >= 4 else numbers * master
            items.append(Item(f"{use.name}: master weights", masters))
            items.append(Item(f"{use.name}: AdamW's moments", math.ceil(numbers * use.moment_bytes) * wide))
            if use.offloaded:
                share = _largest_bucket(use) / _trained_numbers(use)
                here = math.ceil(sum(item.nbytes for item in items[-2:]) * share)
                items[-2:] = [
                    Item(f"{use.name}: master weights and moments of one layer, from the host", here, "training")
                ]
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


def training_items(uses, backend, tokens, gradient_checkpointing, micro_batches, ranks) -> list[Item]:
    """The items of the moment at which training holds most; models are trained in passes of their own."""
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
    # The pool cannot use the arrays kept between layers again for weights' gradients, since their sizes differ. It can
    # use those of whole layers.
    gaps = ("gaps where activations were", (layers - 1) * kept if gradient_checkpointing else 0)
    head_gradient = config.vocab_size * config.hidden_size * use.gradient_bytes * use.head
    first = gradients if gradients_stay else min(gradients, head_gradient)
    head = min(HEAD_ROWS, tokens) * config.vocab_size * dtype.itemsize * HEAD_CHUNKS * use.head
    # The embedding's output, the last norm's sum and output; the chosen rows and their gradient.
    ends = ("activations at both ends", 5 * hidden)
    recomputed, passing = ("one layer again", one_layer), ("gradients of activations", tokens * layer.gradients)
    return [
        [("activations", layers * kept), ends, ("logits", head), ("weights' gradients", first)],
        [("activations", layers * kept), ends, recomputed, passing, ("weights' gradients", first)],
        [("activations", kept), gaps, ends, recomputed, passing, ("weights' gradients", gradients)],
    ]


# ---- rollout ----


def rollout_items(use: ModelUse, engine: EngineConfig, backend) -> list[Item]:
    """What the engine takes beside the cache."""
    config, dtype = use.config, backend.dtype_of(use.dtype)
    rows = backend.row_bucket(engine.max_num_seqs)
    prompt_tokens = backend.row_bucket(engine.max_num_batched_tokens)
    length = engine.max_model_len or config.max_position_embeddings
    logits = rows * config.vocab_size * dtype.itemsize
    tables = rows * -(-length // engine.block_size) * 4
    step = rows * _forward_bytes(config, dtype) + logits
    items = [Item("engine: block tables", tables)]
    if engine.enable_lora:
        layer = Layer(config, backend_for("cpu"), "float16", 0)
        sizes = adapter_sizes(layer, AdapterConfig(engine.max_lora_rank, 1, TARGETS), BESIDE)
        nbytes = engine.max_loras * config.num_hidden_layers * sum(sizes) * dtype.itemsize
        items.append(Item("engine: adapters of requests", nbytes))
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
        if dtype.itemsize < 4:  # backend/numpy/linear.py's WideCopies
            items.append(Item("engine: weights in float32", 4 * sum(parameter_counts(config, use.head)), "rollout"))
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
