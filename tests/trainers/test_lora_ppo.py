"""PPO with an adapter: the critic is trained whole beside it; a run resumes bit for bit."""

import numpy as np
import pytest

from cukit import PPOConfig, PPOTrainer

from .conftest import rows_without_times, share_of_ones, weights_of
from .test_lora import LORA, WAYS, assert_equal_factors, factors_of


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_ppo_trains_an_adapter_beside_its_critic(make_model, tokenizer, tmp_path, rows, critic):
    args = PPOConfig(
        **LORA, output_dir=str(tmp_path / "ppo"), critic=critic, max_steps=2, max_completion_length=6,
        per_device_train_batch_size=8, logging_steps=1, kl_coef=0.05,
    )  # fmt: skip
    trainer = PPOTrainer(make_model(), [share_of_ones], args, rows, processing_class=tokenizer)
    base, before = weights_of(trainer.model), factors_of(trainer)
    critics = weights_of(trainer.critic)
    trainer.train()
    assert all(np.array_equal(x, base[name]) for name, x in weights_of(trainer.model).items())
    assert any((x != before[name]).any() for name, x in factors_of(trainer).items())
    assert any((x != critics[name]).any() for name, x in weights_of(trainer.critic).items())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_ppo_resumes_bit_for_bit(make_model, tokenizer, tmp_path, rows, critic, way):
    """In the middle of a rollout: adapter, whole critic, both optimizers, values and KL coefficient."""

    def make(folder, steps):
        args = PPOConfig(
            **LORA, lora_way=way, output_dir=str(tmp_path / folder), critic=critic, max_steps=steps, save_steps=1,
            max_completion_length=6, per_device_train_batch_size=8, logging_steps=1, kl_coef=0.05, num_ppo_epochs=2,
            kl_target=0.1, lr_scheduler_type="constant",
        )  # fmt: skip
        return PPOTrainer(make_model(), [share_of_ones], args, rows, processing_class=tokenizer)

    whole = make("whole", 4)
    whole.train()
    make("cut", 3).train()
    again = make("cut", 4)
    again.train(resume_from_checkpoint="latest")
    assert_equal_factors(whole, again)
    critics = [weights_of(trainer.critic) for trainer in (whole, again)]
    assert all(np.array_equal(x, critics[1][name]) for name, x in critics[0].items())
    assert getattr(again.critic, "adapter", None) is None
    assert rows_without_times(again.run_folder)[3:] == rows_without_times(whole.run_folder)[3:]
