"""Advantages and token weights: TRL's numbers, and rewards that are missing or equal."""

from pathlib import Path

import numpy as np
import pytest

from cukit.trainers.advantage import combine_rewards, group_advantages, token_weights

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "policy_losses.npz", allow_pickle=False)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_golden(scale):
    advantages, mean, std = group_advantages(GOLDEN["adv/rewards"], int(GOLDEN["adv/num_generations"]), scale)
    np.testing.assert_allclose(advantages, GOLDEN[f"adv/{scale}"], rtol=0, atol=1e-12)
    assert std[1] == 0 and mean[1] == 1  # the group of equal rewards


def test_equal_rewards_give_zero():
    for scale in ("group", "none"):
        assert not group_advantages(np.full(4, 0.3), 4, scale)[0].any()


def test_missing_rewards_are_left_out_of_the_statistics():
    rewards = np.array([1.0, np.nan, 0.0, np.nan, np.nan, np.nan, np.nan, np.nan, 2.0, np.nan, np.nan, np.nan])
    for scale in ("group", "batch", "none"):
        advantages, mean, std = group_advantages(rewards, 4, scale)
        assert np.isfinite(advantages).all() and not advantages[np.isnan(rewards)].any()
        assert mean[0] == 0.5 and np.isnan(mean[1]) and std[1] == 0
        assert advantages[0] > 0 > advantages[2] and advantages[8] == 0


def test_reward_weights_and_none():
    rewards = np.array([[1.0, 2.0], [np.nan, 2.0], [np.nan, np.nan]])
    np.testing.assert_array_equal(combine_rewards(rewards, None), [3.0, 2.0, np.nan])
    np.testing.assert_array_equal(combine_rewards(rewards, [0.5, 2.0]), [4.5, 4.0, np.nan])


def test_an_empty_batch_has_finite_weights():
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo"):
        assert np.isfinite(token_weights(loss_type, np.zeros(4), 8)).all()
    with pytest.raises(ValueError, match="loss_type 'vespo'"):
        token_weights("vespo", np.ones(2), 8)
