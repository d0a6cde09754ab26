"""A reward model among the rewards of GRPO: its scores, what it reads, what the planner knows, what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cukit import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, RewardConfig, RewardTrainer
from cukit.commands.dry_run import without_weights
from cukit.models.decoder import Decoder
from cukit.models.scores import sequence_scores
from cukit.models.weights import load_config, load_model, save_model
from cukit.tokenizer import Tokenizer
from cukit.trainers.reward_model import RewardModel, is_model_name, reward_models

from .conftest import FOLDER, logged, share_of_ones


@pytest.fixture
def folder(make_model, tokenizer, tmp_path):
    """A reward model's folder with the policy's tokenizer."""
    causal = make_model(seed=3)
    model = Decoder(causal.config, causal.backend, causal.dtype, head="score")
    model.init_weights(3)
    path = tmp_path / "my-reward"
    save_model(model, path)
    tokenizer.save(path)
    return str(path)


@pytest.fixture
def other_tokens(folder):
    """The same folder with a chat template of its own."""
    path = f"{folder}/tokenizer_config.json"
    config = json.loads(open(path).read())
    config["chat_template"] = config["chat_template"].replace("{%- for", "{{- '1' }}{%- for", 1)
    with open(path, "w") as file:
        json.dump(config, file)
    return folder


def recorded(trainer):
    """Where what the scorer is called with, and what it returns, is kept."""
    scorer, kept = trainer.scorer, []

    def call(rows, samples, tokenizer=None):
        found = scorer(rows, samples, tokenizer)
        kept.append((rows, samples, found[1]))
        return found

    call.__dict__ = scorer.__dict__
    for name in ("metrics", "names", "weights", "recorded_metrics"):
        setattr(call, name, getattr(scorer, name))
    trainer.scorer = call
    return kept


def expected_scores(folder, sequences):
    return sequence_scores(load_model(folder, dtype="float32", head="score"), sequences)


def test_it_scores_the_ids_that_were_sampled_closed_as_in_training(make_grpo, folder, tokenizer):
    trainer = make_grpo([folder, share_of_ones], max_steps=1, max_tokens_per_batch=50)
    kept = recorded(trainer)
    trainer.train()
    ((_, samples, by_function),) = kept
    end, sequences = tokenizer.encode("<|im_end|>\n"), []
    for ids, reason in zip(samples.token_ids, samples.finish_reasons):
        ids = ids.tolist()
        sequences.append(ids[:-1] + end if reason == "stop" else ids + end)
    assert {"stop", "length"} >= set(samples.finish_reasons)
    np.testing.assert_allclose(by_function[:, 0], expected_scores(folder, sequences), atol=1e-5)
    assert by_function[:, 0].std() > 0.01
    assert trainer.scorer.names == ["my-reward", "share_of_ones"]
    np.testing.assert_allclose(logged(trainer, "rewards/my-reward/mean"), [by_function[:, 0].mean()], rtol=1e-6)


def test_with_another_template_it_reads_the_text(make_grpo, other_tokens):
    trainer = make_grpo(other_tokens, max_steps=1)
    kept = recorded(trainer)
    trainer.train()
    ((rows, samples, by_function),) = kept
    own = Tokenizer.from_folder(other_tokens)
    texts = [
        own.render_chat([*row["prompt"], {"role": "assistant", "content": text}])
        for row, text in zip(rows, samples.texts)
    ]
    assert all(text.startswith("1<|im_start|>user") and text.endswith("<|im_end|>\n") for text in texts)
    expected = expected_scores(other_tokens, [own.encode(text) for text in texts])
    np.testing.assert_allclose(by_function[:, 0], expected, atol=1e-5)


def test_text_prompts_end_with_the_end_token(folder, other_tokens, make_model, tokenizer):
    """Both ways give what training on {"prompt": text, …} gives."""
    end = tokenizer.eos_token_id
    given = dict(prompts=["1+"], completions=["1"], prompt_ids=[[5, 6]], completion_ids=[[7]])
    for made, same, sequence in (
        (folder, False, tokenizer.encode("1+1") + [end]),
        (folder, True, [5, 6, 7, end]),
    ):
        reward = RewardModel(made)
        reward.load(make_model(), tokenizer, 1000)
        assert not reward.shares_ids  # other_tokens has changed the folder
        reward.shares_ids = same
        np.testing.assert_allclose(reward(**given), expected_scores(made, [sequence]), atol=1e-6)


def test_sampled_ids_with_and_without_an_end(folder, make_model, tokenizer):
    reward = RewardModel(folder)
    reward.load(make_model(), tokenizer, 1000)
    assert reward.shares_ids and reward.__name__ == "my-reward"
    prompt, word = [{"role": "user", "content": "1"}], tokenizer.encode("1")[0]
    end, line = tokenizer.encode("<|im_end|>\n")
    other_end = next(iter(tokenizer.eos_token_ids - {end}))
    completions = [[word], [word, end], [word, other_end], []]
    found = reward([prompt] * 4, ["x"] * 4, completions, [[word, word]] * 4)
    expected = expected_scores(folder, [[word, word, word, end, line], [word, word, end, line]])
    np.testing.assert_allclose(found, expected[[0, 0, 0, 1]], atol=1e-6)


def test_arguments_of_the_chat_template_reach_it(make_grpo, folder):
    trainer = make_grpo(folder, chat_template_kwargs={"mark": "7"})
    assert trainer.reward_models[folder].template_arguments == {"mark": "7"}


def test_a_completion_beyond_its_context_is_refused(folder, make_model, tokenizer):
    reward = RewardModel(folder)
    reward.load(make_model(), tokenizer, 1000)
    with pytest.raises(ValueError, match="completion 1 has 97 tokens with its prompt, and the context of the reward"):
        reward(["1", "1"], ["1", "1"], [[1] * 5, [1] * 95], [[1], [1]])


def test_the_policy_learns_from_it(make_grpo, folder):
    trainer = make_grpo(folder, max_steps=25, learning_rate=1e-2)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1


def test_it_rewards_evaluations_alone(make_grpo, folder, rows):
    trainer = make_grpo(
        share_of_ones,
        eval_dataset=rows[:4],
        eval_reward_funcs=[folder],
        eval_steps=1,
        max_steps=1,
        max_tokens_per_batch=64,
    )
    trainer.train()
    assert trainer.scorer.names == ["share_of_ones"] and trainer.eval_scorer.names == ["my-reward"]
    assert np.isfinite(logged(trainer, "eval/rewards/my-reward/mean")).all()


def test_ppo_takes_it_too(folder, make_model, tokenizer, rows, tmp_path):
    args = PPOConfig(
        output_dir=str(tmp_path / "ppo"),
        max_steps=1,
        num_ppo_epochs=1,
        per_device_train_batch_size=4,
        max_completion_length=6,
        logging_steps=1,
        save_steps=0,
    )
    trainer = PPOTrainer(make_model(), [folder], args, rows, None, tokenizer)
    kept = recorded(trainer)
    trainer.train()
    ((_, samples, by_function),) = kept
    assert len(samples) == 4 and np.isfinite(by_function).all()
    np.testing.assert_allclose(logged(trainer, "objective/scores"), [by_function.mean()], rtol=1e-6)


def test_one_folder_given_twice_is_loaded_once(make_grpo, folder):
    trainer = make_grpo([folder], eval_reward_funcs=[folder])
    assert list(trainer.reward_models) == [folder]
    assert trainer.scorer.functions[0] is trainer.eval_scorer.functions[0] is trainer.reward_models[folder]


def test_the_planner_knows_it(make_grpo, folder):
    def weights(trainer, name):
        return [item.nbytes for item in trainer.plan.items if item.name.startswith(name)]

    plain, trainer = make_grpo(share_of_ones), make_grpo([folder, share_of_ones])
    assert weights(plain, "reward model") == []
    (nbytes,) = weights(trainer, "reward model my-reward: weights in float32")
    model = trainer.reward_models[folder].model
    numbers = sum(parameter.data.nbytes for parameter in model.parameters())
    assert nbytes == numbers + sum(table.nbytes for table in model._rope)


def test_a_dry_run_plans_it_without_its_weights(folder, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n')
    args = GRPOConfig(reward_funcs=[folder], max_completion_length=8)
    trainer = without_weights(GRPOTrainer, args, {"model": str(FOLDER), "data": str(rows)})
    assert any(item.name.startswith("reward model my-reward") for item in trainer.plan_memory().items)
    assert trainer.reward_models[folder].model is None


def test_a_run_folder_stands_for_its_model(tmp_path, make_model, tokenizer):
    row = {"chosen": "1", "rejected": "2"}
    args = RewardConfig(output_dir=str(tmp_path / "run"), max_steps=1, save_steps=0)
    RewardTrainer(FOLDER, args, [row]).train()
    shutil.copytree(tmp_path / "run/checkpoint-1", tmp_path / "unfinished/checkpoint-1")
    for name, source in (("run", "run"), ("unfinished", "unfinished/checkpoint-1")):
        reward = RewardModel(str(tmp_path / name))
        assert str(reward.source) == str(tmp_path / source) and reward.__name__ == name
        assert reward.config == load_config(tmp_path / "run")


def test_what_is_no_reward_model_is_refused_in_one_line(make_grpo, tmp_path):
    (tmp_path / "empty").mkdir()
    for given, message in (
        (str(FOLDER), "is no classifier: its config.json says Qwen3ForCausalLM; make one by `cukit reward --model"),
        (str(tmp_path / "empty"), "holds no config.json"),
        ("no-such-reward", "unknown reward 'no-such-reward'"),
        ("", "unknown reward ''"),
    ):
        with pytest.raises(ValueError) as error:
            make_grpo([share_of_ones, given])
        assert message in str(error.value) and "\n" not in str(error.value)


def test_names_of_rewards_and_of_models(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exact").mkdir()
    for spec in (folder, "my-reward", "owner/name", "owner/name@v2"):
        assert is_model_name(spec), spec
    for spec in ("exact", "length(target=3)", "rewards.py:f", "a/rewards.py:f", "unknown", share_of_ones, None):
        assert not is_model_name(spec), spec


def test_a_name_of_the_hub_is_one(hub, make_grpo, folder):
    files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    hub.add("model", "cukit/a-reward", files)
    trainer = make_grpo("cukit/a-reward", max_steps=1)
    assert trainer.scorer.names == ["a-reward"]
    ours, own = (
        expected_scores(place, [[5, 6, 7]]) for place in (trainer.reward_models["cukit/a-reward"].source, folder)
    )
    np.testing.assert_array_equal(ours, own)


def test_what_is_no_reward_is_named():
    assert reward_models("exact", None, [len, "boxed"]) == {}
    with pytest.raises(ValueError, match=r"^rewards are names or functions, or a list of them, got 3$"):
        reward_models(3)
