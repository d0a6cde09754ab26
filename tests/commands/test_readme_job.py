"""The README's first command and other bundled jobs, whole: a minute or two each on two cores."""

import re

import pytest

import cukit_cli


@pytest.mark.slow
def test_the_bundled_job_does_what_the_readme_says(capsys, tmp_path):
    assert cukit_cli.main(["grpo", "--device", "cpu", "--output_dir", str(tmp_path / "run")]) == 0
    found = re.search(r"held-out accuracy: ([0-9.]+) before, ([0-9.]+) after", capsys.readouterr().out)
    before, after = map(float, found.groups())
    assert before == pytest.approx(0.486, abs=0.01) and after > 0.95


@pytest.mark.learning
@pytest.mark.parametrize("options", [[], ["--critic", "shared"]], ids=["separate", "shared"])
def test_the_bundled_job_of_ppo_learns(capsys, tmp_path, options):
    assert cukit_cli.main(["ppo", "--device", "cpu", "--output_dir", str(tmp_path / "run"), *options]) == 0
    found = re.search(r"held-out accuracy: ([0-9.]+) before, ([0-9.]+) after", capsys.readouterr().out)
    before, after = map(float, found.groups())
    assert before == pytest.approx(0.486, abs=0.01) and after > 0.9


@pytest.mark.learning
@pytest.mark.parametrize("way", ["beside", "merged"])
def test_an_adapter_learns_the_bundled_job(way, capsys, tmp_path):
    """What docs/LORA.md says of it, at half its steps."""
    lora = ["--use_peft", "--lora_r", "8", "--lora_target_modules", "all-linear", "--lora_way", way]
    argv = ["grpo", "--device", "cpu", *lora, "--learning_rate", "1e-3", "--max_steps", "50"]
    assert cukit_cli.main([*argv, "--output_dir", str(tmp_path / "run")]) == 0
    found = re.search(r"held-out accuracy: ([0-9.]+) before, ([0-9.]+) after", capsys.readouterr().out)
    before, after = map(float, found.groups())
    assert before == pytest.approx(0.486, abs=0.01) and after > 0.95
