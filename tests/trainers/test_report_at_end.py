"""Every run ends with run.json and report.html, however it ends; what is logged of tokens."""

import json

import numpy as np
import pytest

from cukit.runs.metrics import read_jsonl
from cukit.runs.record import machine, read_starts
from cukit.runs.report import page
from cukit.tokenizer.streaming import token_texts
from cukit.trainers.rewarding import completion_rows


def starts(trainer):
    return json.loads((trainer.run_folder / "run.json").read_text())["starts"]


def data_of(trainer):
    text = (trainer.run_folder / "report.html").read_text(encoding="utf-8")
    return json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def test_a_run_ends_with_its_record_and_its_page(make_grpo, rows):
    trainer = make_grpo(eval_dataset=rows[:2], max_steps=3)
    trainer.train()
    (start,) = starts(trainer)
    assert start["method"] == "grpo" and (start["first_step"], start["last_step"]) == (0, 3)
    assert start["status"] == "finished" and start["total_steps"] == 3 and start["seconds"] > 0
    assert start["dtype"] == "float32" and start["command"] and {"cukit", "Python", "NumPy"} <= start["versions"].keys()
    named = trainer.model.named_parameters().values()
    assert start["parameters"] == sum(parameter.data.size for parameter in named)
    (run,) = data_of(trainer)["runs"]
    assert {"reward", "eval/accuracy", "grad_norm"} <= {name for name, _, _ in run["metrics"]}
    assert [row["step"] for row in run["completions"] if not row["eval"]] == [1] * 4 + [2] * 4 + [3] * 4


def test_a_page_shows_the_critic_of_ppo(make_ppo):
    trainer = make_ppo(cliprange_value=None)
    trainer.train()
    text = (trainer.run_folder / "report.html").read_text(encoding="utf-8")
    data = json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])
    charts = {chart["title"]: chart["metric"] for chart in data["charts"]}
    assert charts["Value loss"] == "loss/value_avg" and charts["Explained variance"] == "critic/explained_variance"
    assert charts["KL of a completion"] == "objective/kl" and charts["Clipped values"] == "val/clipfrac_avg"
    assert charts["Clip ratio"] == "policy/clipfrac_avg" and "KL divergence" not in charts
    (run,) = data["runs"]
    assert {chart["metric"] for chart in data["charts"]} <= {name for name, _, _ in run["metrics"]}
    assert [row["step"] for row in run["completions"]] == [1] * 8 + [2] * 8
    assert starts(trainer)[0]["method"] == "ppo"


def test_a_resumed_run_adds_a_start(make_grpo):
    first = make_grpo(max_steps=2)
    first.train()
    folder = str(first.run_folder)
    again = make_grpo(max_steps=4, output_dir=folder)
    again.train(resume_from_checkpoint="latest")
    assert [(start["first_step"], start["last_step"]) for start in starts(again)] == [(0, 2), (2, 4)]
    assert data_of(again)["runs"][0]["resumed"] == [2]
    more = make_grpo(max_steps=4, output_dir=folder)
    more.train(resume_from_checkpoint="latest")  # already there: nothing runs
    assert len(starts(more)) == 2


def test_a_stop_and_an_error_are_said(make_grpo, make_sft):
    class Stop:
        def on_step_end(self, trainer, metrics):
            trainer.stop()

    stopped = make_grpo(max_steps=3, callbacks=[Stop()])
    stopped.train()
    assert starts(stopped)[0]["status"] == "stopped" and starts(stopped)[0]["last_step"] == 1

    class Fail:
        def on_step_end(self, trainer, metrics):
            if trainer.global_step == 2:
                raise RuntimeError("two\nlines")

    failed = make_sft(callbacks=[Fail()])
    with pytest.raises(RuntimeError):
        failed.train()
    assert starts(failed)[0]["status"] == "error: RuntimeError: two lines"
    assert "error: RuntimeError: two lines" in (failed.run_folder / "report.html").read_text()


def test_a_page_that_fails_is_a_warning(make_sft, monkeypatch, caplog):
    def fail(*_):
        raise KeyError("x")

    monkeypatch.setattr(page, "read_run", fail)
    trainer = make_sft()
    assert trainer.train()["loss"] > 0
    assert "the report of" in caplog.text and "could not be written: 'x'" in caplog.text
    assert not (trainer.run_folder / "report.html").exists()


def test_a_record_that_cannot_be_written_is_a_warning(make_sft, tmp_path, caplog):
    (tmp_path / "run" / "run.json").mkdir(parents=True)
    trainer = make_sft(output_dir=str(tmp_path / "run"))
    trainer.train()
    assert "run.json cannot be written" in caplog.text and (trainer.run_folder / "report.html").exists()
    (tmp_path / "damaged.json").write_text("{")
    assert read_starts(tmp_path / "damaged.json") == [] and "damaged.json is damaged" in caplog.text


def test_versions_of_a_card(monkeypatch):
    class Card:
        name = "cuda"

        def device_name():
            return "a card"

        def memory_info():
            return 0, 80 * 2**30

    monkeypatch.setattr("cukit.runs.record.cuda_versions", lambda: {"CuPy": "14", "driver": "580"})
    found = machine(Card)
    assert found["device"] == "a card, 80 GiB" and found["versions"]["CuPy"] == "14"
    assert found["versions"]["driver"] == "580"


# ---- tokens of completions.jsonl -------------------------------------------------------------------------------------


def test_completions_hold_their_tokens(make_grpo, tokenizer):
    trainer = make_grpo(max_steps=1)
    trainer.train()
    rows = read_jsonl(trainer.run_folder / "completions.jsonl")
    assert len(rows) == 4
    for row in rows:
        assert len(row["tokens"]) == len(row["logprobs"]) == row["length"] and "".join(row["tokens"]).startswith(
            row["completion"]
        )
        assert all(-50 < value <= 0 and value == round(value, 4) for value in row["logprobs"])
    params = trainer.args.sampling_params(n=2)
    samples = trainer.rollout.generate([ids for _, ids in trainer.train_rows[:1]], params, [1])
    (row,) = completion_rows([{"prompt": ""}], samples, [], np.zeros((1, 0)), None, tokenizer)
    ids = samples.completion_ids[0]
    assert row["tokens"] == [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    np.testing.assert_allclose(row["logprobs"], samples.logprobs[0], atol=6e-5)
    assert "tokens" not in completion_rows([{"prompt": ""}], samples, [], np.zeros((1, 0)))[0]


@pytest.mark.parametrize("text", ["plain words, 12", "naïve 日本語 🙂🏳️‍🌈", "\x00\n\t ", "", "a\ufffdb"])
def test_texts_of_tokens_join_to_the_text(qwen, text):
    ids = qwen.encode(text + "<|im_end|>")
    assert "".join(token_texts(qwen, ids)) == text + "<|im_end|>" and len(token_texts(qwen, ids)) == len(ids)


def test_texts_of_random_tokens_join_to_the_text(qwen, rng):
    """Also where the ids are no text: halves of characters, ids without a token."""
    for _ in range(200):
        ids = rng.integers(0, qwen.vocab_size + 50, rng.integers(0, 12)).tolist()
        texts = token_texts(qwen, ids)
        assert len(texts) == len(ids) and "".join(texts) == qwen.decode(ids, skip_special_tokens=False)


def test_a_character_of_several_tokens_stands_at_the_last(qwen):
    ids = qwen.encode("x𓂀")
    texts = token_texts(qwen, ids)
    assert len(ids) > 2 and texts[0] == "x" and texts[-1] == "𓂀" and set(texts[1:-1]) <= {""}
