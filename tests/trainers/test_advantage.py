"""Advantages and token weights: TRL's numbers, and rewards that are missing or equal."""

from pathlib import Path

import numpy as np
import pytest

from cukit.trainers.advantage import SCALE_EPS, combine_rewards, group_advantages, token_weights
from cukit.trainers.loss_config import LOSS_TYPES

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "policy_losses.npz", allow_pickle=False)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_golden(scale):
    advantages, mean, std = group_advantages(GOLDEN["adv/rewards"], int(GOLDEN["adv/num_generations"]), scale)
    np.testing.assert_allclose(advantages, GOLDEN[f"adv/{scale}"], rtol=0, atol=1e-12)
    assert std[1] == 0 and mean[1] == 1  # the group of equal rewards


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_e5_equal_rewards_have_no_advantage(scale):
    """0.1 six times sums to 0.6 less a rounding; still every advantage and the std are exactly 0."""
    rng = np.random.default_rng(5)
    values = [0.1, 0.3, 1 / 3, -7.7, 1e300, -1.7e308, 5e-324, 1e-310, 0.0, *rng.normal(size=200)]
    for value in values:
        for size in (2, 3, 6, 7, 8, 64, int(rng.integers(2, 200))):
            rewards = np.full(2 * size, value)
            rewards[size:] = value / 3  # another group, so that the batch has a spread
            if size > 2:
                rewards[rng.integers(size)] = np.nan
            advantages, mean, std = group_advantages(rewards, size, scale)
            assert not advantages.any() and not std.any() and mean.tolist() == [value, value / 3]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_of_unequal_size(scale):
    """Each group as if it stood alone; equal sizes given one by one are the same numbers."""
    rewards, sizes = np.random.default_rng(0).normal(size=11), [2, 5, 1, 3]
    advantages, mean, std = group_advantages(rewards, np.array(sizes), scale)
    borders = np.cumsum([0, *sizes])
    for group, (start, stop) in enumerate(zip(borders, borders[1:])):
        alone, own_mean, own_std = group_advantages(rewards[start:stop], stop - start, "none")
        divisor = {"none": 1, "group": own_std + SCALE_EPS, "batch": rewards.std(ddof=1) + SCALE_EPS}[scale]
        np.testing.assert_allclose(advantages[start:stop], alone / divisor, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose([mean[group], std[group]], [own_mean[0], own_std[0]], rtol=1e-12)
    for one, each in zip(group_advantages(rewards[:10], 5, scale), group_advantages(rewards[:10], [5, 5], scale)):
        np.testing.assert_array_equal(one, each)


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
    for loss_type in LOSS_TYPES:
        assert np.isfinite(token_weights(loss_type, np.zeros(4), 8)).all()
    with pytest.raises(ValueError, match="loss_type 'gpg'"):
        token_weights("gpg", np.ones(2), 8)
