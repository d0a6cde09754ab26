"""What captured steps of all sizes take together is what the plan says."""

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the arena hands out CuPy's memory pointers")
from backend.test_arena import make_arena

from cukit import autograd
from cukit.autograd import no_grad
from cukit.backend.card import next_bucket
from cukit.bench.subject import config_of
from cukit.engine.config import EngineConfig
from cukit.engine.memory import plan_memory
from cukit.engine.prefill import SHORT_TOKENS
from cukit.engine.shapes import CHUNK_KEYS, STEPS, ModelUse
from cukit.models.attend import PagedDecode, PagedPrefill
from cukit.models.decoder import Decoder
from engine.meter import Ghost, Meter
from engine.shapes import GB, card


class Steps(Meter):
    """Its arrays lie in an arena, once there is one. A step is run plainly and captured, until it could be."""

    def __init__(self, config):
        super().__init__()
        self.arena, self._places, self._kept = None, {}, []
        self.model = Decoder(config, self, "bfloat16")
        self.columns, self.kv = config.num_attention_heads * config.head_dim, [(None, None)] * config.num_hidden_layers

    def add(self, ghost, sign):
        if self.arena is not None and sign > 0:
            self._places[id(ghost)] = self.arena.malloc(ghost.nbytes)
        elif sign < 0:
            self._places.pop(id(ghost), None)

    def qk_norm_rope_store(self, k_cache, v_cache, slots, qkv, *rest):
        return Ghost(self, qkv.shape, qkv.dtype)

    def paged_prefill_attention(self, q, *rest):
        return Ghost(self, (len(q), self.columns), q.dtype)

    def rope_paged_decode_attention(self, k_cache, v_cache, slots, qkv, *rest):
        *_, heads, _, _, longest = rest
        partial = (len(qkv), heads, longest // CHUNK_KEYS, self.columns // heads)
        held = [Ghost(self, partial, np.float32), Ghost(self, (*partial[:3], 2), np.float32)]
        return Ghost(self, (len(held[0]), self.columns), qkv.dtype)

    def run(self, step, *sizes):
        for _ in range(2):
            step(*sizes)
            self.arena.frozen = True
            try:
                self._kept.append(step(*sizes))
                return
            except MemoryError:
                pass
            finally:
                self.arena.frozen = False
        raise AssertionError("a step could not be captured")

    def decode(self, rows, longest):
        ids = np.zeros(rows, np.int32)
        hidden = self.model.forward(ids, ids, PagedDecode(self.kv, ids, ids, ids, longest))
        logits = self.model.logits(hidden).data
        return [Ghost(self, (len(logits),), dtype) for dtype in (np.int32, np.float32)]

    def short_prompts(self, tokens):
        ids = np.zeros(tokens, np.int32)
        hidden = self.model.forward(ids, ids, PagedPrefill(self.kv, ids, ids, ids, ids)).data
        self.embedding_forward(hidden, ids[:16])


def buckets(most):
    return sorted({next_bucket(count) for count in range(1, most + 1)})


@pytest.mark.parametrize("rows", [16, 256])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"])
def test_steps_of_all_sizes_take_what_the_plan_says(name, rows, monkeypatch):
    monkeypatch.setattr(autograd, "backend_of", lambda array: array.meter)
    config, engine = config_of(name), EngineConfig(max_num_seqs=rows, max_model_len=2048)
    plan = plan_memory([ModelUse("model", config, "bfloat16")], engine, card(140 * GB))
    steps = Steps(config)
    steps.arena, _ = make_arena(1 << 20, plan.step_bytes)
    jobs = [(steps.short_prompts, tokens) for tokens in buckets(SHORT_TOKENS)]
    jobs += [(steps.decode, count, longest) for count in buckets(rows) for longest in (256, 512, 1024, 2048)]
    with no_grad():
        for place in np.random.default_rng(0).permutation(len(jobs)):
            steps.run(*jobs[place])
    partials = sum(item.nbytes for item in plan.items if "partial results" in item.name)
    assert plan.step_bytes <= steps.arena.total_bytes <= plan.step_bytes + partials
    assert [item.phase for item in plan.items if item.name == STEPS] == ["always"]
