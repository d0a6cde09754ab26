"""What a model takes on its device, in bytes, from its shape alone: weights, states, activations, engine steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..backend import backend_for
from ..backend.card import CONTEXT_BYTES as CONTEXT_BYTES
from ..models.adapter_config import TARGETS, AdapterConfig
from ..models.adapters import BESIDE, adapter_columns, adapter_sizes
from ..models.config import ModelConfig
from ..models.decoder import Layer
from ..models.quantized import quantized_sizes
from .config import EngineConfig

MIB = 1 << 20
WORKSPACE_BYTES = 32 * MIB  # WORKSPACE_BYTES in backend/cuda/cublas.py
SLAB_BYTES = 32 * MIB  # SLAB_BYTES of the arena that captured steps take their memory from
CHUNK_KEYS = 256  # a decode step keeps one partial result for so many keys
SHORT_TOKENS = 1024  # up to here a pass over prompts waits for the host rather than for a card, and is captured
INPUT_BYTES = 1 << 19  # of the inputs of such a pass, at most
STEPS = "engine: a decode step, or short prompts"  # what captured steps take from memory of their own
CODED_ROWS = 16  # MOST_ROWS of backend/cuda/quantized.py
HEAD_ROWS = 4096  # rows of logits at a time in training: chunk_rows of ops.lm_head_logprobs and lm_head_loss
HEAD_CHUNKS = 1  # arrays of HEAD_ROWS x vocabulary that they hold at once: the logits become their gradient in place
CHECK_ROWS = 1024  # rows at which the exactness check multiplies with a vocabulary's weight


@dataclass(frozen=True)
class ModelUse:
    """A model that a run holds: its shape, and in which dtypes.

    dtype: of the weights, a name or a dtype ("auto" is not known here). trained: it gets gradients and an optimizer.
    loaded: its weights already lie on the device. head: False for a model without a vocabulary's head (value, score).
    adapter_parameters: numbers of an adapter beside frozen weights; if there are any, only they are trained.
    copied_parameters: numbers of what else an adapter's products take (merged copies of weights, zeros), in dtype.
    adapter_columns: numbers a token that its products keep, as models.adapters has them.
    """

    name: str
    config: ModelConfig
    dtype: object
    trained: bool = False
    loaded: bool = False
    head: bool = True
    adapter_parameters: int = 0
    copied_parameters: int = 0
    adapter_columns: tuple[int, int] = (0, 0)  # what the products beside a layer's weights keep: of all, of the last
    base_on_host: bool = False  # the adapted weights of the base; a product without the adapter takes two for a moment
    gradient_bytes: int = 4  # of one number; likewise the next two. 0: there is none
    master_bytes: int | None = None  # None: 2 beside bfloat16 (the remainder), 4 beside float16; float32 is its own
    moment_bytes: float = 8  # of both
    updated_in_backward: bool = False  # where a pass is the whole update, layers' gradients come and go
    offloaded: bool = False  # master and moments lie on the host but for those of the layer that is updated
    gathers: bool = False  # the ranks that share it gather what o_proj and down_proj take (tensor_parallel_invariant)


@dataclass(frozen=True)
class Item:
    """Something that takes memory. phase: "always", "rollout" or "training". pooled: it comes from the pool of arrays,
    unless it lasts.
    """

    name: str
    nbytes: int
    phase: str = "always"
    pooled: bool = True


# ---- what lasts ----


def parameter_counts(config: ModelConfig, head: bool = True) -> tuple[int, int]:
    """(numbers in the model's dtype, numbers of norm weights, which are float32 or better), as the modules declare."""
    layer = Layer(config, backend_for("cpu"), "float16", 0).parameters()
    sizes = [sum(math.prod(x.shape) for x in layer if x.dtype == dtype) for dtype in (np.float16, np.float32)]
    weights, norms = (config.num_hidden_layers * size for size in sizes)
    ends = config.hidden_size * (2 if config.head == "score" else 1)  # the final norm, and a score head
    return weights + _vocabularies(config, head) * config.vocab_rows * config.hidden_size, norms + ends


def _vocabularies(config: ModelConfig, head: bool) -> int:
    """Weights of vocab_size rows: the embedding, and a head of its own."""
    return 1 if config.tie_word_embeddings or not head or config.head == "score" else 2


def logit_columns(config: ModelConfig) -> int:
    """Columns of logits that are held at once: those of all ids; of ranks that share them also a rank's own, and all
    as they arrive.
    """
    return config.vocab_size if config.vocab_parts == 1 else 2 * config.vocab_size + config.vocab_rows


def weight_bytes(use: ModelUse, backend) -> int:
    dtype = backend.dtype_of(use.dtype)
    weights, norms = parameter_counts(use.config, use.head)
    tables = use.config.max_position_embeddings * use.config.head_dim  # rope's cosines and sines
    precise = backend.accumulator(dtype).itemsize
    adapter = use.adapter_parameters + use.copied_parameters
    return (weights + adapter) * dtype.itemsize + (norms + tables) * precise


def adapted(use: ModelUse, adapter: AdapterConfig, way: str, base_on_host: bool = False) -> ModelUse:
    """The same model with an adapter that is trained in place of its weights."""
    layer = Layer(use.config, backend_for("cpu"), "float16", 0)
    sizes = adapter_sizes(layer, adapter, way, base_on_host)
    factors, copies = (use.config.num_hidden_layers * count for count in sizes)
    head = use.config.hidden_size if adapter.with_score else 0  # a score head of its own
    columns = adapter_columns(layer, adapter) if way == BESIDE else (0, 0)
    more = {"adapter_columns": columns, "base_on_host": base_on_host}
    return replace(use, adapter_parameters=factors + head, copied_parameters=copies, **more)


def _largest_linear(config: ModelConfig) -> int:
    """Numbers of the largest weight of a layer."""
    layer = Layer(config, backend_for("cpu"), "float16", 0).parameters()
    return max(math.prod(x.shape) for x in layer)


def _trained_numbers(use: ModelUse) -> int:
    return use.adapter_parameters or sum(parameter_counts(use.config, use.head))


def _passing_numbers(use: ModelUse, layers: int) -> int:
    """Numbers of so many layers and a vocabulary, at most all that is trained: of what comes and goes by layers."""
    numbers, depth = _trained_numbers(use), use.config.num_hidden_layers
    if use.adapter_parameters:
        return min(numbers, -(-layers * numbers // depth))
    vocabulary = use.config.vocab_rows * use.config.hidden_size
    one_layer = -(-(numbers - _vocabularies(use.config, use.head) * vocabulary) // depth)
    return min(numbers, vocabulary + layers * one_layer)


def _gradient_numbers(use: ModelUse, one_pass: bool, ranks: int, zero_stage: int) -> int:
    """Numbers whose gradients lie side by side at the most: all, or two layers' (one is updated when the next is
    complete) and a vocabulary's. From ZeRO-2 on this rank's share of them, a third layer, which is summed, and that.
    """
    numbers = _trained_numbers(use)
    if zero_stage >= 2 and ranks > 1:
        return min(numbers, -(-numbers // ranks) + _passing_numbers(use, 3))
    return _passing_numbers(use, 2) if use.updated_in_backward and one_pass else numbers


def _two_buckets(use: ModelUse) -> int:
    """Numbers of two neighbours among layers and vocabularies that have most; an adapter is taken as one."""
    if use.adapter_parameters:
        return use.adapter_parameters
    layer = sum(math.prod(x.shape) for x in Layer(use.config, backend_for("cpu"), "float16", 0).parameters())
    return min(layer + max(layer, use.config.vocab_rows * use.config.hidden_size), _trained_numbers(use))


def lasting_items(uses, backend, ranks, zero_stage=1) -> list[Item]:
    items = []
    for use in uses:
        dtype = backend.dtype_of(use.dtype)
        nbytes = weight_bytes(use, backend)
        if use.trained and not use.adapter_parameters and zero_stage == 3 and ranks > 1:
            shared = parameter_counts(use.config, use.head)[0] * dtype.itemsize
            others = shared - shared // ranks
            items.append(
                Item(f"{use.name}: weights that the other processes hold in training", others, "rollout", pooled=False)
            )
            coming = min(others, _passing_numbers(use, 2) * dtype.itemsize)
            items.append(Item(f"{use.name}: weights of two layers and a vocabulary", coming, "training"))
            nbytes -= others
        items.append(Item(f"{use.name}: weights in {dtype.name}", nbytes))
        if use.trained:
            numbers, wide = -(-_trained_numbers(use) // ranks), dtype.itemsize // 4 or 1
            master = use.master_bytes if use.master_bytes is not None else 2 if dtype.name == "bfloat16" else 4
            masters = 0 if dtype.itemsize >= 4 else numbers * master
            items.append(Item(f"{use.name}: master weights", masters))
            items.append(Item(f"{use.name}: AdamW's moments", math.ceil(numbers * use.moment_bytes) * wide))
            if use.offloaded:
                share = _two_buckets(use) / _trained_numbers(use)
                here = math.ceil(sum(item.nbytes for item in items[-2:]) * share)
                items[-2:] = [
                    Item(f"{use.name}: master weights and moments of two layers, from the host", here, "training")
                ]
        if use.base_on_host:
            nbytes = 2 * _largest_linear(use.config) * dtype.itemsize
            items.append(Item(f"{use.name}: two weights of the base, from the host", nbytes, "training"))
    return items


# ---- training ----


@dataclass(frozen=True)
class LayerBytes:
    """Bytes a token of one layer, for each level of gradient_checkpointing (docs/MEMORY.md has the sums).

    kept: from the forward pass until the backward pass. again: what a layer that is computed again holds beside that.
    passing: the most that the backward pass holds for a moment beside both, in a layer that is at least as wide within
    as attention is.
    """

    kept: dict[str, int]
    again: dict[str, int]
    passing: dict[str, int]

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: np.dtype,
        precise: np.dtype,
        columns: tuple[int, int] = (0, 0),
        gathers: bool = False,
    ) -> LayerBytes:
        """columns: ModelUse.adapter_columns. gathers: as there."""
        hidden, width = config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        qkv = queries + 2 * config.num_key_value_heads * config.head_dim
        # What the rules of ops/ hold: the residual stream before each half, the outputs of products and of attention …
        products = 2 * hidden + qkv + queries + 2 * width + columns[0]
        # … and what is cheap to make again: two norms' outputs, silu's output, and qkv after its norm and rope. Without
        # that norm it is kept after rope alone.
        cheap = 2 * hidden + width + (qkv if config.qk_norm else 0)
        statistics = 2 + config.num_attention_heads  # rstd of two norms, the log-sum-exp
        if config.qk_norm:
            statistics += config.num_attention_heads + config.num_key_value_heads
        # On the way back through silu: the gradients of the residual stream and of silu's input and output. Its output
        # is gone by then, or just made again.
        passing = {"none": hidden + 2 * width, "selective": hidden + 4 * width, "full": hidden + 2 * width}
        size, one, ranks = dtype.itemsize, precise.itemsize, config.vocab_parts
        into_o = into_down = 0
        if gathers and ranks > 1:
            # What these products take in whole is kept where nothing is remade. On the way back through down_proj its
            # gradient lies beside that of the own columns of the sum. Where it is remade, it lies there twice as it
            # arrives, beside its gradient, which ranks add up; at selective beside silu's output and gradients, too.
            into_o, into_down, own = ranks * queries, ranks * width, hidden // ranks
            passing = {
                "none": hidden + own + into_down,
                "selective": hidden + own + 3 * into_down + 3 * width,
                "full": hidden + own + 3 * into_down,
            }
        whole, stream = (products + cheap + into_o) * size + statistics * one, (hidden + columns[1]) * size + one
        return cls(
            kept={"none": whole + into_down * size, "selective": products * size + statistics * one, "full": stream},
            again={"none": 0, "selective": 0, "full": whole - stream},
            passing={level: numbers * size for level, numbers in passing.items()},
        )


def training_items(uses, backend, tokens, level, micro_batches, ranks, zero_stage=1) -> list[Item]:
    """The items of the moment at which training holds most; models are trained in passes of their own. level: of
    gradient_checkpointing.
    """
    gradients = 0
    for use in uses:
        if use.trained:
            numbers = _gradient_numbers(use, micro_batches == 1, ranks, zero_stage)
            gradients += numbers * use.gradient_bytes * (backend.dtype_of(use.dtype).itemsize // 4 or 1)
    moments = []
    for use in uses:
        if use.trained:
            found = _moments(use, backend, tokens, level, micro_batches > 1, gradients)
            moments += [[Item(f"{use.name}: {name}", nbytes, "training") for name, nbytes in one] for one in found]
    return max(moments, key=lambda items: sum(item.nbytes for item in items))


def _moments(use, backend, tokens, level, gradients_stay, gradients):
    """(name, bytes) of what is held at each moment that may be the peak of a forward and backward pass."""
    config, dtype = use.config, backend.dtype_of(use.dtype)
    layer = LayerBytes.of(config, dtype, backend.accumulator(dtype), use.adapter_columns, use.gathers)
    layers, hidden = config.num_hidden_layers, tokens * config.hidden_size * dtype.itemsize
    kept = tokens * layer.kept[level]
    # The pool cannot use the arrays kept between layers again for weights' gradients, since their sizes differ, nor all
    # that a layer leaves which is computed again. It can use those of whole layers.
    passing_by = tokens * layer.passing[level]
    gaps = ("gaps where activations were", (layers - 1) * kept + passing_by if level == "full" else 0)
    head_gradient = config.vocab_rows * config.hidden_size * use.gradient_bytes * use.head
    first = gradients if gradients_stay else min(gradients, head_gradient)
    head = min(HEAD_ROWS, tokens) * logit_columns(config) * dtype.itemsize * HEAD_CHUNKS * use.head
    # The embedding's output, the last norm's sum and output; the chosen rows and their gradient.
    ends = ("activations at both ends", 5 * hidden)
    recomputed = ("one layer again", tokens * layer.again[level])
    passing = ("gradients of activations", passing_by)
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
    logits = rows * logit_columns(config) * dtype.itemsize
    tables = rows * -(-length // engine.block_size) * 4
    step = rows * _forward_bytes(use, dtype) + logits
    numbers, channels, largest = _quantized(use, engine)
    items = [Item("engine: block tables", tables), Item("engine: weights in 8 bits", numbers + 4 * channels)]
    if engine.enable_lora:
        layer = Layer(config, backend_for("cpu"), "float16", 0)
        sizes = adapter_sizes(layer, AdapterConfig(engine.max_lora_rank, 1, TARGETS), BESIDE)
        nbytes = engine.max_loras * config.num_hidden_layers * sum(sizes) * dtype.itemsize
        items.append(Item("engine: adapters of requests", nbytes))
    short = 0 if engine.enforce_eager else min(prompt_tokens, SHORT_TOKENS)
    if short:
        ends = ends_of_spans(engine.max_num_seqs) * config.hidden_size * dtype.itemsize
        items.append(Item("engine: ends of a short pass over prompts, and its inputs", ends + INPUT_BYTES))
    prompts, passing = max(prompt_tokens * _forward_bytes(use, dtype), logits), "engine: prompts"
    if backend.name == "cuda":
        chunks = -(-length // CHUNK_KEYS)
        partials = rows * config.num_attention_heads * chunks * (config.head_dim + 2) * 4
        step = max(step, short * _forward_bytes(use, dtype) * 5 // 4)  # passes of many sizes leave gaps
        step = -(-step // SLAB_BYTES) * SLAB_BYTES
        # Captured steps keep their memory; plain ones give it back.
        phase = "rollout" if engine.enforce_eager else "always"
        items.append(Item(STEPS, step, phase))
        items.append(Item("engine: decode step, partial results of long rows", partials, phase))
        one_phase = phase if max(rows, short) > CODED_ROWS else "rollout"
        items.append(Item("engine: one weight of 8 bits in the model's dtype", largest * dtype.itemsize, one_phase))
        if dtype.itemsize == 2 and engine.exact != "false":
            check = (config.vocab_size * (config.hidden_size + 2 * CHECK_ROWS)) * dtype.itemsize
            if check > prompts:
                prompts, passing = check, "engine: comparisons of products (exact)"
    else:
        items.append(Item("engine: decode step", step, "rollout"))
        if dtype.itemsize < 4:  # backend/numpy/linear.py's WideCopies
            wide = sum(parameter_counts(config, use.head)) - numbers
            items.append(Item("engine: weights in float32", 4 * wide, "rollout"))
    items.append(Item(passing, prompts, "rollout"))
    return items


def ends_of_spans(capacity: int) -> int:
    """Rows of the array into which a short pass over prompts writes the hidden states at the ends of its spans."""
    return 1 << (min(capacity, SHORT_TOKENS) - 1).bit_length()


def _quantized(use: ModelUse, engine: EngineConfig) -> tuple[int, int, int]:
    """(numbers, output channels, numbers of the largest weight) of what the engine holds in 8 bits."""
    if engine.quantization is None:
        return 0, 0, 0
    numbers, channels, largest = quantized_sizes(Layer(use.config, backend_for("cpu"), "float16", 0))
    return use.config.num_hidden_layers * numbers, use.config.num_hidden_layers * channels, largest


def _forward_bytes(use: ModelUse, dtype) -> int:
    """Bytes a token of a forward pass that keeps nothing: the residual stream, and the larger half of a layer."""
    config, ranks = use.config, use.config.vocab_parts
    hidden, queries, width = config.hidden_size, config.num_attention_heads * config.head_dim, config.intermediate_size
    qkv = queries + 2 * config.num_key_value_heads * config.head_dim
    beside = any(use.adapter_columns)  # what an adapter adds to gate and up lies beside them
    halves = [3 * hidden + 2 * qkv + queries, 4 * hidden + (4 if beside else 3) * width]
    if use.gathers and ranks > 1:  # a rank's own columns, and those of all: as they arrive and side by side
        halves.append(3 * hidden + (1 + 2 * ranks) * max(queries, width))
    return max(halves) * dtype.itemsize


def cache_dtype(engine: EngineConfig, dtype) -> np.dtype:
    """What the KV cache of a model in `dtype` holds; uint8 are E4M3 codes."""
    return np.dtype(np.uint8) if engine.kv_cache_dtype == "fp8" else np.dtype(dtype)


def block_bytes(config: ModelConfig, dtype, block_size: int) -> int:
    """Bytes of one block of the KV cache, keys and values of all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize * block_size
