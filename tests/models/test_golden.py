"""The decoder against transformers: logits, log-probabilities, loss, every gradient, three AdamW steps, on three tiny
models.
"""

from pathlib import Path

import numpy as np
import pytest

from cukit.autograd import no_grad
from cukit.models.config import LEVELS
from cukit.models.logprobs import pack, target_logprobs, token_logprobs
from cukit.models.weights import load_model
from cukit.optim import AdamW

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = ("qwen3_tiny", "qwen2_tiny", "llama_tiny")


def load(name, dtype="float32"):
    model, truth = load_model(GOLDEN / name, dtype=dtype), np.load(GOLDEN / f"{name}.npz")
    rows = [ids[:n].tolist() for ids, n in zip(truth["input_ids"], truth["lengths"])]
    return model, truth, rows


def packed_rows(truth, name):
    """The valid positions of a padded array (B, L, …), packed."""
    return np.concatenate([x[:n] for x, n in zip(truth[name], truth["lengths"])])


def loss_of(model, rows):
    """Minus the mean log-probability of every predicted token, and its tape."""
    logprobs, _ = target_logprobs(model, rows, [np.arange(len(r)) > 0 for r in rows])
    return logprobs.sum() * (-1.0 / logprobs.shape[0])


@pytest.mark.parametrize("name", [*MODELS, "llama3_rope_tiny", "qwen3_tiny_bf16_sharded"])
def test_logits_and_logprobs(name):
    model, truth, rows = load(name)
    with no_grad():
        tokens, positions, attend = pack(model, rows)
        logits = model.logits(model.forward(tokens, positions, attend)).data[: sum(map(len, rows))]
    np.testing.assert_allclose(logits, packed_rows(truth, "logits"), atol=3e-5)
    logprobs = np.concatenate([np.r_[0, values] for values in token_logprobs(model, rows, max_tokens_per_batch=20)])
    np.testing.assert_allclose(logprobs, packed_rows(truth, "logprobs"), atol=3e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loss_and_every_gradient(name, checkpointing, dtype):
    model, truth, rows = load(name, dtype)
    model.gradient_checkpointing = checkpointing
    loss = loss_of(model, rows)
    np.testing.assert_allclose(loss.item(), truth["loss"], rtol=2e-6)
    loss.backward()
    grads = hf_gradients(model)
    expected = {key.removeprefix("grad/"): truth[key] for key in truth.files if key.startswith("grad/")}
    assert grads.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(grads[key], value, atol=4e-6, err_msg=key)


def hf_gradients(model):
    """The gradients under Hugging Face's names."""
    return model.store.part_views(lambda bucket: bucket.grad)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind, max_norm", [("adamw", 1.0), ("adamw_unclipped", 0.0)])
def test_three_adamw_steps(name, kind, max_norm):
    model, truth, rows = load(name)
    optimizer = AdamW(
        model.store,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        max_grad_norm=max_norm,
        decay=lambda parameter: True,
    )
    for step in range(3):
        loss = loss_of(model, rows)
        loss.backward()
        grad_norm, updated = optimizer.step(1e-3)
        assert updated
        np.testing.assert_allclose(loss.item(), truth[f"{kind}/losses"][step], rtol=3e-6)
        np.testing.assert_allclose(grad_norm, truth[f"{kind}/grad_norms"][step], rtol=1e-5)
    if kind == "adamw":
        np.testing.assert_allclose(loss_of(model, rows).item(), truth["adamw/loss_after"], rtol=3e-6)
    differences = np.concatenate(
        [np.abs(value - truth[f"{kind}/param/{key}"]).ravel() for key, value in model.parts().items()]
    )
    # Adam divides by the gradient's size: where that is nearly 0, rounding decides (see README of the golden values)
    assert np.quantile(differences, 0.995) < 1e-6 and differences.max() < 1e-3
