"""The one forward pass: Qwen3, Qwen2 and Llama decoders, for prefill, decoding and training alike.

T tokens packed without padding, C hidden, H query heads, K key heads, D head_dim, F intermediate, V vocabulary. What
differs between the uses is only the `attend` object (cukit.models.attend) and whether the tape is on. In memory q, k, v
are one weight ((H + 2K)·D, C) and gate, up are one (2F, C); Hugging Face's names are views of their rows (hf_tensors).
"""

import math

import numpy as np

from ..autograd import Tensor, recompute
from ..ops import add_rms_norm, embedding, linear, qk_norm_rope, silu_mul
from .config import ModelConfig
from .modules import Embedding, Linear, Module, RMSNorm


class Attention(Module):
    """Projections, q/k norm, rotary embedding; the attention itself is the `attend` object's."""

    def __init__(self, config: ModelConfig, backend, dtype, layer_index: int):
        self.config, self.layer_index = config, layer_index
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.qkv_proj = Linear(backend, dtype, config.hidden_size, heads * config.head_dim, config.attention_bias)
        self.o_proj = Linear(backend, dtype, config.num_attention_heads * config.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(backend, dtype, config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(backend, dtype, config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def __call__(self, x, positions, attend, rope):
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        q_weight, k_weight = (self.q_norm.weight, self.k_norm.weight) if self.q_norm else (None, None)
        qkv = qk_norm_rope(
            self.qkv_proj(x), q_weight, k_weight, *rope, positions, heads, kv_heads, self.config.rms_norm_eps
        )
        return self.o_proj(attend(self.layer_index, qkv, heads, kv_heads))


class MLP(Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, backend, dtype):
        self.gate_up_proj = Linear(backend, dtype, config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = Linear(backend, dtype, config.intermediate_size, config.hidden_size)

    def __call__(self, x):
        return self.down_proj(silu_mul(self.gate_up_proj(x)))


class Layer(Module):
    """One block. The residual stream travels beside the block's output, so that an addition joins the norm after it."""

    def __init__(self, config: ModelConfig, backend, dtype, layer_index: int):
        self.input_layernorm = RMSNorm(backend, dtype, config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, backend, dtype, layer_index)
        self.post_attention_layernorm = RMSNorm(backend, dtype, config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, backend, dtype)

    def __call__(self, x, residual, positions, attend, rope):
        if residual is None:
            h, residual = self.input_layernorm(x), x
        else:
            h, residual = add_rms_norm(x, residual, self.input_layernorm.weight, self.input_layernorm.eps)
        h = self.self_attn(h, positions, attend, rope)
        h, residual = add_rms_norm(h, residual, self.post_attention_layernorm.weight, self.post_attention_layernorm.eps)
        return self.mlp(h), residual


class Decoder(Module):
    """A decoder-only language model. Weights are zero until loaded (models.weights) or drawn (init_weights).

    gradient_checkpointing: keep only the layers' inputs for the backward pass and compute the rest again.
    """

    def __init__(self, config: ModelConfig, backend, dtype):
        self.config, self.backend, self.dtype = config, backend, backend.dtype_of(dtype)
        self.gradient_checkpointing = False
        self.embed_tokens = Embedding(backend, self.dtype, config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, backend, self.dtype, i) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(backend, self.dtype, config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else Embedding(backend, self.dtype, config.vocab_size, config.hidden_size)
        )
        for name, parameter in self.named_parameters().items():
            parameter.name = name
        self._rope = rope_tables(config, backend, self.dtype)

    def forward(self, tokens, positions, attend) -> Tensor:
        """tokens, positions (T,) int32 on the model's device -> hidden states (T, C) after the final norm."""
        x, residual = embedding(self.embed_tokens.weight, tokens), None
        for layer in self.layers:

            def block(x, residual=None, layer=layer):
                return layer(x, residual, positions, attend, self._rope)

            inputs = (x,) if residual is None else (x, residual)
            x, residual = recompute(block, *inputs) if self.gradient_checkpointing else block(*inputs)
        return add_rms_norm(x, residual, self.norm.weight, self.norm.eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (N, C) -> (N, V) in the model's dtype."""
        return linear(hidden, self.lm_head.weight)

    def hf_tensors(self) -> dict:
        """Hugging Face's tensor names -> arrays that are views of this model's weights (a tied head is not listed)."""
        config, found = self.config, {}
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        splits = {
            "qkv_proj": {
                "q_proj": (0, query),
                "k_proj": (query, query + key),
                "v_proj": (query + key, query + 2 * key),
            },
            "gate_up_proj": {
                "gate_proj": (0, config.intermediate_size),
                "up_proj": (config.intermediate_size, 2 * config.intermediate_size),
            },
        }
        for name, parameter in self.named_parameters().items():
            fused = name.split(".")[-2]
            for part, (start, stop) in splits.get(fused, {fused: (0, None)}).items():
                full = name.replace(fused, part)
                found[full if full == "lm_head.weight" else f"model.{full}"] = parameter.data[start:stop]
        return found

    parts = hf_tensors

    def init_weights(self, seed: int):
        """Random weights from `seed`: linear maps N(0, 1/fan_in), o_proj and down_proj also divided by √(2·layers),
        embeddings N(0, 0.05²), norms 1, biases 0.
        """
        generator = np.random.default_rng(seed)
        for name, parameter in self.named_parameters().items():
            if parameter.data.ndim == 1:
                parameter.data[...] = 0.0 if name.endswith("bias") else 1.0
                continue
            scale = 0.05 if name in ("embed_tokens.weight", "lm_head.weight") else parameter.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                scale /= math.sqrt(2 * self.config.num_hidden_layers)
            values = generator.standard_normal(parameter.shape, dtype=np.float32) * np.float32(scale)
            parameter.data[...] = self.backend.array(values.astype(self.dtype))


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
