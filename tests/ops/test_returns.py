"""Rewards of tokens, GAE and whitening: every gae/ and kl/ array of tests/golden/policy_losses.npz, the definitions
written a second time, and degenerate rows.
"""

from pathlib import Path

import numpy as np
import pytest

from cukit.backend.numpy.returns import gae, token_rewards, whiten

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "policy_losses.npz", allow_pickle=False)
LENGTHS = [0, 1, 33, 2, 0, 31, 32, 1037, 0]
BORDERS = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
COUNT = int(BORDERS[-1])


def rows(seed=0, dtype=np.float64):
    """rewards, values (N,) and bootstrap (B,) of the rows of LENGTHS."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=count).astype(dtype) for count in (COUNT, COUNT, len(LENGTHS))]


def by_definition(rewards, values, bootstrap, gamma, lam):
    """GAE's sums over what follows, quadratic: A_t = Σ_l (gamma·lam)^l δ_{t+l} (Schulman et al. 2016, equation 16)."""
    advantages = np.zeros(COUNT)
    for row, (start, stop) in enumerate(zip(BORDERS, BORDERS[1:])):
        after = np.append(values[start:stop], bootstrap[row])[1:]
        deltas = rewards[start:stop] + gamma * after - values[start:stop]
        for t in range(stop - start):
            advantages[start + t] = deltas[t:] @ (gamma * lam) ** np.arange(stop - start - t)
    return advantages


# ---- golden ----


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("kind", ["terminal", "bootstrap", "holes"])
def test_golden_gae(kind, index):
    mask = GOLDEN["gae/mask_holes" if kind == "holes" else "gae/mask"] > 0
    borders = np.concatenate([[0], np.cumsum(mask.sum(1))]).astype(np.int32)
    after = GOLDEN["gae/bootstrap"] if kind == "bootstrap" else np.zeros(len(mask))
    settings = GOLDEN["gae/settings"]
    assert len(settings) == 4
    advantages, returns = gae(GOLDEN["gae/rewards"][mask], GOLDEN["gae/values"][mask], after, borders, *settings[index])
    found = {"advantages": advantages, "returns": returns, "whitened": whiten(advantages)}
    for name, values in found.items():
        expected = GOLDEN[f"gae/{kind}/{index}/{name}"]
        assert not expected[~mask].any()
        np.testing.assert_allclose(values, expected[mask], rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_golden_kl(estimator):
    new, ref = (GOLDEN[f"grpo/{name}_logps"].reshape(-1) for name in ("new", "ref"))
    rewards = token_rewards(new, ref, np.zeros(8), np.arange(0, 105, 13), 0.5, estimator)
    np.testing.assert_allclose(rewards, -0.5 * GOLDEN[f"kl/{estimator}"].reshape(-1), rtol=0, atol=1e-12)


# ---- rewards of tokens ----


def test_a_score_stands_at_its_rows_last_token():
    logprobs, ref, _ = rows()
    scores = np.arange(1.0, len(LENGTHS) + 1)
    at_last = np.zeros(COUNT)
    for start, stop, score in zip(BORDERS, BORDERS[1:], scores):
        if stop > start:
            at_last[stop - 1] = score
    np.testing.assert_array_equal(token_rewards(logprobs, None, scores, BORDERS, 0.5), at_last)
    found = token_rewards(logprobs, ref, scores, BORDERS, 0.5)  # k1 is the default, as in TRL
    np.testing.assert_allclose(found, at_last - 0.5 * (logprobs - ref), rtol=0, atol=1e-14)


def test_a_far_reference_gives_a_finite_k3():
    logprobs, ref = np.array([-101.0, -1.0], np.float32), np.array([-1.0, -101.0], np.float32)
    with np.errstate(all="raise"):
        rewards = token_rewards(logprobs, ref, np.zeros(1, np.float32), np.array([0, 2]), 1.0, "k3")
    np.testing.assert_allclose(rewards, [-(np.exp(20.0) - 21), -99], rtol=1e-6)


# ---- GAE ----


@pytest.mark.parametrize("gamma, lam", [(0.99, 0.95), (1.0, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_gae_by_its_definition(gamma, lam):
    for seed in range(3):
        given = rows(seed)
        advantages, returns = gae(*given[:3], BORDERS, gamma, lam)
        expected = by_definition(*given, gamma, lam)
        np.testing.assert_allclose(advantages, expected, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(returns, expected + given[1], rtol=1e-10, atol=1e-10)


def test_with_lambda_1_returns_are_discounted_sums_of_rewards():
    """Equation 18: values cancel, and a row that was cut counts on with its bootstrap value."""
    rewards, values, bootstrap = rows()
    _, returns = gae(rewards, values, bootstrap, BORDERS, 0.97, 1.0)
    for start, stop, after in zip(BORDERS, BORDERS[1:], bootstrap):
        for t in range(stop - 1, start - 1, -1):
            after = rewards[t] + 0.97 * after
            np.testing.assert_allclose(returns[t], after, rtol=1e-10, atol=1e-12)


def test_a_row_depends_on_no_other_row():
    rewards, values, bootstrap = rows(dtype=np.float32)
    together = gae(rewards, values, bootstrap, BORDERS, 0.99, 0.95)
    for row, (start, stop) in enumerate(zip(BORDERS, BORDERS[1:])):
        alone = gae(
            rewards[start:stop], values[start:stop], bootstrap[row : row + 1], np.array([0, stop - start]), 0.99, 0.95
        )
        for a, b in zip(alone, together):
            np.testing.assert_array_equal(a, b[start:stop])


def test_a_nan_reaches_the_tokens_before_it_alone():
    rewards, values, bootstrap = rows()
    rewards[BORDERS[3] - 5] = np.nan  # in the row of 33
    advantages, _ = gae(rewards, values, bootstrap, BORDERS, 0.99, 0.95)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(advantages)), np.arange(BORDERS[2], BORDERS[3] - 4))


# ---- whitening ----


@pytest.mark.parametrize("count", [2, 33, 1037])
def test_whitened_by_numpys_own_statistics(count):
    x = 3 + 2 * np.random.default_rng(count).normal(size=count)
    expected = (x - np.mean(x)) / np.sqrt(np.var(x, ddof=1) + 1e-8)
    np.testing.assert_allclose(whiten(x), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(whiten(x, shift_mean=False), expected + np.mean(x), rtol=1e-12, atol=1e-12)


def test_few_and_equal_numbers_stay_finite():
    for dtype in (np.float32, np.float64):
        assert whiten(np.zeros(0, dtype)).shape == (0,)
        assert whiten(np.full(1, 0.1, dtype)) == 0 and whiten(np.full(1, 0.1, dtype), False) == dtype(0.1)
        np.testing.assert_allclose(whiten(np.full(1000, 0.1, dtype)), 0, rtol=0, atol=1e-11)


def test_a_million_float32_numbers_far_from_0():
    x = (100 + np.random.default_rng(0).normal(size=1_000_000)).astype(np.float32)
    for shift_mean in (True, False):
        got, true = whiten(x, shift_mean), whiten(x.astype(np.float64), shift_mean)
        np.testing.assert_allclose(got, true, rtol=2e-7, atol=1e-7)


# ---- types and no rows ----


def test_float32_is_kept_and_near_float64():
    given = rows(dtype=np.float32)
    precise = [x.astype(np.float64) for x in given]
    calls = (
        lambda x: gae(*x, BORDERS, 0.99, 0.95),
        lambda x: [token_rewards(*x, BORDERS, 0.05, "k3")],
        lambda x: [whiten(x[0])],
    )
    for call in calls:
        for got, true in zip(call(given), call(precise)):
            assert got.dtype == np.float32 and true.dtype == np.float64
            np.testing.assert_allclose(got, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_no_tokens_at_all(num_rows):
    nothing, scores = np.zeros(0, np.float32), np.ones(num_rows, np.float32)
    borders = np.zeros(num_rows + 1, np.int32)
    assert token_rewards(nothing, nothing, scores, borders, 0.05).shape == (0,)
    for column in gae(nothing, nothing, scores, borders, 0.99, 0.95):
        assert column.shape == (0,)
