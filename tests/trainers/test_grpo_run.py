"""GRPO runs: evaluation, the run folder, exact resume, Ctrl-C, and what a user can get wrong."""

import json
import os
import signal

import pytest

from cukit import GRPOConfig, GRPOTrainer
from cukit.models.weights import load_model

from .conftest import assert_equal_weights, equal, logged

# ---- evaluation, files, resume ----


def test_evaluation_and_the_run_folder(make_grpo, rows, tmp_path):
    calls = []

    class Watch:
        def on_step_end(self, trainer, metrics):
            calls.append("step")

        def on_log(self, trainer, row):
            calls.append("log")

        def on_evaluate(self, trainer, metrics):
            calls.append("evaluate")

        def on_train_end(self, trainer):
            calls.append("end")

    def first_is_right(completions, **_):
        return [1.0 if i == 0 else 0.25 for i in range(len(completions))]

    trainer = make_grpo(first_is_right, max_steps=4, eval_dataset=rows[:4], eval_steps=2, callbacks=[Watch()])
    trainer.train()
    assert logged(trainer, "eval/accuracy") == [0.25] * 3 and logged(trainer, "eval/reward") == [(1 + 3 * 0.25) / 4] * 3
    assert [calls.count(name) for name in ("step", "log", "evaluate", "end")] == [4, 4, 3, 1]
    names = {
        "loss",
        "grad_norm",
        "learning_rate",
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "rewards/first_is_right/mean",
        "entropy",
        "completions/mean_length",
        "completions/clipped_ratio",
        "completions/mean_terminated_length",
        "clip_ratio/low_mean",
        "num_tokens",
        "epoch",
        "step_time",
        "time/generate",
        "time/reward",
        "time/train",
        "tokens_per_second",
    }
    assert all(len(logged(trainer, name)) == 4 for name in names)
    completions = [json.loads(line) for line in (trainer.run_folder / "completions.jsonl").read_text().splitlines()]
    assert {"step", "prompt", "completion", "rewards/first_is_right", "finish_reason"} <= completions[0].keys()
    assert (trainer.run_folder / "config.yaml").exists() and load_model(
        trainer.run_folder / "checkpoint-4"
    ).config.hidden_size == 32
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "options, where",
    [
        (dict(max_completion_length=2), "cut off at max_completion_length=2; raise it"),
        (
            dict(max_completion_length=60, max_model_len=24),
            "cut off where max_model_len, the context, ends, before max_",
        ),
    ],
)
def test_what_cuts_completions_off_is_named(make_grpo, capsys, options, where):
    make_grpo(**options, max_steps=1, ignore_eos=True).train()
    assert f"completions were {where}" in capsys.readouterr().out


def test_a_cache_without_room_for_one_sequence_is_refused(make_grpo):
    """But for a max_model_len that is given: it cuts completions off on purpose."""
    sizes = {"max_completion_length": 60, "block_size": 4}
    longest = max(len(ids) for _, ids in make_grpo(**sizes).train_rows) + 60
    blocks = -(-longest // 4)
    make_grpo(**sizes, num_kv_blocks=blocks)
    with pytest.raises(ValueError) as error:
        make_grpo(**sizes, num_kv_blocks=blocks - 1)
    room = 4 * (blocks - 1)
    assert str(error.value) == (
        f"the KV cache has room for {room} tokens ({blocks - 1} blocks of 4), and the longest prompt with "
        f"max_completion_length=60 takes {longest}: raise num_kv_blocks, or lower max_completion_length, or give "
        f"max_model_len={room} to cut completions there"
    )
    make_grpo(**sizes, num_kv_blocks=blocks - 1, max_model_len=room, max_steps=1).train()
    # beyond the model's own context nothing is asked for
    make_grpo(max_completion_length=512, block_size=4, num_kv_blocks=24)
    with pytest.raises(ValueError, match="takes 96: raise num_kv_blocks"):
        make_grpo(max_completion_length=512, block_size=4, num_kv_blocks=23)
    with pytest.raises(ValueError, match="raise memory_limit or num_kv_blocks, or lower max_completion_length; "):
        make_grpo(**sizes, memory_limit="1MB")  # not even a prompt has room


def test_sampled_evaluation(make_grpo, rows):
    trainer = make_grpo(eval_dataset=rows, num_generations_eval=3)
    assert trainer.evaluate()["eval/reward"] == trainer.evaluate()["eval/reward"]  # its draws are seeded


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(
            num_iterations=2,
            steps_per_generation=2,
            per_device_train_batch_size=8,
            beta=0.05,
            sync_ref_model=True,
            ref_model_sync_steps=2,
        ),
    ],
)
def test_resume_is_exact(make_grpo, tmp_path, options):
    """10 steps = 5 + 5 after a resume, in the middle of a generation batch too: equal losses, metrics and bits."""
    options = dict(max_steps=10, save_steps=5, lr_scheduler_type="cosine", warmup_steps=3) | options
    straight = make_grpo(**options)
    straight.train()
    folder = str(tmp_path / "cut")
    make_grpo(output_dir=folder, **options).train()
    resumed = make_grpo(output_dir=folder, **options)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-5")
    for name in ("loss", "grad_norm", "reward", "num_tokens", "epoch", "kl"):
        assert logged(resumed, name) == logged(straight, name)
    assert len(logged(resumed, "loss")) == 10
    assert_equal_weights(straight, resumed)


def test_ctrl_c_loses_nothing(make_grpo, capsys):
    """The first Ctrl-C ends the run with a checkpoint; resumed, it ends where an undisturbed run does."""

    class Interrupt:
        def on_step_end(self, trainer, metrics):
            if trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    straight = make_grpo(max_steps=5)
    straight.train()
    cut = make_grpo(max_steps=5, callbacks=[Interrupt()])
    cut.train()
    assert cut.global_step == 2 and "resume_from_checkpoint latest" in capsys.readouterr().out
    resumed = make_grpo(max_steps=5, output_dir=str(cut.run_folder))
    resumed.train(resume_from_checkpoint="latest")
    assert_equal_weights(straight, resumed)


def test_a_run_is_a_function_of_its_seed(make_grpo):
    runs = [make_grpo(seed=seed) for seed in (1, 1, 2)]
    for trainer in runs:
        trainer.train()
    assert_equal_weights(runs[0], runs[1])
    assert logged(runs[0], "reward") != logged(runs[2], "reward")


# ---- what a user can get wrong ----


def test_a_prompt_longer_than_the_context(make_grpo, rows):
    with pytest.raises(ValueError, match=r"train_dataset row 12: the prompt has 1\d\d tokens and the context only 96"):
        make_grpo(train_dataset=[*rows, {"prompt": [{"role": "user", "content": "1" * 120}]}])
    with pytest.raises(ValueError, match="eval_dataset row 0: the prompt has .* context only 12"):
        make_grpo(train_dataset=[{"prompt": "1+1="}], eval_dataset=[{"prompt": "1" * 12}], max_model_len=12)


@pytest.mark.parametrize(
    "reward, message",
    [
        (lambda completions, **_: [1.0], "returned 1 values for 16 completions"),
        (lambda completions, **_: 1 / 0, "raised ZeroDivisionError"),
        ([], "reward_funcs is empty"),
        ("nonsense", "unknown reward 'nonsense'"),
    ],
)
def test_rewards_that_are_wrong(make_grpo, reward, message):
    with pytest.raises(ValueError, match=message):
        make_grpo(reward).train()


def test_arguments_that_are_wrong(make_model, tokenizer, rows):
    with pytest.raises(ValueError, match="num_generations=1"):
        GRPOConfig(num_generations=1)
    with pytest.raises(ValueError, match="needs train_dataset"):
        GRPOTrainer(make_model(), [equal], GRPOConfig(), None, processing_class=tokenizer)
    with pytest.raises(ValueError, match="give processing_class"):
        GRPOTrainer(make_model(), [equal], GRPOConfig(), rows)
    with pytest.raises(ValueError, match="eval_strategy=steps needs an eval_dataset"):
        GRPOTrainer(make_model(), [equal], GRPOConfig(eval_steps=1), rows, processing_class=tokenizer)
    with pytest.raises(ValueError, match="the data has no rows"):
        GRPOTrainer(make_model(), [equal], GRPOConfig(), [], processing_class=tokenizer)


@pytest.mark.parametrize(
    "options, changed, message",
    [
        ((4, 1), (2, 2), "generation batch makes 4 optimizer batches, and this run's options make 2; resume with the"),
        ((1, 4), (4, 1), "generation batch makes 1 optimizer batches, and this run's options make 4; resume with the"),
        ((4, 1), dict(beta=0.1), "within a generation batch that was drawn without beta; resume with beta=0"),
    ],
)
def test_the_rest_of_a_generation_batch_keeps_its_options(make_grpo, options, changed, message):
    """(steps_per_generation, num_iterations), both with four updates a generation batch; step 2 is in its middle."""

    def run(values, **more):
        if not isinstance(values, dict):
            values = dict(zip(("steps_per_generation", "num_iterations"), values, strict=True))
        return make_grpo(per_device_train_batch_size=4, **values, **more)

    cut = run(options, max_steps=2)
    cut.train()
    given = changed if not isinstance(changed, dict) else changed | {"steps_per_generation": 4}
    with pytest.raises(ValueError, match=message):
        run(given, max_steps=8).train(resume_from_checkpoint=str(cut.run_folder / "checkpoint-2"))
    run(options, max_steps=8).train(resume_from_checkpoint=str(cut.run_folder / "checkpoint-2"))
