"""The command reward: its bundled job, what it leaves, and what takes that."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cukit_cli
from cukit.commands.dry_run import without_weights
from cukit.datasets.sources import load_rows
from cukit.models.weights import load_config
from cukit.trainers.reward import RewardTrainer
from cukit.trainers.reward_config import RewardConfig

ROOT = Path(__file__).parents[2]
FILES = ("pairs.jsonl", "test-pairs.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The run folder of one step of the bundled job, whose output is in printed.txt."""
    folder = tmp_path_factory.mktemp("reward") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        words = [
            "reward",
            "--max_steps",
            "1",
            "--eval_on_start",
            "false",
            "--output_dir",
            str(folder),
            "--device",
            "cpu",
        ]
        result = subprocess.run([sys.executable, ROOT / "cukit_cli.py", *words], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (folder.parent / "printed.txt").write_text(result.stdout)
    return folder


def test_it_leaves_a_classifier_and_says_what_takes_it(run):
    assert load_config(run).architecture == "Qwen3ForSequenceClassification"
    assert f"cukit_cli.py grpo --reward_funcs {run}" in (run.parent / "printed.txt").read_text()
    assert (run / "report.html").is_file()


def test_grpo_takes_it_beside_another_reward(run, tmp_path, capsys):
    words = ["--max_steps", "1", "--per_device_train_batch_size", "8", "--eval_on_start", "false", "--device", "cpu"]
    words += ["--eval_steps", "9", "--output_dir", str(tmp_path / "grpo"), "--logging_steps", "1"]
    assert cukit_cli.main(["grpo", "--reward_funcs", str(run), "gsm8k", *words]) == 0
    metrics = (tmp_path / "grpo/metrics.jsonl").read_text()
    assert "rewards/run/mean" in metrics and "rewards/gsm8k/mean" in metrics


def test_what_needs_a_causal_model_refuses_it_in_one_line(run, fails):
    rows = str(ROOT / "data/arithmetic/test.jsonl")
    for words in (
        ["generate", "--prompt", "1", "--model", run],
        ["sft", "--data", ROOT / "data/arithmetic/sft.jsonl", "--model", run],
        ["sft", "--data", ROOT / "data/arithmetic/sft.jsonl", "--model", run, "--dry_run"],
        ["grpo", "--data", rows, "--reward_funcs", "gsm8k", "--model", run],
    ):
        line = fails(*words, "--device", "cpu")
        assert "holds a reward model (Qwen3ForSequenceClassification)" in line, words


def test_a_dry_run_plans_a_score_head(capsys):
    assert cukit_cli.main(["reward", "--dry_run", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "max_length: 1024" in printed and "policy: activations" in printed
    pairs = str(ROOT / "data/arithmetic/test-pairs.jsonl")
    trainer = without_weights(RewardTrainer, RewardConfig(), {"model": str(ROOT / "data/tiny-qwen3"), "data": pairs})
    assert trainer.model.config.head == "score"
    assert not any(item.nbytes for item in trainer.plan_memory().items if "logits" in item.name)


def test_own_pairs_leave_the_bundled_held_out_rows_alone(options, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"chosen": "a", "rejected": "b"}\n')
    values = options("reward", "--data", str(tmp_path / "mine.jsonl"))
    assert values.get("eval_data") is None and values.get("eval_steps") is None
    assert options("reward")["eval_data"].endswith("test-pairs.jsonl")
    given = options("reward", "--model_name_or_path", "m", "--max_seq_length", "64", "--disable_dropout", "true")
    assert (given["model"], given["max_length"]) == ("m", 64)
    assert given["data"].endswith("arithmetic/pairs.jsonl")


def test_the_bundled_pairs_are_what_the_script_writes(tmp_path):
    subprocess.run([sys.executable, ROOT / "data/make_pairs.py", "--output_dir", tmp_path], check=True)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (ROOT / "data/arithmetic" / name).read_bytes()


def test_the_bundled_pairs_are_right_and_wrong():
    answers = {}
    for name in ("train", "test"):
        for row in load_rows(ROOT / f"data/arithmetic/{name}.jsonl"):
            answers[row["prompt"][0]["content"]] = row["answer"]
    seen = [row["prompt"][0]["content"] for name in FILES for row in load_rows(ROOT / "data/arithmetic" / name)]
    assert len(seen) == len(set(seen)) > 3000
    for name in FILES:
        for row in load_rows(ROOT / "data/arithmetic" / name):
            right, wrong = (row[column][0]["content"] for column in ("chosen", "rejected"))
            answer = answers[row["prompt"][0]["content"]]
            assert right.endswith(f"\n####{answer}")
            steps = wrong.split("\n")
            faulty = [step for step in steps if "=" in step and eval(step.replace("=", "!="))]
            assert faulty or not steps[-1].startswith("####"), row


@pytest.mark.slow
def test_the_bundled_job_learns(capsys, tmp_path):
    assert cukit_cli.main(["reward", "--device", "cpu", "--output_dir", str(tmp_path / "run")]) == 0
    found = re.search(r"held-out accuracy: ([0-9.]+) before, ([0-9.]+) after", capsys.readouterr().out)
    before, after = map(float, found.groups())
    assert before < 0.7 and after >= 0.95
