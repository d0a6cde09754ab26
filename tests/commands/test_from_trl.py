"""Options as a user who comes from TRL gives them: faults that use has found."""

import pytest

from cukit.commands.parser import make
from cukit.rewards import load_reward
from cukit.trainers.grpo_config import GRPOConfig

GRPO = ("grpo", "--model", "m")


def written(tmp_path, text: str) -> str:
    (tmp_path / "run.yaml").write_text(text)
    return str(tmp_path / "run.yaml")


def test_all_values_of_a_wrong_type_are_named_at_once(fails, tmp_path):
    text = "model: m\nbeta: abc\nlogging_steps: ten\nlearning_rate: 0.1\n"
    line = fails("grpo", "--config", written(tmp_path, text))
    assert "run.yaml: beta must be a number, got 'abc'; logging_steps must be a whole number, got 'ten'" in line


def test_null_where_there_is_no_none_says_the_way_out(fails, tmp_path):
    line = fails("grpo", "--config", written(tmp_path, "model: m\nmax_completion_length: null\n"))
    assert line.endswith("max_completion_length must be a whole number, got None; leave it out for its default")


def test_names_in_an_object_are_texts(fails, tmp_path):
    line = fails("grpo", "--config", written(tmp_path, "model: m\nchat_template_kwargs: {1: 2}\n"))
    assert line.endswith("chat_template_kwargs must be a JSON object, each name in it a text, got {1: 2}")


def test_top_k_null_is_off_as_in_older_trl(options, tmp_path):
    path = written(tmp_path, "model: m\ntop_k: null\n")
    assert make(GRPOConfig, options(*GRPO, "--config", path)).top_k == 0
    assert make(GRPOConfig, options(*GRPO, "--top_k", "none")).top_k == 0 == GRPOConfig(top_k=None).top_k
    assert GRPOConfig(generation_kwargs={"top_k": None}).top_k == 0


@pytest.mark.parametrize("name", ["eval_data", "lora_adapter_path", "environment", "loss"])
def test_none_takes_back_a_folder_a_file_or_a_function(options, tmp_path, name):
    path = written(tmp_path, f"model: m\n{name}: given\nuse_peft: true\n")
    assert options(*GRPO, "--config", path, f"--{name}", "none")[name] is None
    assert options(*GRPO, "--config", path)[name] == "given"


def test_reward_weights_are_finite():
    with pytest.raises(ValueError, match=r"^reward_weights must be finite, got \[1.0, nan\]$"):
        GRPOConfig(reward_funcs=["exact", "boxed"], reward_weights=[1, float("nan")])


def test_a_path_in_yaml_may_begin_in_the_home_folder(options, monkeypatch, tmp_path):
    """Where no shell has expanded it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = written(
        tmp_path, "model: ~/m\ndata: ~/a.jsonl\neval_data: ~/b.jsonl\nlora_adapter_path: ~/c\nuse_peft: true\n"
    )
    found = options("grpo", "--config", path, "--reward_funcs", "exact")
    for name, end in {"model": "m", "data": "a.jsonl", "eval_data": "b.jsonl", "lora_adapter_path": "c"}.items():
        assert found[name] == str(tmp_path / end)
    (tmp_path / "mine.py").write_text("def right(**kwargs): return []\n")
    assert load_reward("~/mine.py:right")() == []
