"""Reward models: the loss, what a split must not change, resume, metrics, what is saved, what is refused."""

import json
import shutil
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from check import check_gradient, normal

from cukit import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from cukit.autograd import Parameter
from cukit.datasets.preferences import encode_pairs
from cukit.models.decoder import Decoder
from cukit.models.scores import sequence_scores
from cukit.models.weights import load_config, load_model
from cukit.trainers.reward import preference_loss

from .conftest import FOLDER, logged, weights_of

GOLDEN = Path(__file__).parents[1] / "golden"


def pairs(count=16, margins=False):
    return [
        {
            "prompt": [{"role": "user", "content": "1" + "+1" * (i % 4)}],
            "chosen": [{"role": "assistant", "content": str(i % 4 + 1) * (i % 3 + 1)}],
            "rejected": [{"role": "assistant", "content": str((i + i // 4) % 4 + 5)}],
        }
        | ({"margin": i / 8} if margins else {})
        for i in range(count)
    ]


@pytest.fixture
def make_reward_model(make_model):
    def make(dtype="float32", seed=0):
        causal = make_model(dtype, seed)
        model = Decoder(causal.config, causal.backend, causal.dtype, head="score")
        model.init_weights(seed)
        return model

    return make


@pytest.fixture
def train(make_reward_model, tokenizer, tmp_path):
    """train(rows, dtype=, **options) -> the trainer after its run."""
    numbers = count()

    def run(rows, dtype="float32", resume=None, evaluate=None, model=None, **options):
        options = (
            dict(
                output_dir=str(tmp_path / f"run{next(numbers)}"),
                learning_rate=1e-2,
                max_steps=3,
                logging_steps=1,
                lr_scheduler_type="constant",
                per_device_train_batch_size=16,
                gradient_checkpointing=False,
                save_steps=0,
            )
            | options
        )
        trainer = RewardTrainer(
            model or make_reward_model(dtype),
            args=RewardConfig(**options),
            train_dataset=rows,
            eval_dataset=evaluate,
            processing_class=tokenizer,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


# ---- the loss ----


def test_the_loss_against_its_formula():
    """The logarithm of the softmax over the two scores: another way to write log σ of their difference."""
    chosen, rejected, margins = normal(7), normal(7, seed=1), np.abs(normal(7, seed=2))
    expected = [-np.log(np.exp(c) / (np.exp(c) + np.exp(r + m))) for c, r, m in zip(chosen, rejected, margins)]
    center = [(c + r) ** 2 for c, r in zip(chosen, rejected)]
    found = preference_loss(Parameter(chosen), Parameter(rejected), margins, 1 / 7)
    np.testing.assert_allclose(found.item(), np.mean(expected), rtol=1e-12)
    found = preference_loss(Parameter(chosen), Parameter(rejected), margins, 1 / 7, 0.3)
    np.testing.assert_allclose(found.item(), np.mean(expected) + 0.3 * np.mean(center), rtol=1e-12)


@pytest.mark.parametrize("coefficient", [None, 0.01])
def test_the_losss_gradient(coefficient):
    margins = np.arange(5) / 4  # constants
    check_gradient(
        lambda chosen, rejected: preference_loss(chosen, rejected, margins, 0.2, coefficient),
        normal(5),
        normal(5, seed=1),
    )
    first, second = Parameter(np.zeros(1)), Parameter(np.zeros(1))  # a fresh head of zeros
    preference_loss(first, second, np.zeros(1), 1.0, coefficient).backward()
    assert (first.grad, second.grad) == (-0.5, 0.5)


@pytest.mark.parametrize("name", ["qwen3_reward", "qwen2_reward", "llama_reward"])
def test_loss_and_margins_are_those_of_transformers(name, tokenizer):
    """Loss and every gradient of the golden pairs, which torch computed, through the trainer's own passes."""
    truth, model = np.load(GOLDEN / f"{name}.npz"), load_model(GOLDEN / name, dtype="float64", head="score")
    sequences = [ids[:n].tolist() for ids, n in zip(truth["ids"], truth["lengths"])]
    args = RewardConfig(max_tokens_per_batch=12, gradient_checkpointing=True)
    trainer = RewardTrainer(model, args, [{"chosen": "1", "rejected": "2"}], None, tokenizer)
    rows = encode_pairs([{"chosen": "1", "rejected": "2", "margin": float(m)} for m in truth["margins"]], tokenizer)[0]
    rows = [type(row)(sequences[2 * i], sequences[2 * i + 1], row.margin) for i, row in enumerate(rows)]
    parts = list(trainer._packed(rows))
    assert len(parts) > 1
    total = 0.0
    for part in parts:
        loss, _ = trainer.compute_loss(part)
        loss.backward()
        total += loss.item()
    np.testing.assert_allclose(total, truth["loss"], rtol=2e-6)
    grads = model.store.part_views(lambda bucket: bucket.grad)
    for key in (key for key in truth.files if key.startswith("grad/")):
        np.testing.assert_allclose(grads[key.removeprefix("grad/")], truth[key], atol=3e-6, err_msg=key)


# ---- a run ----


def test_the_logged_numbers_are_those_of_the_pairs(train, make_reward_model, tokenizer):
    rows = pairs(margins=True)
    trainer = train(rows, "float64", max_steps=1, shuffle_dataset=False, center_rewards_coefficient=0.5)
    model, encoded = make_reward_model("float64"), encode_pairs(rows, tokenizer)[0]
    chosen = sequence_scores(model, [pair.chosen for pair in encoded])
    rejected = sequence_scores(model, [pair.rejected for pair in encoded])
    difference = chosen - rejected - [pair.margin for pair in encoded]
    both = np.concatenate([chosen, rejected])
    expected = {
        "loss": np.log1p(np.exp(-difference)).mean() + 0.5 * np.square(chosen + rejected).mean(),
        "accuracy": np.mean(chosen > rejected),
        "margin": np.mean(chosen - rejected),
        "mean_reward": both.mean(),
        "min_reward": both.min(),
        "max_reward": both.max(),
        "num_tokens": sum(pair.num_tokens for pair in encoded),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(logged(trainer, name), [value], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "split",
    [
        dict(per_device_train_batch_size=1, gradient_accumulation_steps=16),
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=4),
        dict(max_tokens_per_batch=80),
        dict(gradient_checkpointing="selective"),
        dict(gradient_checkpointing="full"),
    ],
)
def test_the_split_of_a_batch_changes_nothing(train, split):
    rows = pairs(margins=True)
    options = dict(center_rewards_coefficient=0.1)
    whole, other = train(rows, "float64", **options), train(rows, "float64", **options, **split)
    for name in ("loss", "accuracy", "margin", "min_reward", "max_reward"):
        np.testing.assert_allclose(logged(other, name), logged(whole, name), rtol=1e-9, err_msg=name)
    for name, value in weights_of(whole.model).items():
        np.testing.assert_allclose(weights_of(other.model)[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "option", [{"center_rewards_coefficient": 0.5}, {"max_length": 17}, {"learning_rate": 1e-3}, {"seed": 3}]
)
def test_an_option_reaches_the_numbers(train, option):
    plain, other = train(pairs(20)), train(pairs(20), **option)
    assert logged(plain, "loss")[1:] != logged(other, "loss")[1:]


def test_it_learns_and_evaluates(train):
    trainer = train(pairs(), max_steps=30, evaluate=pairs(8), eval_steps=15, eval_on_start=True)
    losses, accuracies = logged(trainer, "eval/loss"), logged(trainer, "eval/accuracy")
    assert len(losses) == 3 and losses[-1] < 0.1 < losses[0] and accuracies[-1] == 1.0
    assert logged(trainer, "eval/margin")[-1] > 1
    assert set(trainer.evaluations[-1][1]) == {
        f"eval/{name}" for name in ("loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward")
    }


def test_resume_is_exact(train, tmp_path):
    rows = pairs(20)
    straight = train(rows, "bfloat16", max_steps=6, per_device_train_batch_size=7, lr_scheduler_type="linear")
    folder = str(tmp_path / "resumed")
    options = dict(
        max_steps=6, per_device_train_batch_size=7, lr_scheduler_type="linear", save_steps=3, output_dir=folder
    )
    train(rows, "bfloat16", **options)
    resumed = train(rows, "bfloat16", resume=f"{folder}/checkpoint-3", **options)
    assert logged(resumed, "loss") == logged(straight, "loss") and len(logged(resumed, "loss")) == 6
    for name, value in weights_of(straight.model).items():
        np.testing.assert_array_equal(weights_of(resumed.model)[name], value)


def test_pairs_that_are_too_long_are_left_out_and_said(train, caplog):
    long = {"chosen": "1" * 80, "rejected": "2"}
    trainer = train([*pairs(3), long], max_length=50)
    assert "train_dataset: 1 of 4 pairs left out: longer than 50 tokens" in caplog.text
    assert len(trainer.train_rows) == 3
    assert len(train([*pairs(3), long], max_length=None).train_rows) == 4  # the context holds 96
    with pytest.raises(ValueError, match="train_dataset: all 1 pairs are longer than 50 tokens"):
        train([long], max_length=50)


# ---- folders ----


def test_a_causal_folder_becomes_a_reward_model_with_the_tokenizers_padding(tmp_path):
    causal = shutil.copytree(FOLDER, tmp_path / "causal")
    raw = json.loads((causal / "config.json").read_text())
    (causal / "config.json").write_text(json.dumps(raw | {"pad_token_id": None}))
    args = dict(max_steps=1, per_device_train_batch_size=4, save_steps=0)
    first = RewardTrainer(causal, RewardConfig(output_dir=str(tmp_path / "a"), seed=5, **args), pairs(4))
    again = RewardTrainer(causal, RewardConfig(output_dir=str(tmp_path / "b"), seed=6, **args), pairs(4))
    heads = [trainer.model.score.weight.data for trainer in (first, again)]
    assert heads[0].any() and not np.array_equal(*heads)
    first.train()
    config = load_config(first.run_folder)
    assert config.architecture == "Qwen3ForSequenceClassification"
    assert config.pad_token_id == config.raw["pad_token_id"] == first.tokenizer.pad_token_id == 0
    saved = load_model(first.run_folder, head="score")
    for name, value in weights_of(first.model).items():
        np.testing.assert_array_equal(weights_of(saved)[name], value)
    further = RewardTrainer(first.run_folder, RewardConfig(seed=9), pairs(4))  # its own head, none drawn
    np.testing.assert_array_equal(further.model.score.weight.data, saved.score.weight.data)
    with pytest.raises(ValueError, match="holds a reward model"):
        SFTTrainer(first.run_folder, SFTConfig(), pairs(4))


def test_the_planner_counts_no_logits(make_model, tokenizer):
    causal = make_model(vocab_size=5000)
    model = Decoder(causal.config, causal.backend, causal.dtype, head="score")
    items = RewardTrainer(model, RewardConfig(), pairs(4), processing_class=tokenizer).plan.items
    assert any("activations" in item.name for item in items)
    assert not any(item.nbytes for item in items if "logits" in item.name)


def test_arguments_of_the_chat_template_reach_the_rows(make_reward_model, tokenizer, monkeypatch):
    seen = []

    def render(messages, add_generation_prompt=False, tools=None, **arguments):
        seen.append(arguments)
        return "1"

    monkeypatch.setattr(tokenizer, "render_chat", render)
    args = RewardConfig(chat_template_kwargs={"mark": "7"})
    RewardTrainer(make_reward_model(), args, pairs(2), processing_class=tokenizer)
    assert seen == [{"mark": "7"}] * 4


def test_a_causal_decoder_is_refused(make_model, tokenizer):
    with pytest.raises(ValueError, match="a reward model has a score head"):
        RewardTrainer(make_model(), RewardConfig(), pairs(4), processing_class=tokenizer)


@pytest.mark.parametrize("option", [{"max_length": 0}, {"center_rewards_coefficient": -1.0}])
def test_values_out_of_range(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        RewardConfig(**option)


def test_the_defaults_are_trls():
    args = RewardConfig()
    assert (args.learning_rate, args.max_length, args.center_rewards_coefficient) == (1e-4, 1024, None)
