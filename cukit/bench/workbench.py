"""What a case of `bench kernels` is, and the sizes and arrays that cases are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .measure import random_array
from .subject import Subject

BLOCK_SIZE = 16  # EngineConfig.block_size
DECODE_ROWS = (1, 8, 64, 256)
HEAD_ROWS = 4096  # rows of logits that training holds at once: chunk_rows of ops.lm_head_logprobs
INT, FLOAT = 4, 4  # bytes of int32 and of float32 statistics


@dataclass(frozen=True)
class Case:
    """One array function of the backend at one shape."""

    name: str
    shape: str
    arguments: Callable[[], tuple]  # of a call; new arrays each time
    bytes: int
    flops: int = 0
    note: str = ""


class Workbench:
    """The sizes of a subject at one token count, and arrays for it."""

    def __init__(self, subject: Subject, tokens: int, sequences: int, context: int, batch: int, seed: int):
        self.backend, self.config, self.dtype = subject.backend, subject.config, subject.dtype
        self.statistics = self.backend.accumulator(self.dtype)
        self.size = self.dtype.itemsize
        self.tokens, self.sequences, self.context, self.batch = tokens, sequences, context, batch
        self.heads, self.kv_heads, self.dim = (
            self.config.num_attention_heads,
            self.config.num_key_value_heads,
            self.config.head_dim,
        )
        self.width = (self.heads + 2 * self.kv_heads) * self.dim
        self.generator = np.random.default_rng(seed)
        self.lengths = np.diff(np.arange(sequences + 1) * tokens // sequences).astype(np.int32)
        cuts = 1 + self.generator.choice(tokens - 1, sequences - 1, replace=False) if sequences > 1 else []
        self.mixed_lengths = np.diff(np.concatenate([[0], np.sort(cuts), [tokens]])).astype(np.int32)

    def random(self, *shape: int, scale: float = 1.0, dtype=None):
        return random_array(self.backend, self.generator, shape, self.dtype if dtype is None else dtype, scale)

    def zeros(self, *shape: int):
        """A buffer for gradients or moments."""
        return self.backend.zeros(shape, self.statistics)

    def weight(self, out_features: int, in_features: int):
        return self.random(out_features, in_features, scale=in_features**-0.5)

    def norm_weight(self, columns: int):
        return self.random(columns, dtype=self.statistics)

    def ids(self, count: int) -> np.ndarray:
        return self.generator.integers(0, self.config.vocab_size, count).astype(np.int32)

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """Weight -> (out, in), as models/decoder.py fuses them."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return {
            "qkv_proj": (self.width, hidden),
            "o_proj": (hidden, self.heads * self.dim),
            "gate_up_proj": (2 * inner, hidden),
            "down_proj": (hidden, inner),
            "lm_head": (self.config.vocab_size, hidden),
        }


def visible_pairs(lengths, cached: int = 0) -> int:
    """(query, key) pairs that causal attention reads: query i of a sequence sees the cached keys and i + 1 new ones."""
    lengths = np.asarray(lengths, np.int64)
    return int((lengths * cached + lengths * (lengths + 1) // 2).sum())
