"""eval: tasks that know their rows, prompt and reward; pass@k; the answers file."""

import json
from pathlib import Path

import pytest

import cukit_cli
from cukit.commands.evaluate import EvalOptions
from cukit.datasets.tasks import TASKS, Task, find_tasks
from cukit.rewards import BUILTIN_REWARDS
from cukit.runs.files import check_writable

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "data/tiny-qwen3")


@pytest.fixture
def evaluated(capsys, tmp_path):
    """evaluated(*options): (what eval prints, its answers)."""

    def run(*options):
        output = tmp_path / "answers.jsonl"
        argv = ["eval", "--model", TINY, "--device", "cpu", "--max_tokens", "24", "--output", str(output), *options]
        capsys.readouterr()
        assert cukit_cli.main([str(word) for word in argv]) == 0
        return capsys.readouterr(), [json.loads(line) for line in output.read_text().splitlines()]

    return run


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_task_asks_in_its_words_and_brings_its_reward(evaluated, tmp_path):
    rows = [{"question": f"{i} + 1 {{problem}}", "answer": f"#### {i + 1}"} for i in range(3)]
    printed, answers = evaluated("--tasks", "gsm8k", "--data", write(tmp_path / "rows.jsonl", rows), "--limit", "2")
    assert printed.out.startswith("accuracy ") and "rewards/gsm8k/mean" in printed.out
    assert f"gsm8k: {tmp_path / 'rows.jsonl'}" in printed.out and "bundled" not in printed.err
    assert [one["prompt"][0]["content"].splitlines()[0] for one in answers] == ["0 + 1 {problem}", "1 + 1 {problem}"]
    assert "####" in answers[0]["prompt"][0]["content"] and answers[0]["task"] == "gsm8k"
    assert [one["answer"] for one in answers] == ["#### 1", "#### 2"] and "rewards/gsm8k" in answers[0]
    mine = tmp_path / "mine.py"
    mine.write_text("def mine(completions, **_):\n    return [1.0] * len(completions)\n")
    rows = [{"problem": r"\frac{1}{2}", "answer": "0.5", "solution": "long"}]
    data = write(tmp_path / "rows.jsonl", rows)
    printed, answers = evaluated("--tasks", "math500", "--data", data, "--reward_funcs", f"{mine}:mine")
    assert printed.out.startswith("accuracy 1.0000 (1 of 1") and "rewards/boxed" not in printed.out
    assert (
        answers[0]["prompt"][0]["content"].startswith(r"\frac{1}{2}")
        and r"\boxed{}" in answers[0]["prompt"][0]["content"]
    )


def test_several_tasks_and_the_rows_of_the_bundled_one(evaluated, monkeypatch, tmp_path):
    data = write(tmp_path / "more.jsonl", [{"question": "1+2", "answer": "3"}])
    monkeypatch.setitem(TASKS, "more", Task(str(data), "{question}", "exact", seen=True))
    printed, answers = evaluated("--tasks", "arithmetic,more", "--limit", "3")
    assert [one["task"] for one in answers] == ["arithmetic"] * 3 + ["more"]
    assert printed.out.count("accuracy ") == 2 and "rewards/exact/mean" in printed.out
    plain, same = evaluated("--data", "data/arithmetic/test.jsonl", "--limit", "3")
    assert same == [{name: value for name, value in one.items() if name != "task"} for one in answers[:3]]
    assert "task" not in plain.out


def test_several_answers_a_prompt(evaluated):
    options = ("--n", "4", "--temperature", "1", "--seed", "3", "--limit", "5")
    printed, answers = evaluated(*options)
    line = printed.out.splitlines()[1].split()
    assert line[::2] == ["avg@4", "pass@1", "pass@2", "pass@4"] and len(answers) == 20
    right = [[one["rewards/gsm8k"] >= 1 for one in answers if one["row"] == row] for row in range(5)]
    assert float(line[1]) == float(line[3]) == pytest.approx(sum(map(sum, right)) / 20, abs=1e-4)
    assert float(line[7]) == pytest.approx(sum(map(any, right)) / 5, abs=1e-4)
    assert "pass@3 " in evaluated(*options, "--pass_at_k", "3")[0].out
    assert "the n=2 answers to a prompt are equal" in evaluated("--n", "2", "--limit", "1")[0].err


def test_what_a_user_can_get_wrong(fails, tmp_path):
    data = write(tmp_path / "rows.jsonl", [{"text": "x"}])
    assert "tasks has 'gsm9k'; there are gsm8k, math500" in fails("eval", "--tasks", "gsm8k,gsm9k")
    assert "the rows of one task, but tasks names 2" in fails("eval", "--tasks", "gsm8k,math500", "--data", data)
    assert "data row 0: no column 'question'" in fails("eval", "--tasks", "gsm8k", "--data", data)
    assert "pass_at_k=3 needs" in fails("eval", "--pass_at_k", "3", "--n", "2")


def test_the_table_of_tasks():
    assert TASKS["gsm8k"].data == "openai/gsm8k:main:test"
    assert list(find_tasks(["gsm8k, math500", "GSM8K"])) == ["gsm8k", "math500"]
    for name, task in TASKS.items():
        assert task.reward in BUILTIN_REWARDS, name
        row = task.row({"question": "Q", "problem": "Q", "prompt": "Q", "answer": "1"})
        assert "Q" in str(row["prompt"]) and row["answer"] == "1"
    assert "gsm8k, math500" in EvalOptions.options()["tasks"].help


def test_an_answers_file_that_cannot_be_written_is_said_before_the_answers(fails, tmp_path):
    (tmp_path / "file").write_text("")
    said = fails("eval", "--device", "cpu", "--output", tmp_path)
    assert f"output {tmp_path} is a folder; give a file" in said and "accuracy" not in said
    said = fails("eval", "--device", "cpu", "--output", tmp_path / "file" / "answers.jsonl")
    assert f"answers.jsonl cannot be written: {tmp_path / 'file'} is a file" in said and "accuracy" not in said
    check_writable(tmp_path / "new" / "folder" / "answers.jsonl", "output")
    check_writable(Path("answers.jsonl"), "output")
