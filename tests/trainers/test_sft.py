"""Supervised fine-tuning: what is in the loss, what a split must not change, resume, rows that are too long."""

import os
import signal
from itertools import count

import numpy as np
import pytest

from cukit import SFTConfig, SFTTrainer
from cukit.datasets.demonstrations import encode_sft
from cukit.models.logprobs import token_logprobs
from cukit.models.weights import load_model

from .conftest import FOLDER, logged, weights_of


def demonstrations(count=16):
    return [
        {
            "prompt": [{"role": "user", "content": "1" + "+1" * (i % 4)}],
            "completion": [{"role": "assistant", "content": str(i % 4 + 1) * (i % 4 + 1)}],
        }
        for i in range(count)
    ]


@pytest.fixture
def train(make_model, tokenizer, tmp_path):
    """train(rows, dtype=, **options) -> the trainer after its run."""
    numbers = count()

    def run(rows, dtype="float32", callbacks=(), resume=None, evaluate=None, **options):
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
        trainer = SFTTrainer(
            make_model(dtype),
            args=SFTConfig(**options),
            train_dataset=rows,
            eval_dataset=evaluate,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


def test_the_loss_is_the_mean_over_completion_tokens(train, make_model, tokenizer):
    rows = demonstrations()
    trainer = train(rows, max_steps=1, shuffle_dataset=False)
    model, total, count = make_model(), 0.0, 0
    for row in rows:
        ids, mask = encode_sft(row, tokenizer)
        learnt = np.array(mask[1:], bool)
        total -= token_logprobs(model, [ids], vocab_size=tokenizer.vocab_size)[0][learnt].sum()
        count += learnt.sum()
    np.testing.assert_allclose(logged(trainer, "loss")[0], total / count, rtol=1e-6)
    assert all(0 <= value <= 1 for value in logged(trainer, "mean_token_accuracy"))
    assert 0 < logged(trainer, "entropy")[0] <= np.log(tokenizer.vocab_size)


@pytest.mark.parametrize(
    "split",
    [
        dict(per_device_train_batch_size=1, gradient_accumulation_steps=16),
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=4),
        dict(max_tokens_per_batch=40),
        dict(packing=True, max_length=512, per_device_train_batch_size=1),
        dict(gradient_checkpointing=True),
    ],
)
def test_the_split_of_a_batch_changes_nothing(train, split):
    """1×16 = 4×4 = 16×1 = cut by tokens = packed rows, though rows have different numbers of learnt tokens."""
    whole, other = train(demonstrations(), "float64"), train(demonstrations(), "float64", **split)
    np.testing.assert_allclose(logged(other, "loss"), logged(whole, "loss"), rtol=1e-10)
    for name, value in weights_of(whole.model).items():
        np.testing.assert_allclose(weights_of(other.model)[name], value, rtol=0, atol=1e-9)


def test_it_learns_and_evaluates(train):
    trainer = train(demonstrations(), max_steps=60, evaluate=demonstrations(), eval_steps=30, eval_on_start=True)
    losses = logged(trainer, "eval/loss")
    assert len(losses) == 3 and losses[-1] < 0.1 < losses[0]
    assert logged(trainer, "eval/mean_token_accuracy")[-1] > 0.95
    assert trainer.evaluations[-1][0] == 60


def test_resume_is_exact(train, tmp_path):
    """6 steps = 3 + 3 after a resume: equal losses and equal bits, the order of the rows included."""
    rows = demonstrations(20)
    straight = train(rows, max_steps=6, per_device_train_batch_size=7, lr_scheduler_type="linear")
    folder = str(tmp_path / "resumed")
    options = dict(
        max_steps=6, per_device_train_batch_size=7, lr_scheduler_type="linear", save_steps=3, output_dir=folder
    )
    train(rows, **options)
    resumed = train(rows, resume=f"{folder}/checkpoint-3", **options)
    assert logged(resumed, "loss") == logged(straight, "loss") and len(logged(resumed, "loss")) == 6
    for name, value in weights_of(straight.model).items():
        np.testing.assert_array_equal(weights_of(resumed.model)[name], value)


def test_a_checkpoint_is_a_model_folder(train):
    trainer = train(demonstrations())
    loaded = load_model(trainer.run_folder / "checkpoint-3")
    for name, value in weights_of(trainer.model).items():
        np.testing.assert_array_equal(weights_of(loaded)[name], value)


def test_rows_whose_answer_is_cut_off(train, caplog):
    """A prompt longer than max_length leaves nothing to learn: the row is left out and counted, and no NaN appears."""
    long = {"prompt": [{"role": "user", "content": "1" * 80}], "completion": [{"role": "assistant", "content": "1"}]}
    trainer = train([*demonstrations(3), long], max_length=40)
    assert "1 of 4 rows skipped" in caplog.text
    assert np.isfinite(logged(trainer, "loss")).all()
    with pytest.raises(ValueError, match="train_dataset: max_length=40 cuts off every completion"):
        train([long], max_length=40)


def test_loss_on_everything(train, tokenizer):
    trainer = train(demonstrations(), completion_only_loss=False, max_steps=1)
    assert all(all(mask) for row in trainer.train_rows for _, mask in row)


def test_completions_alone_are_asked_for_and_a_row_is_plain_text(train):
    rows = [*demonstrations(2), {"text": "1+1=2"}]
    with pytest.raises(ValueError, match="train_dataset: data row 2 is plain text, and completion_only_loss=true"):
        train(rows, completion_only_loss=True)
    train(demonstrations(2), completion_only_loss=True, max_steps=1)
    train(rows, max_steps=1)


@pytest.mark.parametrize("packing", [False, True])
def test_without_a_longest_length_the_context_is_the_limit(train, packing):
    """TRL's max_length=None."""
    rows = [{"text": "1" * 1500}, {"text": "12"}]
    trainer = train(rows, max_length=None, packing=packing, max_steps=1)
    context = trainer.model.config.max_position_embeddings
    lengths = [[len(ids) for ids, _ in row] for row in trainer.train_rows]
    assert context < 1500 and lengths == [[context], [3]]


def test_random_weights_from_a_config(tokenizer, tmp_path):
    args = SFTConfig(output_dir=str(tmp_path / "run"), init_from_config=True, seed=5, max_steps=1)
    trainers = [SFTTrainer(FOLDER, args=args, train_dataset=demonstrations(4)) for _ in range(2)]
    first, second = (weights_of(trainer.model) for trainer in trainers)
    assert all(np.array_equal(value, second[name]) for name, value in first.items())
    assert abs(first["layers.0.mlp.gate_up_proj.weight"].std() * 128**0.5 - 1) < 0.02


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(train, dtype):
    """Half-precision weights on float32 masters learn too; float16's loss scale is logged."""
    trainer = train(demonstrations(), dtype, max_steps=30)
    losses = logged(trainer, "loss")
    assert losses[-1] < losses[0] / 2
    assert bool(logged(trainer, "loss_scale")) == (dtype == "float16")


@pytest.mark.parametrize("num_rows, size, epochs, steps", [(3, 64, 1, 1), (3, 64, 2, 2), (7, 3, 1, 3), (7, 3, 1.5, 5)])
def test_e14_an_epoch_is_each_row_once(train, num_rows, size, epochs, steps):
    """The last batch of an epoch is short, and its loss is a mean over what is really in it."""
    rows, seen = demonstrations(num_rows), []

    class Watch:
        def on_step_end(self, trainer, metrics):
            seen.append((trainer.num_tokens, metrics["epoch"]))

    trainer = train(rows, callbacks=[Watch()], max_steps=-1, num_train_epochs=epochs, per_device_train_batch_size=size)
    assert trainer.total_steps == len(seen) == steps
    tokens = sum(len(ids) for row in trainer.train_rows for ids, _ in row)
    per_epoch = -(-num_rows // size)
    assert seen[per_epoch - 1] == (tokens, 1.0)
    whole = train(rows, "float64", max_steps=1, per_device_train_batch_size=num_rows, learning_rate=0.0)
    short = train(rows, "float64", max_steps=1, per_device_train_batch_size=size * 64, learning_rate=0.0)
    assert logged(whole, "loss") == logged(short, "loss")


def test_a_conversation_learns_what_the_assistant_says(train, make_model, tokenizer):
    """Two assistant turns a row: the loss is the mean of −log p over both, not over the user's turn between them."""
    turns = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    ids, mask = encode_sft(row, tokenizer)
    learnt = np.array(mask[1:], bool)
    assert (np.diff(np.flatnonzero(learnt)) > 1).sum() == 1
    logprobs = token_logprobs(make_model(), [ids], vocab_size=tokenizer.vocab_size)[0]
    trainer = train([row], max_steps=1)
    assert logged(trainer, "loss")[0] == pytest.approx(-logprobs[learnt].mean(), rel=1e-6)


def test_c5_a_stop_in_an_evaluation(train, monkeypatch):
    """It ends between two passes; nothing of it is logged."""

    class Interrupt:
        def on_step_end(self, trainer, metrics):
            compute_loss = trainer.compute_loss

            def stopping(rows):
                os.kill(os.getpid(), signal.SIGINT)
                return compute_loss(rows)

            trainer.compute_loss = stopping

    trainer = train(
        demonstrations(), evaluate=demonstrations(), eval_steps=1, max_tokens_per_batch=40, callbacks=[Interrupt()]
    )
    assert trainer.global_step == 1 and trainer.evaluations == [] and not logged(trainer, "eval/loss")
