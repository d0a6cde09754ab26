"""Models for engine tests: a tiny real one in float64, and one that recites a script."""

import lzma
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cukit.autograd import Tensor
from cukit.backend import backend_for
from cukit.engine.llm import LLM
from cukit.models.weights import load_model
from cukit.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
TINY_MODELS = ("qwen3_tiny", "qwen2_tiny", "llama_tiny")


def tiny_model(name="qwen3_tiny"):
    """The same object every time."""
    return _tiny_model(name)


@cache
def _tiny_model(name):
    return load_model(GOLDEN / name, device="cpu", dtype="float64")


def tiny_llm(name="qwen3_tiny", **options):
    """Float64, so that rounding cannot flip a draw."""
    return LLM.from_model(tiny_model(name), None, **{"max_model_len": 64, "block_size": 4} | options)


def random_prompts(count, low, high, seed=0, vocab_size=211):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(low, high)).tolist() for _ in range(count)]


class ScriptModel:
    """A model that puts token script[p] (almost surely) at position p. It reads and writes no KV."""

    def __init__(self, script, vocab_size=151_669, max_position_embeddings=128):
        self.script, self.backend, self.dtype = np.asarray(script), backend_for("cpu"), np.dtype(np.float32)
        self.config = SimpleNamespace(
            vocab_size=vocab_size,
            max_position_embeddings=max_position_embeddings,
            num_hidden_layers=1,
            num_key_value_heads=1,
            head_dim=2,
            eos_token_id=None,
        )

    def forward(self, tokens, positions, attend):
        return Tensor(np.asarray(positions, np.float32)[:, None])

    def logits(self, hidden):
        logits = np.zeros((len(hidden.data), self.config.vocab_size), np.float32)
        following = np.minimum(hidden.data[:, 0].astype(int) + 1, len(self.script) - 1)
        logits[np.arange(len(logits)), self.script[following]] = 1000
        return Tensor(logits)


@cache
def qwen_tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        packed = (GOLDEN / "qwen3-tokenizer" / "tokenizer.json.xz").read_bytes()
        Path(folder, "tokenizer.json").write_bytes(lzma.decompress(packed))
        shutil.copy(GOLDEN / "qwen3-tokenizer" / "tokenizer_config.json", folder)
        return Tokenizer.from_folder(folder)


def reciting_llm(prompt, text_ids, **options):
    """(llm, prompt ids) that answers `prompt` with text_ids."""
    tokenizer = qwen_tokenizer()
    prompt_ids = prompt if isinstance(prompt, list) else tokenizer.encode(prompt)
    return LLM.from_model(ScriptModel(prompt_ids + list(text_ids)), tokenizer, **options), prompt_ids
