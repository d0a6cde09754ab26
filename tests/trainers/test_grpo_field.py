"""Faults of GRPO that use has found (rows of the field list), each with other inputs of its kind."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from cukit import GRPOTrainer
from cukit.trainers.rewarding import accuracy, evaluation_metrics
from cukit.trainers.rollout import Samples

from .conftest import assert_equal_weights, equal, logged, share_of_ones, weights_of

# ---- e4: completions that fail ----


def failing(trainer, places):
    """From now on the completions at `places` of every rollout end with "error" after one token."""
    generate = trainer.rollout.generate

    def broken(*arguments):
        samples = generate(*arguments)
        for place in places:
            samples.finish_reasons[place] = "error"
            samples.token_ids[place] = samples.token_ids[place][: samples.prompt_lengths[place] + 1]
            samples.logprobs[place] = samples.logprobs[place][:1]
        return samples

    trainer.rollout.generate = broken


def test_e4_failed_completions_are_left_out_and_counted(make_grpo, capsys):
    """The gradient is that of the others: nothing computes with the failed row, no reward is asked about it."""
    asked = []

    def reward(completions, trainer_state, log_extra, log_metric, **columns):
        asked.append((len(completions), {name: len(values) for name, values in columns.items()}))
        return share_of_ones(completions)

    trainer = make_grpo(reward, num_iterations=2)
    failing(trainer, [0, 5])
    micro_batches, metrics = trainer.make_batch(0)
    batch = micro_batches[0].batch
    assert len(batch) == 14 and metrics["sampling/error_rows"] == 2
    assert asked[0][0] == 14 and set(asked[0][1].values()) == {14}
    assert np.bincount(batch.groups).tolist() == [3, 3, 4, 4] and np.isfinite(batch.rewards).all()
    assert np.isfinite(batch.advantages).all() and batch.weights.sum() == pytest.approx(1)
    trainer.train()
    assert logged(trainer, "sampling/error_rows") == [2] and np.isfinite(logged(trainer, "loss")).all()
    assert "2 of 16 completions failed" in capsys.readouterr().out


def test_e4_a_generation_that_failed_whole_ends_the_run(make_grpo):
    """One clear line; the weights are as they were, and the prompts come again after a resume."""
    trainer = make_grpo(max_steps=3)
    before, state = weights_of(trainer.model), trainer.sampler.state_dict()
    for parameter in trainer.model.parameters():
        parameter.data[...] = np.nan
    with pytest.raises(ValueError, match="weights are damaged") as error:
        trainer.train()
    assert "\n" not in str(error.value) and trainer.sampler.state_dict() == state and trainer.global_step == 0
    for parameter, value in zip(trainer.model.parameters(), before.values(), strict=True):
        parameter.data[...] = value
    trainer.rollout.weights_changed()  # the engine is usable again: no request is left behind
    assert len(trainer.make_batch(0)[0]) > 0


def nan_logits(model, share):
    """The model's head gives NaN for about that share of the rows it is asked about; training's own head does not."""
    logits = model.logits

    def broken(hidden):
        out = logits(hidden)
        first = hidden.data[:, 0]
        out.data[np.abs(first * 1e4) % 1 < share] = np.nan
        return out

    model.logits = broken


@pytest.mark.parametrize("options", [dict(), dict(beta=0.1, num_iterations=2), dict(mask_truncated_completions=True)])
def test_e4_through_the_engine(make_grpo, rows, options, capsys):
    """Some rows get NaN from the model: they end with "error", the others are trained on, evaluations go on too."""
    trainer = make_grpo(max_steps=3, eval_dataset=rows, max_completion_length=20, **options)
    nan_logits(trainer.model, 0.03)
    before = weights_of(trainer.model)
    trainer.train()
    failed = logged(trainer, "sampling/error_rows")
    assert sum(failed) > 0 and max(failed) < 16
    assert np.isfinite(logged(trainer, "loss")).all() and logged(trainer, "skipped_updates")[-1] == 0
    assert logged(trainer, "eval/error_rows") and "completions failed" in capsys.readouterr().out
    assert any(not np.array_equal(before[name], x) for name, x in weights_of(trainer.model).items())


def test_e4_a_model_that_gives_nothing_but_nan(make_grpo, rows):
    trainer = make_grpo(eval_dataset=rows)
    logits = trainer.model.logits
    nan_logits(trainer.model, 1.0)
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match="weights are damaged"):
            call()
    trainer.model.logits = logits
    assert trainer.evaluate()["eval/length"] > 0 and len(trainer.make_batch(0)[0]) > 0


# ---- c11: all of the engine's sampling options reach training ----


@pytest.mark.parametrize(
    "options, holds",
    [
        (dict(stop=["1"]), lambda text, ids, reason: "1" not in text),
        (dict(generation_kwargs={"stop_strings": ["1"]}), lambda text, ids, reason: "1" not in text),
        (dict(stop_token_ids=[5, 6, 7]), lambda text, ids, reason: not {5, 6, 7} & set(ids[:-1])),
        (dict(min_tokens=15), lambda text, ids, reason: len(ids) >= 15),
        (dict(ignore_eos=True), lambda text, ids, reason: len(ids) == 30 and reason == "length"),
        (dict(generation_kwargs={"top_k": 1}), lambda text, ids, reason: True),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_c11_sampling_options_reach_training(make_grpo, options, holds):
    """Each changes what is drawn, and does there what it says; the engine's limits too."""

    def drawn(**given):
        trainer = make_grpo(max_completion_length=30, max_num_seqs=8, block_size=8, **given)
        kept, generate = [], trainer.rollout.generate
        trainer.rollout.generate = lambda *arguments: kept.append(generate(*arguments)) or kept[-1]
        assert trainer.rollout.llm.config.max_num_seqs == trainer.rollout.llm.config.block_size == 8
        trainer.make_batch(0)
        return kept[0]

    with_it, without = drawn(**options), drawn()
    assert with_it.completion_ids != without.completion_ids
    rows = zip(with_it.texts, with_it.completion_ids, with_it.finish_reasons, strict=True)
    assert all(holds(*row) for row in rows)
    rows = zip(without.texts, without.completion_ids, without.finish_reasons, strict=True)
    assert not all(holds(*row) for row in rows) or "top_k" in str(options)


# ---- e5: nothing to learn ----


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e30])
def test_e5_a_step_with_nothing_to_learn_changes_nothing(make_grpo, scale, value):
    """Equal rewards with a mean that rounds: no pass has a gradient; weights and reported spreads stay as before."""
    trainer = make_grpo(
        lambda completions, **_: [value] * len(completions), num_generations=8, scale_rewards=scale, weight_decay=0.1
    )
    assert not any(rows.has_gradient for rows in trainer.make_batch(0)[0])
    before = weights_of(trainer.model)
    trainer.train()
    assert logged(trainer, "frac_reward_zero_std") == [1, 1] and logged(trainer, "grad_norm") == [0, 0]
    assert logged(trainer, "reward_std") == [0, 0] and logged(trainer, "reward") == [value, value]
    assert trainer.optimizer.step_count == trainer.optimizer.skipped == 0
    assert all(np.array_equal(before[name], x) for name, x in weights_of(trainer.model).items())


# ---- e8: one definition of accuracy ----


def samples_of(reasons):
    count = len(reasons)
    ids, ones = [np.zeros(3, np.int32)] * count, np.ones(count, np.int32)
    return Samples(ids, ones, np.arange(count, dtype=np.int32), [np.zeros(2)] * count, reasons, [""] * count)


def test_e8_rows_without_a_reward_are_left_out():
    """One right, one wrong, one that does not apply: 0.5, a third left out. A failed completion is wrong."""
    nan, false = np.nan, np.zeros(3, bool)
    assert accuracy(np.array([1.0, 0.0, nan]), false) == (0.5, pytest.approx(1 / 3))
    assert accuracy(np.array([1.0, nan, nan]), np.array([False, True, False])) == (0.5, pytest.approx(1 / 3))
    nothing, left_out = accuracy(np.array([nan, nan]), np.zeros(2, bool))
    assert np.isnan(nothing) and left_out == 1
    by_function = np.array([[1.0, nan], [0.99, 0.5], [nan, 1.0]])
    found = evaluation_metrics(["a", "b"], samples_of(["stop", "length", "stop"]), np.array([1, 1.49, 1]), by_function)
    assert found["eval/accuracy"] == 0.5 and found["eval/frac_reward_none"] == pytest.approx(1 / 3)
    assert found["eval/rewards/b/mean"] == 0.75 and found["eval/clipped_ratio"] == pytest.approx(1 / 3)
    assert "eval/error_rows" not in found
    assert evaluation_metrics(["a"], samples_of(["error"] * 2), np.ones(2), np.ones((2, 1)))["eval/error_rows"] == 2


def test_e8_training_says_what_was_left_out(make_grpo, rows):
    def some(completions, answer, **_):
        return [None if int(a) % 3 == 2 else float(int(a) % 3 == 0) for a in answer]

    trainer = make_grpo(some, eval_dataset=rows[:6], max_steps=1)
    trainer.train()
    assert logged(trainer, "eval/accuracy") == [0.5, 0.5]
    assert logged(trainer, "eval/frac_reward_none") == pytest.approx([1 / 3, 1 / 3])


# ---- e12: metrics of far log-ratios ----


def test_e12_metrics_cannot_overflow(make_grpo):
    """A sampler that is off by 800 on one token (as after a bad reload): finite metrics, the token is counted."""
    for offset in (25.0, 89.0, 800.0):
        for level in ("token", "sequence"):
            trainer = make_grpo(max_steps=1, importance_sampling_level=level)
            generate = trainer.rollout.generate

            def broken(*arguments, generate=generate, offset=offset):
                samples = generate(*arguments)
                samples.logprobs[3] = samples.logprobs[3] - np.float32(offset)
                samples.logprobs[7] = samples.logprobs[7] + np.float32(offset)
                return samples

            trainer.rollout.generate = broken
            trainer.train()
            row = json.loads((trainer.run_folder / "metrics.jsonl").read_text().splitlines()[-1])
            assert all(value is not None for value in row.values()), row
            assert row["sampling/extreme_log_ratios"] > 0 and row["skipped_updates"] == 0
            assert row["sampling/sampling_logp_difference/max"] == pytest.approx(offset, abs=1)
            assert row["sampling/importance_sampling_ratio/max"] <= np.exp(20.0) and row["grad_norm"] < 1e3
    trainer = make_grpo(max_steps=1)
    trainer.train()
    assert logged(trainer, "sampling/extreme_log_ratios") == [0]


# ---- e14: an epoch is each row once ----


@pytest.mark.parametrize(
    "num_rows, epochs, steps", [(1, 1, 1), (3, 2, 2), (5, 1, 2), (9, 2, 6), (8, 0.5, 1), (9, 1.5, 5)]
)
def test_e14_an_epoch_is_each_prompt_once(make_grpo, rows, num_rows, epochs, steps):
    """4 prompts a step at most; the last generation of an epoch has what is left, in whole groups."""
    seen, sizes = [], []

    def reward(completions, answer, **_):
        seen.extend(answer)
        sizes.append(len(completions))
        return share_of_ones(completions)

    trainer = make_grpo(reward, train_dataset=rows[:num_rows], max_steps=-1, num_train_epochs=epochs)
    assert trainer.total_steps == steps
    trainer.train()
    assert len(sizes) == steps and all(size % 4 == 0 and size <= 16 for size in sizes)
    for epoch in range(int(epochs)):
        asked = seen[epoch * 4 * num_rows : (epoch + 1) * 4 * num_rows]
        assert sorted(asked) == sorted([row["answer"] for row in rows[:num_rows]] * 4)
    assert logged(trainer, "epoch")[-1] >= epochs and np.isfinite(logged(trainer, "loss")).all()


def test_e14_a_short_generation_in_several_updates(make_grpo, rows):
    """One prompt left for 4 updates of a generation: each sees a part of its group, with weights that sum to one."""
    trainer = make_grpo(
        train_dataset=rows[:5], steps_per_generation=4, per_device_train_batch_size=4, max_steps=-1, num_train_epochs=1
    )
    assert trainer.total_steps == 8
    parts = []
    for step in range(8):
        micro_batches, _ = trainer.make_batch(step)
        parts.append(sum(len(part) for part in micro_batches))
        assert sum(float(part.weights.sum()) for part in micro_batches) == pytest.approx(1)
    assert parts == [4, 4, 4, 4, 1, 1, 1, 1]


def test_e14_max_steps_beyond_the_data_begins_new_epochs(make_grpo, rows):
    trainer = make_grpo(train_dataset=rows[:3], max_steps=4)
    trainer.train()
    assert logged(trainer, "epoch") == [1, 2, 3, 4]


# ---- t9: what a reward sees of the prompt ----


def test_t9_rewards_see_the_rendered_prompt(make_grpo, tokenizer):
    """prompt_ids are the ids the engine was given, prompt_text is what the template wrote, special tokens included."""
    seen = {}

    def spy(prompts, prompt_ids, prompt_text, **_):
        seen.update(prompts=prompts, ids=prompt_ids, text=prompt_text)
        return [0.0] * len(prompts)

    trainer = make_grpo(spy)
    trainer.make_batch(0)
    for prompt, ids, text in zip(seen["prompts"], seen["ids"], seen["text"], strict=True):
        assert text == tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        assert ids == tokenizer.apply_chat_template(prompt, add_generation_prompt=True) and isinstance(ids, list)
    assert len(seen["ids"]) == 16 and "<|" in seen["text"][0]


# ---- c5: a stop in the middle of drawing ----


def stop_after(trainer, monkeypatch, count):
    """Ctrl-C at the engine's step number `count` from now on; the engine steps of each generation after that are
    counted."""
    step, seen = trainer.rollout.llm.core.step, []

    def counting():
        seen.append(1)
        if len(seen) == count:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(trainer.rollout.llm.core, "step", counting)
    return seen


def test_c5_a_stop_while_drawing_ends_soon_and_loses_nothing(make_grpo, monkeypatch):
    """The generation is given up at once; the same step comes after a resume, as if nothing had been."""
    straight = make_grpo(max_steps=3, save_steps=1)
    straight.train()
    cut = make_grpo(max_steps=3, save_steps=1)
    seen = stop_after(cut, monkeypatch, 9)  # 6 steps a generation: in the second one
    cut.train()
    assert cut.global_step == 1 and len(seen) == 9
    resumed = make_grpo(max_steps=3, save_steps=1, output_dir=str(cut.run_folder))
    resumed.train(resume_from_checkpoint="latest")
    assert_equal_weights(straight, resumed)


def test_c5_a_stop_in_an_evaluation(make_grpo, rows, monkeypatch):
    """Nothing is logged of an evaluation that was cut short, and no request is left behind."""
    trainer = make_grpo(equal, eval_dataset=rows, eval_on_start=True)
    seen = stop_after(trainer, monkeypatch, 2)
    trainer.train()
    assert len(seen) == 2 and trainer.evaluations == [] and trainer.global_step == 0
    monkeypatch.undo()
    assert trainer.evaluate()["eval/accuracy"] == 0


# ---- e16: a cache that sleeps while training runs ----


def test_e16_a_run_with_a_sleeping_cache_is_the_same_run(make_grpo, monkeypatch):
    """The planner says so where memory is short; the cache is there in a rollout and gone in training."""
    awake = make_grpo(max_steps=3)
    awake.train()
    plan = GRPOTrainer.plan_memory
    monkeypatch.setattr(GRPOTrainer, "plan_memory", lambda self: replace(plan(self), sleeps_cache=True))
    asleep, seen = make_grpo(max_steps=3), []
    loss = asleep.compute_loss

    def watched(rows):
        seen.append(asleep.rollout.llm.core.is_awake)
        return loss(rows)

    monkeypatch.setattr(asleep, "compute_loss", watched)
    asleep.train()
    assert seen and not any(seen)
    assert_equal_weights(awake, asleep)
