"""No level of gradient_checkpointing changes a bit: of the losses, of any gradient, in any dtype, with any head.

The same on a GPU: tests/gpu/test_levels.py.
"""

from pathlib import Path

import numpy as np
import pytest

from cukit import ops
from cukit.models.adapter_config import TARGETS, AdapterConfig
from cukit.models.adapters import WAYS, Adapter
from cukit.models.config import LEVELS
from cukit.models.logprobs import pack, pack_tokens, packed_logprobs
from cukit.models.scores import packed_scores, score_rows
from cukit.models.weights import load_model

GOLDEN = Path(__file__).parents[1] / "golden"
DTYPES = ("bfloat16", "float32", "float16")
NAMES = ("qwen3_tiny", "qwen2_tiny", "llama_tiny")
# two micro-batches; their gradients add up
BATCHES = [[[5, 9, 50, 7, 3], [8, 1, 2]], [list(range(3, 40))]]
ADAPTERS = {
    "all linear layers": AdapterConfig(4, 8, TARGETS),
    "products of what is remade": AdapterConfig(2, 8, ("q_proj", "up_proj", "down_proj")),
    "none of what is remade": AdapterConfig(3, 8, ("o_proj",)),
}


def loss_of(model, rows):
    if model.config.head == "score":
        packed = pack_tokens(model.backend, rows)
        (scores,) = packed_scores(model, packed, model.backend.array(score_rows(rows)))
        return (scores * scores).sum()
    logprobs, entropy = packed_logprobs(model, pack_tokens(model.backend, rows, [np.arange(len(r)) > 0 for r in rows]))
    return (logprobs * logprobs).sum() + entropy.sum() * 0.1


def bits(model, level: str) -> dict[str, bytes]:
    """Losses and gradients of both micro-batches."""
    model.gradient_checkpointing = level
    model.trained_store.zero_grad()
    found = {}
    for number, rows in enumerate(BATCHES):
        loss = loss_of(model, rows)
        loss.backward()
        found[f"loss {number}"] = model.backend.to_numpy(loss.data).tobytes()
    for parameter in model.trained_store.parameters:
        gradient = model.backend.to_numpy(parameter.grad)
        assert gradient.shape == parameter.shape and gradient.any() and np.isfinite(gradient).all(), parameter.name
        found[parameter.name] = gradient.tobytes()
    return found


def assert_one_set_of_bits(model):
    first, *others = (bits(model, level) for level in LEVELS)
    assert all(other == first for other in others)


def adapted(config, way: str, device: str, dtype: str):
    model = load_model(GOLDEN / "qwen2_tiny", device=device, dtype=dtype)
    adapter = Adapter(model, config, way)
    for index, (name, view) in enumerate(adapter.parts().items()):
        if "lora_B" in name:  # zeros at first, and A then has no gradient
            adapter.backend.fill_normal(view, index, 0.1)
    adapter.refresh()
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_language_models(name, dtype):
    assert_one_set_of_bits(load_model(GOLDEN / name, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_models_of_scores(dtype):
    assert_one_set_of_bits(load_model(GOLDEN / "qwen3_reward", dtype=dtype, head="score"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters(config, way, dtype):
    assert_one_set_of_bits(adapted(config, way, "cpu", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loss_of_whole_logits(dtype):
    """The head's product takes the last norm's output itself."""
    model, found = load_model(GOLDEN / "llama_tiny", dtype=dtype), []
    for model.gradient_checkpointing in LEVELS:
        model.store.zero_grad()
        tokens, positions, attend = pack(model, BATCHES[0])
        targets = np.ones(len(tokens), np.int32)
        logprobs, _ = ops.token_logprobs(model.logits(model.forward(tokens, positions, attend)), targets)
        logprobs.sum().backward()
        found.append([parameter.grad.tobytes() for parameter in model.parameters()])
        assert model.lm_head.weight.grad.any() and model.norm.weight.grad.any()
    assert found[0] == found[1] == found[2]


def test_a_model_takes_levels_and_bools():
    model = load_model(GOLDEN / "qwen3_tiny")
    assert model.gradient_checkpointing == "none"
    for given, level in ((True, "full"), (False, "none"), ("selective", "selective"), ("full", "full")):
        model.gradient_checkpointing = given
        assert model.gradient_checkpointing == level
    for wrong in ("auto", "yes", None, 1):
        with pytest.raises(ValueError, match="must be one of none, selective, full, got"):
            model.gradient_checkpointing = wrong
    assert model.gradient_checkpointing == "full"
