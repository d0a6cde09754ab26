"""The one forward pass: Qwen3, Qwen2 and Llama decoders, for prefill, decoding and training alike.

T tokens packed without padding, C hidden, H query heads, K key heads, D head_dim, F intermediate, V vocabulary. What
differs between the uses is only the `attend` object (cukit.models.attend) and whether the tape is on. In memory q, k, v
are one weight ((H + 2K)·D, C) and gate, up are one (2F, C); Hugging Face's names are views of their rows (parts).
"""

import math
from typing import Any

import numpy as np

from ..autograd import Tensor, recompute, remaking
from ..ops import add_rms_norm, silu_mul
from .adapters import Adapter
from .attend import Turn
from .config import LEVELS, LEVELS_OF_BOOLS, ModelConfig
from .heads import LanguageModelHead, ScoreHead
from .modules import Embedding, Module, RMSNorm, declare
from .store import Store
from .tensor_parallel import EmbeddingOfRanks, TensorParallel, first_linear, last_linear

MAX_SEED = 2**64 - 1


class Attention(Module):
    """Projections; q/k norm, rotary embedding and the attention itself are the `attend` object's."""

    def __init__(self, config: ModelConfig, backend, dtype, layer_index: int, tensor: TensorParallel | None = None):
        self.config, self.layer_index = config, layer_index
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv_proj = first_linear(tensor, backend, dtype, config.hidden_size, parts, config.attention_bias)
        self.o_proj = last_linear(tensor, backend, dtype, query, {"o_proj": config.hidden_size})
        self.q_norm = RMSNorm(backend, dtype, config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(backend, dtype, config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def attended(self, x, positions, attend, rope):
        """All but the last product: (T, C) -> (T, H·D)."""
        config, weights = self.config, (self.q_norm.weight, self.k_norm.weight) if self.q_norm else (None, None)
        sizes = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
        turn = Turn(*weights, *rope, positions, *sizes)
        return attend(self.layer_index, self.qkv_proj(x), turn)


class MLP(Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, backend, dtype, tensor: TensorParallel | None = None):
        width = config.intermediate_size
        parts = {"gate_proj": width, "up_proj": width}
        self.gate_up_proj = first_linear(tensor, backend, dtype, config.hidden_size, parts)
        self.down_proj = last_linear(tensor, backend, dtype, width, {"down_proj": config.hidden_size})

    def gated(self, x):
        """All but the last product: (T, C) -> (T, F)."""
        return silu_mul(self.gate_up_proj(x))


class Layer(Module):
    """One block, between two norms. It takes its input after the input norm, beside the residual stream, and ends
    before its last product, mlp.down_proj: a layer that is computed again need not repeat that. The norm that comes
    next (the next layer's, or the final one) makes the block's last addition. config: of this rank's part.
    """

    def __init__(self, config: ModelConfig, backend, dtype, layer_index: int, tensor: TensorParallel | None = None):
        self.input_layernorm = RMSNorm(backend, dtype, config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, backend, dtype, layer_index, tensor)
        self.post_attention_layernorm = RMSNorm(backend, dtype, config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, backend, dtype, tensor)

    def __call__(self, h, residual, positions, attend, rope):
        """h = input_layernorm(residual), both (T, C) -> (x (T, F), residual'); down_proj(x) + residual' is the next
        residual stream.
        """
        attention, norm = self.self_attn, self.post_attention_layernorm
        h, residual = attention.o_proj.add_norm(attention.attended(h, positions, attend, rope), residual, norm)
        return self.mlp.gated(h), residual


class Decoder(Module):
    """A decoder-only language model or, with head="score", a model of one number a token: a reward model, a critic.
    Weights are zero until loaded (models.weights) or drawn (init_weights).

    store: the flat buckets that hold all of them. tensor: the ranks that share the model, of which this one has its
    part, of the shape own_config; every rank gets the whole hidden states and logits.
    """

    def __init__(
        self, config: ModelConfig, backend, dtype, head: str = "lm_head", tensor: TensorParallel | None = None
    ):
        if head == "lm_head" and config.head == "score":
            raise ValueError(f"{config.architecture} is a reward model: it has no language-model head")
        config = config.as_classifier() if head == "score" else config
        self.config, self.backend, self.dtype = config, backend, backend.dtype_of(dtype)
        self._level, self._exact, self.tensor = "none", "auto", tensor
        sizes, own, columns = (config.vocab_size, config.hidden_size), config, None
        if tensor is None:
            self.embed_tokens = Embedding(backend, self.dtype, *sizes)
        else:
            own, columns = tensor.part_of(config), tensor.columns(backend, config.vocab_size)
            self.embed_tokens = EmbeddingOfRanks(tensor, backend, self.dtype, *sizes)
        self.own_config = own
        self.layers = [Layer(own, backend, self.dtype, i, tensor) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(backend, self.dtype, config.hidden_size, config.rms_norm_eps)
        if head == "score":
            self.score = ScoreHead(backend, self.dtype, config.hidden_size)
        else:
            table = self.embed_tokens.weight
            weight = table if config.tie_word_embeddings else declare(table.shape, self.dtype)
            self.lm_head = LanguageModelHead(weight, config.vocab_size, columns)
        self._vocab_size = config.vocab_size
        parts = {
            name if name.startswith(("lm_head.", "score.")) else f"model.{name}": part
            for name, part in self.named_parts().items()
        }
        self.store = Store(backend, self.named_parameters(), parts, tensor)
        self._layer_parameters = [layer.parameters() for layer in self.layers]
        self._rope = rope_tables(config, backend, self.dtype)
        self.adapter: Adapter | None = None
        self.around_layers: Any = None  # what is told of the way through the layers (trainers.sharded_weights)

    # ---- the forward pass ----

    def forward(self, tokens, positions, attend) -> Tensor:
        """tokens, positions (T,) int32 on the model's device -> hidden states (T, C) after the final norm."""
        with remaking(self._level != "none"):
            return self._forward(tokens, positions, attend)

    def _forward(self, tokens, positions, attend) -> Tensor:
        if (around := self.around_layers) is not None:
            around.begin()
        residual = self.embed_tokens(tokens)
        h = self.layers[0].input_layernorm(residual)
        norms = [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, norms, strict=True)):

            def block(h, residual, layer=layer):
                return layer(h, residual, positions, attend, self._rope)

            if around is not None:
                h = around.enter(index, h)
            if self._level == "full":
                x, residual = recompute(block, self._layer_parameters[index], h, residual)
            else:
                x, residual = block(h, residual)
            if around is None:
                h, residual = layer.mlp.down_proj.add_norm(x, residual, next_norm)
            else:
                x = around.leave(index, layer.mlp.down_proj(x))
                h, residual = add_rms_norm(x, residual, next_norm.weight, next_norm.eps)
            del x  # not held through the next layer
        if around is not None:
            around.end()
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (N, C) -> (N, V) in the model's dtype."""
        return self.lm_head(hidden)

    def scores(self, hidden: Tensor) -> Tensor:
        """hidden (N, C) -> (N,) float32 (float64 for a float64 model), of a model with head="score"."""
        return self.score(hidden)

    # ---- what belongs to the model ----

    @property
    def vocab_size(self) -> int:
        """The number of ids that count: those from here on are neither sampled nor part of a normaliser."""
        return self._vocab_size

    def limit_vocabulary(self, num_ids: int):
        """Count the first num_ids ids only (a tokenizer's), or all rows if the model has fewer."""
        if num_ids < 1:
            raise ValueError(f"the vocabulary cannot be limited to {num_ids} ids: give at least 1")
        self._vocab_size = min(num_ids, self.config.vocab_size)
        if self.config.head == "lm_head":
            self.lm_head.vocab_size = self._vocab_size

    @property
    def gradient_checkpointing(self) -> str:
        """What the backward pass finds in memory: everything (none), the outputs of products and of attention and the
        residual streams (selective), or the residual stream before each layer (full). The rest it makes again, to the
        same bits. Setting it takes a bool too: full or none.
        """
        return self._level

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, level: str | bool):
        level = LEVELS_OF_BOOLS[level] if isinstance(level, bool) else level
        if level not in LEVELS:
            raise ValueError(f"gradient_checkpointing of a model must be one of {', '.join(LEVELS)}, got {level!r}")
        self._level = level

    @property
    def exact(self) -> str:
        """auto, true or false: whether decoding and training must compute the same bits. Setting it tells the backend,
        which holds it for the whole process; ValueError where it cannot be promised.
        """
        return self._exact

    @exact.setter
    def exact(self, policy: str):
        self.backend.set_exact(policy)
        self._exact = policy

    def attach(self, adapter: Adapter):
        """Freeze the weights; what is trained from now on is the adapter, which stands in the linear layers."""
        self.adapter = adapter
        for parameter in self.store.parameters:
            parameter.requires_grad = False
        for index, parameters in enumerate(self._layer_parameters):
            parameters += adapter.layer_parameters(index)

    @property
    def trained_store(self) -> Store:
        """The store of what training updates: the adapter's, or the weights'."""
        return self.store if self.adapter is None else self.adapter.store

    def parts(self) -> dict:
        """Hugging Face's tensor names -> arrays that are views of this model's weights (a tied head is not listed)."""
        return self.store.part_views()

    def whole_shape(self, part: str) -> tuple[int, ...]:
        """Of a part's tensor in a checkpoint, of which this model may hold a share."""
        parameter, rows = self.store.parts[part]
        shape = list(parameter.data[rows].shape)
        if self.tensor is not None and (axis := self.tensor.axis_of(part)) is not None:
            by_ids = "embed_tokens" in part or "lm_head" in part
            shape[axis] = self.config.vocab_size if by_ids else shape[axis] * self.tensor.size
        return tuple(shape)

    @property
    def num_parameters(self) -> int:
        """Of the whole model, a tied head once; of an adapter's none."""
        return sum(math.prod(self.whole_shape(part)) for part in self.store.parts)

    def share_out(self, tensor: TensorParallel) -> "Decoder":
        """This rank's part of this whole model, in memory of its own."""
        part = Decoder(self.config, self.backend, self.dtype, self.config.head, tensor)
        part.limit_vocabulary(self.vocab_size)
        whole = self.parts()
        for name, view in part.parts().items():
            view[...] = whole[name][tensor.own(name, whole[name].shape)]
        return part

    def frozen_copy(self) -> "Decoder":
        """The same weights in memory of their own, never trained: a reference model."""
        copy = Decoder(self.config, self.backend, self.dtype, self.config.head, self.tensor)
        copy.limit_vocabulary(self.vocab_size)
        copy.store.copy_from(self.store)
        for parameter in copy.store.parameters:
            parameter.requires_grad = False
        return copy

    def init_weights(self, seed: int):
        """Random weights from `seed`, drawn on the device: linear maps N(0, 1/fan_in), o_proj and down_proj also
        divided by √(2·layers), embeddings N(0, 0.05²), norms 1, biases 0, a score head N(0, 1/(C + 1)).

        The numbers of a part depend on the seed and on its place among the parts, on every device.
        """
        for index, (name, view) in enumerate(self.parts().items()):
            if view.ndim == 1:
                view[...] = 0.0 if name.endswith("bias") else 1.0
                continue
            shape = self.whole_shape(name)
            scale = 0.05 if name in ("model.embed_tokens.weight", "lm_head.weight") else shape[1] ** -0.5
            if name == "score.weight":
                scale = (shape[1] + 1) ** -0.5
            if "o_proj" in name or "down_proj" in name:
                scale /= math.sqrt(2 * self.config.num_hidden_layers)
            whole = view if self.tensor is None else self.backend.empty(shape, view.dtype)
            self.backend.fill_normal(whole, (seed ^ index << 32) & MAX_SEED, scale)
            if self.tensor is not None:
                view[...] = whole[self.tensor.own(name, shape)]


def rope_tables(config: ModelConfig, backend, dtype):
    """(cos, sin), each (max_position_embeddings, D/2) in float32 or better: angle = position · theta^(-2i/D).

    rope_type llama3 (Llama 3.1) divides low frequencies by `factor` and fades over to the high ones, as transformers
    does.
    """
    inverse = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    if scaling := config.rope_scaling:
        wavelength = 2 * math.pi / inverse
        context, low, high = (
            scaling[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        smooth = np.clip((context / wavelength - low) / (high - low), 0, 1)
        inverse = inverse * (smooth + (1 - smooth) / scaling["factor"])
    angles = np.arange(config.max_position_embeddings)[:, None] * inverse
    precise = backend.accumulator(dtype)
    return backend.array(np.cos(angles), precise), backend.array(np.sin(angles), precise)
