"""Advantage estimators, penalties, importance corrections and the choice of tokens against formulas written anew."""

from types import SimpleNamespace

import numpy as np
import pytest

from cukit import GRPOConfig
from cukit.trainers.advantage import estimate, token_weights
from cukit.trainers.correction import importance_correction
from cukit.trainers.entropy import EntropyBonus, high_entropy
from cukit.trainers.loss_config import AdvantageOptions, LossOptions
from cukit.trainers.rollout import Samples
from cukit.trainers.shaping import kl_of_rows, overlong_penalty, shaped

RNG = np.random.default_rng(3)
SIZES = np.array([4, 4, 2, 5])
REWARDS = RNG.normal(size=(15, 2))
LENGTHS = RNG.integers(1, 30, 15)
GROUPS = np.repeat(np.arange(4), SIZES)


def advantages_of(values=REWARDS, weights=None, **options):
    return estimate(values, weights, SIZES, LENGTHS, AdvantageOptions(**options))


@pytest.mark.parametrize("normalize", [False, True])
def test_rloo(normalize):
    """Each reward less the mean of the others of its group."""
    found, rewards = advantages_of(advantage_estimator="rloo", normalize_advantages=normalize)
    expected = []
    for row, group in enumerate(GROUPS):
        others = [REWARDS[i].sum() for i in np.flatnonzero(GROUPS == group) if i != row]
        expected.append(REWARDS[row].sum() - sum(others) / len(others))
    if normalize:
        expected = (expected - np.mean(expected)) / (np.std(expected, ddof=1) + 1e-4)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(rewards, REWARDS.sum(1))


def test_rloo_leaves_missing_rewards_out():
    values = REWARDS.copy()
    values[[1, 9]] = np.nan  # of the third group one reward is left: nothing to compare it with
    found = advantages_of(values, advantage_estimator="rloo")[0]
    total = REWARDS.sum(1)
    assert found[1] == found[8] == found[9] == 0
    np.testing.assert_allclose(found[0], total[0] - (total[2] + total[3]) / 2, rtol=1e-12)


def test_reinforce_plus_plus():
    """One mean and one variance over every token of the batch; no group takes part."""
    found = advantages_of(advantage_estimator="reinforce_plus_plus")[0]
    tokens = np.repeat(REWARDS.sum(1), LENGTHS)
    expected = (REWARDS.sum(1) - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found @ LENGTHS, 0, atol=1e-10)


def test_reinforce_plus_plus_baseline():
    found = advantages_of(advantage_estimator="reinforce_plus_plus_baseline")[0]
    total = REWARDS.sum(1)
    centred = total - np.array([total[GROUPS == group].mean() for group in GROUPS])
    tokens = np.repeat(centred, LENGTHS)
    expected = (centred - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_whitening_leaves_missing_rewards_out():
    values = REWARDS.copy()
    values[4] = np.nan
    there = np.arange(15) != 4
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        found = advantages_of(values, advantage_estimator=name)[0]
        assert found[4] == 0 and abs(found[there] @ LENGTHS[there]) < 1e-10
        assert not advantages_of(np.full((15, 1), 0.3), advantage_estimator=name)[0].any()


@pytest.mark.parametrize("weights", [None, [0.3, 2.0]])
def test_normalize_then_sum(weights):
    """GDPO: an advantage for each reward in its group, their weighted sum, scaled by the batch."""
    found = advantages_of(weights=weights, multi_objective_aggregation="normalize_then_sum")[0]
    parts = np.zeros_like(REWARDS)
    for group in range(4):
        rows = REWARDS[GROUPS == group]
        parts[GROUPS == group] = (rows - rows.mean(0)) / (rows.std(0, ddof=1) + 1e-4)
    summed = parts @ (weights or [1, 1])
    expected = (summed - summed.mean()) / (summed.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_normalize_then_sum_without_spread_or_reward():
    values = REWARDS.copy()
    values[:4] = 0.1
    values[5, 0] = values[6] = np.nan
    found = advantages_of(values, multi_objective_aggregation="normalize_then_sum")[0]
    assert not found[:4].any() and found[6] == 0 and found[5] != 0 and np.isfinite(found).all()


def test_the_default_is_group_relative():
    found = advantages_of()[0]
    total = REWARDS.sum(1)
    for group in range(4):
        rows = total[GROUPS == group]
        expected = (rows - rows.mean()) / (rows.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(found[GROUPS == group], expected, rtol=1e-12)


def test_weights_of_tokens():
    """Σ weight · ℓ is what each paper averages."""
    lengths, losses = np.array([3, 1, 5, 0]), [np.arange(1.0, n + 1) for n in (3, 1, 5, 0)]

    def total(loss_type, scale=16):
        return sum(w * row.sum() for w, row in zip(token_weights(loss_type, lengths, scale), losses))

    sums = [row.sum() for row in losses]
    assert total("luspo") == pytest.approx(sum(sums) / 4) == total("dr_grpo", 1)
    assert total("sapo") == pytest.approx((sums[0] / 3 + sums[1] + sums[2] / 5) / 4) == total("grpo")
    assert total("vespo") == pytest.approx(sum(sums) / 9) == total("dapo")
    assert total("dr_grpo") == pytest.approx(sum(sums) / 4 / 16)


# ---- penalties ----


def samples_of(lengths, reasons=None, logprobs=None):
    return Samples(
        [np.arange(n + 2, dtype=np.int32) for n in lengths],
        np.full(len(lengths), 2, np.int32),
        np.zeros(len(lengths), np.int32),
        logprobs or [np.zeros(n) for n in lengths],
        reasons or ["stop"] * len(lengths),
        [""] * len(lengths),
    )


def test_soft_overlong_penalty():
    """DAPO, equation 13, of L_max 20 and L_cache 8."""
    found = overlong_penalty(np.array([0, 11, 12, 13, 16, 19, 20]), 20, 8, 1.0)
    assert found.tolist() == [0, 0, 0, -1 / 8, -4 / 8, -7 / 8, -1]
    assert overlong_penalty(np.array([20]), 20, 8, 0.5).tolist() == [-0.5]


def test_shaped_rewards():
    values = np.array([[1.0, 2.0], [1.0, np.nan], [np.nan, np.nan], [1.0, 1.0]])
    samples = samples_of([4, 10, 10, 7], ["stop", "length", "length", "stop"])

    def args(**options):
        return GRPOConfig(max_completion_length=10, **options)

    assert shaped(values, [1.0, 3.0], samples, args()) == (values, [1.0, 3.0])  # the same array: nothing is touched
    found, weights = shaped(values, None, samples, args(overlong_buffer_len=4, overlong_penalty_factor=2.0))
    np.testing.assert_array_equal(found[:, 2], [0, -2.0, np.nan, -0.5])
    np.testing.assert_array_equal(found[:, :2], values)
    assert weights == [1.0, 1.0, 1.0]
    found, weights = shaped(values, [1.0, 3.0], samples, args(stop_properly_penalty_coef=0.0))
    np.testing.assert_array_equal(found, [[1, 2], [0, np.nan], [np.nan, np.nan], [1, 1]])
    assert weights == [1.0, 3.0]
    found, weights = shaped(values, None, samples, args(beta=0.1, use_kl_in_reward=True), kl=np.array([1.0, 2, 3, 4]))
    np.testing.assert_allclose(found[:, 2], [-0.1, -0.2, np.nan, -0.4])


def test_kl_of_rows():
    policy, reference = [np.array([-1.0, -2.0]), np.array([-0.5])], [np.array([-1.5, -1.0]), np.array([-0.7])]
    samples = samples_of([2, 1], logprobs=policy)
    differences = [p - r for p, r in zip(policy, reference)]
    for name, formula in (
        ("k1", lambda d: d),
        ("k2", lambda d: d**2 / 2),
        ("k3", lambda d: np.exp(-d) - 1 + d),
    ):
        expected = [formula(d).sum() for d in differences]
        np.testing.assert_allclose(kl_of_rows(samples, reference, name), expected, rtol=1e-12)


# ---- importance correction ----


def test_importance_correction():
    log_ratio, borders = np.log([0.5, 2.0, 4.0, 1.5, 3.0, 0.2]), np.array([0, 2, 2, 3, 6])
    rows = [1.0, 1.0, 4.0, 0.9, 0.9, 0.9]

    def found(mode, low=None, high=None):
        return importance_correction(log_ratio, borders, mode, low, high)

    np.testing.assert_allclose(found("token_truncate", 0.4, 2.5), [0.5, 2, 2.5, 1.5, 2.5, 0.4])
    np.testing.assert_allclose(found("token_truncate", None, 2.5), [0.5, 2, 2.5, 1.5, 2.5, 0.2])
    np.testing.assert_allclose(found("token_mask", 0.4, 2.5), [0.5, 2, 0, 1.5, 0, 0])
    np.testing.assert_allclose(found("sequence_truncate", 0.95, 3.0), [1, 1, 3, 0.95, 0.95, 0.95])
    np.testing.assert_allclose(found("sequence_mask", None, 3.0), [1, 1, 0, 0.9, 0.9, 0.9])
    np.testing.assert_allclose(found("sequence_mask", 0.95, None), [1, 1, 4, 0, 0, 0])
    np.testing.assert_allclose(found("sequence_mask", None, 9.0), rows)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        same = importance_correction(np.zeros(6), borders, mode, 0.5, 2.0)
        assert (same == 1).all()  # exactly
        far = importance_correction(np.full(6, 1000.0), borders, mode, None, 3.0)
        assert (far == (0 if "mask" in mode else 3)).all()


# ---- entropy ----


def test_high_entropy():
    entropies = np.array([0.1, 3.0, 0.2, 2.0, 1.0])
    assert high_entropy(entropies, 1.0).all() and high_entropy(entropies[:0], 0.5).size == 0
    assert high_entropy(entropies, 0.0).tolist() == [False, True, False, False, False]
    assert high_entropy(entropies, 0.5).tolist() == [False, True, False, True, True]
    assert high_entropy(entropies, 0.25).tolist() == [False, True, False, True, False]


def test_the_adaptive_coefficient():
    """TRL's and Skywork-OR1's rule: up after a low entropy, down after a high one; off while it is high."""
    options = LossOptions(
        use_adaptive_entropy=True, entropy_coef=0.01, entropy_coef_delta=0.02, entropy_coef_max=0.04, entropy_target=1.0
    )
    bonus, seen = EntropyBonus(options), []
    for entropy in (2.0, 0.5, 1.0, 0.5, 0.5, 2.0, float("nan"), 0.9):
        bonus.update(entropy)
        seen.append((round(bonus.coefficient, 9), round(bonus.applied, 9)))
    assert seen == [(0, 0), (0.02, 0.02), (0.04, 0.04), (0.04, 0.04), (0.04, 0.04), (0.02, 0), (0.02, 0), (0.04, 0.04)]
    other = EntropyBonus(options)
    assert other.state() == {} and other.applied == 0  # the first step has none, as in TRL
    other.load(bonus.state())
    assert (other.coefficient, other.last_entropy) == (bonus.coefficient, 0.9)


def test_a_constant_coefficient_stays():
    bonus = EntropyBonus(SimpleNamespace(use_adaptive_entropy=False, entropy_coef=0.3, entropy_target=0.2))
    bonus.update(0.1)
    assert bonus.applied == 0.3 and bonus.state() == {}
