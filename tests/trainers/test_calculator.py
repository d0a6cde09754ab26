"""docs/examples/calculator.py: the environment answers calls, and the bundled model learns to make them."""

import importlib.util
from pathlib import Path

import pytest

from cukit.trainers.environment import EnvironmentMaker

from .conftest import FOLDER, logged

FILE = Path(__file__).parents[2] / "docs" / "examples" / "calculator.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("calculator", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_answers_calls_and_nothing_else(example):
    calculator = EnvironmentMaker(example.Calculator).make(0, 0).own
    for text, answer in [("calc:47*83", "3901"), ("####3901", None), ("calc:4+7", None), ("so calc:1*1", None)]:
        replies = calculator.respond([{"role": "assistant", "content": text}])
        assert replies == (answer and [{"role": "user", "content": answer}])


def test_one_demonstration_in_four_calls(example):
    rows = example.demonstrations(400, seed=3)
    called = [row["messages"] for row in rows if len(row["messages"]) == 4]
    assert 70 < len(called) < 130
    for question, call, answer, final in called:
        assert call["content"] == f"calc:{question['content']}" and final["content"] == f"####{answer['content']}"
        assert int(answer["content"]) == eval(question["content"])


@pytest.mark.slow
def test_the_model_learns_to_call(example, tmp_path):
    trainer = example.main(FOLDER, folder=tmp_path)
    calls, rewards = logged(trainer, "completions/mean_turns"), logged(trainer, "reward")
    assert calls[0] < 1.5 and min(calls[-5:]) > 1.9, calls
    assert rewards[0] < 0.5 and min(rewards[-5:]) > 0.85, rewards
