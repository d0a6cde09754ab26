"""Training a reward model by an adapter and its score head: what moves, resume, folders, commands."""

import json
import shutil
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

import cukit_cli
from cukit import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from cukit.models.adapter_config import AdapterConfig
from cukit.models.decoder import Decoder
from cukit.models.scores import sequence_scores
from cukit.models.weights import load_model
from cukit.trainers.lora import adapter_of
from cukit.trainers.reward_model import RewardModel

from .conftest import FOLDER, demonstrations, logged, rows_without_times, weights_of
from .test_lora import LORA, WAYS, assert_equal_factors, factors_of, peft_config
from .test_reward import pairs

HEAD = "base_model.model.score.weight"


@pytest.fixture
def make_reward(make_model, tokenizer, tmp_path):
    """make_reward(**options) -> a trainer of a reward model with an adapter."""
    numbers = count()

    def make(dtype="float32", peft=None, **options):
        causal = make_model(dtype)
        model = Decoder(causal.config, causal.backend, causal.dtype, head="score")
        model.init_weights(0)
        defaults = dict(
            output_dir=str(tmp_path / f"run{next(numbers)}"), max_steps=4, logging_steps=1, save_steps=1,
            per_device_train_batch_size=8, lr_scheduler_type="constant", gradient_checkpointing=False,
        )  # fmt: skip
        args = RewardConfig(**defaults | ({} if peft else LORA) | options)
        return RewardTrainer(model, args, pairs(16), processing_class=tokenizer, peft_config=peft)

    return make


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_the_factors_and_the_head_move_and_the_base_stays(make_reward, way, checkpointing):
    trainer = make_reward(lora_way=way, gradient_checkpointing=checkpointing, max_steps=8)
    base, before = weights_of(trainer.model), factors_of(trainer)
    assert HEAD in before
    trainer.train()
    assert all(np.array_equal(x, base[name]) for name, x in weights_of(trainer.model).items())
    assert all((x != before[name]).any() for name, x in factors_of(trainer).items())
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_resumes_bit_for_bit(make_reward, tmp_path, way, dtype):
    whole = make_reward(dtype, lora_way=way)
    whole.train()
    folder = tmp_path / "cut"
    make_reward(dtype, lora_way=way, max_steps=2, output_dir=str(folder)).train()
    again = make_reward(dtype, lora_way=way, output_dir=str(folder))
    again.train(resume_from_checkpoint="latest")
    assert_equal_factors(whole, again)
    assert rows_without_times(again.run_folder)[2:] == rows_without_times(whole.run_folder)[2:]


def test_the_plan_counts_the_head(make_reward):
    trainer = make_reward()
    moments = {item.name: item.nbytes for item in trainer.plan.items}["policy: AdamW's moments"]
    assert moments == 8 * sum(view.size for view in factors_of(trainer).values())


def test_pefts_configuration_may_name_the_head(make_reward, make_model, tokenizer):
    for changes in (
        {"task_type": "SEQ_CLS", "modules_to_save": ["score"]},
        {"task_type": "SEQ_CLS"},
        {"task_type": None, "modules_to_save": ["score"]},
        {},
    ):
        trainer = make_reward(peft=peft_config(**changes))
        assert trainer.model.adapter.config.with_score and trainer.model.adapter.config.r == 3
    with pytest.raises(ValueError, match="a score head .* is a reward model's: use RewardTrainer, or task_type CAUSAL"):
        SFTTrainer(
            make_model(), SFTConfig(), demonstrations(), processing_class=tokenizer,
            peft_config=peft_config(task_type="SEQ_CLS"),
        )  # fmt: skip


@pytest.mark.parametrize("given", [{"task_type": "SEQ_CLS"}, {"modules_to_save": ["classifier", "score"]}])
def test_either_says_that_there_is_a_head(given):
    assert AdapterConfig.from_peft({"r": 2} | given, "x").with_score
    assert not AdapterConfig.from_peft({"r": 2, "task_type": "CAUSAL_LM"}, "x").with_score


def test_a_dry_run_knows_of_the_head():
    for head in ("score", "lm_head"):
        config, *_ = adapter_of(SimpleNamespace(config=SimpleNamespace(head=head)), RewardConfig(use_peft=True))
        assert config.with_score == (head == "score")


@pytest.fixture
def bundled_run(tmp_path, monkeypatch):
    """A run folder of `reward` with an adapter on the bundled model, which is a causal one, without a padding id."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FOLDER, "base")
    config = json.loads((tmp_path / "base/config.json").read_text())
    config.pop("pad_token_id", None)
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    (tmp_path / "pairs.jsonl").write_text(
        "\n".join(f'{{"prompt": "{i}+1", "chosen": "{i + 1}", "rejected": "{i}"}}' for i in range(6)) + "\n"
    )
    argv = ["--model", "base", "--data", "pairs.jsonl", "--use_peft", "--lora_r", "2", "--device", "cpu"]
    assert cukit_cli.main(["reward", *argv, "--dry_run"]) == 0
    assert cukit_cli.main(["reward", *argv, "--max_steps", "2", "--learning_rate", "0.05", "--output_dir", "run"]) == 0
    return tmp_path / "run"


def test_every_command_takes_a_reward_adapter(bundled_run, tmp_path, capsys):
    assert {path.name for path in bundled_run.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert cukit_cli.main(["merge", "run", "--output", "merged"]) == 0
    merged, folder = (load_model(path, head="score") for path in ("merged", "run"))
    assert all(np.array_equal(x, weights_of(folder)[name]) for name, x in weights_of(merged).items())
    assert merged.config.head == "score" and weights_of(merged)["score.weight"].any()
    (tmp_path / "run/tokenizer.json").unlink()  # the base's is taken then
    scores, policy = {}, load_model(FOLDER)
    for name in ("merged", "run"):
        reward = RewardModel(name)
        reward.load(policy, reward_tokenizer(name), 100)
        assert reward.model.config.pad_token_id == reward.tokenizer.pad_token_id is not None
        scores[name] = sequence_scores(reward.model, [[1, 5, 9], [4, 4]])
    assert np.array_equal(scores["merged"], scores["run"])
    steps = ["--model", str(FOLDER), "--max_steps", "1", "--max_completion_length", "4", "--device", "cpu"]
    small = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--output_dir", "ppo"]
    assert cukit_cli.main(["ppo", *steps, *small, "--reward_model_path", "run", "--critic_model", "run"]) == 0
    capsys.readouterr()
    assert cukit_cli.main(["generate", "--model", "run", "1+1", "--device", "cpu"]) == 2
    assert "run holds the adapter of a reward model: give a causal model here" in capsys.readouterr().err


def reward_tokenizer(name):
    from cukit.models.weights import tokenizer_folders
    from cukit.tokenizer import Tokenizer

    return Tokenizer.from_folder(*tokenizer_folders(name))
