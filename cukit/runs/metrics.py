"""What a run records: metrics.jsonl and completions.jsonl in the run folder, means over steps, timers of phases."""

import json
import logging
import math
import os
import time
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

from .files import write_text
from .reporters import Reporters

METRICS, COMPLETIONS = "metrics.jsonl", "completions.jsonl"
# In a logged row these are the newest value; every other metric is the mean over the steps since the last row.
LATEST = ("learning_rate", "lr", "num_tokens", "epoch", "episode", "eps", "skipped_updates", "loss_scale")

logger = logging.getLogger(__name__)


def plain_value(value):
    """A value as JSON can hold it: NumPy scalars and arrays become Python's, NaN and infinity become None."""
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is str or kind is int or kind is bool:
        return value
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if hasattr(value, "tolist"):
        return plain_value(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class MetricsLogger:
    """Appends rows to metrics.jsonl and completions.jsonl in `folder`.

    A run resumed from step S begins with `resume_step=S`: rows of later steps, written by the run that was cut off, are
    dropped, so that each step stands there once; `redo_last` drops the training row of step S too (its mean covers a
    part of the steps only). A disk that is full ends nothing: rows wait, in order, until there is room. `reporters`, if
    the run sets them, get every row too.
    """

    def __init__(self, folder: str | os.PathLike, resume_step: int | None = None, redo_last: bool = False):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: dict = {}
        self._waiting: dict[str, list[bytes]] = {METRICS: [], COMPLETIONS: []}
        self.reporters: Reporters | None = None
        if resume_step is not None:
            _drop_rows(self.folder / COMPLETIONS, lambda row: row["step"] > resume_step)
            _drop_rows(
                self.folder / METRICS,
                lambda row: row["step"] > resume_step or (redo_last and row["step"] == resume_step and "loss" in row),
            )

    def log(self, step: int, metrics: dict) -> dict:
        """Write one row {"step": step, **metrics} to metrics.jsonl and return it."""
        row = plain_value({"step": step, **metrics})
        self._write(METRICS, [row])
        if self.reporters is not None:
            self.reporters.log(step, {name: value for name, value in row.items() if name != "step"})
        return row

    def log_completions(self, step: int, rows: Iterable[dict]) -> None:
        """Write rows (prompt, completion, reward, ... of one completion each) to completions.jsonl."""
        found = [plain_value({"step": step, **row}) for row in rows]
        self._write(COMPLETIONS, found)
        if self.reporters is not None:
            self.reporters.log_completions(step, found)

    def close(self) -> None:
        for name, lines in self._waiting.items():
            if lines:
                logger.warning("%d rows could not be written to %s", len(lines), self.folder / name)
        for file in self._files.values():
            file.close()
        self._files = {}
        if self.reporters is not None:
            self.reporters.close()

    def _write(self, name: str, rows: list[dict]) -> None:
        waiting = self._waiting[name]
        had_room = not waiting
        # as write_text() does with half a surrogate pair
        waiting += [
            (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")
            for row in rows
        ]
        try:
            while waiting:
                self._append(name, waiting[0])
                waiting.pop(0)
        except OSError as error:
            if had_room:
                logger.warning(
                    "%s cannot be written: %s; rows wait until it can", self.folder / name, error.strerror or error
                )

    def _append(self, name: str, line: bytes) -> None:
        """Write a whole line or nothing."""
        if name not in self._files:
            self._files[name] = open(self.folder / name, "ab", buffering=0)
        file = self._files[name]
        before = file.seek(0, os.SEEK_END)
        try:
            if file.write(line) != len(line):
                raise OSError("the disk is full")
        except OSError:
            file.truncate(before)
            raise


def read_jsonl(path: str | os.PathLike) -> list[dict]:
    """The rows of a log file; a last line cut off by a crash is left out."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                rows.append(json.loads(line))
    return rows


def last_logged_step(folder: Path) -> int:
    """The highest step in metrics.jsonl; 0 without one (an evaluation before the first step has step 0)."""
    path = folder / METRICS
    try:
        return max((row["step"] for row in read_jsonl(path)), default=0) if path.is_file() else 0
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); choose another folder, or mend or delete it") from error


def _drop_rows(path: Path, dropped) -> None:
    """Rewrite a log file without the rows for which dropped(row); without any row it is deleted."""
    if not path.exists():
        return
    rows = [row for row in read_jsonl(path) if not dropped(row)]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    if not rows:
        path.unlink()


class MetricsWindow:
    """Metrics of the steps since the last logged row."""

    def __init__(self, values: dict[str, list[float]] | None = None):
        self.values = values or {}  # JSON values, for a checkpoint between two rows

    def __bool__(self) -> bool:
        return bool(self.values)

    def add(self, metrics: dict) -> None:
        for name, value in metrics.items():
            if value is not None and not (math.isnan(value) and name not in ("loss", "grad_norm")):
                self.values.setdefault(name, []).append(float(value))

    def row(self) -> dict:
        return {name: found[-1] if name in LATEST else sum(found) / len(found) for name, found in self.values.items()}

    def pop(self) -> dict:
        row, self.values = self.row(), {}
        return row


class Timer:
    """Adds up wall-clock seconds per phase: `with timer("generate"): ...`, then `timer.pop()` once a step.

    A phase within a phase is left out of the outer one.
    """

    def __init__(self):
        self._seconds: dict[str, float] = {}
        self._within: list[float] = []  # of each open phase: seconds of the phases within
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        self._within.append(0.0)
        try:
            yield
        finally:
            seconds, within = time.perf_counter() - start, self._within.pop()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds - within
            if self._within:
                self._within[-1] += seconds

    def pop(self) -> dict[str, float]:
        """{"time/<phase>": seconds, ..., "step_time": seconds since the last pop}; starts anew."""
        now = time.perf_counter()
        result = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()} | {
            "step_time": now - self._start
        }
        self._seconds, self._start = {}, now
        return result
