"""The live display of a run, or plain lines where stdout is no terminal."""

import sys
import time

from .metrics import plain_value

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
