"""evaluations/step-N.jsonl in the run folder: every answer of the evaluation after step N."""

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from .files import write_text
from .metrics import plain_value

FOLDER = "evaluations"

logger = logging.getLogger(__name__)


def write_answers(path: Path, rows: Iterable[dict]) -> None:
    """A JSON object a line; what JSON does not know is written as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(plain_value(row), ensure_ascii=False, default=str) + "\n" for row in rows)
    write_text(path, "".join(lines))


def log_evaluation(run: Path, step: int, rows: Iterable[dict]) -> None:
    """Write the answers of a run's evaluation. A disk that is full ends nothing."""
    path = run / FOLDER / f"step-{step}.jsonl"
    try:
        write_answers(path, rows)
    except OSError as error:
        logger.warning("%s cannot be written: %s; training goes on", path, error.strerror or error)


def drop_later_evaluations(run: Path, step: int) -> None:
    """Delete the answers after `step`, of steps that are now run again."""
    for path in (run / FOLDER).glob("step-*.jsonl"):
        match = re.fullmatch(r"step-(\d+)\.jsonl", path.name)
        if match and int(match[1]) > step:
            path.unlink()
