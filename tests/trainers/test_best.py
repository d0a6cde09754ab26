"""The best model and the early stop: which evaluation counts, what is kept, published, resumed."""

import json
import logging

import numpy as np
import pytest

from cukit import GRPOConfig, SFTConfig
from cukit.models.weights import load_model
from cukit.runs.checkpoint import list_checkpoints, newest_model
from cukit.trainers.best import BestModel

from .conftest import assert_equal_weights, demonstrations, weights_of


def best_of(values, **options):
    """(BestModel after these evaluations of steps 1, 2, …; the steps that were the best when they came)."""
    best = BestModel(SFTConfig(eval_steps=1, load_best_model_at_end=True, **options))
    return best, [step for step, value in enumerate(values, 1) if best.compare(step, {best.metric: value})]


def test_the_best_is_better_than_all_before_it():
    best, steps = best_of([3.0, 2.0, 2.0, 2.5, 1.0, float("nan"), -float("inf")])
    assert steps == [1, 2, 5] and (best.step, best.value, best.metric) == (5, 1.0, "eval/loss")
    for name in ("accuracy", "eval_accuracy", "eval/accuracy"):
        best, steps = best_of([0.1, 0.3, 0.2, 0.3], metric_for_best_model=name)
        assert steps == [1, 2] and best.metric == "eval/accuracy"
    assert best_of([2.0, 1.0], metric_for_best_model="error", greater_is_better=False)[1] == [1, 2]
    assert best_of([1.0, 2.0], greater_is_better=True)[1] == [1, 2]
    assert BestModel(GRPOConfig(eval_steps=1, load_best_model_at_end=True)).metric == "eval/reward"
    best, _ = best_of([])
    assert not best.compare(0, {"eval/loss": 0.0}) and best.value is None  # before the first step
    with pytest.raises(ValueError, match="eval/bleu is no metric of the evaluation; there are a, b$"):
        BestModel(SFTConfig(eval_steps=1, early_stopping_patience=1, metric_for_best_model="bleu")).compare(
            0, {"eval/b": 1.0, "eval/a": 2.0}
        )


def test_patience_counts_evaluations_that_gain_no_more_than_the_threshold():
    """transformers' EarlyStoppingCallback: small gains move the best and use up the patience."""

    def waits(values, **options):
        best = BestModel(SFTConfig(eval_steps=1, early_stopping_patience=2, **options))
        return [(best.compare(step, {"eval/loss": value}), best.waited, best.exhausted)[1:] for step, value in values]

    values = list(enumerate([5.0, 4.0, 4.5, 3.9, 3.9, 3.95], 1))
    assert waits(values) == [(0, False), (0, False), (1, False), (0, False), (1, False), (2, True)]
    assert waits(values, early_stopping_threshold=0.2)[2:4] == [(1, False), (2, True)]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(load_best_model_at_end=True), "load_best_model_at_end compares evaluations of the run: give eval_steps"),
        (dict(early_stopping_patience=2), "early_stopping_patience compares evaluations"),
        (dict(eval_steps=1, early_stopping_patience=0), "early_stopping_patience must be at least 1"),
        (dict(eval_steps=1, early_stopping_threshold=-1.0), "early_stopping_threshold must be at least 0"),
        (dict(eval_steps=1, metric_for_best_model="loss"), "metric_for_best_model=loss does nothing without"),
        (dict(eval_steps=1, greater_is_better=True), "greater_is_better=True does nothing without"),
    ],
)
def test_options_that_do_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SFTConfig(**options)
    assert not SFTConfig(load_best_model_at_end=False, greater_is_better=None, metric_for_best_model=None).best.tracks


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(make_sft, monkeypatch):
    """scripted(losses, **options): an SFTTrainer; the evaluation after step N says losses[N - 1]."""

    def build(losses, **options):
        trainer = make_sft(evaluate=demonstrations(4), **dict(eval_steps=1, max_steps=len(losses)) | options)
        trainer.run_evaluation = lambda: {"eval/loss": losses[trainer.global_step - 1]}
        return trainer

    return build


def test_the_final_model_is_the_best_one(scripted, capsys):
    trainer = scripted([3.0, 1.0, 2.0, 2.0, 2.0], load_best_model_at_end=True, save_total_limit=1)
    at_step = {}
    trainer.callbacks.append(
        type("Keep", (), {"on_step_end": lambda _, t, m: at_step.update({t.global_step: weights_of(t.model)})})()
    )
    trainer.train()
    run = trainer.run_folder
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-2", "checkpoint-5"]
    assert newest_model(run) == run and "the final model is checkpoint-2" in capsys.readouterr().out
    published = {name: part.data for name, part in load_model(run, "cpu", "float32").named_parameters().items()}
    for name, weight in at_step[2].items():
        np.testing.assert_array_equal(published[name], weight)
        np.testing.assert_array_equal(trainer.model.named_parameters()[name].data, weight)
    assert any((at_step[5][name] != weight).any() for name, weight in at_step[2].items())


def test_without_a_comparison_the_final_model_is_the_last(scripted):
    trainer = scripted([float("nan")] * 2, load_best_model_at_end=True)
    trainer.train()
    assert newest_model(trainer.run_folder) == trainer.run_folder
    assert [path.name for path in list_checkpoints(trainer.run_folder)] == ["checkpoint-2"]


def test_an_early_stop_is_an_end(scripted, capsys, caplog, monkeypatch):
    losses = [3.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    trainer = scripted(losses, early_stopping_patience=2)
    trainer.train()
    assert (trainer.global_step, trainer.finished) == (4, True)
    assert "stopped early at step 4 of 6: 2 evaluations in a row were not better than eval/loss 1.0 of step 2" in (
        capsys.readouterr().out
    )
    run = trainer.run_folder
    assert newest_model(run) == run and [path.name for path in list_checkpoints(run)] == ["checkpoint-4"]
    same = scripted(losses, early_stopping_patience=2, output_dir=str(run))
    with monkeypatch.context() as patch:  # nothing of what is there is touched
        patch.setattr("cukit.runs.checkpoint.withdraw_model", None)
        same.train(resume_from_checkpoint="latest")
    assert same.global_step == 4 and "was stopped early; raise early_stopping_patience" in caplog.text
    assert newest_model(run) == run
    more = scripted(losses, early_stopping_patience=4, output_dir=str(run))
    more.train(resume_from_checkpoint="latest")
    assert more.global_step == 6 and newest_model(run) == run


def test_the_best_and_the_history_survive_a_resume(scripted):
    """A run that stops after step 3 and goes on equals one that did not stop."""
    losses, options = [3.0, 1.0 / 3.0, 2.0, 0.1 + 0.2, 0.5, 0.4], dict(load_best_model_at_end=True, save_total_limit=2)
    straight = scripted(losses, **options)
    straight.train()
    cut = scripted(losses, **options)
    cut.callbacks.append(type("Stop", (), {"on_step_end": lambda _, t, m: t.global_step == 3 and t.stop()})())
    cut.train()
    assert cut.global_step == 3 and (cut.best.step, cut.best.value, cut.best.waited) == (2, 1.0 / 3.0, 0)
    resumed = scripted(losses, **options, output_dir=str(cut.run_folder))
    resumed.train(resume_from_checkpoint="latest")
    assert resumed.best.state() == straight.best.state() and resumed.evaluations == straight.evaluations
    assert_equal_weights(resumed, straight)
    names = [[path.name for path in list_checkpoints(one.run_folder)] for one in (straight, resumed)]
    assert names[0] == names[1] == ["checkpoint-4", "checkpoint-6"]
    states = [
        json.loads((one.run_folder / "checkpoint-6/trainer_state.json").read_text()) for one in (straight, resumed)
    ]
    assert states[0]["best"] == states[1]["best"] == {"metric": "eval/loss", "value": 0.1 + 0.2, "step": 4, "waited": 2}
    assert states[0]["evaluations"] == states[1]["evaluations"]


def test_a_last_evaluation_that_was_cut_short_may_still_find_the_best(scripted, capsys):
    losses, options = [1.0, 2.0, 0.5], dict(load_best_model_at_end=True, early_stopping_patience=2)
    cut = scripted(losses, **options)
    evaluate = cut.run_evaluation

    def stopped():
        if cut.global_step == 3:
            cut.stop()
            cut.raise_if_stopped()
        return evaluate()

    cut.run_evaluation = stopped
    cut.train()
    run = cut.run_folder
    assert (run / "model.safetensors").read_bytes() == (run / "checkpoint-1/model.safetensors").read_bytes()
    again = scripted(losses, **options, output_dir=str(run))
    again.train(resume_from_checkpoint="latest")
    assert again.best.step == 3
    assert (run / "model.safetensors").read_bytes() == (run / "checkpoint-3/model.safetensors").read_bytes()
    last = scripted([1.0, 2.0, 3.0], early_stopping_patience=2)
    last.train()
    assert last.finished and "stopped early" not in capsys.readouterr().out  # the patience ends with the run


def test_a_best_checkpoint_that_is_gone_is_not_promised(scripted, caplog):
    losses = [1.0, 2.0, 3.0, 2.5]
    cut = scripted(losses, load_best_model_at_end=True)
    cut.callbacks.append(type("Stop", (), {"on_step_end": lambda _, t, m: t.global_step == 2 and t.stop()})())
    cut.train()
    (cut.run_folder / "checkpoint-1/model.safetensors").unlink()
    with caplog.at_level(logging.WARNING, "cukit"):
        again = scripted(losses, load_best_model_at_end=True, output_dir=str(cut.run_folder))
        again.train(resume_from_checkpoint="latest")
    assert "checkpoint-1, the best so far, cannot be kept" in caplog.text and again.best.step == 2
    other = scripted(losses, load_best_model_at_end=True)  # a resume into another folder leaves the best behind
    other.train(resume_from_checkpoint=str(cut.run_folder / "checkpoint-2"))
    assert other.best.step == 4


def test_grpo_takes_the_best_by_any_of_its_metrics(make_grpo, rows):
    def falling(completions, **_):
        falling.calls += 1
        return [10.0 - falling.calls] * len(completions)

    falling.calls = 0
    trainer = make_grpo(
        eval_dataset=rows[:2],
        eval_steps=1,
        max_steps=9,
        num_generations_eval=2,
        load_best_model_at_end=True,
        metric_for_best_model="pass@2",
        early_stopping_patience=3,
    )
    trainer.eval_scorer = type(trainer.scorer)([falling])
    trainer.train()
    assert trainer.best.metric == "eval/pass@2" and trainer.best.step == 1 and trainer.global_step == 4
