"""The decoder on the GPU: the golden tiny models in float32, held to twice the NumPy backend's own error."""

from pathlib import Path

import numpy as np
import pytest
from check import ulp

from cukit.autograd import no_grad
from cukit.models.logprobs import pack, target_logprobs
from cukit.models.weights import load_model

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parents[1] / "golden"


def results(name, device, dtype, checkpointing=False):
    """logits, log-probabilities, loss and every gradient of the golden batch, as float64 on the host."""
    model, truth = load_model(GOLDEN / name, device=device, dtype=dtype), np.load(GOLDEN / f"{name}.npz")
    model.gradient_checkpointing = checkpointing
    rows = [ids[:n].tolist() for ids, n in zip(truth["input_ids"], truth["lengths"])]
    with no_grad():
        tokens, positions, attend = pack(model, rows)
        found = {"logits": model.logits(model.forward(tokens, positions, attend)).data[: sum(map(len, rows))]}
    logprobs, _ = target_logprobs(model, rows, [np.arange(len(r)) > 0 for r in rows])
    loss = logprobs.sum() * (-1.0 / logprobs.shape[0])
    loss.backward()
    found |= {"logprobs": logprobs.data, "loss": loss.data} | {f"grad {p.name}": p.grad for p in model.parameters()}
    return {key: np.asarray(model.backend.to_numpy(value), np.float64) for key, value in found.items()}


@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen2_tiny", "llama_tiny", "llama3_rope_tiny"])
def test_float32_within_twice_numpy(name):
    true, near, got = results(name, "cpu", "float64"), results(name, "cpu", "float32"), results(name, "cuda", "float32")
    for key, value in true.items():
        error, yardstick = np.abs(got[key] - value).max(), np.abs(near[key] - value).max()
        assert error <= 2 * yardstick + ulp(np.abs(value).max(), "float32"), (
            f"{key}: error {error:.2e}, NumPy's own {yardstick:.2e}"
        )


def size(difference):
    """rms, as in the comparison with transformers."""
    return np.sqrt(np.mean(difference**2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_recompute_and_a_second_run_give_the_same_bits(dtype):
    first, *others = (results("qwen3_tiny", "cuda", dtype, level) for level in ("none", "none", "selective", "full"))
    for key, value in first.items():
        for again in others:
            np.testing.assert_array_equal(value, again[key], err_msg=key)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen2_tiny", "llama_tiny"])
def test_half_types_stay_near_numpy_in_the_same_type(name, dtype):
    true, near, got = results(name, "cpu", "float64"), results(name, "cpu", dtype), results(name, "cuda", dtype)
    for key, value in true.items():
        error, yardstick = size(got[key] - value), size(near[key] - value)
        assert error <= 2 * yardstick + ulp(np.abs(value).max(), dtype), (
            f"{key}: error {error:.2e}, NumPy's own {yardstick:.2e}"
        )
