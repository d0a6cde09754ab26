"""What a run tells: metrics.jsonl and completions.jsonl in the run folder, and timers of phases."""

import json
import math
import os
import time
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path


def plain_value(value):
    """A value as JSON can hold it: NumPy scalars and arrays become Python's, NaN and infinity become None."""
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
    dropped, so that each step stands there once.
    """

    def __init__(self, folder: str | os.PathLike, resume_step: int | None = None):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files = {}
        for name in ("metrics.jsonl", "completions.jsonl"):
            if resume_step is not None:
                _drop_rows_after(self.folder / name, resume_step)

    def log(self, step: int, metrics: dict) -> dict:
        """Write one row {"step": step, **metrics} to metrics.jsonl and return it."""
        return self._write("metrics.jsonl", step, metrics)

    def log_completions(self, step: int, rows: Iterable[dict]) -> None:
        """Write rows (prompt, completion, reward, ... of one completion each) to completions.jsonl."""
        for row in rows:
            self._write("completions.jsonl", step, row)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _write(self, name: str, step: int, values: dict) -> dict:
        row = plain_value({"step": step, **values})
        if name not in self._files:
            self._files[name] = open(self.folder / name, "a", encoding="utf-8")
        self._files[name].write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._files[name].flush()
        return row


def read_jsonl(path: str | os.PathLike) -> list[dict]:
    """The rows of a log file; a last line cut off by a crash is left out."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                rows.append(json.loads(line))
    return rows


def _drop_rows_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        for row in read_jsonl(path):
            if row["step"] <= step:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


class Timer:
    """Adds up wall-clock seconds per phase: `with timer("generate"): ...`, then `timer.pop()` once a step."""

    def __init__(self):
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def pop(self) -> dict[str, float]:
        """{"time/<phase>": seconds, ..., "step_time": seconds since the last pop}; starts anew."""
        now = time.perf_counter()
        result = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()} | {
            "step_time": now - self._start
        }
        self._seconds, self._start = {}, now
        return result
