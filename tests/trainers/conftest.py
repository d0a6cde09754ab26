"""A random model small enough to train in milliseconds, with the bundled tokenizer, and rows it can be asked."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cukit.backend import backend_for
from cukit.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2] / "data" / "tiny-qwen3"


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.from_folder(FOLDER)


@pytest.fixture
def make_model():
    """make_model(dtype="float32", seed=0): 2 layers, hidden 32, context 96."""
    raw = json.loads((FOLDER / "config.json").read_text())
    raw |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 16, "max_position_embeddings": 96}

    def make(dtype="float32", seed=0):
        model = Decoder(replace(ModelConfig.from_json(raw)), backend_for("cpu"), dtype)
        model.init_weights(seed)
        return model

    return make


@pytest.fixture
def rows():
    """12 rows with conversational prompts of different lengths."""
    return [{"prompt": [{"role": "user", "content": "+".join(map(str, range(i % 5 + 1)))}], "answer": str(i)} for i in range(12)]


def weights_of(model):
    return {name: parameter.data.copy() for name, parameter in model.named_parameters().items()}
