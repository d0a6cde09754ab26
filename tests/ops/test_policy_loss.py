"""Policy losses: every case of tests/golden/policy_losses.npz (TRL's own numbers), gradients, and degenerate inputs."""

import json
from pathlib import Path

import numpy as np
import pytest

from cukit.autograd import Tensor
from cukit.backend.numpy.policy_loss import policy_loss_forward
from cukit.ops.policy_loss import MAX_LOG_RATIO, STATS, policy_loss
from cukit.trainers.advantage import token_weights
from cukit.trainers.grpo_config import LOSS_TYPES

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "policy_losses.npz", allow_pickle=False)
CASES = json.loads(str(GOLDEN["grpo/cases"]))


def golden_inputs(case):
    """(new, old, ref, advantages, weights) as (8, 13) arrays, the weights 0 at masked tokens."""
    mask = GOLDEN[f"grpo/mask_{case['mask']}"]
    per_row = token_weights(
        case["loss_type"],
        mask.sum(1),
        int(GOLDEN["grpo/max_completion_length"]),
        float(GOLDEN[f"grpo/num_items_{case['mask']}"]),
    )
    advantages = np.broadcast_to(GOLDEN["grpo/advantages"][:, None], mask.shape)
    return (
        GOLDEN["grpo/new_logps"],
        GOLDEN["grpo/old_logps"],
        GOLDEN["grpo/ref_logps"],
        advantages,
        per_row[:, None] * mask,
    )


def run(case, new, old, ref, advantages, weights, cu_seqlens):
    leaf = Tensor(new.copy(), requires_grad=True)
    loss, stats = policy_loss(
        leaf,
        old,
        ref if case["beta"] else None,
        advantages,
        weights,
        kind=LOSS_TYPES[case["loss_type"]],
        eps_low=case["eps_low"],
        eps_high=case["eps_high"],
        delta=case["delta"],
        beta=case["beta"],
        bias_kl=case["bias_kl"],
        cu_seqlens=cu_seqlens if case["level"] == "sequence" else None,
    )
    loss.backward()
    return loss.item(), leaf.grad, dict(zip(STATS, stats, strict=True))


@pytest.mark.parametrize("packed", [False, True], ids=["holes_as_weight_0", "packed"])
@pytest.mark.parametrize("name", CASES)
def test_golden(name, packed):
    case = CASES[name]
    inputs = golden_inputs(case)
    mask = GOLDEN[f"grpo/mask_{case['mask']}"] > 0
    lengths = mask.sum(1) if packed else np.full(8, 13)
    inputs = [x[mask] if packed else x.reshape(-1) for x in inputs]
    loss, grad, stats = run(case, *inputs, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    np.testing.assert_allclose(loss, GOLDEN[f"grpo/{name}/loss"], rtol=0, atol=1e-12)
    expected = GOLDEN[f"grpo/{name}/grad"]
    np.testing.assert_allclose(grad, expected[mask] if packed else expected.reshape(-1), rtol=0, atol=1e-12)
    assert stats["num_tokens"] == mask.sum()
    if case["loss_type"] != "cispo":
        low, high = stats["clip_low"] / stats["clip_count"], stats["clip_high"] / stats["clip_count"]
        np.testing.assert_allclose(
            [low, high, low + high],
            [GOLDEN[f"grpo/{name}/clip_{m}_mean"] for m in ("low", "high", "region")],
            rtol=0,
            atol=1e-12,
        )
    if case["beta"]:
        np.testing.assert_allclose(
            stats["kl"] / stats["num_tokens"], GOLDEN[f"grpo/{name}/kl_mean"], rtol=0, atol=1e-12
        )


@pytest.mark.parametrize(
    "kind, level", [("clip", "token"), ("clip", "sequence"), ("cispo", "token"), ("cispo", "sequence")]
)
def test_gradient_along_a_direction(kind, level):
    """Every term at once, bias-corrected KL included. CISPO's ratio is held fixed: a constant by definition."""
    rng = np.random.default_rng(0)
    count, cu_seqlens = 29, np.array([0, 1, 1, 18, 29], np.int32)
    new, old, ref, advantages, direction = rng.normal(size=(5, count))
    weights = rng.random(count) * (rng.random(count) > 0.2)
    settings = dict(
        kind=kind,
        eps_low=0.2,
        eps_high=1.3 if kind == "cispo" else 0.3,
        delta=1.7,
        beta=0.1,
        bias_kl=kind == "clip",
        cu_seqlens=cu_seqlens if level == "sequence" else None,
    )
    leaf = Tensor(new.copy(), requires_grad=True)
    policy_loss(leaf, old, ref, advantages, weights, **settings)[0].backward()
    step = 1e-6
    old_up, old_down = (old + step * direction, old - step * direction) if kind == "cispo" else (old, old)
    up = policy_loss(Tensor(new + step * direction), old_up, ref, advantages, weights, **settings)[0].item()
    down = policy_loss(Tensor(new - step * direction), old_down, ref, advantages, weights, **settings)[0].item()
    np.testing.assert_allclose(leaf.grad @ direction, (up - down) / (2 * step), rtol=1e-6)


# ---- e12: log-ratios that exp cannot take ----

LEVELS = {"token": None, "sequence": np.array([0, 1], np.int32)}


def one_token(new, old, ref=None, advantage=1.0, level="token", kind="clip", delta=None, beta=0.0, bias_kl=False):
    """(loss, gradient, {statistic: value}) of one float32 token of weight 1."""
    new, old, ref, advantage = (None if x is None else np.array([x], np.float32) for x in (new, old, ref, advantage))
    eps_high = 5.0 if kind == "cispo" else 0.2
    loss, grad, stats = policy_loss_forward(
        new, old, ref, advantage, np.ones(1, np.float32), LEVELS[level], kind, 0.2, eps_high, delta, beta, bias_kl
    )
    return float(loss), float(grad[0]), dict(zip(STATS, stats, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_e12_a_clipped_ratio_beyond_float32(level):
    """new − old = 89 overflows float32's exp: the loss is the clipped one and its gradient 0, not ∞·0."""
    loss, grad, stats = one_token(0.0, -89.0, level=level)
    assert (loss, grad) == (-np.float32(1.2), 0.0) and stats["clip_high"] == 1 and stats["extreme"] == 1


@pytest.mark.parametrize("level", LEVELS)
def test_e12_cispo_beyond_float32(level):
    """The factor is the cap, a constant: −5 · A · new."""
    loss, grad, stats = one_token(-1.0, -90.0, level=level, kind="cispo")
    assert (loss, grad) == (5.0, -5.0) and stats["extreme"] == 1


@pytest.mark.parametrize("ratio", [25.0, 800.0])
@pytest.mark.parametrize("level", LEVELS)
def test_e12_one_token_does_not_rule_the_batch(ratio, level):
    """A < 0 has no upper clip: far off, the token keeps a finite loss, no gradient, and is counted."""
    loss, grad, stats = one_token(-1.0, -1.0 - ratio, advantage=-1.0, level=level)
    assert loss == pytest.approx(np.exp(MAX_LOG_RATIO)) and grad == 0 and stats["extreme"] == 1
    assert one_token(-1.0, -1.0 - 19.0, advantage=-1.0, level=level)[2]["extreme"] == 0


def test_e12_kl_of_a_far_reference():
    """ref − new = 100: a huge k3, no infinity, gradient 0. The other way k3 grows linearly and goes on pulling."""
    for bias_kl in (False, True):
        loss, grad, stats = one_token(-101.0, -101.0, ref=-1.0, advantage=0.0, beta=0.1, bias_kl=bias_kl)
        assert np.isfinite(loss) and grad == 0 and stats["extreme"] == 1 and np.isfinite(stats["kl"])
    assert one_token(-1.0, -26.0, ref=-11.0, advantage=0.0, beta=0.1, bias_kl=True)[1] == 0  # the ratio is held
    loss, grad, stats = one_token(-1.0, -1.0, ref=-1001.0, advantage=0.0, beta=0.1)
    assert loss == pytest.approx(99.9) and grad == pytest.approx(0.1) and stats["extreme"] == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["clip", "cispo"])
def test_e12_any_finite_log_probs_give_finite_numbers(kind, level):
    """Log-probs drawn from [−1000, 0], alone and in batches, with every term on: loss, gradient, statistics finite."""
    rng = np.random.default_rng(12)
    for case in range(200):
        count = int(rng.integers(1, 30))
        spread = 10.0 ** rng.uniform(-3, 3)
        new, old, ref = (np.float32(-spread * rng.random(count)) for _ in range(3))
        edges = rng.random(count) < 0.2
        new[edges], old[edges] = rng.permutation([0.0, -1000.0])
        advantages, weights = np.float32(rng.normal(size=count)), np.float32(rng.random(count) / count)
        cuts = np.sort(rng.integers(0, count + 1, 3))
        cu_seqlens = np.array([0, *cuts, count], np.int32) if level == "sequence" else None
        delta = (None, 1.5)[case % 2]
        with np.errstate(all="raise", under="ignore"):
            loss, grad, stats = policy_loss_forward(
                new, old, ref, advantages, weights, cu_seqlens, kind, 0.2, 0.3, delta, 0.1, case % 3 == 0
            )
        assert np.isfinite(loss) and np.isfinite(grad).all() and np.isfinite(stats).all()


def test_masked_tokens_may_hold_anything():
    """Weight 0 with log-probs of -inf or NaN: loss 0, gradient 0, statistics 0."""
    bad = np.array([-np.inf, np.nan, 800.0], np.float32)
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    for level in (None, np.array([0, 0, 3], np.int32)):
        leaf = Tensor(bad, requires_grad=True)
        loss, stats = policy_loss(leaf, ones, bad, ones, zeros, beta=0.1, bias_kl=True, cu_seqlens=level)
        loss.backward()
        assert loss.item() == 0 and not leaf.grad.any() and not stats[[3, 4, 5]].any()


def test_no_tokens_at_all():
    empty = np.zeros(0, np.float32)
    leaf = Tensor(empty, requires_grad=True)
    loss, _ = policy_loss(leaf, empty, empty, empty, empty, beta=0.1)
    loss.backward()
    assert loss.item() == 0 and leaf.grad.shape == (0,)


def test_equal_rewards_still_feel_the_kl():
    """Advantages of 0: no gradient without a reference, a gradient with one."""
    new, ref = np.array([-1.0, -2.0]), np.array([-1.5, -1.0])
    for beta in (0.0, 0.1):
        leaf = Tensor(new, requires_grad=True)
        policy_loss(leaf, new, ref, np.zeros(2), np.full(2, 0.5), beta=beta)[0].backward()
        assert leaf.grad.any() == (beta > 0)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("rows_each", [1, 4])
def test_splitting_the_batch_changes_nothing(loss_type, rows_each):
    """16 rows at once = 4 × 4 = 16 × 1, to float64 rounding, an empty row included."""
    rng = np.random.default_rng(1)
    lengths = np.array([5, 1, 0, 9, 3, 7, 2, 8, 4, 6, 1, 1, 9, 5, 2, 3])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    new, old, advantages = rng.normal(size=(3, starts[-1]))
    weights = np.repeat(token_weights(loss_type, lengths, 16), lengths)

    def grad(first, last):
        tokens = slice(starts[first], starts[last])
        leaf = Tensor(new[tokens], requires_grad=True)
        loss, _ = policy_loss(
            leaf,
            old[tokens],
            None,
            advantages[tokens],
            weights[tokens],
            kind=LOSS_TYPES[loss_type],
            cu_seqlens=starts[first : last + 1] - starts[first] if loss_type == "vespo" else None,
            coefficients={"sapo": (1.0, 1.05), "vespo": (2.0, 3.0, 3.0, 2.0)}.get(loss_type, ()),
        )
        loss.backward()
        return loss.item(), leaf.grad

    whole_loss, whole = grad(0, 16)
    parts = [grad(row, row + rows_each) for row in range(0, 16, rows_each)]
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole_loss, rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), whole)
