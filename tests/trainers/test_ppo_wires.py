"""Every option of PPO reaches the numbers of a run: losses, gradients and weights are those by hand, from the samples
and the models alone, and differ from those without the option.
"""

import math
from dataclasses import fields

import numpy as np
import pytest

from cukit import PPOConfig
from cukit.models.decoder import Decoder
from cukit.models.weights import load_model, save_model
from cukit.ops.ppo_loss import PPO_STATS

from .conftest import logged, share_of_ones, weights_of
from .playing import Asking
from .ppo_by_hand import both, first_rollout, loss_by_hand, loss_of_run, rows_of, shake
from .test_wires import dense, name_of, noisy

LONG = dict(max_completion_length=40)  # so that some completions stop and others are cut


def score(args, samples):
    """The scores of share_of_ones as the options change them."""
    scores = np.array(share_of_ones(samples.texts))
    if args.normalize_rewards:
        scores = (scores - scores.mean()) / scores.std(ddof=1)
    if args.reward_clip is not None:
        scores = np.clip(scores, -args.reward_clip, args.reward_clip)
    if args.missing_eos_penalty is not None:
        scores = scores - args.missing_eos_penalty * np.array([reason != "stop" for reason in samples.finish_reasons])
    return scores


def assert_same(run, hand):
    assert run[0] == pytest.approx(hand[0], rel=1e-9, abs=1e-12)
    assert run[1].keys() == hand[1].keys() and any(np.any(grad) for grad in run[1].values())
    for name, grad in hand[1].items():
        np.testing.assert_allclose(run[1][name], grad, rtol=1e-7, atol=1e-10, err_msg=name)


# ---- the loss and the gradients of a mini-batch ----

CASES = [  # (options, what they are compared with)
    (dict(cliprange=0.05), {}),
    (dict(cliprange_high=0.6), {}),
    (dict(dual_clip=1.1), {}),
    (dict(entropy_coef=0.1), {}),
    (dict(kl_coef=0.4), {}),
    (dict(kl_coef=0.0), {}),
    (dict(kl_coef=0.4, kl_estimator="k3"), dict(kl_coef=0.4)),
    (dict(beta=0.3), {}),
    (dict(beta=0.3, kl_coef=0.0), dict(kl_coef=0.0)),
    (dict(missing_eos_penalty=1.5) | LONG, LONG),
    (dict(normalize_rewards=True), {}),
    (dict(reward_clip=0.05), {}),
    (dict(normalize_rewards=True, reward_clip=0.5), dict(normalize_rewards=True)),
    (dict(reward_clip=0.01, missing_eos_penalty=1.5) | LONG, dict(missing_eos_penalty=1.5) | LONG),
    (dict(whiten_rewards=True), {}),
    (dict(whiten_advantages=False), {}),
    (dict(critic="shared"), {}),
    (dict(critic="shared", kl_coef=0.4, beta=0.2, entropy_coef=0.1, vf_coef=2.0), dict(critic="shared")),
    (dict(critic="shared", bootstrap_truncated=True) | LONG, dict(critic="shared") | LONG),
    (dict(vf_coef=1.0), {}),
    (dict(vf_coef=1.0, cliprange_value=0.02), dict(vf_coef=1.0)),
    (dict(vf_coef=1.0, cliprange_value=None), dict(vf_coef=1.0)),
    (dict(gamma=0.8), {}),
    (dict(lam=0.3), {}),
    (dict(bootstrap_truncated=True) | LONG, LONG),
    (dict(temperature=0.7, beta=0.3), dict(beta=0.3)),
    (dict(response_length=9), {}),
    (dict(num_mini_batches=2, per_device_train_batch_size=6), {}),
]


@pytest.mark.parametrize("options, without", CASES, ids=name_of)
def test_options_of_the_loss(make_ppo, options, without):
    run, hand = both(make_ppo(dtype="float64", **options), score)
    assert_same(run, hand)
    other, _ = both(make_ppo(dtype="float64", **without), score)
    assert abs(run[0] - other[0]) > 1e-6


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_turns_of_an_environment(make_ppo, critic):
    """Tokens that the environment wrote learn nothing: their neighbours are neighbours in rewards and advantages."""
    options = dict(stop=["1", "2", "a", "+"], critic=critic, kl_coef=0.3, bootstrap_truncated=True, lam=0.7) | LONG
    trainer = make_ppo(None, "float64", environment_factory=Asking, **options)
    found = []

    def scored(args, samples):
        assert any((~mask).any() for mask in samples.masks)
        found.extend(one.own.reward for one in samples.environments)
        return np.array(found)

    run, hand = both(trainer, scored)
    assert_same(run, hand)
    assert len(set(found)) > 2


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_splits_change_nothing(make_ppo, critic):
    options = dict(dtype="float64", critic=critic, bootstrap_truncated=True, beta=0.1, num_mini_batches=2) | LONG
    whole, hand = both(make_ppo(**options), score)
    assert_same(whole, hand)
    trainer = make_ppo(max_tokens_per_batch=60, **options)
    parts, _ = both(trainer, score)
    assert_same(parts, whole)
    assert len(trainer.make_batch(1)[0]) > (2 if critic == "shared" else 4)


@pytest.mark.parametrize("level", ["selective", "full"])
@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_recomputation_changes_nothing(make_ppo, critic, level):
    trainer = make_ppo(dtype="float64", critic=critic, gradient_checkpointing=level, entropy_coef=0.1)
    assert trainer.model.gradient_checkpointing == getattr(trainer.critic, "gradient_checkpointing", level) == level
    assert_same(*both(trainer, score))


def test_rewards_are_weighted(make_ppo):
    def length(completion_ids, **_):
        return [len(ids) / 6 for ids in completion_ids]

    def weighted(args, samples):
        return np.array(share_of_ones(samples.texts)) * 0.3 + samples.lengths / 6 * 2

    trainer = make_ppo([share_of_ones, length], "float64", reward_weights=[0.3, 2.0], whiten_advantages=False)
    assert_same(*both(trainer, weighted))


# ---- over several rollouts ----


def watched(trainer, score_of):
    """Train; after each rollout its advantages and returns are compared with those by hand, the models being as they
    then are. score_of(all samples so far) -> the newest one's scores. Returns the number of rollouts.
    """
    kept, make, count = noisy(trainer), trainer.generation.batch, []

    def batch(number):
        before = trainer.generation.kl_coef
        found, metrics = make(number)
        rows = list(rows_of(trainer, kept[-1], score_of(kept), before).values())
        for name in ("advantages", "returns", "values"):
            expected = np.concatenate([getattr(row, name) for row in rows])
            np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-8, atol=1e-9, err_msg=name)
        assert metrics["kl_coef"] == before
        count.append(number)
        return found, metrics

    trainer.generation.batch = batch
    if trainer.reference is not None:
        shake(trainer.reference, 2)
    trainer.train()
    return len(count)


def ones(kept):
    return np.array(share_of_ones(kept[-1].texts))


@pytest.mark.parametrize("target", [0.001, 1000.0])
def test_the_controller_of_the_kl(make_ppo, target):
    """kl_target and kl_horizon; the coefficient of a rollout is the one that the rollouts before it left."""
    options = dict(kl_coef=0.2, kl_target=target, kl_horizon=30, max_steps=4, kl_estimator="k3")
    trainer = make_ppo(dtype="float64", **options)
    assert watched(trainer, ones) == 4
    coefficient, logged_kl = 0.2, logged(trainer, "objective/kl")
    for now, kl in zip(logged(trainer, "kl_coef"), logged_kl, strict=True):
        assert now == pytest.approx(coefficient, rel=1e-12)
        coefficient *= 1 + min(max(kl / target - 1, -0.2), 0.2) * 12 / 30
    assert trainer.generation.kl_coef == pytest.approx(coefficient, rel=1e-12)
    assert (coefficient > 0.25) if target < 1 else (coefficient < 0.15)
    penalties = zip(logged(trainer, "kl_coef"), logged_kl, logged(trainer, "objective/non_score_reward"), strict=True)
    assert all(penalty == pytest.approx(-now * kl) for now, kl, penalty in penalties)


def test_a_controller_near_its_target_moves_by_the_error(make_ppo):
    trainer = make_ppo(kl_coef=0.2, kl_target=2.0, kl_horizon=100)
    trainer.generation._move_kl_coef(2.2, 10)
    assert trainer.generation.kl_coef == pytest.approx(0.2 * (1 + 0.1 * 10 / 100))


def test_the_running_moments_of_rewards(make_ppo):
    """Of all scores so far, the newest rollout's included; completions without a reward are not among them."""

    def some(completion_ids, **_):
        return [None if sum(ids) % 5 == 0 else sum(ids) % 101 / 10 for ids in completion_ids]

    def normalized(kept):
        scores = [np.array([np.nan if x is None else x for x in some(one.completion_ids)]) for one in kept]
        every = np.concatenate(scores)
        return (scores[-1] - np.nanmean(every)) / np.nanstd(every, ddof=1)

    trainer = make_ppo(some, "float64", normalize_rewards=True, max_steps=4, whiten_advantages=False)
    assert watched(trainer, normalized) == 4
    assert trainer.generation.scores.count < 48


# ---- what a run does with a rollout ----


def steps_of(trainer):
    """[(number of the rollout, place of the mini-batch)] of each optimizer step of a run."""
    found, loss, batches = [], trainer.compute_loss, []

    def spy(rows):
        if rows.serves == "critic":  # passes of its own over the same rows
            return loss(rows)
        if not any(rows.batch is batch for batch in batches):
            batches.append(rows.batch)
        found.append((len(batches) - 1, rows.batch.slices.tolist().index(rows.first)))
        return loss(rows)

    trainer.compute_loss = spy
    kept = noisy(trainer, 0.0)
    trainer.train()
    assert len(kept) == len(batches)
    return found


@pytest.mark.parametrize(
    "options, steps",
    [
        (dict(max_steps=2), [(0, 0), (1, 0)]),
        (dict(num_ppo_epochs=3, max_steps=4), [(0, 0), (0, 0), (0, 0), (1, 0)]),
        (
            dict(num_mini_batches=2, num_ppo_epochs=2, per_device_train_batch_size=6, max_steps=5),
            [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0)],
        ),
        (dict(total_episodes=24), [(0, 0), (1, 0)]),
        (dict(total_episodes=25, num_ppo_epochs=2), [(i, 0) for i in (0, 0, 1, 1, 2, 2)]),
        (dict(total_episodes=24, per_device_train_batch_size=8), [(i, 0) for i in range(4)]),  # 8 + 4 + 8 + 4
        (dict(total_episodes=14, per_device_train_batch_size=8), [(i, 0) for i in range(3)]),  # 8 + 4 + 8
        (dict(total_episodes=12, gradient_accumulation_steps=2, per_device_train_batch_size=3), [(0, 0), (1, 0)]),
    ],
    ids=str,
)  # fmt: skip
def test_steps_and_rollouts(make_ppo, options, steps):
    if "total_episodes" in options:
        options = options | {"max_steps": -1}
    trainer = make_ppo(**options)
    assert steps_of(trainer) == steps and trainer.total_steps == len(steps)
    assert trainer.generation.episodes >= (options.get("total_episodes") or 0)
    assert logged(trainer, "episode")[-1] == trainer.generation.episodes


def test_later_epochs_and_mini_batches_learn_from_the_same_columns(make_ppo):
    """The loss of every step of a rollout is that by hand: old numbers stay, the models are those of the step."""
    options = dict(num_ppo_epochs=2, num_mini_batches=2, per_device_train_batch_size=6, critic="shared", beta=0.1)
    trainer = make_ppo(dense, "float64", max_steps=4, learning_rate=1e-3, vf_coef=1.0, **options)
    kept, loss, rows, ends = noisy(trainer), trainer.compute_loss, {}, []

    def spy(part):
        batch, samples = part.batch, kept[0]
        if not rows:
            assert len(part) == 6
            rows.update(rows_of(trainer, samples, np.array(dense(samples.completion_ids))))
        order = [
            next(row for row in rows.values() if row.ids.tolist() == batch.ids[a:b].tolist())
            for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        ]
        expected, _ = loss_by_hand(trainer, order[part.first : part.last])
        found, extra = loss(part)
        ends.append((found.item(), expected))
        return found, extra

    trainer.compute_loss = spy
    trainer.train()
    assert len(ends) == 4 and len({found for found, _ in ends}) == 4
    for found, expected in ends:
        assert found == pytest.approx(expected, rel=1e-9)


# ---- the critic ----


def weights_after_steps(trainer):
    """[(policy's, critic's)] after each step of a run."""
    found = []

    class Look:
        def on_step_end(self, trainer, metrics):
            found.append((weights_of(trainer.model), weights_of(trainer.critic)))

    trainer.callbacks.append(Look())
    trainer.train()
    return found


def change(before, after):
    return max(np.abs(value - after[name]).max() for name, value in before.items())


@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("rate, expected", [(None, 1e-3), (5e-3, 5e-3), (0.0, 0.0)])
def test_the_learning_rates(make_ppo, critic, rate, expected):
    """Adam's first step moves a weight by its rate: critic_learning_rate is the critic's, else the run's. Both follow
    the schedule.
    """
    options = dict(max_steps=2, warmup_steps=2, lr_scheduler_type="linear", learning_rate=2e-3)  # 1e-3 at first
    given = {} if rate is None else {"critic_learning_rate": 2 * rate}
    trainer = make_ppo(dense, "float64", critic=critic, max_grad_norm=0.0, adam_epsilon=1e-14, **options | given)
    before = weights_of(trainer.model), weights_of(trainer.critic)
    ends = weights_after_steps(trainer)
    assert change(before[0], ends[0][0]) == pytest.approx(1e-3, rel=1e-3)
    assert change(before[1], ends[0][1]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_the_warm_up_of_the_critic(make_ppo, critic):
    options = dict(critic_warmup_steps=2, critic=critic, max_steps=4, weight_decay=0.1, kl_coef=0.3)
    trainer = make_ppo(dense, **options)
    for part in trainer.make_batch(0)[0]:
        if (loss := trainer.compute_loss(part)[0]).requires_grad:
            loss.backward()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())  # its backward pass is spared
    assert all(parameter.grad is not None for parameter in trainer.critic.parameters())
    trainer = make_ppo(dense, **options)
    ends = [(weights_of(trainer.model), weights_of(trainer.critic)), *weights_after_steps(trainer)]
    moved = [(change(a[0], b[0]), change(a[1], b[1])) for a, b in zip(ends, ends[1:])]
    assert [policy > 0 for policy, _ in moved] == [False, False, True, True]
    assert all(value > 0 for _, value in moved)
    assert [norm > 0 for norm in logged(trainer, "grad_norm")] == [False, False, True, True]
    assert all(norm > 0 for norm in logged(trainer, "grad_norm/critic"))


def test_the_critics_gradient_is_clipped_by_itself(make_ppo):
    """A huge value loss takes nothing from the policy's step."""
    ends = []
    for vf_coef in (0.1, 1e6):
        trainer = make_ppo(dense, "float64", max_steps=1, vf_coef=vf_coef, max_grad_norm=0.01)
        trainer.train()
        ends.append(weights_of(trainer.model))
    assert change(*ends) == 0


@pytest.fixture
def critic_folder(make_model, tokenizer, tmp_path):
    """critic_folder(head, **changes of config.json): a folder with random weights, and a tokenizer."""

    def make(head="score", **changes):
        given = make_model("float32", 5, **changes)
        model = given if head == "lm_head" else Decoder(given.config, given.backend, "float32", head="score")
        model.init_weights(5)
        if head == "score":
            model.score.init_weights(6)
        save_model(model, tmp_path / "critic")
        tokenizer.save(tmp_path / "critic")
        return str(tmp_path / "critic")

    return make


@pytest.mark.parametrize("changes", [{}, {"hidden_size": 64, "head_dim": 32, "num_hidden_layers": 1}])
def test_a_critic_from_a_folder(make_ppo, critic_folder, changes):
    folder = critic_folder(**changes)
    trainer = make_ppo(dtype="float64", critic_model=folder)
    stored, own = load_model(folder, "cpu", "float64", "score"), trainer.critic.named_parameters()
    for name, parameter in stored.named_parameters().items():
        np.testing.assert_array_equal(own[name].data, parameter.data)
    assert np.abs(own["score.weight"].data).max() > 0
    run, hand = both(trainer, score)
    assert_same(run, hand)
    names = {item.name: item.nbytes for item in trainer.plan.items}
    assert names["critic: AdamW's moments"] > 0
    if changes:
        assert names["critic: AdamW's moments"] != names["policy: AdamW's moments"]


def test_a_critic_begins_with_the_policys_trunk_and_values_of_zero(make_ppo, critic_folder):
    trainer = make_ppo()
    assert trainer.critic.store is not trainer.model.store
    policy = weights_of(trainer.model)
    for name, value in weights_of(trainer.critic).items():
        np.testing.assert_array_equal(value, np.zeros_like(value) if name == "score.weight" else policy[name])
    assert make_ppo(critic_model=critic_folder("lm_head")).critic.parts()["score.weight"].any() == False  # noqa: E712


def test_every_option_of_ppo_is_tried_here():
    text = open(__file__, encoding="utf-8").read()
    own = [item.name for item in fields(PPOConfig) if item.name in PPOConfig.__annotations__]
    assert len(own) > 25
    assert [name for name in own if name not in text] == []
    assert math.isfinite(PPOConfig().kl_coef)


def test_first_rollout_is_what_it_says(make_ppo):
    """The noise of the other tests is there: ratios differ from 1, and values from the old ones."""
    trainer = make_ppo(dtype="float64")
    _, parts, _ = first_rollout(trainer)
    assert np.abs(parts[0].batch.values).max() > 0
    shake(trainer.critic, 4)
    loss_of_run(trainer, parts)
    stats = dict(zip(PPO_STATS, trainer.compute_loss(parts[0])[1]["policy"], strict=True))
    assert 0.5 < stats["ratio"] / stats["num_tokens"] < 2 and stats["clip"] > 0
