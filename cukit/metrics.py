"""What a run tells: metrics.jsonl and completions.jsonl in the run folder, a live display, and timers of phases."""

import json
import math
import os
import sys
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


# What the display shows, in this order: metric name, label, format.
_SHOWN = (
    ("loss", "loss", "{:.4f}"),
    ("reward", "reward", "{:.3f}"),
    ("eval/accuracy", "accuracy", "{:.3f}"),
    ("eval/loss", "eval loss", "{:.4f}"),
    ("mean_token_accuracy", "token accuracy", "{:.3f}"),
    ("completions/mean_length", "length", "{:.1f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)


class Progress:
    """A live display (rich) where stdout is a terminal; elsewhere one plain line per `update`.

    `advance(step)` moves the bar; `update(step, metrics)` shows numbers too; both may be called at every step, and a
    number stays shown until a newer one comes (the accuracy is that of the last evaluation).
    """

    def __init__(self, total_steps: int, label: str = "", start_step: int = 0, live: bool | None = None):
        self.total_steps, self.label, self.start_step = total_steps, label, start_step
        self.live = sys.stdout.isatty() if live is None else live
        self._shown: dict[str, float] = {}
        self._started = time.perf_counter()
        self._bar = self._task = None

    def __enter__(self) -> "Progress":
        self._started = time.perf_counter()
        if self.live:
            from rich import progress, text

            class Display(progress.Progress):
                def get_renderables(self):
                    """The bar, and below it the numbers, which would not fit beside it in 80 columns."""
                    yield self.make_tasks_table(self.tasks)
                    yield from (text.Text(task.fields["numbers"]) for task in self.tasks)

            self._bar = Display(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[left]}"),
            )
            self._bar.start()
            self._task = self._bar.add_task(
                self.label, total=self.total_steps, completed=self.start_step, numbers="", left=""
            )
        return self

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step, left=self._time_left(step))

    def update(self, step: int, metrics: dict) -> None:
        self._shown |= {name: metrics[name] for name, _, _ in _SHOWN if plain_value(metrics.get(name)) is not None}
        numbers = "  ".join(
            f"{label} {text.format(self._shown[name])}" for name, label, text in _SHOWN if name in self._shown
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers, left=self._time_left(step))
        else:
            print(
                "  ".join(
                    filter(
                        None, [f"{self.label} step {step}/{self.total_steps}".strip(), numbers, self._time_left(step)]
                    )
                ),
                flush=True,
            )

    def message(self, text: str) -> None:
        """Print a line above the display. `text` may be a model's own: it is never read as markup."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def _time_left(self, step: int) -> str:
        done = step - self.start_step
        if done <= 0:
            return ""
        return format_seconds((time.perf_counter() - self._started) / done * max(self.total_steps - step, 0)) + " left"


def format_seconds(seconds: float) -> str:
    """12 s, 3 min 20 s or 2 h 05 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
