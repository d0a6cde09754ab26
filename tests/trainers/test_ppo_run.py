"""PPO runs: exact resume, stops in any phase, what a checkpoint holds, and resumes that do not fit."""

import re
from pathlib import Path

import numpy as np
import pytest

from cukit.models.weights import load_model
from cukit.runs.checkpoint import newest_model

from .conftest import assert_equal_weights, logged, rows_without_times, share_of_ones, weights_of
from .playing import Asking
from .test_stops import PHASES, Strike, advised_resume

# two rollouts of four steps each, and what goes on from one rollout to the next
LASTING = dict(
    num_ppo_epochs=2,
    num_mini_batches=2,
    per_device_train_batch_size=6,
    kl_coef=0.1,
    kl_target=0.01,
    kl_horizon=20,
    normalize_rewards=True,
    reward_clip=2.0,
    bootstrap_truncated=True,
    beta=0.05,
    lr_scheduler_type="cosine",
    warmup_steps=3,
    critic_learning_rate=2e-2,
    critic_warmup_steps=2,
)
TURNS = dict(stop=["1", "2", "a", "+"], max_completion_length=40)


def assert_equal_runs(first, second, after=-1):
    """Rows of metrics are compared from the step after this one."""
    assert_equal_weights(first, second)
    for (name, x), y in zip(weights_of(first.critic).items(), weights_of(second.critic).values(), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)
    expected, found = (rows_without_times(one.run_folder) for one in (first, second))
    assert found == [row for row in expected if row["step"] > after] != []
    assert first.generation.state() == second.generation.state()


@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("turns", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_resume_is_exact(make_ppo, critic, turns):
    """In the middle of a rollout (2 and 5) and at its border (4): equal bits, metrics and moments."""
    options = LASTING | dict(critic=critic, max_steps=9, save_steps=1) | (TURNS if turns else {})
    playing = dict(reward=None, environment_factory=Asking) if turns else {}
    straight = make_ppo(**playing, **options)
    straight.train()
    coefficients = logged(straight, "kl_coef")
    assert len(set(coefficients)) == len(coefficients) == 3 and straight.generation.scores.count == 36
    for step in (2, 4, 5):
        resumed = make_ppo(**playing, **options | {"save_steps": 0})
        resumed.train(resume_from_checkpoint=str(straight.run_folder / f"checkpoint-{step}"))
        assert_equal_runs(straight, resumed, step)


@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_in_any_phase_loses_nothing(make_ppo, rows, monkeypatch, capsys, phase):
    """A rollout that is cut short counts no episodes, no scores and moves no coefficient."""
    options = LASTING | dict(num_ppo_epochs=1, num_mini_batches=1, max_steps=4, logging_steps=2, eval_steps=2)
    options |= dict(save_steps=2 if phase == "saving" else 0, eval_on_start=phase != "first generation")
    straight = make_ppo(eval_dataset=rows[:4], **options)
    straight.train()
    with monkeypatch.context() as patch:
        strike = Strike(phase, patch)
        cut = make_ppo(eval_dataset=rows[:4], **options, callbacks=[strike])
        capsys.readouterr()
        cut.train()
    folder = cut.args.output_dir
    assert not strike.left and (cut.global_step < 4 or phase == "last evaluation")
    advice = advised_resume(capsys.readouterr().out)
    resumed = make_ppo(eval_dataset=rows[:4], **options | {"output_dir": folder})
    resumed.train(resume_from_checkpoint="latest" if advice else None)
    assert_equal_runs(straight, resumed)
    assert newest_model(folder) == Path(folder)


def test_a_rollout_that_an_error_ends_is_drawn_again(make_ppo, capsys):
    """A reward raises after it has seen the third rollout; the saved state is that of the second's last step."""
    calls = []

    def fragile(completions, **_):
        calls.append(len(completions))
        if len(calls) == 3:
            raise RuntimeError("gone")
        return share_of_ones(completions)

    options = LASTING | dict(max_steps=10)
    straight = make_ppo(**options)
    straight.train()
    cut = make_ppo(fragile, **options)
    with pytest.raises(ValueError, match="gone"):
        cut.train()
    assert cut.global_step == 8
    resumed = make_ppo(**options | {"output_dir": advised_resume(capsys.readouterr().out)})
    resumed.train(resume_from_checkpoint="latest")
    assert_equal_weights(straight, resumed)
    assert straight.generation.state() == resumed.generation.state()


def test_what_a_checkpoint_holds(make_ppo):
    """Beside the policy a classifier, which is the critic, or the weights of a head."""
    for critic in ("separate", "shared"):
        trainer = make_ppo(critic=critic, critic_learning_rate=1e-2)
        trainer.train()
        folder = trainer.run_folder / "checkpoint-2" / "critic"
        if critic == "separate":
            found = load_model(folder, "cpu", head="score")
            assert found.config.architecture.endswith("ForSequenceClassification")
            for name, value in weights_of(trainer.critic).items():
                np.testing.assert_array_equal(found.named_parameters()[name].data, value)
            again = make_ppo(critic_model=str(folder))
            assert np.abs(again.critic.parts()["score.weight"]).max() > 0
        else:
            (name,) = trainer.critic.parts()
            stored = trainer.critic.stored_parts(folder)
            assert stored[name].tobytes() == trainer.critic.parts()[name].tobytes()
        assert load_model(trainer.run_folder / "checkpoint-2", "cpu").config.head == "lm_head"


def test_resumes_that_do_not_fit(make_ppo, make_grpo):
    runs = {}
    for critic in ("separate", "shared"):
        runs[critic] = make_ppo(critic=critic, max_steps=1)
        runs[critic].train()
    grpo = make_grpo(max_steps=1, num_generations=4)
    grpo.train()
    for trainer, options, message in (
        (runs["separate"], dict(critic="shared"), "a separate critic, and this run .* shared one: .* critic=separate"),
        (runs["shared"], dict(critic="separate"), "a shared critic, and this run .* separate one: .* critic=shared"),
        (runs["shared"], dict(critic="shared", num_ppo_epochs=2), "made 1 updates a generation batch, this run makes 2"
         "; resume with the same num_ppo_epochs and num_mini_batches"),
        (grpo, dict(), "was made by grpo, not ppo; to go on with it: cukit grpo --resume_from_checkpoint"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            make_ppo(**options).train(resume_from_checkpoint=str(trainer.run_folder / "checkpoint-1"))
        assert re.search(message, str(error.value)) and "\n" not in str(error.value)


def test_a_warm_up_of_the_critic_that_takes_the_whole_run_is_said(make_ppo, caplog):
    before = {}
    for steps, said in ((2, ["critic_warmup_steps=2 leaves the policy none of the run's 2 steps"]), (3, [])):
        caplog.clear()
        trainer = make_ppo(max_steps=steps, critic_warmup_steps=2)
        assert [message.partition(", so ")[0] for message in caplog.messages if "critic_warmup" in message] == said
        before = {name: view.copy() for name, view in trainer.model.parts().items()}
        trainer.train()
        same = all(np.array_equal(view, before[name]) for name, view in trainer.model.parts().items())
        assert same == bool(said)


def test_a_run_is_a_function_of_its_seed(make_ppo):
    runs = [make_ppo(seed=seed, critic="shared", num_mini_batches=2) for seed in (1, 1, 2)]
    for trainer in runs:
        trainer.train()
    assert_equal_runs(*runs[:2])
    assert logged(runs[0], "reward") != logged(runs[2], "reward")


@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types(make_ppo, critic, dtype):
    """The critic's head is float32; one loss scale serves both models."""
    trainer = make_ppo(dtype=dtype, critic=critic, max_steps=4, num_ppo_epochs=2, vf_coef=1.0)
    before = weights_of(trainer.model), weights_of(trainer.critic)
    trainer.train()
    assert trainer.critic.parts()["score.weight"].dtype == np.float32
    assert all(abs(ratio - 1) < 0.05 for ratio in logged(trainer, "val/ratio")[::2])
    assert logged(trainer, "skipped_updates") == [0.0] * 4 and all(x > 0 for x in logged(trainer, "grad_norm/critic"))
    for first, model in zip(before, (trainer.model, trainer.critic), strict=True):
        assert any(np.any(value != first[name]) for name, value in weights_of(model).items())
