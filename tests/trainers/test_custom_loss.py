"""docs/examples/custom_loss.py: a user's loss is one method, its gradient is the formula's, and it learns."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from cukit import GRPOConfig

from .conftest import FOLDER, logged

FILE = Path(__file__).parents[2] / "docs" / "examples" / "custom_loss.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("custom_loss", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_learns(example, tmp_path):
    trainer = example.main(FOLDER, output_dir=str(tmp_path / "run"), device="cpu", save_steps=0)
    rewards = logged(trainer, "reward")
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1, rewards
    assert len(logged(trainer, "advantage")) == 20 and not logged(trainer, "clip_ratio/low_mean")


def test_on_policy_its_gradient_is_that_of_grpo(example, make_model, tokenizer, rows, make_grpo, tmp_path):
    """At ratio 1 the clipped surrogate has REINFORCE's gradient."""
    args = GRPOConfig(output_dir=str(tmp_path / "own"), per_device_train_batch_size=16, num_generations=4,
                      max_completion_length=6, gradient_checkpointing=False)  # fmt: skip
    own = example.ReinforceTrainer(
        make_model("float64"), _texts(example.share_of_ones), args, rows, processing_class=tokenizer
    )
    found = []
    for trainer in (own, make_grpo(dtype="float64")):
        for part in trainer.make_batch(0)[0]:
            loss, _ = trainer.compute_loss(part)
            if loss.requires_grad:
                loss.backward()
        found.append({name: parameter.grad.copy() for name, parameter in trainer.model.named_parameters().items()})
    for name, grad in found[0].items():
        np.testing.assert_allclose(grad, found[1][name], rtol=0, atol=1e-7, err_msg=name)  # old log-probs are float32


def _texts(reward):
    """For conversational rows: their completions are message lists."""
    return lambda completions, **columns: reward([completion[0]["content"] for completion in completions])


def test_the_example_is_short():
    """The class is a dozen lines, as the documentation says."""
    text = FILE.read_text(encoding="utf-8")
    body = text[text.index("class ReinforceTrainer") : text.index("def share_of_ones")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 12
