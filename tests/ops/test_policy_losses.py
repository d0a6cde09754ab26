"""Each loss of the op against a formula written a second time, row by row in complex numbers: f(x + ih) gives the loss
in its real part and the gradient, to 1e-15, in its imaginary part. What a paper calls a constant is taken at the real
log-probabilities.
"""

import numpy as np
import pytest

from cukit.autograd import Tensor
from cukit.ops.policy_loss import STATS, policy_loss

LENGTHS = [3, 1, 0, 9, 5, 7, 4, 2]
BORDERS = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
SAPO, VESPO = (1.0, 1.05), (2.0, 3.0, 3.0, 2.0)


def columns(seed=0, spread=0.4):
    """new, old, ref, advantages, weights, factors, sampled of the rows; one token of weight 0, an advantage a row."""
    rng = np.random.default_rng(seed)
    count = int(BORDERS[-1])
    new = -rng.random(count) * 3
    old, ref, sampled = (new + spread * rng.normal(size=count) for _ in range(3))
    advantages = np.repeat(rng.normal(size=len(LENGTHS)), LENGTHS)
    weights = rng.random(count)
    weights[7] = 0
    factors = rng.random(count) * 2
    return new, old, ref, advantages, weights, factors, sampled


def smaller(x, y):
    return x if x.real <= y.real else y


def held(x, low, high):
    return low if x.real < low else high if x.real > high else x


def ratio_of(now, here, old, level, token):
    """The ratio of a token; now: complex, here: the same without the step."""
    if level == "token":
        return np.exp(now[token] - old[token])
    if level == "sequence":
        return np.exp(np.mean(now - old))
    return np.exp(np.mean(here - old)) * np.exp(now[token] - here[token])  # sg[s] · π / sg[π]


def term(kind, ratio, weight, now, advantage, s):
    """ℓ of a token. weight: VESPO's w of its row."""
    if kind == "clip":
        first = held(ratio, -np.inf, s["delta"] or np.inf) * advantage
        return -smaller(first, held(ratio, 1 - s["eps_low"], 1 + s["eps_high"]) * advantage)
    if kind == "cispo":
        return -min(ratio.real, s["eps_high"]) * advantage * now
    if kind == "sapo":
        tau = s["coefficients"][0 if advantage > 0 else 1]
        return -advantage * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
    k, decay = s["coefficients"][:2] if advantage >= 0 else s["coefficients"][2:]
    return -np.exp(decay) * weight**k * np.exp(-decay * weight) * advantage * now


def kl_of(name, new, ref):
    """Schulman's estimators of KL(new || ref) in terms of the ratio ref / new."""
    ratio = np.exp(ref - new)
    return {"k1": -np.log(ratio), "k2": np.log(ratio) ** 2 / 2, "k3": ratio - 1 - np.log(ratio)}[name]


def by_hand(new, old, ref, advantages, weights, factors, sampled, s):
    """The loss of complex `new`."""
    total = 0
    for start, stop in zip(BORDERS, BORDERS[1:]):
        used = np.flatnonzero(weights[start:stop]) + start
        now, here, before = new[used], new[used].real, old[used]
        weight = np.clip(np.exp(np.sum(here - before)), 1e-8, np.exp(20)) if len(used) else 1.0
        drift = np.mean((before if sampled is None else sampled[used]) - here) if len(used) else 0
        for place, token in enumerate(used):
            ratio = ratio_of(now, here, before, s["level"], place)
            loss = term(s["kind"], ratio, weight, now[place], advantages[token], s)
            loss = loss * (1 if factors is None else factors[token])
            if s["off_policy_threshold"] is not None and advantages[token] < 0 and drift > s["off_policy_threshold"]:
                loss = 0
            if s["beta"]:
                kl = kl_of(s["kl_estimator"], now[place], ref[token])
                loss = loss + s["beta"] * (kl * ratio if s["bias_kl"] else kl)
            total = total + weights[token] * loss
    return total


def gradient_by_hand(new, *arguments):
    step, grad = 1e-30, np.zeros(len(new))
    for token in range(len(new)):
        shifted = new.astype(complex)
        shifted[token] += 1j * step
        grad[token] = np.imag(by_hand(shifted, *arguments)) / step
    return np.real(by_hand(new.astype(complex), *arguments)), grad


DEFAULTS = dict(
    kind="clip",
    eps_low=0.2,
    eps_high=0.28,
    delta=None,
    beta=0.0,
    bias_kl=False,
    level="token",
    coefficients=(),
    kl_estimator="k3",
    off_policy_threshold=None,
)
CASES = {
    "clip": {},
    "two_sided": dict(delta=1.5),
    "gspo": dict(level="sequence"),
    "gspo_token": dict(level="sequence_token"),
    "gspo_token_two_sided": dict(level="sequence_token", delta=1.3, eps_high=0.1, eps_low=0.05),
    "cispo": dict(kind="cispo", eps_high=1.2),
    "cispo_sequence": dict(kind="cispo", eps_high=1.05, level="sequence"),
    "sapo": dict(kind="sapo", coefficients=SAPO),
    "sapo_other_temperatures": dict(kind="sapo", coefficients=(3.0, 0.5)),
    "sapo_sequence": dict(kind="sapo", coefficients=SAPO, level="sequence"),
    "vespo": dict(kind="vespo", coefficients=VESPO),
    "vespo_other": dict(kind="vespo", coefficients=(1.0, 0.5, 0.7, 1.5)),
    "vespo_bias_kl": dict(kind="vespo", coefficients=VESPO, beta=0.3, bias_kl=True),
    **{f"{name}": dict(beta=0.3, kl_estimator=name) for name in ("k1", "k2", "k3")},
    **{f"{name}_bias": dict(beta=0.3, kl_estimator=name, bias_kl=True) for name in ("k1", "k2", "k3")},
    **{f"{name}_gspo": dict(beta=0.3, kl_estimator=name, bias_kl=True, level="sequence") for name in ("k1", "k2")},
    **{
        f"{name}_gspo_token": dict(beta=0.3, kl_estimator=name, bias_kl=True, level="sequence_token")
        for name in ("k3",)
    },
    "off_policy": dict(off_policy_threshold=0.05),
    "off_policy_kl": dict(off_policy_threshold=0.0, beta=0.2, level="sequence"),
}


@pytest.mark.parametrize("with_factors", [False, True], ids=["", "factors"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_formula(name, seed, with_factors):
    new, old, ref, advantages, weights, factors, sampled = columns(seed)
    settings = DEFAULTS | CASES[name]
    factors = factors if with_factors else None
    sampled = sampled if with_factors else None
    loss, grad = gradient_by_hand(new, old, ref, advantages, weights, factors, sampled, settings)
    leaf = Tensor(new.copy(), requires_grad=True)
    given = dict(settings, cu_seqlens=BORDERS, factors=factors, sampled=sampled)
    found, stats = policy_loss(leaf, old, ref, advantages, weights, **given)
    found.backward()
    np.testing.assert_allclose(found.item(), loss, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(leaf.grad, grad, rtol=1e-11, atol=1e-12)
    assert stats.shape == (len(STATS),)
    if settings["off_policy_threshold"] is not None:
        assert dict(zip(STATS, stats))["off_policy"] > 0


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_a_loss_of_its_own(name):
    """No setting is without an effect."""
    new, old, ref, advantages, weights, *_ = columns()
    settings = DEFAULTS | CASES[name]
    loss = policy_loss(Tensor(new), old, ref, advantages, weights, cu_seqlens=BORDERS, **settings)[0].item()
    for other in CASES:
        if other != name:
            given = DEFAULTS | CASES[other]
            leaf = Tensor(new.copy(), requires_grad=True)
            found = policy_loss(leaf, old, ref, advantages, weights, cu_seqlens=BORDERS, **given)[0].item()
            # GSPO-token has GSPO's value; only its gradient is another
            assert abs(found - loss) > 1e-9 or {name, other} == {"gspo", "gspo_token"}, other


def test_factors_of_one_change_no_bit():
    """Exact models: the importance correction is 1, and the loss is the one without it."""
    new, old, ref, advantages, weights, *_ = columns()
    for dtype in (np.float32, np.float64):
        given = [x.astype(dtype) for x in (new, old, ref, advantages, weights)]
        found = []
        for factors in (None, np.ones(len(new), dtype)):
            leaf = Tensor(given[0], requires_grad=True)
            loss, stats = policy_loss(leaf, *given[1:], beta=0.1, factors=factors)
            loss.backward()
            found.append((loss.data.tobytes(), leaf.grad.tobytes(), stats.tobytes()))
        assert found[0] == found[1]


@pytest.mark.parametrize("name", ["sapo", "vespo", "gspo_token", "k2", "off_policy"])
def test_any_finite_log_probs_give_finite_numbers(name):
    rng = np.random.default_rng(7)
    settings = DEFAULTS | CASES[name]
    for _ in range(100):
        count = int(BORDERS[-1])
        new, old, ref = (np.float32(-(10.0 ** rng.uniform(-3, 3)) * rng.random(count)) for _ in range(3))
        advantages, weights = np.float32(rng.normal(size=count)), np.float32(rng.random(count) / count)
        leaf = Tensor(new, requires_grad=True)
        with np.errstate(all="raise", under="ignore"):
            loss, stats = policy_loss(leaf, old, ref, advantages, weights, cu_seqlens=BORDERS, **settings)
            loss.backward()
        assert np.isfinite(loss.item()) and np.isfinite(leaf.grad).all() and np.isfinite(stats).all()


@pytest.mark.parametrize("name", CASES)
def test_nan_comes_through(name):
    """So that the step is skipped."""
    new, old, ref, advantages, weights, *_ = columns()
    new[5] = np.nan
    loss, _ = policy_loss(Tensor(new), old, ref, advantages, weights, cu_seqlens=BORDERS, **(DEFAULTS | CASES[name]))
    assert np.isnan(loss.item())


def test_whole_sequences_need_borders():
    new, old, ref, advantages, weights, *_ = columns()
    for settings in (dict(kind="vespo", coefficients=VESPO), dict(off_policy_threshold=0.1)):
        with pytest.raises(ValueError, match="whole sequences"):
            policy_loss(Tensor(new), old, ref, advantages, weights, **settings)
