"""A run folder on disk: config.yaml, metrics.jsonl, completions.jsonl, checkpoint-N/."""

import os
import re
from pathlib import Path

import yaml

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


def open_run_folder(output_dir: str | os.PathLike | None, label: str, resume: bool = False) -> Path:
    """Make and return the run folder.

    Without `output_dir` a fresh one: runs/<label>-001, -002, ... Raises ValueError if `output_dir` holds another run
    and this one does not resume it.
    """
    if output_dir is None:
        return _fresh_run_folder(label)
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir {folder} is a file; give a folder")
    if not resume and folder.is_dir() and _holds_run(folder):
        raise ValueError(
            f"output_dir {folder} already holds a run; choose another folder, or continue that run with "
            f"--resume_from_checkpoint latest"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fresh_run_folder(label: str) -> Path:
    base = Path("runs")
    base.mkdir(exist_ok=True)
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "run"
    taken = [
        int(match[1]) for path in base.iterdir() if (match := re.fullmatch(re.escape(label) + r"-(\d+)", path.name))
    ]
    number = max(taken, default=0) + 1
    while True:
        folder = base / f"{label}-{number:03d}"
        try:
            folder.mkdir()  # fails if another run took the number meanwhile
            return folder
        except FileExistsError:
            number += 1


def _holds_run(folder: Path) -> bool:
    return any(
        path.name in ("config.yaml", "metrics.jsonl") or CHECKPOINT_NAME.fullmatch(path.name)
        for path in folder.iterdir()
    )


def write_run_config(folder: str | os.PathLike, config: dict) -> None:
    """Write the resolved configuration to config.yaml, readable by --config."""
    write_text(Path(folder) / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
