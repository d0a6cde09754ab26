"""What the tests of commands share."""

import contextlib
import io
from pathlib import Path

import pytest
from safetensors.numpy import save_file

import cukit_cli
from cukit.commands.parser import parse, resolve
from cukit.runs.checkpoint import STATE_ARRAYS, STATE_JSON


@pytest.fixture
def options():
    """options(*argv): all values that a command line gives."""

    def run(*argv: str) -> dict:
        name, given = parse(cukit_cli.COMMANDS, list(argv))
        return resolve(cukit_cli.COMMANDS[name], given)

    return run


@pytest.fixture
def write_checkpoint():
    """write_checkpoint(folder): the files that make a checkpoint whole, with nothing in them."""

    def write(folder: Path) -> Path:
        folder.mkdir(parents=True)
        for name in ("config.json", STATE_JSON):
            (folder / name).write_text("{}")
        for name in ("model.safetensors", STATE_ARRAYS):
            save_file({}, folder / name)
        return folder

    return write


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
    """fails(*argv): run a command that must end with code 2 and one error line, the last, which is returned."""

    def run(*argv) -> str:
        capsys.readouterr()
        assert cukit_cli.main([str(word) for word in argv]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith("error: ") and sum("error" in line.lower() for line in lines) == 1, lines
        return lines[-1]

    return run
