"""The README's first command, whole: a minute and a half on two cores."""

import re

import pytest

import cukit_cli


@pytest.mark.slow
def test_the_bundled_job_does_what_the_readme_says(capsys, tmp_path):
    assert cukit_cli.main(["grpo", "--device", "cpu", "--output_dir", str(tmp_path / "run")]) == 0
    found = re.search(r"held-out accuracy: ([0-9.]+) before, ([0-9.]+) after", capsys.readouterr().out)
    before, after = map(float, found.groups())
    assert before == pytest.approx(0.486, abs=0.01) and after > 0.95
