"""PPO: what a rollout holds, what is logged of it, mini-batches of tokens, and what a user can get wrong."""

import math
import warnings

import numpy as np
import pytest

from cukit import PPOConfig, PPOTrainer
from cukit.models.weights import load_model, save_model
from cukit.trainers.experience import RunningMoments, token_slices

from .conftest import equal, logged, share_of_ones, weights_of
from .playing import Asking
from .ppo_by_hand import both, first_rollout, logprobs_and_values, rows_of
from .test_ppo_wires import LONG, assert_same, change, critic_folder, weights_after_steps  # noqa: F401
from .test_wires import dense, noisy

# ---- before the first update ----


@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("turns", [False, True])
def test_before_the_first_update_every_ratio_is_one(make_ppo, critic, turns):
    options = dict(critic=critic, num_mini_batches=2, num_ppo_epochs=2, max_steps=8, temperature=0.8) | LONG
    playing = dict(reward=None, environment_factory=Asking, stop=["1", "2", "a", "+"]) if turns else {}
    trainer = make_ppo(**playing, **options)
    found, loss = [], trainer.compute_loss

    def spy(part):
        if trainer._on_policy and part.serves != "critic":
            now, _ = trainer.model.lm_head.logprobs(*_states(trainer, part))
            found.append(np.abs(now.data - part.logprobs).max())
        return loss(part)

    trainer.compute_loss = spy
    trainer.train()
    assert len(found) == 2 and max(found) < 1e-5
    ratios = logged(trainer, "val/ratio")
    for first in (0, 4):
        assert abs(ratios[first] - 1) < 1e-5 and max(abs(ratio - 1) for ratio in ratios[first + 1 : first + 4]) > 1e-4
        assert logged(trainer, "policy/clipfrac_avg")[first] == 0
        assert logged(trainer, "policy/approxkl_avg")[first] < 1e-10
        assert logged(trainer, "val/ratio_var")[first] == 0
        for last in range(2, 5):
            expected = np.var(ratios[first : first + last], ddof=1)
            assert logged(trainer, "val/ratio_var")[first + last - 1] == pytest.approx(expected)
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5


def _states(trainer, part):
    from cukit.models.logprobs import predicting_states

    return predicting_states(trainer.model, part.tokens), part.targets, trainer.args.temperature


# ---- completions that are left out ----


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_completions_without_a_reward_and_failed_ones_are_left_out(make_ppo, critic):
    def some(completion_ids, **_):
        return [None if sum(ids) % 3 == 0 else sum(ids) % 101 / 101 for ids in completion_ids]

    trainer = make_ppo(some, "float64", critic=critic, num_mini_batches=2, per_device_train_batch_size=6)
    generate = trainer.rollout.generate

    def failing(*arguments):
        samples = generate(*arguments)
        samples.finish_reasons[1] = "error"
        samples.logprobs[2] = samples.logprobs[2] * np.nan
        return samples

    trainer.rollout.generate = failing

    def scores(args, samples):
        found = np.array([np.nan if x is None else x for x in some(samples.completion_ids)])
        assert np.isnan(found).any() and not np.isnan(found[[1, 2]]).any()
        found[[1, 2]] = np.nan
        left.append(int((~np.isnan(found)).sum()))
        return found

    left = []

    assert_same(*both(trainer, scores))
    assert [len(trainer._batch)] == left and trainer.generation.episodes == 12


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(critic="shared", num_mini_batches=2, num_ppo_epochs=2, bootstrap_truncated=True, whiten_rewards=True),
        dict(normalize_rewards=True, reward_clip=1.0, missing_eos_penalty=1.0, beta=0.1, kl_target=1.0, kl_horizon=20),
    ],
    ids=str,
)
def test_a_rollout_of_nothing_does_not_break_the_run(make_ppo, options):
    """The second rollout has no reward at all: no weight moves, nor does the coefficient of the KL."""

    def reward(completion_ids, trainer_state=None, **_):
        return [None if len(kept) == 2 else sum(ids) % 101 / 101 for ids in completion_ids]

    trainer = make_ppo(reward, **options)
    trainer.args.max_steps = trainer.total_steps = 3 * trainer.updates_a_generation
    kept = noisy(trainer, 0.0)
    coefficients, make = [], trainer.generation.batch
    trainer.generation.batch = lambda number: coefficients.append(trainer.generation.kl_coef) or make(number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ends = weights_after_steps(trainer)
    updates = trainer.updates_a_generation
    for step in range(updates, 2 * updates):
        assert change(ends[step - 1][0], ends[step][0]) == change(ends[step - 1][1], ends[step][1]) == 0
    assert change(ends[-2][0], ends[-1][0]) > 0
    assert logged(trainer, "grad_norm")[updates : 2 * updates] == [0.0] * updates
    assert all(len(logged(trainer, name)) == 2 for name in ("objective/kl", "objective/scores", "critic/values"))
    assert logged(trainer, "episode") == [12.0 * (1 + i // updates) for i in range(3 * updates)]
    if "kl_target" in options:
        assert coefficients[0] != coefficients[1] == coefficients[2]


def test_fewer_rows_than_mini_batches(make_ppo):
    """Steps without a row change nothing; the ratios of a rollout are its own."""

    def one(completion_ids, **_):
        return [1.0 if i == 0 else None for i in range(len(completion_ids))]

    trainer = make_ppo(one, num_mini_batches=3, per_device_train_batch_size=4, max_steps=6)
    ends = weights_after_steps(trainer)
    moved = [change(a[0], b[0]) > 0 for a, b in zip(ends, ends[1:])]
    assert sum(moved) <= 2 and len(logged(trainer, "val/ratio")) == 2
    assert logged(trainer, "val/ratio_var") == [0.0, 0.0]


# ---- what is logged ----

TRL_METRICS = (  # docs/source/ppo_trainer.md of TRL
    *("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward", "objective/scores"),
    *("policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg", "loss/value_avg"),
    *("val/clipfrac_avg", "val/ratio", "val/ratio_var", "val/num_eos_tokens", "eps", "lr", "episode"),
)


def test_every_metric_of_trl_is_logged(make_ppo):
    trainer = make_ppo(max_steps=3, dual_clip=3.0, beta=0.1)
    trainer.train()
    own = ("critic/explained_variance", "critic/values", "kl_coef", "kl", "policy/dual_clipfrac_avg", "entropy",
           "grad_norm/critic", "reward", "completions/mean_length", "time/values", "time/reference")  # fmt: skip
    for name in (*TRL_METRICS, *own):
        assert len(logged(trainer, name)) == 3, name
    assert all(rate > 0 for rate in logged(trainer, "eps"))
    assert logged(trainer, "lr") == logged(trainer, "learning_rate")


def test_a_logged_row_has_the_newest_count_of_episodes(make_ppo):
    trainer = make_ppo(max_steps=4, logging_steps=4, lr_scheduler_type="linear")
    trainer.train()
    assert logged(trainer, "episode") == [48] and logged(trainer, "lr") == logged(trainer, "learning_rate")


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("kl_coef", [0.3, 0.0])
def test_the_metrics_of_a_rollout_are_those_by_hand(make_ppo, estimator, kl_coef):
    options = dict(kl_coef=kl_coef, beta=0.1, kl_estimator=estimator, missing_eos_penalty=0.5) | LONG
    trainer = make_ppo(dtype="float64", **options)
    samples, _, metrics = first_rollout(trainer)
    raw = np.array(share_of_ones(samples.texts))
    stopped = np.array([reason == "stop" for reason in samples.finish_reasons])
    assert 0 < stopped.sum() < 12
    rows = list(rows_of(trainer, samples, raw - 0.5 * ~stopped).values())
    x = [row.ref - row.old for row in rows]
    kl = np.mean([(-one if estimator == "k1" else np.exp(one) - one - 1).sum() for one in x])
    returns, values = (np.concatenate([getattr(row, name) for row in rows]) for name in ("returns", "values"))
    expected = {
        "val/num_eos_tokens": stopped.sum(),
        "objective/kl": kl,
        "objective/non_score_reward": -kl_coef * kl,
        "reward": raw.mean(),
        "objective/scores": (raw - 0.5 * ~stopped).mean(),  # TRL's has the penalty too
        "objective/rlhf_reward": (raw - 0.5 * ~stopped).mean() - kl_coef * kl,
        "objective/entropy": -np.mean([row.old.sum() for row in rows]),
        "critic/values": values.mean(),
        "critic/explained_variance": 1 - (returns - values).var() / returns.var(),
        "kl_coef": kl_coef,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_the_metrics_of_an_update_are_those_by_hand(make_ppo):
    trainer = make_ppo(dtype="float64", vf_coef=0.5, entropy_coef=0.1, cliprange_value=0.02, dual_clip=1.1, beta=0.2)
    samples, parts, _ = first_rollout(trainer)
    rows = list(rows_of(trainer, samples, np.array(share_of_ones(samples.texts))).values())
    trainer.critic.score.weight.data[...] += 0.05
    loss, sums, _ = trainer._accumulate(parts)
    metrics = trainer.step_metrics(sums)
    found = [[x.data for x in logprobs_and_values(trainer, trainer.model, row.ids, row.drawn)] for row in rows]
    now, entropy, value = (np.concatenate([one[i] for one in found]) for i in range(3))
    names = ("old", "ref", "values", "returns", "advantages")
    old, ref, before, returns, advantages = (np.concatenate([getattr(row, name) for row in rows]) for name in names)
    ratio, held = np.exp(now - old), before + np.clip(value - before, -0.02, 0.02)
    plain, clipped = -advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.2)
    policy, errors = np.maximum(plain, clipped), ((value - returns) ** 2, (held - returns) ** 2)
    bounded = (advantages < 0) & (policy > -1.1 * advantages)
    policy = np.where(bounded, -1.1 * advantages, policy)
    expected = {
        "loss/policy_avg": policy.mean(),
        "loss/value_avg": np.maximum(*errors).mean() / 2,
        "policy/approxkl_avg": ((now - old) ** 2).mean() / 2,
        "policy/clipfrac_avg": (clipped > plain).mean(),
        "policy/dual_clipfrac_avg": bounded.mean(),
        "policy/entropy_avg": entropy.mean(),
        "entropy": entropy.mean(),
        "val/clipfrac_avg": (errors[1] > errors[0]).mean(),
        "val/ratio": ratio.mean(),
        "kl": (np.exp(ref - now) - (ref - now) - 1).mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert 0 < expected["val/clipfrac_avg"] < 1 and 0 < expected["policy/clipfrac_avg"] < 1 and bounded.any()
    parts_of_it = policy.mean() + 0.5 * expected["loss/value_avg"] - 0.1 * entropy.mean() + 0.2 * expected["kl"]
    assert loss == pytest.approx(parts_of_it, rel=1e-9)


def test_what_has_no_number_is_not_logged(make_ppo):
    """Equal returns have no share that values explain; without a reference there is no KL."""
    trainer = make_ppo(equal, max_steps=1, kl_coef=0.0, lam=1.0)
    trainer.train()
    for name in ("critic/explained_variance", "objective/kl", "kl", "policy/dual_clipfrac_avg"):
        assert logged(trainer, name) == [], name
    assert trainer.reference is None and logged(trainer, "objective/rlhf_reward") == [0.5]


@pytest.mark.parametrize("every, expected", [(1, 3), (3, 3), (4, 2), (9, 1), (10, 0)])
def test_a_completion_is_shown_where_a_step_of_its_rollout_is_logged(make_ppo, every, expected):
    trainer, said = make_ppo(log_completions=True, logging_steps=every, num_ppo_epochs=3, max_steps=9), []
    trainer.say = said.append
    trainer.train()
    assert sum(text.startswith("prompt ") for text in said) == expected


# ---- mini-batches ----


def test_mini_batches_have_about_as_many_tokens_each():
    """Every row once and in order; none empty where there are rows enough; within a row of its share."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        lengths = rng.integers(1, rng.choice([2, 5, 60]), rng.integers(0, 40))
        order, count = rng.permutation(len(lengths)), int(rng.integers(1, 9))
        order = order[: rng.integers(0, len(order) + 1)]
        slices = token_slices(order, lengths, count)
        assert len(slices) == count and np.concatenate(slices).tolist() == order.tolist()
        if len(order) >= count:
            assert all(map(len, slices))
        if len(order):
            tokens = np.array([lengths[part].sum() for part in slices])
            share, longest = tokens.sum() / count, lengths[order].max()
            assert np.abs(tokens - share).max() <= longest, (lengths, tokens)
            if share > 2 * longest:  # then each end is the nearest to its share
                assert np.abs(np.cumsum(tokens) - share * np.arange(1, count + 1)).max() <= longest / 2


def test_mini_batches_are_drawn_anew_for_each_rollout(make_ppo):
    def orders(**options):
        trainer = make_ppo(dense, num_mini_batches=3, per_device_train_batch_size=4, **options)
        found = []
        for step in (0, 3):
            batch = trainer.make_batch(step)[0][0].batch
            assert batch.num_slices == 3 and sorted(batch.groups.tolist()) == list(range(12))
            for start, stop in zip(batch.slices, batch.slices[1:]):
                weights = batch.weights[batch.cu_learnt[start] : batch.cu_learnt[stop]]
                np.testing.assert_allclose(weights, 1 / len(weights), rtol=1e-6)
            found.append(batch.groups.tolist())
        return found

    first = orders()
    assert first[0] != first[1] and orders() == first != orders(seed=1)


def test_running_moments():
    rng, moments, seen = np.random.default_rng(3), RunningMoments(), np.zeros(0)
    assert moments.normalized(np.array([2.0])).tolist() == [0.0]
    for size in (0, 1, 5, 0, 40):
        values = rng.normal(3, 7, size)
        seen = np.append(seen, values)
        moments.add(values)
        again = RunningMoments(*moments.state())
        if len(seen) > 1:
            expected = (values - seen.mean()) / seen.std(ddof=1)
            np.testing.assert_allclose(again.normalized(values), expected, rtol=1e-12, atol=1e-12)
    assert moments.state()[0] == 46 and not np.any(RunningMoments(3, 1.0, 0.0).normalized(np.ones(3)))


# ---- learning ----


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_dense_reward_rises(make_ppo, critic):
    options = dict(num_ppo_epochs=2, num_mini_batches=2, max_steps=60, kl_coef=0.0, vf_coef=0.5)
    trainer = make_ppo(critic=critic, learning_rate=3e-3, critic_learning_rate=1e-2, critic_warmup_steps=4, **options)
    trainer.train()
    reward = logged(trainer, "reward")
    assert np.mean(reward[-3:]) > np.mean(reward[:3]) + 0.15
    assert all(math.isfinite(x) for x in logged(trainer, "critic/explained_variance"))


# ---- what a user can get wrong ----


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(kl_target=0.1, kl_coef=0.0), "kl_target=0.1 moves kl_coef, which must begin above 0, got 0.0"),
        (dict(kl_target=0.0), "kl_target must be above 0, got 0.0"),
        (dict(critic="shared", critic_model="x"), "critic_model=x is for critic=separate; a shared critic is a head"),
        (dict(dual_clip=0.9), "dual_clip must be above 1, got 0.9"),
        (dict(dual_clip=1.0), "dual_clip must be above 1, got 1.0"),
        (dict(response_length=5, max_completion_length=6), "response_length=5 and max_completion_length=6 are two"),
        (dict(critic="both"), "critic must be one of separate, shared, got 'both'"),
        (dict(kl_estimator="k2"), "kl_estimator must be one of k1, k3, got 'k2'"),
        (dict(num_ppo_epochs=0), "num_ppo_epochs must be at least 1, got 0"),
        (dict(num_mini_batches=0), "num_mini_batches must be at least 1"),
        (dict(total_episodes=0), "total_episodes must be at least 1"),
        (dict(kl_horizon=0), "kl_horizon must be at least 1"),
        (dict(cliprange=-0.1), "cliprange must be at least 0"),
        (dict(cliprange_high=-0.1), "cliprange_high must be at least 0"),
        (dict(entropy_coef=-0.1), "entropy_coef must be at least 0"),
        (dict(kl_coef=-0.1), "kl_coef must be at least 0"),
        (dict(beta=-0.1), "beta must be at least 0"),
        (dict(vf_coef=-0.1), "vf_coef must be at least 0"),
        (dict(reward_clip=0), "reward_clip must be above 0"),
        (dict(cliprange_value=0), "cliprange_value must be above 0"),
        (dict(critic_learning_rate=-1), "critic_learning_rate must be at least 0"),
        (dict(critic_warmup_steps=-1), "critic_warmup_steps must be at least 0"),
        (dict(missing_eos_penalty=-1), "missing_eos_penalty must be at least 0"),
        (dict(gamma=1.1), "gamma must be at least 0 and at most 1"),
        (dict(lam=-0.1), "lam must be at least 0 and at most 1"),
        (dict(gamma=float("nan")), "gamma must be"),
        (dict(missing_eos_penalty=float("inf")), "missing_eos_penalty must be"),
    ],
    ids=str,
)
def test_options_that_are_wrong(options, message):
    with pytest.raises(ValueError) as error:
        PPOConfig(**options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_trls_spellings():
    config = PPOConfig(response_length=9, reward_model_path="a", reward_funcs="exact", max_completion_length=9)
    assert config.max_completion_length == 9 and config.reward_funcs == ["exact", "a"]
    assert PPOConfig(reward_model_path="a", reward_funcs=["b", "c"]).reward_funcs == ["b", "c", "a"]
    assert PPOConfig(reward_model_path=None).reward_funcs is None and PPOConfig(reward_model_path="a").reward_funcs == [
        "a"
    ]


def test_a_critic_that_cannot_read_what_the_policy_writes(make_ppo, make_model, critic_folder, tmp_path, tokenizer):  # noqa: F811
    with pytest.raises(
        ValueError, match="has 8 ids, and the policy's tokenizer .*; give a critic with the policy's tok"
    ):
        make_ppo(critic_model=critic_folder(vocab_size=8))
    with pytest.raises(ValueError, match="context of 48 tokens, shorter than the policy's; give max_model_len=48"):
        make_ppo(critic_model=critic_folder(max_position_embeddings=48))
    assert make_ppo(critic_model=critic_folder(max_position_embeddings=48), max_model_len=48).critic.config.hidden_size
    with pytest.raises(ValueError, match="is no folder|holds no|not a|no such|does not exist"):
        make_ppo(critic_model=str(tmp_path / "nowhere"))
    folder = critic_folder()
    path = tmp_path / "critic/tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace('"1":', '"x":').replace('"2":', '"1":').replace('"x":', '"2":'))
    assert path.read_text() != text
    with pytest.raises(ValueError, match="critic_model=.* has another tokenizer than the policy; give a critic with"):
        make_ppo(critic_model=folder)
    path.unlink()
    assert make_ppo(critic_model=folder).critic is not None


def test_arguments_of_another_trainer(make_model, tokenizer, rows):
    from cukit import GRPOConfig

    with pytest.raises(ValueError, match=r"PPOTrainer takes args=PPOConfig\(…\), got GRPOConfig"):
        PPOTrainer(make_model(), [equal], GRPOConfig(), rows, processing_class=tokenizer)
    with pytest.raises(ValueError, match="PPOTrainer needs train_dataset"):
        PPOTrainer(make_model(), [equal], PPOConfig(), None, processing_class=tokenizer)


def test_a_model_folder_that_is_trained_is_a_causal_model(make_ppo, tmp_path):
    """No critic is in it; a shared one neither."""
    for critic in ("separate", "shared"):
        trainer = make_ppo(critic=critic)
        trainer.train()
        found = load_model(trainer.run_folder, "cpu")
        for name, value in weights_of(trainer.model).items():
            np.testing.assert_array_equal(found.named_parameters()[name].data, value)
        assert not (trainer.run_folder / "critic").exists() and "score.weight" not in found.parts()
        save_model(found, tmp_path / critic)
