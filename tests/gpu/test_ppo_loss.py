"""PPO's loss on the GPU: golden cases, and degenerate inputs, against the NumPy shelf."""

import json
from pathlib import Path

import numpy as np
import pytest
from check import check_kernel, statistics

from cukit.autograd import Tensor
from cukit.backend import backend_for
from cukit.ops import ppo_loss, token_logprobs
from cukit.ops.ppo_loss import PPO_STATS

pytestmark = pytest.mark.gpu
GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "policy_losses.npz", allow_pickle=False)
CASES = json.loads(str(GOLDEN["ppo/cases"]))
MASK = GOLDEN["ppo/mask"] > 0
# what follows the columns: eps_low, eps_high, dual_clip, vf_coef, cliprange_value, entropy_coef, beta, kl_estimator
SETTINGS = {
    "trl": (0.2, 0.2, None, 0.1, 0.2, 0.0, 0.0, "k3"),
    "all": (0.2, 0.28, 1.6, 0.5, 0.3, 0.01, 0.1, "k3"),
    "k1": (0.1, 0.1, None, 0.5, None, 0.01, 0.3, "k1"),
    "k2": (0.1, 0.1, 3.0, 0.5, 0.1, 0.0, 0.3, "k2"),
}


def columns(count, beta=1.0):
    """logps, values, entropies, old_logps, old_values, ref_logps, advantages, returns, weights."""
    given = [statistics(count, seed=seed, scale=0.5) for seed in range(9)]
    given[5] = given[5] if beta else None
    rng = np.random.default_rng(count)
    given[8] = (rng.random(count) * (rng.random(count) > 0.2)).astype(np.float32)
    return given


def check_ppo_loss(given, settings):
    check_kernel("ppo_loss_forward", *given, *settings, dtypes=("float32",))
    check_statistics(given, settings)


def check_statistics(given, settings):
    """Each sum by itself: the harness judges an array of them by its largest. Counts are equal."""
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    *_, got = cuda.ppo_loss_forward(*(None if x is None else cuda.array(x) for x in given), *settings)
    *_, true = cpu.ppo_loss_forward(*(None if x is None else x.astype(np.float64) for x in given), *settings)
    for name, a, b in zip(PPO_STATS, cuda.to_numpy(got), true, strict=True):
        counts = name in ("clip", "value_clip", "dual_clip", "extreme", "num_tokens")
        np.testing.assert_allclose(a, b, rtol=0 if counts else 1e-9, atol=0 if counts else 1e-9, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    cuda, case = backend_for("cuda"), CASES[name]
    names = ("old_logps", "old_values", "advantages", "returns")
    old_logps, old_values, advantages, returns = (cuda.array(GOLDEN[f"ppo/{n}"][MASK], np.float32) for n in names)
    logits, vpred = (
        Tensor(cuda.array(GOLDEN[f"ppo/{n}"][MASK], np.float32), requires_grad=True) for n in ("logits", "vpred")
    )
    logps, entropies = token_logprobs(logits, cuda.array(GOLDEN["ppo/actions"][MASK], np.int32))
    loss, stats = ppo_loss(
        logps,
        vpred,
        entropies,
        old_logps,
        old_values,
        None,
        advantages,
        returns,
        cuda.array(np.full(MASK.sum(), 1 / MASK.sum(), np.float32)),
        eps_low=case["cliprange"],
        eps_high=case["cliprange"],
        cliprange_value=case["cliprange_value"],
        vf_coef=case["vf_coef"],
        entropy_coef=case["ent_coef"],
    )
    loss.backward()
    stats = dict(zip(PPO_STATS, cuda.to_numpy(stats), strict=True))
    found = {
        "loss": loss.item(),
        "pg_loss": stats["policy_loss"],
        "vf_loss": stats["value_loss"],
        "entropy": stats["entropy"],
        "pg_clipfrac": stats["clip"] / stats["num_tokens"],
        "vf_clipfrac": stats["value_clip"] / stats["num_tokens"],
    }
    for part, value in found.items():
        np.testing.assert_allclose(value, GOLDEN[f"ppo/{name}/{part}"], rtol=1e-6, atol=1e-6, err_msg=part)
    for part, leaf in (("grad_logits", logits), ("grad_vpred", vpred)):
        expected = GOLDEN[f"ppo/{name}/{part}"][MASK]
        np.testing.assert_allclose(cuda.to_numpy(leaf.grad), expected, rtol=1e-5, atol=1e-7, err_msg=part)


@pytest.mark.parametrize("count", [0, 1, 211, 1024, 5003, 300_007])
@pytest.mark.parametrize("name", SETTINGS)
def test_sizes(name, count):
    settings = SETTINGS[name]
    check_ppo_loss(columns(count, beta=settings[6]), settings)


def test_on_policy_every_ratio_is_one():
    cuda, given = backend_for("cuda"), columns(5003)
    given[3], given[4] = given[0], given[1]
    *_, stats = cuda.ppo_loss_forward(*map(cuda.array, given), *SETTINGS["all"])
    stats = dict(zip(PPO_STATS, cuda.to_numpy(stats), strict=True))
    assert stats["ratio"] == stats["num_tokens"] == np.count_nonzero(given[8])
    assert stats["clip"] == stats["value_clip"] == stats["dual_clip"] == stats["approx_kl"] == stats["extreme"] == 0


def test_masked_tokens_may_hold_anything():
    bad = np.array([-np.inf, np.nan, 800.0], np.float32)
    for settings in SETTINGS.values():
        check_ppo_loss([bad] * 8 + [np.zeros(3, np.float32)], settings)


@pytest.mark.parametrize("index", range(8))
def test_nan_in_a_used_token_comes_through(index):
    """So that the step is skipped instead of training on nonsense: where NumPy's results are NaN, in any column."""
    given = [statistics(5, seed=seed) for seed in range(8)] + [np.ones(5, np.float32)]
    given[index][2] = np.nan
    check_ppo_loss(given, SETTINGS["all"])
    cuda = backend_for("cuda")
    assert np.isnan(cuda.to_numpy(cuda.ppo_loss_forward(*map(cuda.array, given), *SETTINGS["all"])[0]))


@pytest.mark.parametrize("name", SETTINGS)
def test_any_finite_log_probs(name):
    """Held log-ratios and references among them."""
    rng = np.random.default_rng(12)
    for count in (1, 211, 5003):
        given = columns(count)
        for index in (0, 3, 5):
            given[index] = -1000 * rng.random(count).astype(np.float32)
        check_ppo_loss(given, SETTINGS[name])
