"""PPO's loss: every ppo/ array of tests/golden/policy_losses.npz, the formula written a second time, gradients, and
degenerate inputs.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from check import check_gradient

from cukit.autograd import Tensor
from cukit.backend.numpy.ppo_loss import ppo_loss_forward
from cukit.ops import ppo_loss, token_logprobs
from cukit.ops.policy_loss import MAX_LOG_RATIO
from cukit.ops.ppo_loss import PPO_STATS

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "policy_losses.npz", allow_pickle=False)
CASES = json.loads(str(GOLDEN["ppo/cases"]))
MASK = GOLDEN["ppo/mask"] > 0
NAMES = ("logps", "values", "entropies", "old_logps", "old_values", "ref_logps", "advantages", "returns", "weights")
SETTINGS = {  # name -> settings of random tests
    "trl": dict(eps_low=0.2, eps_high=0.2, vf_coef=0.1, cliprange_value=0.2),
    "all": dict(
        eps_low=0.2, eps_high=0.28, dual_clip=1.6, vf_coef=0.5, cliprange_value=0.3, entropy_coef=0.01, beta=0.1
    ),
    "k1": dict(eps_low=0.1, eps_high=0.1, vf_coef=0.5, cliprange_value=None, beta=0.3, kl_estimator="k1"),
    "k2": dict(eps_low=0.1, eps_high=0.1, dual_clip=3.0, vf_coef=0.5, cliprange_value=0.1, beta=0.3, kl_estimator="k2"),
}


def columns(count, seed=0, dtype=np.float64):
    """The nine columns; about one weight in five is 0."""
    rng = np.random.default_rng([seed, count])
    logps = -rng.random(count) * 3
    old, ref = (logps + 0.5 * rng.normal(size=count) for _ in range(2))
    values, advantages = rng.normal(size=(2, count))
    old_values, returns = (values + 0.4 * rng.normal(size=count) for _ in range(2))
    weights = rng.random(count) * (rng.random(count) > 0.2)
    given = (logps, values, rng.random(count) * 2, old, old_values, ref, advantages, returns, weights)
    return [x.astype(dtype) for x in given]


def run(given, settings):
    """(loss, gradients of logps, values and entropies, {statistic: value})."""
    leaves = [Tensor(x, requires_grad=True) for x in given[:3]]
    loss, stats = ppo_loss(*leaves, *given[3:], **settings)
    loss.backward()
    return loss.item(), [leaf.grad for leaf in leaves], dict(zip(PPO_STATS, stats, strict=True))


def by_hand(given, s):
    """({statistic: sum}, the loss), token by token from the formulas of the papers."""
    sums = dict.fromkeys(("loss", *PPO_STATS), 0.0)
    for logp, value, entropy, old, old_value, ref, advantage, target, weight in zip(*given):
        if weight == 0:
            continue
        ratio = np.exp(logp - old)
        kept = min(max(ratio, 1 - s["eps_low"]), 1 + s["eps_high"])
        objective = min(ratio * advantage, kept * advantage)  # Schulman 2017
        dual = s.get("dual_clip")
        bounded = dual is not None and advantage < 0 and dual * advantage > objective
        if bounded:  # Ye 2020: max(min(…), c·A) where A < 0
            objective = dual * advantage
        errors = [(value - target) ** 2]
        if s["cliprange_value"] is not None:
            low, high = old_value - s["cliprange_value"], old_value + s["cliprange_value"]
            errors.append(((low if value < low else high if value > high else value) - target) ** 2)
        x = ref - logp
        kl = {"k1": -x, "k2": x * x / 2, "k3": np.exp(x) - x - 1}[s.get("kl_estimator", "k3")] if s.get("beta") else 0
        sums["loss"] += weight * (-objective + s["vf_coef"] * 0.5 * max(errors) + s.get("beta", 0) * kl)
        sums["loss"] -= weight * s.get("entropy_coef", 0) * entropy
        sums["policy_loss"] -= weight * objective
        sums["value_loss"] += weight * 0.5 * max(errors)
        sums["entropy"] += weight * entropy
        sums["clip"] += (ratio > kept and advantage > 0) or (ratio < kept and advantage < 0)
        sums["value_clip"] += errors[-1] > errors[0]
        sums["dual_clip"] += bounded
        sums["approx_kl"] += (logp - old) ** 2 / 2
        sums["ratio"] += ratio
        sums["kl"] += kl
        sums["num_tokens"] += 1
    return sums.pop("loss"), sums


# ---- golden ----


def golden_inputs(packed):
    """(logits, actions, a function of a column's name), of the tokens that learn or of all, weight 0 where not."""
    chosen = MASK if packed else np.ones_like(MASK)
    weights = MASK[chosen] / MASK.sum()
    return (
        GOLDEN["ppo/logits"][chosen],
        GOLDEN["ppo/actions"][chosen],
        lambda name: GOLDEN[f"ppo/{name}"][chosen],
        weights,
    )


def golden_settings(case):
    return dict(
        eps_low=case["cliprange"],
        eps_high=case["cliprange"],
        cliprange_value=case["cliprange_value"],
        vf_coef=case["vf_coef"],
        entropy_coef=case["ent_coef"],
    )


def golden_run(packed, settings, advantages=1.0):
    """The loss, its gradients in logits and values, the statistics. advantages: what they are multiplied by."""
    logits, actions, column, weights = golden_inputs(packed)
    logits, vpred = (Tensor(x.copy(), requires_grad=True) for x in (logits, column("vpred")))
    logps, entropies = token_logprobs(logits, actions)
    kept = [column(name) for name in ("old_logps", "old_values")]
    loss, stats = ppo_loss(
        logps,
        vpred,
        entropies,
        *kept,
        None,
        advantages * column("advantages"),
        column("returns"),
        weights,
        **settings,
    )
    loss.backward()
    return loss.item(), logits.grad, vpred.grad, dict(zip(PPO_STATS, stats, strict=True))


@pytest.mark.parametrize("packed", [False, True], ids=["masked", "packed"])
@pytest.mark.parametrize("name", CASES)
def test_golden(name, packed):
    case, chosen = CASES[name], MASK if packed else np.ones_like(MASK)
    settings = golden_settings(case)
    loss, dlogits, dvalues, stats = golden_run(packed, settings)
    count = stats["num_tokens"]
    assert count == MASK.sum() and stats["extreme"] == stats["dual_clip"] == stats["kl"] == 0
    found = {
        "loss": loss,
        "pg_loss": stats["policy_loss"],
        "vf_loss": stats["value_loss"],
        "entropy": stats["entropy"],
        "pg_clipfrac": stats["clip"] / count,
        "vf_clipfrac": stats["value_clip"] / count,
        "grad_logits": dlogits,
        "grad_vpred": dvalues,
        "grad_entropy_wrt_logits": golden_run(packed, settings | {"vf_coef": 0.0, "entropy_coef": -1.0}, 0.0)[1],
        "grad_vf_wrt_vpred": golden_run(packed, settings | {"vf_coef": 1.0})[2],
    }
    _, _, column, weights = golden_inputs(packed)
    names = ("new_logps", "vpred", "token_entropy", "old_logps", "old_values", "advantages", "returns")
    given = [column(name) for name in names]
    found["grad_pg_wrt_logps"] = run([*given[:5], None, *given[5:], weights], settings)[1][0]
    assert set(found) == {key.rpartition("/")[2] for key in GOLDEN if key.startswith(f"ppo/{name}/")}
    for part, value in found.items():
        expected = GOLDEN[f"ppo/{name}/{part}"]
        if expected.ndim:
            assert not expected[~MASK].any()
            expected = expected[chosen]
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12, err_msg=part)


def test_golden_log_probabilities_and_entropies():
    logits, actions, column, _ = golden_inputs(packed=True)
    logps, entropies = token_logprobs(Tensor(logits), actions)
    np.testing.assert_allclose(logps.data, column("new_logps"), rtol=0, atol=1e-12)
    np.testing.assert_allclose(entropies.data, column("token_entropy"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_golden_kl(estimator):
    """KL alone: no advantages and no value loss."""
    new, ref = (GOLDEN[f"grpo/{name}_logps"].reshape(-1) for name in ("new", "ref"))
    zeros, weights = np.zeros(new.size), np.random.default_rng(0).random(new.size)
    settings = SETTINGS["trl"] | {"beta": 0.5, "kl_estimator": estimator}
    loss, _, stats = run([new, zeros, zeros, new, zeros, ref, zeros, zeros, weights], settings)
    expected = GOLDEN[f"kl/{estimator}"].reshape(-1)
    np.testing.assert_allclose(loss, 0.5 * weights @ expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(stats["kl"], expected.sum(), rtol=0, atol=1e-11)


# ---- the formula again, and its gradients ----


@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, 1037])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_formula_token_by_token(name, count):
    for seed in range(3):
        given = columns(count, seed)
        loss, _, stats = run(given, SETTINGS[name])
        expected_loss, expected = by_hand(given, SETTINGS[name])
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose([*stats.values()], [*expected.values()], rtol=1e-12, atol=1e-12)
    if count > 1000 and name == "all":
        assert all(stats[part] > 10 for part in ("clip", "value_clip", "dual_clip"))


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_along_a_direction(name):
    settings = SETTINGS[name] | {"entropy_coef": 0.01}
    for count, seed in ((1, 3), (33, 0), (33, 1)):
        given = columns(count, seed)
        check_gradient(lambda *x: ppo_loss(*x, *given[3:], **settings)[0], *given[:3], seed=seed)  # noqa: B023


@pytest.mark.parametrize("logp, loss, slope", [(-1.0, 1.0, 1.0), (-0.5, 1.6487212707, 1.6487212707), (0.2, 3.0, 0.0)])
def test_the_dual_clip_bounds_what_a_large_ratio_does(logp, loss, slope):
    """A = −1, c = 3: the loss follows the ratio up to 3 and stands still from there on. A > 0 is left as it is."""
    one, zero = np.ones(1), np.zeros(1)
    given = [np.full(1, logp), zero, zero, -one, zero, None, -one, zero, one]
    settings = SETTINGS["trl"] | {"dual_clip": 3.0}
    found, gradients, stats = run(given, settings)
    assert found == pytest.approx(loss) and gradients[0] == pytest.approx(slope) and stats["dual_clip"] == (loss == 3)
    given[6] = one
    assert run(given, settings)[:1] == run(given, SETTINGS["trl"])[:1] and run(given, settings)[2]["dual_clip"] == 0


def test_on_policy_every_ratio_is_one():
    given = columns(1037, dtype=np.float32)
    given[3], given[4] = given[0], given[1]
    _, _, stats = run(given, SETTINGS["all"])
    assert stats["ratio"] == stats["num_tokens"] == np.count_nonzero(given[-1])
    assert stats["clip"] == stats["value_clip"] == stats["dual_clip"] == stats["approx_kl"] == stats["extreme"] == 0


def test_without_an_entropy_bonus_the_head_gets_no_gradient_for_it():
    given = columns(5)
    assert run(given, SETTINGS["trl"])[1][2] is None
    np.testing.assert_array_equal(run(given, SETTINGS["all"])[1][2], -0.01 * given[-1])


def test_splitting_the_batch_changes_nothing():
    given = columns(97)
    loss, gradients, stats = run(given, SETTINGS["all"])
    parts = [run([x[i : i + 10] for x in given], SETTINGS["all"]) for i in range(0, 97, 10)]
    np.testing.assert_allclose(sum(part[0] for part in parts), loss, rtol=1e-12)
    for index, whole in enumerate(gradients):
        np.testing.assert_array_equal(np.concatenate([part[1][index] for part in parts]), whole)
    for name, value in stats.items():
        np.testing.assert_allclose(sum(part[2][name] for part in parts), value, rtol=1e-12)


# ---- degenerate inputs ----


def one_token(logp, old, ref=-1.0, advantage=1.0, beta=0.0, estimator="k3"):
    """(loss, gradient of the log-probability, {statistic: value}) of one float32 token without a value loss."""
    given = [np.array([x], np.float32) for x in (logp, 0, 0, old, 0, ref, advantage, 0, 1)]
    loss, gradients, stats = run(given, SETTINGS["trl"] | {"beta": beta, "kl_estimator": estimator})
    return loss, gradients[0][0], stats


def test_log_ratios_that_exp_cannot_take():
    """As tests/ops/test_policy_loss.py: finite, gradient 0 where it is held, one extreme token."""
    loss, gradient, stats = one_token(-1.0, -801.0, advantage=-1.0)
    assert loss == pytest.approx(np.exp(MAX_LOG_RATIO)) and gradient == 0 and stats["extreme"] == 1
    assert stats["approx_kl"] == MAX_LOG_RATIO**2 / 2
    assert one_token(-801.0, -1.0)[1:2] == (0.0,) and one_token(-801.0, -1.0)[2]["extreme"] == 1
    assert one_token(-1.0, -20.0, advantage=-1.0)[2]["extreme"] == 0
    loss, gradient, stats = one_token(-101.0, -101.0, advantage=0.0, beta=0.1)  # the reference is far above
    assert np.isfinite(loss) and gradient == 0 and stats["extreme"] == 1
    loss, gradient, stats = one_token(-1.0, -1.0, ref=-1001.0, advantage=0.0, beta=0.1)  # k3 goes on pulling
    assert loss == pytest.approx(99.9) and gradient == pytest.approx(0.1) and stats["extreme"] == 0
    assert one_token(-1.0, -801.0, ref=-2.0, advantage=0.0, beta=0.1, estimator="k1")[1] == pytest.approx(0.1)


def test_any_finite_numbers_give_finite_numbers():
    rng = np.random.default_rng(12)
    for case in range(200):
        count, spread = int(rng.integers(1, 30)), 10.0 ** rng.uniform(-3, 3)
        given = [np.float32(spread * rng.normal(size=count)) for _ in NAMES]
        for index in (0, 3, 5):
            given[index] = -np.abs(given[index])
        with np.errstate(all="raise", under="ignore"):
            loss, gradients, stats = run(given, SETTINGS[list(SETTINGS)[case % 4]])
        assert np.isfinite([loss, *stats.values()]).all()
        assert all(np.isfinite(x).all() for x in gradients if x is not None)


def test_masked_tokens_may_hold_anything():
    bad = np.array([-np.inf, np.nan, 800.0], np.float32)
    for settings in SETTINGS.values():
        loss, gradients, stats = run([bad] * 8 + [np.zeros(3, np.float32)], settings)
        assert loss == 0 and not any(stats.values()) and not any(x.any() for x in gradients if x is not None)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_nan_in_a_used_token_comes_through(name):
    """So that the step is skipped instead of training on nonsense."""
    given = columns(5, dtype=np.float32)
    given[-1][:] = 1
    given[NAMES.index(name)][2] = np.nan
    assert np.isnan(run(given, SETTINGS["all"])[0])


def test_float32_is_kept_and_near_float64():
    given = columns(1037, dtype=np.float32)
    settings = [SETTINGS["all"].get(key) for key in ("eps_low", "eps_high", "dual_clip", "vf_coef", "cliprange_value")]
    got = ppo_loss_forward(*given, *settings, 0.01, 0.1)
    true = ppo_loss_forward(*(x.astype(np.float64) for x in given), *settings, 0.01, 0.1)
    for a, b in zip(got[:4], true[:4]):
        assert a.dtype == np.float32 and b.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert got[4].dtype == np.float64
    np.testing.assert_allclose(got[4], true[4], rtol=1e-5)


def test_beta_needs_a_reference():
    given = columns(3)
    given[5] = None
    with pytest.raises(ValueError, match="beta=0.1 needs the reference"):
        run(given, SETTINGS["all"])
