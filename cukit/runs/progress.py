"""The live display of a run, or plain lines where stdout is no terminal; log lines for a command line's user.

A display never ends a run: characters that a stream's encoding lacks are replaced, and a closed stream goes silent.
"""

import logging
import os
import sys
import time
from contextlib import suppress

from .metrics import plain_value

# What the display shows, in this order: metric name, label, format.
_SHOWN = (
    ("loss", "loss", "{:.4f}"),
    ("reward", "reward", "{:.3f}"),
    ("eval/accuracy", "accuracy", "{:.3f}"),
    ("eval/loss", "eval loss", "{:.4f}"),
    ("accuracy", "pair accuracy", "{:.3f}"),
    ("mean_token_accuracy", "token accuracy", "{:.3f}"),
    ("completions/mean_length", "length", "{:.1f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)
_live: list["Progress"] = []  # displays that are drawn now; log lines go above the last one


class SafeStream:
    """A text stream; its write() always succeeds."""

    def __init__(self, stream):
        self._stream = stream
        self._silent = stream is None  # pythonw has no stdout

    def write(self, text: str) -> int:
        if not self._silent:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._write_replaced(text)
            except (OSError, ValueError):
                self._go_silent()
        return len(text)

    def flush(self) -> None:
        if not self._silent:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._go_silent()

    def isatty(self) -> bool:
        with suppress(ValueError):  # closed
            return not self._silent and self._stream.isatty()
        return False

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def _write_replaced(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "ascii"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):
            self._go_silent()

    def _go_silent(self) -> None:
        """Nothing reads this stream any more (`| head -1`), or its disk is full. What its buffer still holds must not
        fail again when the interpreter ends, so it goes nowhere.
        """
        self._silent = True
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class LogHandler(logging.Handler):
    """Log lines as a command line shows them: on stderr, or above the live display while one is drawn.

    A warning begins with "warning: ". `show_log_lines()` installs it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # wrong arguments of a log call: logging's own report
            self.handleError(record)
            return
        if record.levelno >= logging.WARNING and not text.lower().startswith(("warning", "error")):
            text = f"{record.levelname.lower()}: {text}"
        if _live:
            _live[-1].message(text)
        else:
            stream = SafeStream(sys.stderr)
            stream.write(text + "\n")
            stream.flush()


def show_log_lines(level: int = logging.INFO) -> LogHandler:
    """Show what cukit logs from `level` on; a second call changes nothing but the level."""
    cukit = logging.getLogger("cukit")
    handler = next((found for found in cukit.handlers if isinstance(found, LogHandler)), None)
    if handler is None:
        handler = LogHandler()
        cukit.addHandler(handler)
    cukit.setLevel(level)
    return handler


class Progress:
    """A live display (rich) where stdout is a terminal; elsewhere one plain line per `update`.

    `advance(step)` moves the bar; `update(step, metrics)` shows numbers too; both may be called at every step. In the
    live display a number stays until a newer one comes (the accuracy is that of the last evaluation); a plain line has
    the numbers of its own update only. silent: nothing is shown at all.
    """

    def __init__(self, total_steps: int, label: str = "", start_step: int = 0, live: bool | None = None,
                 silent: bool = False):  # fmt: skip
        self.total_steps, self.label, self.start_step = total_steps, label, start_step
        self._out = SafeStream(None if silent else sys.stdout)
        self.live = self._out.isatty() if live is None else live
        self._shown: dict[str, float] = {}
        self._started = time.perf_counter()
        self._bar = self._task = None

    def __enter__(self) -> "Progress":
        self._started = time.perf_counter()
        if self.live:
            from rich import console, progress, text

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
                console=console.Console(file=self._out),
            )
            self._bar.start()
            self._task = self._bar.add_task(
                self.label, total=self.total_steps, completed=self.start_step, numbers="", left=""
            )
            _live.append(self)
        return self

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            _live.remove(self)
            self._bar.stop()
            self._bar = None

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step, left=self._time_left(step))

    def update(self, step: int, metrics: dict) -> None:
        new = {name: metrics[name] for name, _, _ in _SHOWN if plain_value(metrics.get(name)) is not None}
        self._shown = self._shown | new if self.live else new
        numbers = "  ".join(
            f"{label} {text.format(self._shown[name])}" for name, label, text in _SHOWN if name in self._shown
        )
        left = self._time_left(step)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers, left=left)
        else:
            place = f"{self.label} step {step}/{self.total_steps}".strip()
            self.message("  ".join(filter(None, [place, numbers, left])))

    def message(self, text: str) -> None:
        """Print a line above the display. `text` may be a model's own: it is never read as markup."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._out.write(text + "\n")
            self._out.flush()

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
