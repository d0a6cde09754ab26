"""eval on several processes: the rows are shared out, or a model; what it prints and writes is that of one process."""

import json
import subprocess
from pathlib import Path

import pytest

from .launch import command, environment, needs_mpi
from .run_trainer import TINY

pytestmark = [pytest.mark.mpi, needs_mpi]

PLAYED = Path(__file__).parents[1] / "trainers/playing.py"
SAMPLED = "--tasks arithmetic --limit 5 --n 2 --temperature 1 --max_tokens 16".split()
ENVIRONMENT = f"--environment {PLAYED}:Asking --reward_funcs length(target=30) --stop 1 2 = +".split()


def started(ranks, *options):
    words = ["-m", "cukit_cli", "eval", "--model", TINY, "--device", "cpu", *options]
    called = command(ranks, *words)
    return subprocess.run(called, capture_output=True, text=True, env=environment(), timeout=100)


def questions(folder):
    """A file of 5 conversations, of which the last two begin as the first two do."""
    rows = [{"prompt": [{"role": "user", "content": "+".join("12345"[: 1 + i % 3])}]} for i in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


@pytest.fixture
def evaluated(tmp_path):
    """evaluated(ranks, *options): (lines on stdout but for the speed, warnings, the answers file)."""

    def run(ranks, *options):
        output = tmp_path / "answers.jsonl"
        output.unlink(missing_ok=True)
        done = started(ranks, "--output", output, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
        return [line.rpartition(", ")[0] for line in done.stdout.splitlines()], warnings, output.read_text()

    return run


def test_the_rows_or_the_model_are_shared_out(evaluated):
    """Draws without a seed follow the prompt's place; four processes are two copies."""
    one = evaluated(1, *SAMPLED)
    assert len(one[0]) == 4 and len(one[1]) == 1 and len(one[2].splitlines()) == 10
    assert evaluated(2, *SAMPLED) == one
    assert evaluated(4, *SAMPLED, "--tensor_parallel_size", "2") == one


def test_environments_are_those_of_the_prompts_place(evaluated, tmp_path):
    given = [*ENVIRONMENT, "--data", questions(tmp_path), "--max_tokens", "60"]
    assert evaluated(1, *given) == evaluated(2, *given)


def test_environments_of_a_training_run_are_those_of_the_prompts_place(tmp_path):
    data = questions(tmp_path)
    options = """--max_steps 1 --max_completion_length 60 --eval_on_start true --eval_strategy steps --eval_steps 9
        --num_generations 2 --generation_batch_size 4 --per_device_train_batch_size 2""".split()
    found = []
    for ranks in (1, 2):
        files = ["--model", TINY, "--data", data, "--eval_data", data, "--output_dir", tmp_path / f"run-{ranks}"]
        called = command(ranks, "-m", "cukit", "grpo", *files, "--device", "cpu", *ENVIRONMENT, *options)
        done = subprocess.run(called, capture_output=True, text=True, env=environment(), timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append((tmp_path / f"run-{ranks}" / "evaluations" / "step-0.jsonl").read_text())
    assert len(found[0].splitlines()) == 5 and found[1] == found[0]


def test_mistakes_are_said_once(tmp_path):
    """One that every rank meets, and one of the second rank alone."""
    done = started(3, *SAMPLED, "--tensor_parallel_size", "3")
    assert done.returncode != 0 and done.stderr.count("error: ") == 1
    assert "tensor_parallel_size=3 does not divide the model's num_key_value_heads" in done.stderr
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def mine(answer, **_):\n    return [{'1': 1.0}[one] for one in answer]\n")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": "1+1=", "answer": one}) + "\n" for one in "12"))
    done = started(2, "--data", data, "--reward_funcs", f"{rewards}:mine", "--max_tokens", "4")
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.count("error: ") == 1 and "rank 1 failed in evaluation: " in done.stderr, done.stderr
    assert "reward 'mine' raised KeyError: '2'" in done.stderr
