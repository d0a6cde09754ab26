"""Writes a run's small files, and finds names that are free."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it; if that fails, nothing of it stays.

    Half of a surrogate pair, which a model can write, has no UTF-8: it becomes the escape \\udXXX, which JSON reads.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path, option: str) -> None:
    """ValueError if write_text() cannot make this file or its folder; to be said before the work whose fruit it is."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give a file")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        reason = "not writable" if above.is_dir() else "a file"
        raise ValueError(f"{option} {path} cannot be written: {above} is {reason}")


def free_name(path: Path) -> Path:
    """`path`, or with -2, -3, … before its suffix if it is taken."""
    name, number = path, 1
    while name.exists():
        number += 1
        name = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return name
