"""Every option of the advantages reaches the numbers of a run: they are those by hand, and differ from those
without the option.
"""

import numpy as np
import pytest

from cukit.models.logprobs import token_logprobs

from .by_hand import LONG, advantages_by_hand, by_hand, by_tokens, order_of, prepared, run
from .conftest import logged, share_of_ones


def length_reward(completion_ids, **_):
    return [len(ids) / 6 for ids in completion_ids]


def rewards_of(trainer, column="advantages"):
    """(the advantage of each sample, the samples) of the first generation batch."""
    rows, samples, batch = prepared(trainer)
    found = np.full(len(samples), np.nan)
    found[order_of(samples, batch)] = getattr(batch, column)[batch.cu_learnt[:-1]]
    return found, samples


def test_advantage_estimators(make_grpo):
    seen = []
    for name, options in (
        ("grpo", {}),
        ("rloo", {}),
        ("rloo", dict(normalize_advantages=True)),
        ("reinforce_plus_plus", {}),
        ("reinforce_plus_plus_baseline", {}),
    ):
        found, samples = rewards_of(make_grpo(dtype="float64", advantage_estimator=name, **LONG, **options))
        rewards = np.array(share_of_ones(samples.texts))
        groups = rewards.reshape(-1, 4)
        centred = (groups - groups.mean(1, keepdims=True)).ravel()
        values = rewards if name == "reinforce_plus_plus" else centred
        tokens = np.repeat(values, samples.lengths)
        expected = {"grpo": advantages_by_hand(rewards), "rloo": centred * 4 / 3}.get(
            name, (values - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
        )
        if options:
            expected = (expected - expected.mean()) / (expected.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12, err_msg=name)
        seen.append(found)
    assert all(np.abs(x - y).max() > 1e-3 for i, x in enumerate(seen) for y in seen[:i])


def test_reinforce_plus_plus_needs_no_group(make_grpo):
    trainer = make_grpo(advantage_estimator="reinforce_plus_plus", num_generations=1, max_steps=1)
    trainer.train()
    assert logged(trainer, "grad_norm")[0] > 0
    with pytest.raises(ValueError, match="num_generations=1 leaves nothing"):
        make_grpo(num_generations=1)


def test_normalize_then_sum(make_grpo):
    options = dict(dtype="float64", reward_weights=[1.0, 0.5], **LONG)
    found, samples = rewards_of(
        make_grpo([share_of_ones, length_reward], multi_objective_aggregation="normalize_then_sum", **options)
    )
    ones, lengths = np.array(share_of_ones(samples.texts)), samples.lengths / 6
    summed = advantages_by_hand(ones) + 0.5 * advantages_by_hand(lengths)
    np.testing.assert_allclose(found, summed / (summed.std(ddof=1) + 1e-4), rtol=1e-9, atol=1e-12)
    assert np.abs(found - rewards_of(make_grpo([share_of_ones, length_reward], **options))[0]).max() > 1e-3


def test_penalties_of_long_and_cut_completions(make_grpo):
    for options in (
        dict(overlong_buffer_len=30),
        dict(overlong_buffer_len=30, overlong_penalty_factor=0.25),
        dict(stop_properly_penalty_coef=0.0),
        dict(stop_properly_penalty_coef=0.5),
    ):
        found, samples = rewards_of(make_grpo(dtype="float64", **LONG, **options))
        rewards = np.array(share_of_ones(samples.texts))
        cut = np.array([reason == "length" for reason in samples.finish_reasons])
        assert cut.any() and not cut.all()
        expected = np.where(cut, rewards * options.get("stop_properly_penalty_coef", 1), rewards)
        if "overlong_buffer_len" in options:
            over = np.maximum(samples.lengths - 10, 0) / 30
            expected = expected - options.get("overlong_penalty_factor", 1.0) * over
        np.testing.assert_allclose(found, advantages_by_hand(expected), rtol=1e-9, atol=1e-12)
        assert np.abs(found - advantages_by_hand(rewards)).max() > 1e-3


@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3"])
def test_kl_in_the_reward(make_grpo, estimator):
    """Reward − beta · Σ KL of the row; none in the loss. The mean over tokens is logged."""
    options = dict(dtype="float64", beta=0.2, use_kl_in_reward=True, max_tokens_per_batch=50)
    trainer = make_grpo(**options, kl_estimator=estimator)
    loss, _, samples, batch = run(trainer)
    places, kl = order_of(samples, batch), []
    for ids, length, old in zip(samples.token_ids, samples.prompt_lengths, samples.logprobs):
        ref = token_logprobs(trainer.reference, [ids], 1.0, trainer.tokenizer.vocab_size)[0][length - 1 :]
        gap = old.astype(np.float64) - ref
        kl.append({"k2": gap**2 / 2, "k3": np.exp(-gap) - 1 + gap}.get(estimator, gap).sum())
    rewards = np.array(share_of_ones(samples.texts)) - 0.2 * np.array(kl)
    advantages = advantages_by_hand(rewards)
    np.testing.assert_allclose(batch.advantages[batch.cu_learnt[:-1]], advantages[places], rtol=1e-9)
    np.testing.assert_allclose(loss, by_hand(trainer, samples, batch, by_tokens, advantages)[0], rtol=1e-9)
    assert batch.ref_logprobs is None
    trainer = make_grpo(**options | dict(dtype="float32"), kl_estimator=estimator, max_steps=1)
    trainer.train()
    (mean,), (penalty,) = logged(trainer, "kl"), logged(trainer, "reward_penalty")
    assert penalty == pytest.approx(-0.2 * mean * logged(trainer, "completions/mean_length")[0])
