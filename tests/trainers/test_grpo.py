"""GRPO on a random model: what must not change the gradient, engine against trainer, degenerate rewards, methods."""

from dataclasses import replace

import numpy as np
import pytest

from cukit import LLM, SamplingParams
from cukit.trainers.advantage import group_advantages
from cukit.trainers.batch import FINISH_REASONS
from cukit.trainers.policy_trainer import LAUNCHING

from .conftest import equal, logged, share_of_ones, weights_of

# ---- the gradient ----


def gradients(trainer):
    """Gradients of the first optimizer batch, before any update."""
    micro_batches, _ = trainer.make_batch(0)
    for micro_batch in micro_batches:
        loss, _ = trainer.compute_loss(micro_batch)
        if loss.requires_grad:
            loss.backward()
    return {name: parameter.grad for name, parameter in trainer.model.named_parameters().items()}, len(micro_batches)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float64", 1e-12)])
def test_gradient_accumulation_changes_nothing(make_grpo, loss_type, dtype, tolerance):
    """1×16 = 4×4 = 16×1 = cut by tokens = with recomputation, to rounding."""
    whole, count = gradients(make_grpo(dtype=dtype, loss_type=loss_type))
    assert count <= 2
    scale = max(np.abs(grad).max() for grad in whole.values())
    for split in (
        dict(per_device_train_batch_size=1, gradient_accumulation_steps=16),
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=4),
        dict(max_tokens_per_batch=8),
        dict(gradient_checkpointing=True),
    ):
        other, count = gradients(make_grpo(dtype=dtype, loss_type=loss_type, **split))
        assert count >= 16 or "max_tokens_per_batch" not in split
        for name, grad in whole.items():
            np.testing.assert_allclose(other[name], grad, rtol=0, atol=tolerance * scale, err_msg=f"{split} {name}")


def test_rows_without_advantage_cost_no_gradient(make_grpo):
    """Groups of equal rewards run without the tape; the gradient is that of all rows with the tape."""

    def half(prompts, completions, **_):
        return [
            0.0 if len(prompt[0]["content"]) < 4 else share
            for prompt, share in zip(prompts, share_of_ones(completions), strict=True)
        ]

    trainer = make_grpo(half, "float64")
    micro_batches, _ = trainer.make_batch(0)
    assert {micro_batch.has_gradient for micro_batch in micro_batches} == {True, False}
    fast, _ = gradients(make_grpo(half, "float64"))
    for micro_batch in micro_batches:
        micro_batch.has_gradient = True
        trainer.compute_loss(micro_batch)[0].backward()
    for name, parameter in trainer.model.named_parameters().items():
        np.testing.assert_allclose(fast[name], parameter.grad, rtol=0, atol=1e-15)


def test_few_tokens_without_a_gradient_ride_along_on_a_device_that_waits_for_the_host(make_grpo, monkeypatch):
    def first(prompts, **_):
        return [float(len(prompt[0]["content"]) < 4 and i % 2) for i, prompt in enumerate(prompts)]

    apart, _ = make_grpo(first, "float64").make_batch(0)
    assert [rows.has_gradient for rows in apart] == [False, True]
    trainer = make_grpo(first, "float64")
    monkeypatch.setattr(trainer.model.backend, "is_asynchronous", True)
    layers, numbers = trainer.model.config.num_hidden_layers, trainer.model.num_parameters
    assert trainer._riding_tokens == int(LAUNCHING * layers / (4 * numbers)) > sum(rows.num_learnt for rows in apart)
    monkeypatch.undo()
    together, _ = trainer.make_batch(0)
    assert [rows.has_gradient for rows in together] == [True] and len(together[0]) == sum(map(len, apart))


def test_training_uses_the_sampled_ids_and_the_stop_token(make_grpo, tokenizer, rows):
    """A row of training is the prompt's ids and the engine's, its stop token included, never text tokenised again."""
    trainer = make_grpo(max_completion_length=40)
    kept = []
    generate = trainer.rollout.generate
    trainer.rollout.generate = lambda *arguments: kept.append(generate(*arguments)) or kept[-1]
    micro_batches, _ = trainer.make_batch(0)
    samples, batch = kept[0], micro_batches[0].batch
    advantages = group_advantages(np.array(share_of_ones(samples.texts)), 4, "group")[0]
    order = np.argsort(advantages == 0, kind="stable")  # rows without a gradient come last
    expected = [samples.prompt_ids[i] + samples.completion_ids[i] for i in order]
    assert [ids.tolist() for ids in np.split(batch.ids, batch.cu_seqlens[1:-1])] == expected
    np.testing.assert_array_equal(batch.logprobs, np.concatenate([samples.logprobs[i] for i in order]))
    stopped = [
        ids for ids, reason in zip(samples.completion_ids, samples.finish_reasons, strict=True) if reason == "stop"
    ]
    assert stopped and all(ids[-1] in tokenizer.eos_token_ids for ids in stopped)
    assert all("<|" not in text for text in samples.texts)
    assert len(batch.logprobs) == samples.lengths.sum() == batch.num_learnt.sum()


# ---- engine against trainer ----


@pytest.mark.parametrize(
    "sampling",
    [
        dict(temperature=0.6),
        dict(temperature=1.3),
        dict(top_p=0.9, top_k=20),
        dict(min_p=0.02),
        dict(repetition_penalty=1.2),
    ],
)
def test_the_engine_stores_the_log_probs_that_training_computes(make_grpo, sampling):
    """Before an update every ratio is 1: temperature is in both, top-k, top-p, min-p and the penalty are in neither."""
    trainer = make_grpo(max_steps=1, max_completion_length=20, **sampling)
    trainer.train()
    assert logged(trainer, "sampling/sampling_logp_difference/max")[0] < 1e-5
    for which in ("min", "mean", "max"):
        assert abs(logged(trainer, f"sampling/importance_sampling_ratio/{which}")[0] - 1) < 1e-5


def test_without_learning_the_difference_stays_flat(make_grpo):
    trainer = make_grpo(learning_rate=0.0, max_steps=12)
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5


def test_no_cached_key_outlives_an_update(make_grpo, tokenizer, rows):
    """After training, the trainer's engine answers as a fresh engine on the saved weights does."""
    trainer = make_grpo(max_steps=4)
    trainer.train()
    prompts = [ids for _, ids in trainer.train_rows]
    greedy = SamplingParams(temperature=0, max_tokens=20, logprobs=True)
    fresh = LLM(str(trainer.run_folder / "checkpoint-4"), device="cpu").generate(prompts, greedy)
    mine = trainer.rollout.generate(prompts, greedy)
    assert mine.completion_ids == [request.outputs[0].token_ids for request in fresh]


# ---- rewards that say nothing ----


def test_every_completion_cut_off(make_grpo):
    """mask_truncated_completions and nothing that ended by itself: loss 0, no gradient, no NaN, same weights."""
    trainer = make_grpo(mask_truncated_completions=True, beta=0.1)
    generate = trainer.rollout.generate
    trainer.rollout.generate = lambda *arguments: replace(generate(*arguments), finish_reasons=["length"] * 16)
    before = weights_of(trainer.model)
    trainer.train()
    assert logged(trainer, "loss") == [0, 0] and logged(trainer, "grad_norm") == [0, 0]
    assert logged(trainer, "completions/clipped_ratio") == [1, 1]
    assert all(np.array_equal(before[name], value) for name, value in weights_of(trainer.model).items())


def test_truncated_completions_are_left_out(make_grpo):
    trainer = make_grpo(mask_truncated_completions=True, max_completion_length=40, loss_type="dapo")
    micro_batches, _ = trainer.make_batch(0)
    batch = micro_batches[0].batch
    assert 0 < len(batch) < 16 and {FINISH_REASONS[code] for code in batch.finish_reasons} == {"stop"}
    assert min(part.first for part in micro_batches) == 0 and max(part.last for part in micro_batches) == len(batch)
    np.testing.assert_allclose(batch.weights, 1 / batch.num_learnt.sum(), rtol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_equal_rewards(make_grpo, beta):
    """No advantage: weights stay, unless the policy has left the reference, which the KL then feels."""
    trainer = make_grpo(equal, beta=beta, scale_rewards="group")
    if beta:
        trainer.reference.parameters()[0].data[...] *= 1.5
    before = weights_of(trainer.model)
    trainer.train()
    moved = any(not np.array_equal(before[name], value) for name, value in weights_of(trainer.model).items())
    assert (
        moved == (beta > 0)
        and logged(trainer, "frac_reward_zero_std") == [1, 1]
        and logged(trainer, "reward_std") == [0, 0]
    )
    assert len(logged(trainer, "kl")) == (2 if beta else 0) and all(kl > 0 for kl in logged(trainer, "kl"))
    assert np.isfinite(logged(trainer, "loss")).all()


def test_missing_rewards(make_grpo, capsys):
    """None leaves a completion out of its group; a batch of nothing but None trains nothing."""

    def some(completions, **_):
        return [None if i % 4 == 0 else value for i, value in enumerate(share_of_ones(completions))]

    trainer = make_grpo(some)
    trainer.train()
    assert logged(trainer, "frac_reward_none") == [0.25, 0.25] and np.isfinite(logged(trainer, "loss")).all()
    assert "no reward applies" not in capsys.readouterr().out
    trainer = make_grpo(lambda completions, **_: [None] * len(completions))
    before = weights_of(trainer.model)
    trainer.train()
    assert logged(trainer, "frac_reward_none") == [1, 1] and logged(trainer, "loss") == [0, 0]
    assert capsys.readouterr().out.count("no reward applies to any completion of this generation batch") == 1
    assert all(np.array_equal(before[name], value) for name, value in weights_of(trainer.model).items())


def test_a_reward_that_is_never_given_is_said_once(make_grpo, capsys):
    make_grpo(lambda completions, **_: [0.0] * len(completions), max_steps=12, max_completion_length=2).train()
    said = capsys.readouterr().out
    assert (
        said.count("every reward of the first 10 generation batches was 0") == 1
        and said.count("max_completion_length=2; raise it") == 1
    )


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_a_gradient_that_is_not_finite_is_skipped(make_grpo, caplog):
    """An infinite advantage (1e300 in float32): the update is skipped, counted and said; weights stay."""
    trainer = make_grpo(
        lambda completions, **_: [1e300 * (i % 2) for i in range(len(completions))], scale_rewards="none"
    )
    before = weights_of(trainer.model)
    with pytest.raises(ValueError, match="every update of this run"):
        trainer.train()
    assert logged(trainer, "skipped_updates") == [1, 2] and "the update was skipped" in caplog.text
    assert all(np.array_equal(before[name], value) for name, value in weights_of(trainer.model).items())


def test_log_probs_that_are_not_finite_leave_a_row_out(make_grpo, capsys):
    trainer = make_grpo()
    generate = trainer.rollout.generate

    def broken(*arguments):
        samples = generate(*arguments)
        samples.logprobs[3][0] = np.nan
        return samples

    trainer.rollout.generate = broken
    trainer.train()
    assert logged(trainer, "sampling/error_rows") == [1, 1] and "left out" in capsys.readouterr().out
    assert np.isfinite(logged(trainer, "loss")).all() and logged(trainer, "skipped_updates") == [0, 0]


# ---- methods and learning ----


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(loss_type="dr_grpo", scale_rewards="none"),
        dict(importance_sampling_level="sequence", loss_type="grpo"),
        dict(loss_type="cispo", epsilon_high=5.0),
        dict(num_iterations=2, beta=0.01),
        dict(dtype="bfloat16"),
        dict(delta=1.5, epsilon_high=0.28, use_bias_correction_kl=True, beta=0.01),
    ],
)
def test_it_learns(make_grpo, options):
    """The dense reward rises well above its start with each method."""
    trainer = make_grpo(max_steps=24, per_device_train_batch_size=32, num_generations=8, learning_rate=2e-2, **options)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert np.mean(rewards[-5:]) > np.mean(rewards[:3]) + 0.2, rewards


def test_clipping_shows_only_off_policy(make_grpo):
    """In the first pass over a generation batch every ratio is 1; in the second some are clipped."""
    trainer = make_grpo(num_iterations=2, learning_rate=0.1, max_steps=2)
    trainer.train()
    first, second = logged(trainer, "clip_ratio/region_mean")
    assert first == 0 < second
    assert len(logged(trainer, "reward")) == 1 and len(logged(trainer, "sampling/sampling_logp_difference/mean")) == 1


def test_two_rewards_and_their_weights(make_grpo):
    def long(completion_ids, **_):
        return [len(ids) for ids in completion_ids]

    trainer = make_grpo([share_of_ones, long], reward_weights=[1.0, 0.5])
    trainer.train()
    for total, ones, length in zip(
        *(logged(trainer, name) for name in ("reward", "rewards/share_of_ones/mean", "rewards/long/mean"))
    ):
        assert abs(total - (ones + 0.5 * length)) < 1e-9


def test_rewards_get_what_trl_gives_them(make_grpo, rows):
    """Keywords: prompts, completions (message lists where the prompt is one), completion_ids, other columns."""
    seen = {}

    def spy(prompts, completions, completion_ids, answer, **more):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer, more=more)
        return [0.0] * len(prompts)

    make_grpo(spy).make_batch(0)
    assert (
        len(seen["prompts"]) == len(seen["answer"]) == 16
        and seen["prompts"][0] == seen["prompts"][3] != seen["prompts"][4]
    )
    assert all(
        row in rows
        for row in ({"prompt": p, "answer": a} for p, a in zip(seen["prompts"], seen["answer"], strict=True))
    )
    assert [list(message) for message in seen["completions"][0]] == [["role", "content"]]
    make_grpo(spy, train_dataset=[{"prompt": "1+1=", "answer": "2"}]).make_batch(0)
    assert isinstance(seen["completions"][0], str)


def test_every_prompt_once_an_epoch(make_grpo, rows):
    """12 rows, 4 prompts a step: 3 steps see each row once, with num_generations completions."""
    seen = []
    trainer = make_grpo(
        lambda prompts, answer, **_: seen.extend(answer) or [0.0] * len(prompts), max_steps=-1, num_train_epochs=2
    )
    assert trainer.total_steps == 6
    trainer.train()
    for epoch in (seen[:48], seen[48:]):
        assert sorted(epoch) == sorted([row["answer"] for row in rows] * 4)
    assert seen[:48] != seen[48:] and logged(trainer, "epoch")[-1] == 2
