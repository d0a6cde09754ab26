"""What the tests of commands share."""

import contextlib
import io
from pathlib import Path

import pytest

import cukit_cli
from cukit.commands.parser import parse, resolve


@pytest.fixture
def options():
    """options(*argv): all values that a command line gives."""

    def run(*argv: str) -> dict:
        name, given = parse(cukit_cli.COMMANDS, list(argv))
        return resolve(cukit_cli.COMMANDS[name], given)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A model folder made by one step of the sft command."""
    run = tmp_path_factory.mktemp("tiny") / "a run"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cukit_cli.main(["sft", "--max_steps", "1", "--output_dir", str(run)]) == 0
    (run.parent / "printed.txt").write_text(printed.getvalue())
    return run / "checkpoint-1"


@pytest.fixture
def fails(capsys):
    """fails(*argv): run a command that must end with code 2 and one line, which is returned."""

    def run(*argv) -> str:
        capsys.readouterr()
        assert cukit_cli.main([str(word) for word in argv]) == 2
        lines = [
            line
            for line in capsys.readouterr().err.splitlines()
            if "(bundled; " not in line and not line.startswith("recipe: ")
        ]
        assert len(lines) == 1 and lines[0].startswith("error: "), lines
        return lines[0]

    return run
