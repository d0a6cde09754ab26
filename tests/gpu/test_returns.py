"""Rewards of tokens, GAE and whitening on the GPU: golden arrays, and rows of many lengths against the NumPy shelf."""

from pathlib import Path

import numpy as np
import pytest
from check import check_kernel, statistics

from cukit.backend import backend_for

pytestmark = pytest.mark.gpu
GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "policy_losses.npz", allow_pickle=False)
ROWS = {  # name -> learnt tokens of the rows
    "no rows": [],
    "empty rows": [0, 0, 0],
    "one token": [1],
    "a warp and its neighbours": [0, 1, 2, 31, 32, 33, 0, 63, 64, 65, 0],
    "long": [1037, 0, 5003, 256, 257],
    "many": [n % 7 for n in range(211)],
}


def columns(lengths):
    """Two columns of the tokens, one of the rows, and the borders."""
    borders = np.cumsum([0, *lengths]).astype(np.int32)
    count = int(borders[-1])
    return statistics(count, seed=1), statistics(count, seed=2), statistics(len(lengths), seed=3), borders


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("kind", ["terminal", "bootstrap", "holes"])
def test_golden_gae(kind, index):
    cuda = backend_for("cuda")
    mask = GOLDEN["gae/mask_holes" if kind == "holes" else "gae/mask"] > 0
    borders = np.concatenate([[0], np.cumsum(mask.sum(1))]).astype(np.int32)
    after = GOLDEN["gae/bootstrap"] * (kind == "bootstrap")
    given = [cuda.array(x, np.float32) for x in (GOLDEN["gae/rewards"][mask], GOLDEN["gae/values"][mask], after)]
    advantages, returns = cuda.gae(*given, cuda.array(borders), *GOLDEN["gae/settings"][index].tolist())
    found = {"advantages": advantages, "returns": returns, "whitened": cuda.whiten(advantages)}
    for name, values in found.items():
        expected = GOLDEN[f"gae/{kind}/{index}/{name}"][mask]
        np.testing.assert_allclose(cuda.to_numpy(values), expected, rtol=1e-6, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_golden_kl(estimator):
    cuda = backend_for("cuda")
    new, ref = (cuda.array(GOLDEN[f"grpo/{name}_logps"].reshape(-1), np.float32) for name in ("new", "ref"))
    borders = cuda.array(np.arange(0, 105, 13, dtype=np.int32))
    rewards = cuda.token_rewards(new, ref, cuda.zeros(8, np.float32), borders, 0.5, estimator)
    expected = -0.5 * GOLDEN[f"kl/{estimator}"].reshape(-1)
    np.testing.assert_allclose(cuda.to_numpy(rewards), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("name", ROWS)
def test_token_rewards(name, estimator):
    logprobs, ref, scores, borders = columns(ROWS[name])
    if estimator is None:
        check_kernel("token_rewards", logprobs, None, scores, borders, 0.05, dtypes=("float32",))
    else:
        check_kernel("token_rewards", logprobs, ref, scores, borders, 0.05, estimator, dtypes=("float32",))


def test_a_far_reference_gives_a_finite_k3():
    far, near = np.array([-101, -1, -30], np.float32), np.array([-1, -101, -1], np.float32)
    borders = np.array([0, 3], np.int32)
    check_kernel("token_rewards", far, near, np.ones(1, np.float32), borders, 0.05, "k3", dtypes=("float32",))


@pytest.mark.parametrize("gamma, lam", [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
@pytest.mark.parametrize("name", ROWS)
def test_gae(name, gamma, lam):
    check_kernel("gae", *columns(ROWS[name]), gamma, lam, dtypes=("float32",))


def test_a_row_depends_on_no_other_row():
    """The bits of a row alone, first, and behind others are the same."""
    cuda = backend_for("cuda")
    rewards, values, bootstrap, borders = columns(ROWS["a warp and its neighbours"] + ROWS["long"])
    together = [cuda.to_numpy(x) for x in cuda.gae(*map(cuda.array, (rewards, values, bootstrap, borders)), 0.99, 0.95)]
    for row, (start, stop) in enumerate(zip(borders, borders[1:])):
        own = (rewards[start:stop], values[start:stop], bootstrap[row : row + 1], np.array([0, stop - start], np.int32))
        for alone, whole in zip(cuda.gae(*map(cuda.array, own), 0.99, 0.95), together):
            assert cuda.to_numpy(alone).tobytes() == whole[start:stop].tobytes(), f"row {row}"


def test_a_nan_reaches_the_tokens_before_it_alone():
    cuda = backend_for("cuda")
    rewards, values, bootstrap, borders = columns([40, 100, 40])
    rewards[100] = np.nan
    advantages, _ = cuda.gae(*map(cuda.array, (rewards, values, bootstrap, borders)), 0.99, 0.95)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(cuda.to_numpy(advantages))), np.arange(40, 101))


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 211, 4096, 5003, 1_000_003])
def test_whiten(count, shift_mean):
    for around in (0.0, 100.0):
        check_kernel("whiten", statistics(count, around=around), shift_mean, dtypes=("float32",))


def test_equal_numbers_stay_finite():
    cuda = backend_for("cuda")
    for count in (1, 5003):
        whitened = cuda.whiten(cuda.array(np.full(count, 0.1, np.float32)))
        np.testing.assert_allclose(cuda.to_numpy(whitened), 0, rtol=0, atol=1e-11)
