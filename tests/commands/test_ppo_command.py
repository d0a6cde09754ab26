"""The ppo command: dry runs, its own config.yaml, resumes by the command line, help, one line for a mistake."""

import json
from pathlib import Path

import pytest
import yaml

import cukit_cli
from cukit.commands.parser import make
from cukit.models.weights import load_model
from cukit.runs.metrics import read_jsonl
from cukit.trainers.ppo_config import PPOConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tiny, tmp_path):
    """run(*more): `cukit ppo` for a step or two on four rows; gives its folder."""
    lines = (ROOT / "data/arithmetic/test.jsonl").read_text().splitlines()[:4]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    folder = tmp_path / "run"

    def start(*more):
        given = ["ppo", "--model", str(tiny), "--data", str(tmp_path / "rows.jsonl"), "--reward_funcs", "gsm8k"]
        given += ["--max_steps", "2", "--logging_steps", "1", "--max_completion_length", "4", "--device", "cpu"]
        assert cukit_cli.main([*given, "--output_dir", str(folder), *more]) == 0
        return folder

    return start


def test_a_run_and_its_own_configuration(run, options, tiny, capsys):
    """A value of none (cliprange_value null) is in config.yaml too, since the default is another."""
    folder = run("--cliprange_value", "null", "--kl_target", "0.5", "--num_ppo_epochs", "2", "--critic", "shared")
    assert f"run folder: {folder}" in capsys.readouterr().out
    assert load_model(folder, "cpu").config.head == "lm_head"
    text = (folder / "config.yaml").read_text()
    assert yaml.safe_load(text)["cliprange_value"] is None and "reward_clip" not in text
    values = options("ppo", "--config", str(folder / "config.yaml"))
    config = make(PPOConfig, values)
    assert (config.cliprange_value, config.kl_target, config.critic, config.num_ppo_epochs) == (None, 0.5, "shared", 2)
    assert config.max_completion_length == 4 and config.total_episodes is None and values["model"] == str(tiny)
    assert make(PPOConfig, options("ppo", "--resume_from_checkpoint", str(folder))).cliprange_value is None


def test_a_resume_by_the_command_line(run, capsys):
    folder = run("--critic_learning_rate", "1e-3")
    again = ["ppo", "--output_dir", str(folder), "--resume_from_checkpoint", "latest", "--max_steps", "3"]
    assert cukit_cli.main(again) == 0
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "loss/value_avg" in row]
    assert [(row["step"], row["episode"]) for row in rows] == [(1, 4), (2, 4), (3, 4)]
    assert (folder / "checkpoint-3/critic/model.safetensors").is_file()


def dry(capsys, *more):
    assert cukit_cli.main(["ppo", "--device", "cpu", "--dry_run", *more]) == 0
    text = capsys.readouterr().out
    return text, yaml.safe_load(text)


def test_dry_runs(capsys, tmp_path, monkeypatch, make_critic):
    monkeypatch.chdir(tmp_path)
    text, values = dry(capsys, "--total_episodes", "1000", "--cliprange_value", "null")
    assert "critic: AdamW's moments" in text and "reference" not in text and list(tmp_path.iterdir()) == []
    assert (
        "# steps: 32\n" in text and "max_steps" not in values and "num_train_epochs" not in values
    )  # 8 rollouts of 128
    assert values["cliprange_value"] is None and values["total_episodes"] == 1000
    (tmp_path / "run.yaml").write_text(text)
    again, _ = dry(capsys, "--config", "run.yaml")
    assert again.partition("# left")[0] == text.partition("# left")[0]  # what is free changes
    shared, _ = dry(capsys, "--critic", "shared", "--kl_coef", "0.1")
    assert "critic: AdamW" not in shared and "reference: weights" in shared
    small, _ = dry(capsys, "--critic_model", make_critic(hidden_size=64))
    moments = [[line for line in one.splitlines() if "critic: AdamW" in line] for one in (text, small)]
    assert moments[0] != moments[1]  # the critic's own shape is planned


@pytest.fixture
def make_critic(tmp_path_factory):
    """A folder with a config.json alone."""

    def make(**changes):
        folder = tmp_path_factory.mktemp("critic")
        raw = json.loads((ROOT / "data/tiny-qwen3/config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(raw))
        return str(folder)

    return make


def test_help_says_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        cukit_cli.main(["ppo", "--help"])
    assert not ended.value.code
    text = capsys.readouterr().out
    for name in PPOConfig.options():
        assert f"--{name} " in text
    assert "\nCritic:\n" in text and "\nLoss:\n" in text and "cukit ppo --model FOLDER" in text


@pytest.mark.parametrize(
    "words, message",
    [
        (["--kl_target", "0.1", "--kl_coef", "0"], "kl_target=0.1 moves kl_coef, which must begin above 0, got 0.0"),
        (["--critic", "shared", "--critic_model", "x"], "critic_model=x is for critic=separate"),
        (["--dual_clip", "0.5"], "dual_clip must be above 1, got 0.5"),
        (["--critic", "both"], "critic must be one of separate, shared"),
        (["--num_generations", "4"], "unknown option --num_generations"),
    ],
)
def test_a_mistake_is_one_line(fails, words, message):
    assert message in fails("ppo", *words)


@pytest.mark.parametrize(
    "given, line",
    [
        (dict(max_steps=7, total_episodes=91), "max_steps=7 rules: total_episodes=91 is not used"),
        (dict(num_train_epochs=9, total_episodes=92), "total_episodes=92 rules: num_train_epochs=9.0 is not used"),
        (dict(total_episodes=93), None),
    ],
)
def test_what_says_the_length_of_a_run(caplog, given, line):
    PPOConfig(**given)
    assert [record.getMessage() for record in caplog.records] == ([line] if line else [])


def test_a_critic_that_does_not_fit_is_one_line(fails, make_critic):
    line = fails("ppo", "--device", "cpu", "--dry_run", "--critic_model", make_critic(vocab_size=5))
    assert "has 5 ids, and the policy's tokenizer" in line
