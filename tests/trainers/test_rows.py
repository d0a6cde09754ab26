"""What a trainer takes as its data, and the options that make prompts of it."""

import logging

import pyarrow
import pytest
from pyarrow import parquet

LONG = "+".join("123456789" * 2)
QUESTIONS = [{"q": "1+1", "a": "2"}, {"q": LONG, "a": "90"}, {"q": "2+2", "a": "4"}]
COLUMNS = {"columns": "question=q,answer=a"}


class Rows:
    """__len__ and __getitem__ alone, as many data sets have; only the length says where they end."""

    def __len__(self):
        return len(QUESTIONS)

    def __getitem__(self, index):
        return QUESTIONS[index % len(QUESTIONS)]


def asked(trainer):
    return [row["prompt"][-1]["content"] for row, _ in trainer.train_rows]


def test_data_of_each_kind_trains(make_grpo, tmp_path):
    """A file, an object with __len__ and __getitem__, and a list are the same rows; rewards get the mapped columns."""
    parquet.write_table(pyarrow.Table.from_pylist(QUESTIONS), tmp_path / "rows.parquet")
    answers = []

    def reward(completions, answer, **other):
        answers.extend(answer)
        assert "a" not in other and "q" not in other
        return [0.0] * len(completions)

    for data in (tmp_path / "rows.parquet", str(tmp_path / "rows.parquet"), Rows(), QUESTIONS):
        trainer = make_grpo(reward, train_dataset=data, eval_dataset=data, max_steps=1, **COLUMNS)
        assert asked(trainer) == [row["q"] for row in QUESTIONS] and len(trainer.eval_rows) == 3
    trainer.train()
    assert set(answers) == {row["a"] for row in QUESTIONS}


def test_datasets_of_the_library_train(make_grpo, make_sft, datasets_library):
    found = datasets_library.Dataset.from_list(QUESTIONS)
    trainer = make_grpo(train_dataset=found, max_steps=1, **COLUMNS)
    trainer.train()
    assert asked(trainer) == [row["q"] for row in QUESTIONS]
    assert len(make_sft(rows=found, columns="prompt=q,completion=a").train_rows) == 3


def test_prompts_are_made_by_options(make_grpo):
    trainer = make_grpo(train_dataset=QUESTIONS, prompt_template="{q}+0", system_prompt="1+1", max_steps=1)
    row, ids = trainer.train_rows[0]
    assert row["prompt"] == [{"role": "system", "content": "1+1"}, {"role": "user", "content": "1+1+0"}]
    assert ids == trainer.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)


def test_a_demonstration_follows_the_options(make_sft):
    plain = make_sft(rows=[{"prompt": "1+1", "completion": "2"}], chat_prompts=True, system_prompt="3")
    answer = [{"role": "assistant", "content": "2"}]
    prompt = [{"role": "system", "content": "3"}, {"role": "user", "content": "1+1"}]
    wanted = make_sft(rows=[{"prompt": prompt, "completion": answer}])
    (((ids, mask),),), (((other, other_mask),),) = plain.train_rows, wanted.train_rows
    assert ids.tolist() == other.tolist() and mask.tolist() == other_mask.tolist()


def test_long_prompts_are_refused_as_ever(make_grpo):
    with pytest.raises(ValueError, match="^train_dataset row 1: the prompt has .* and the context only 20; shorten or"):
        make_grpo(train_dataset=QUESTIONS, max_model_len=20, **COLUMNS)
    with pytest.raises(ValueError, match="^train_dataset row 1: the prompt has .* and max_prompt_length is 20; raise"):
        make_grpo(train_dataset=QUESTIONS, max_prompt_length=20, **COLUMNS)


def test_long_prompts_are_skipped_or_cut_by_option(make_grpo, caplog):
    with caplog.at_level(logging.WARNING, "cukit"):
        trainer = make_grpo(train_dataset=QUESTIONS, max_prompt_length=20, overlong_prompts="skip", **COLUMNS)
    assert asked(trainer) == ["1+1", "2+2"]
    assert caplog.text.count("train_dataset: 1 of 3 prompts are longer than 20 tokens: skipped") == 1
    whole = make_grpo(train_dataset=QUESTIONS, **COLUMNS).train_rows[1][1]
    trainer = make_grpo(train_dataset=QUESTIONS, max_prompt_length=20, overlong_prompts="cut", max_steps=1, **COLUMNS)
    assert trainer.train_rows[1][1] == whole[-20:] and len(trainer.train_rows) == 3
    trainer.train()


def test_data_that_cannot_be_read_names_the_argument(make_grpo, tmp_path):
    (tmp_path / "rows.csv").write_text("a\n1\n")
    for data, message in (
        (str(tmp_path / "rows.csv"), "^train_dataset: data row 0: columns asks for 'q', .*found: a"),
        ("nowhere.csv", "^train_dataset: data file 'nowhere.csv' does not exist"),
        ({"train": QUESTIONS}, "^train_dataset: the data is a dict of train"),
    ):
        with pytest.raises(ValueError, match=message):
            make_grpo(train_dataset=data, **COLUMNS)


def test_an_evaluation_row_without_a_prompt_names_the_argument(make_grpo):
    with pytest.raises(ValueError, match="^eval_dataset: data row 0: no 'prompt' column"):
        make_grpo(train_dataset=[{"prompt": "1"}], eval_dataset=[{"promt": "1"}])
