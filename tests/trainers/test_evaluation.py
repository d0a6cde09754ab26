"""Evaluations: pass@k against a count of all subsets, the answers file, rewards of their own."""

import itertools
import json
import math

import numpy as np
import pytest

from cukit import GRPOConfig, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from cukit.trainers.evaluation import pass_at_k, solved_metrics
from cukit.trainers.evaluation_config import pass_at_k_values
from cukit.trainers.ranks import merged
from cukit.trainers.rollout import Samples

from .conftest import FOLDER, logged


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Its mean over the draws of n samples is the chance that k fresh ones hold a right one."""
    for p, n, k in ((0.3, 8, 4), (0.05, 10, 2), (0.9, 5, 5)):
        mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4)  # no overflow


def samples_of(groups, failed=()):
    count = len(groups)
    reasons = ["error" if i in failed else "stop" for i in range(count)]
    ids = [np.zeros(1, np.int32)] * count
    return Samples(ids, np.zeros(count, np.int32), np.array(groups), [np.zeros(0)] * count, reasons, [""] * count)


def test_solved_metrics_are_means_over_prompts():
    rewards = np.array([1, 0, 0, 0, 1.5, 0.9, np.nan, np.nan, *[np.nan] * 4, 1, 0, np.nan, 0])
    groups = np.repeat(range(4), 4)
    found = solved_metrics(samples_of(groups, failed=(14,)), rewards, [1, 2, 3])
    # prompts: 1 of 4; 1 of 2 (two do not apply); none applies; 1 of 4 (the failed one is wrong)
    assert found["avg@4"] == pytest.approx(np.mean([1 / 4, 1 / 2, 1 / 4]))
    assert found["pass@1"] == found["avg@4"]
    assert found["pass@2"] == pytest.approx(np.mean([1 / 2, 1, 1 / 2]))
    assert found["pass@3"] == pytest.approx(np.mean([3 / 4, 3 / 4]))
    assert list(found) == ["avg@4", "pass@1", "pass@2", "pass@3"]
    assert solved_metrics(samples_of([0, 1]), np.ones(2), []) == {}
    nothing = solved_metrics(samples_of([0, 0]), np.full(2, np.nan), [1])
    assert np.isnan(nothing["avg@2"]) and np.isnan(nothing["pass@1"])


def test_solved_metrics_against_a_count_over_random_results():
    random = np.random.default_rng(8)
    for _ in range(20):
        prompts, n, k = (int(random.integers(low, high)) for low, high in ((1, 6), (2, 6), (1, 3)))
        right = random.random((prompts, n)) < random.random()
        found = solved_metrics(samples_of(np.repeat(range(prompts), n)), right.ravel().astype(float), [k])
        counted = [any(chosen) for row in right for chosen in itertools.combinations(row, k)]
        assert found[f"pass@{k}"] == pytest.approx(np.mean(counted)) and found[f"avg@{n}"] == pytest.approx(
            right.mean()
        )


def test_the_k_of_pass_at_k():
    assert pass_at_k_values(None, 8, "n") == [1, 2, 4, 8] and pass_at_k_values(None, 6, "n") == [1, 2, 4, 6]
    assert pass_at_k_values(None, 1, "n") == [] and pass_at_k_values([3, 1, 3], 4, "n") == [1, 3]
    with pytest.raises(ValueError, match="pass_at_k=9 needs .* raise num_generations_eval=8"):
        GRPOConfig(num_generations_eval=8, pass_at_k=[1, 9])
    with pytest.raises(ValueError, match="pass_at_k=2 needs .* raise num_generations_eval=1"):
        GRPOConfig(pass_at_k=[2])


# ---- in a run --------------------------------------------------------------------------------------------------------


def third_is_right(completions, **_):
    return [float(i % 3 == 2) for i in range(len(completions))]


def test_a_run_says_avg_and_pass_at_k_and_keeps_every_answer(make_grpo, rows):
    trainer = make_grpo(eval_dataset=rows[:4], num_generations_eval=3, eval_reward_funcs=None, max_steps=1)
    trainer.train()
    assert logged(trainer, "eval/pass@1") == logged(trainer, "eval/avg@3") and len(logged(trainer, "eval/pass@3")) == 2
    trainer = make_grpo(third_is_right, eval_dataset=rows[:4], num_generations_eval=3, pass_at_k=[2], eval_steps=1)
    trainer.train()
    assert logged(trainer, "eval/avg@3") == pytest.approx([1 / 3] * 3)
    assert logged(trainer, "eval/pass@2") == pytest.approx([2 / 3] * 3) and not logged(trainer, "eval/pass@1")
    files = sorted((trainer.run_folder / "evaluations").iterdir())
    assert [path.name for path in files] == ["step-0.jsonl", "step-1.jsonl", "step-2.jsonl"]
    for path in files:
        answers = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(one["row"], one["sample"]) for one in answers] == list(itertools.product(range(4), range(3)))
        assert [one["rewards/third_is_right"] for one in answers] == [0.0, 0.0, 1.0] * 4
        assert [one["answer"] for one in answers] == [rows[one["row"]]["answer"] for one in answers]
        assert {"prompt", "completion", "finish_reason", "length"} <= answers[0].keys()


def test_an_evaluation_may_have_rewards_of_its_own(make_grpo, rows, tmp_path, make_model, tokenizer):
    (tmp_path / "mine.py").write_text("def mine(completions, **_):\n    return [2.0] * len(completions)\n")
    trainer = make_grpo(eval_dataset=rows[:4], eval_reward_funcs=[f"{tmp_path / 'mine.py'}:mine"], max_steps=1)
    trainer.train()
    assert logged(trainer, "eval/accuracy") == [1.0, 1.0] and logged(trainer, "eval/rewards/mine/mean") == [2.0, 2.0]
    assert not logged(trainer, "rewards/mine/mean") and logged(trainer, "rewards/share_of_ones/mean")
    trainer = type(trainer)(
        make_model(),
        [third_is_right],
        GRPOConfig(),
        rows,
        rows[:3],
        tokenizer,
        eval_reward_funcs=[lambda **_: [1.0] * 3],
    )
    assert trainer.evaluate()["eval/accuracy"] == 1.0


def test_answers_of_steps_that_run_again_are_deleted(make_grpo, rows):
    options = dict(eval_dataset=rows[:2], eval_steps=1, save_steps=1, max_steps=3)
    trainer = make_grpo(**options)
    trainer.train()
    folder, step_2 = trainer.run_folder, (trainer.run_folder / "evaluations" / "step-2.jsonl").read_bytes()
    again = make_grpo(**options | dict(output_dir=str(folder), max_steps=2, eval_on_start=False, eval_steps=9))
    again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert sorted(path.name for path in (folder / "evaluations").iterdir()) == ["step-0.jsonl", "step-1.jsonl"]
    again = make_grpo(**options | dict(output_dir=str(folder), max_steps=2))
    again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert (folder / "evaluations" / "step-2.jsonl").read_bytes() == step_2


@pytest.mark.parametrize("method", ["sft", "reward"])
def test_metrics_of_several_ranks_are_plain_numbers(tmp_path, method):
    trainers = {"sft": (SFTTrainer, SFTConfig), "reward": (RewardTrainer, RewardConfig)}
    rows = [{"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3"}] * 2
    made, config = trainers[method]
    args = config(output_dir=str(tmp_path / "run"), max_steps=1, per_device_train_batch_size=2)
    trainer = made(model=str(FOLDER), args=args, train_dataset=rows, eval_dataset=rows)
    trainer.ranks.add_up = lambda work, what: merged([work(), work()])
    found = trainer.evaluate()
    assert "eval/loss" in found and {type(value) for value in found.values()} == {float}
