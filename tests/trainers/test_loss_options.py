"""What the options of the loss and of the advantages refuse, what they warn of, and that they come back from YAML."""

import logging

import pytest

from cukit import GRPOConfig, options
from cukit.options import flat_values
from cukit.trainers.loss_config import LATER_LOSSES, LOSS_TYPES


@pytest.mark.parametrize(
    "given, message",
    [
        *[({"loss_type": name}, f"loss_type={name} is not there yet .* there are dapo, grpo") for name in LATER_LOSSES],
        ({"kl_estimator": "k4"}, "kl_estimator must be one of k1, k2, k3"),
        ({"use_kl_in_reward": True}, "use_kl_in_reward needs a reference model: set beta"),
        ({"use_kl_in_reward": True, "beta": 0.1, "use_bias_correction_kl": True}, "give only one"),
        ({"top_entropy_quantile": 1.5}, "top_entropy_quantile must be at least 0 and at most 1"),
        ({"entropy_coef": -0.1}, "entropy_coef must be at least 0"),
        ({"entropy_coef_min": 0.5, "entropy_coef_max": 0.1}, "entropy_coef_max must be at least 0.5"),
        ({"sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be above 0"),
        ({"loss_scale_factor": 0}, "loss_scale_factor must be at least 1"),
        ({"vllm_importance_sampling_mode": "token"}, "vllm_importance_sampling_mode must be one of sequence_mask"),
        (
            {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_min": 4.0},
            "vllm_importance_sampling_clip_min=4.0 must be below vllm_importance_sampling_clip_max=3.0",
        ),
        (
            {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": None},
            "needs a bound",
        ),
        ({"vllm_importance_sampling_correction": True, "loss_type": "vespo"}, "loss_type=vespo weighs rows"),
        ({"advantage_estimator": "gae"}, "advantage_estimator must be one of grpo, rloo"),
        ({"advantage_estimator": "rloo", "scale_rewards": "batch"}, "scale_rewards=batch is not for"),
        ({"normalize_advantages": True}, "normalize_advantages=True is not for advantage_estimator=grpo"),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
            "scale_rewards=none is not for advantage_estimator=grpo with multi_objective_aggregation",
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus", "num_generations": 1, "dynamic_sampling": True},
            "dynamic_sampling compares the completions",
        ),
        ({"overlong_buffer_len": 600}, "overlong_buffer_len=600 must not exceed max_completion_length=512"),
        ({"stop_properly_penalty_coef": 2.0}, "stop_properly_penalty_coef must be at least 0 and at most 1"),
    ],
    ids=str,
)
def test_refused(given, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**given)


@pytest.mark.parametrize(
    "given, warning",
    [
        ({"loss_type": "cispo"}, "epsilon_high=0.2 is the cap of the ratio itself"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "epsilon_high=0.28 is the cap of the ratio itself"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, None),
        ({"loss_type": "luspo"}, "luspo: the paper's importance_sampling_level is sequence"),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, None),
        ({"importance_sampling_level": "sequence"}, "weighs a sequence by its length; GSPO's is loss_type=grpo"),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, None),
        ({"beta": 0.1, "kl_estimator": "k1"}, "kl_estimator=k1 in the loss has a mean gradient of 0"),
        ({"beta": 0.1, "kl_estimator": "k1", "use_kl_in_reward": True}, None),
        ({}, None),
    ],
    ids=str,
)
def test_warned(given, warning, caplog, monkeypatch):
    monkeypatch.setattr(options, "_said", set())
    with caplog.at_level(logging.WARNING):
        GRPOConfig(**given)
    assert (warning in caplog.text) if warning else not caplog.text


def test_the_defaults_of_what_follows():
    assert GRPOConfig(beta=0.1).loss_options.estimates_kl_by == "k3"
    assert GRPOConfig(beta=0.1, use_kl_in_reward=True).loss_options.estimates_kl_by == "k1"
    assert GRPOConfig(beta=0.1, use_kl_in_reward=True).loss_options.kl_in_loss == 0
    assert GRPOConfig().loss_options.all_rows_learn is False


@pytest.mark.parametrize(
    "given",
    [
        {"advantage_estimator": "rloo", "normalize_advantages": True},
        {"advantage_estimator": "reinforce_plus_plus", "num_generations": 1},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "scale_rewards": "none"},
    ],
    ids=str,
)
def test_a_run_reads_its_own_options_again(given):
    """config.yaml holds every value but those that others rule out."""
    first = GRPOConfig(**given)
    again = GRPOConfig(**{name: value for name, value in flat_values(first).items() if value is not None})
    assert flat_values(again) == flat_values(first) and all(getattr(again, name) == x for name, x in given.items())


def test_trls_scale_rewards_with_another_estimator():
    """A TRL YAML that spells the default out is no mistake."""
    assert GRPOConfig(advantage_estimator="rloo", scale_rewards=True).advantage_estimator == "rloo"


def test_no_loss_is_both_here_and_later():
    assert not LOSS_TYPES.keys() & LATER_LOSSES.keys()
