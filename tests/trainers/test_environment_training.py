"""Training and evaluation with environments: what is learnt, what rewards get, how runs end and go on."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

import cukit_cli
from cukit import Environment, GRPOTrainer
from cukit.commands.parser import make
from cukit.models.logprobs import token_logprobs
from cukit.trainers.callbacks import TrainerCallback
from cukit.trainers.grpo_config import GRPOConfig
from cukit.trainers.rewarding import RewardScorer

from .conftest import FOLDER, assert_equal_weights, logged, rows_without_times

STOP = ["1", "2", "a", "+"]
FILE = '''
from cukit import Environment


class Again(Environment):
    """Says what it was told, twice."""

    reward = 0.0

    def reset(self, **columns):
        self.answer, self.turns = columns.get("answer"), 0

    def respond(self, conversation):
        self.turns += 1
        self.reward += conversation[-1]["content"].count("4")
        return None if self.turns > 1 + (self.seed + self.index) % 2 else [{"role": "user", "content": str(self.turns)}]


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Two.
    """
    return a + b


def words(completions, environments, **columns):
    return [sum(len(m["content"]) for m in completion) for completion in completions]
'''


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Two.
    """
    return a + b


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "again.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def make_run(make_grpo, file):
    def build(reward=(), **options):
        options = {"stop": STOP, "max_completion_length": 50, "environment": f"{file}:Again"} | options
        return make_grpo(list(reward), **options)

    return build


def test_only_what_the_model_drew_is_learnt(make_run):
    trainer = make_run(dtype="float64")
    seen = []
    plain = trainer.rollout.generate
    trainer.rollout.generate = lambda *arguments: seen.append(plain(*arguments)) or seen[-1]
    batch, metrics = trainer.generation.batch(0)
    (samples,) = seen
    drawn = [
        ids[length:][mask].tolist()
        for ids, length, mask in zip(samples.token_ids, samples.prompt_lengths, samples.masks, strict=True)
    ]
    assert any(not mask.all() for mask in samples.masks)
    place = {tuple(ids.tolist()): row for row, ids in enumerate(samples.token_ids)}
    for row in range(len(batch)):
        ids = batch.ids[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        learnt = slice(*batch.cu_learnt[row : row + 2])
        source = place[tuple(ids.tolist())]
        assert batch.targets[learnt].tolist() == drawn[source]
        np.testing.assert_array_equal(batch.logprobs[learnt], samples.logprobs[source])
    assert batch.num_learnt.sum() == sum(map(len, drawn)) < len(batch.ids)
    assert np.ptp(batch.weights) < 1e-12 and batch.weights.sum() == pytest.approx(1), "dapo: one weight a drawn token"
    assert metrics["completions/mean_length"] == np.mean([len(ids) for ids in drawn])
    assert metrics["completions/max_turns"] == 3 and 2 < metrics["completions/mean_turns"] < 3


def test_the_policy_of_the_first_step_is_the_one_that_sampled(make_run):
    trainer = make_run(dtype="float64", max_steps=2, loss_type="grpo")
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-10
    assert min(logged(trainer, "grad_norm")) > 0


def test_the_kl_of_a_reward_is_that_of_drawn_tokens(make_run):
    """Through passes of some rows each, against the log-probabilities of each row alone."""
    trainer = make_run(dtype="float64", beta=0.2, use_kl_in_reward=True, max_tokens_per_batch=100)
    trainer.reference.init_weights(5)
    seen = []
    plain = trainer.rollout.generate
    trainer.rollout.generate = lambda *arguments: seen.append(plain(*arguments)) or seen[-1]
    _, metrics = trainer.generation.batch(0)
    (samples,) = seen
    assert any(not mask.all() for mask in samples.masks)
    kl = 0.0
    for ids, length, mask, old in zip(
        samples.token_ids, samples.prompt_lengths, samples.masks, samples.logprobs, strict=True
    ):
        reference = token_logprobs(trainer.reference, [ids], 1.0, trainer.tokenizer.vocab_size)[0][length - 1 :]
        kl += (old - reference[mask]).sum()
    assert metrics["kl"] == pytest.approx(kl / samples.lengths.sum(), rel=1e-9)


def test_rewards_get_the_conversation_and_the_environment(make_run):
    got = []

    def lengths(prompts, completions, environments, answer, **columns):
        got.append((prompts, completions, environments, answer))
        return [float(environment.turns) for environment in environments]

    trainer = make_run([lengths], reward_weights=[0.5], log_completions=True, eval_dataset=None)
    trainer.train()
    assert trainer.scorer.names == ["lengths", "Again"] and trainer.scorer.weights == [0.5, 1.0]
    for prompts, completions, environments, answer in got:
        assert len(prompts) == len(completions) == len(environments) == 16
        assert max(map(len, completions)) > 2
        for completion, environment, wanted in zip(completions, environments, answer, strict=True):
            roles = [message["role"] for message in completion]
            assert roles[::2] == ["assistant"] * len(roles[::2]) and environment.answer == wanted
            assert set(roles[1::2]) <= {"user"}
    means = [logged(trainer, f"rewards/{name}/mean") for name in ("lengths", "Again")]
    np.testing.assert_allclose(logged(trainer, "reward"), 0.5 * np.array(means[0]) + np.array(means[1]), atol=1e-6)
    shown = [json.loads(line) for line in (trainer.run_folder / "completions.jsonl").read_text().splitlines()]
    assert "rewards/Again" in shown[0] and any("<|im_start|>user\n1<|im_end|>" in row["completion"] for row in shown)


def test_dynamic_sampling_replaces_groups_of_episodes(make_run):
    """A group whose episodes all end with equal rewards gives its place to a new prompt, with its own data row."""
    got, seen = [], []

    def odd(environments, answer, **columns):
        got.extend((environment.answer, wanted) for environment, wanted in zip(environments, answer, strict=True))
        return [float(int(wanted) % 3 == 0 and environment.index) for environment, wanted in
                zip(environments, answer, strict=True)]  # fmt: skip

    trainer = make_run([odd], dynamic_sampling=True, max_num_gen_batches=3, reward_weights=[1.0])
    trainer.environments.gives_rewards = False
    trainer.scorer = RewardScorer([odd])
    plain = trainer.rollout.generate
    trainer.rollout.generate = lambda *arguments: seen.append(plain(*arguments)) or seen[-1]
    batch, metrics = trainer.generation.batch(0)
    drawn = len(np.unique(seen[0].groups))
    assert 4 < drawn <= 12 and metrics["dynamic_sampling/num_gen_batches"] == drawn / 4
    assert all(own == wanted for own, wanted in got) and len(got) == 4 * drawn
    assert len(batch) == 16 and set(np.bincount(batch.groups)[np.unique(batch.groups)]) == {4}
    again, _ = make_run([odd], dynamic_sampling=True, max_num_gen_batches=3).generation.batch(0)
    assert again.ids is not None and not trainer.rollout.llm.core.scheduler.held


def test_evaluations_use_the_environment(make_run, rows):
    trainer = make_run(eval_dataset=rows[:3], max_steps=1, num_generations_eval=2)
    trainer.train()
    assert logged(trainer, "eval/rewards/Again/mean") and trainer.evaluations
    first = trainer.evaluate()
    assert {n: v for n, v in trainer.evaluate().items() if n != "eval/runtime"} == {
        n: v for n, v in first.items() if n != "eval/runtime"
    }


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_episodes(make_run, tmp_path):
    """A generation batch is drawn anew from the same seeds."""
    whole = make_run(max_steps=4, save_steps=2, num_iterations=1)
    whole.train()

    class Killed(TrainerCallback):
        def on_step_end(self, trainer, metrics):
            if trainer.global_step == 3:
                raise KeyboardInterrupt

    cut = make_run(max_steps=4, save_steps=2, callbacks=[Killed()])
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    again = make_run(max_steps=4, save_steps=2, output_dir=str(cut.run_folder))
    again.train(cut.run_folder / "checkpoint-2")
    assert_equal_weights(whole, again)
    assert rows_without_times(whole.run_folder)[-1] == rows_without_times(again.run_folder)[-1]


def test_a_stop_ends_an_environment_that_hangs(make_run, monkeypatch):
    trainer = make_run()
    calls = []

    def hang(self, conversation):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("it went on after the stop")
        return None

    monkeypatch.setattr(trainer.environments.factory, "respond", hang)
    trainer.train()
    assert len(calls) == 5 and trainer.global_step == 0 and not trainer.rollout.llm.core.requests


def test_an_environment_without_rewards_needs_a_reward_function(rows):
    class Silent(Environment):
        def respond(self, conversation):
            return None

    with pytest.raises(ValueError, match="reward_funcs is empty"):
        GRPOTrainer(FOLDER, None, GRPOConfig(), rows, environment_factory=Silent)


def test_names_by_file(make_run, file):
    trainer = make_run([f"{file}:words"])
    assert trainer.environments.name == "Again" and trainer.scorer.names == ["words", "Again"]
    for spec, message in [
        ("Again", "give it as"),
        (f"{file}:Nothing", "has no 'Nothing'"),
        (f"{file.parent / 'none.py'}:Again", "does not exist"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            make_run([f"{file}:words"], environment=spec)
        assert "\n" not in str(error.value)
    broken = file.parent / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(ValueError, match="importing it raised ZeroDivisionError"):
        make_run(environment=f"{broken}:Again")
    with pytest.raises(ValueError, match="the chat template does not show tools"):
        make_run([f"{file}:words"], environment=None, tools=[f"{file}:add,add"])


def test_the_limit_reaches_the_episodes(make_run):
    assert make_run(max_tool_calling_iterations=3).rollout.episodes.max_iterations == 3
    assert make_run().rollout.episodes.max_iterations is None
    with pytest.raises(ValueError, match="max_tool_calling_iterations"):
        make_run(max_tool_calling_iterations=0)


def test_prompts_show_the_tools(make_grpo, file, tmp_path):
    """The template's own text of the schemas stands in the prompts, in training and in later turns."""
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% if tools %}{{ tools[0].function.name }}{% endif %}" + config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    prompt = [{"prompt": [{"role": "user", "content": "1"}]}]
    options = dict(output_dir=str(tmp_path / "run"), device="cpu", max_steps=1, max_completion_length=9)
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        GRPOTrainer(folder, None, GRPOConfig(**options), prompt, tools=[add])
    trainer = GRPOTrainer(folder, [lambda completions, **_: [1.0] * 8], GRPOConfig(**options), prompt, tools=[add])
    (_, ids), tokenizer = trainer.train_rows[0], trainer.tokenizer
    assert tokenizer.decode(ids, False).startswith("add<|im_start|>user\n1<|im_end|>")
    trainer.train()
    assert logged(trainer, "tools/call_frequency") == [0.0] and logged(trainer, "tools/failure_frequency") == [0.0]


@pytest.mark.slow
def test_the_command_line(file, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["grpo", "--environment", f"{file}:Again", "--max_steps", "1", "--max_completion_length", "40"]
    words += ["--per_device_train_batch_size", "16", "--eval_steps", "9", "--eval_on_start", "false"]
    assert cukit_cli.main([*words, "--reward_funcs", f"{file}:words", "--output_dir", str(run)]) == 0
    (row,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert row["completions/mean_turns"] > 1 and "rewards/Again/mean" in row
    assert f"environment: {file}:Again" in (run / "config.yaml").read_text()
    capsys.readouterr()
    told = ["--environment", f"{file}:Again", "--limit", "8", "--temperature", "1", "--seed", "1", "--max_tokens", "40"]
    assert cukit_cli.main(["eval", *told]) == 0
    first = capsys.readouterr().out
    assert "rewards/Again/mean" in first
    assert cukit_cli.main(["eval", *told, "--max_tool_calling_iterations", "1"]) == 0
    assert capsys.readouterr().out.split("mean length")[1] != first.split("mean length")[1]
    assert cukit_cli.main([*words, "--dry_run"]) == 0
    assert f"environment: {file}:Again" in capsys.readouterr().out
    assert cukit_cli.main(["grpo", "--tools", f"{file}:add", "--max_steps", "1", "--output_dir", str(run) + "2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("take a model that was taught to call them")
    assert make(GRPOConfig, {"tools": ["a.py:f", "b.py:g"]}).tools == ["a.py:f", "b.py:g"]
