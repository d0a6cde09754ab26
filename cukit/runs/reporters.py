"""Dashboards that a run reports to beside its own files: trackio, wandb, tensorboard (the option report_to).

Metrics have the names that transformers' callbacks give them (train/loss, eval/loss, train/global_step), so that charts
made for TRL's runs show these too. Ids of runs are kept in the run folder: a resumed run goes on with the same ones.
"""

import importlib.util
import json
import logging
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .files import write_text

IDS = "dashboards.json"  # in the run folder: dashboard -> id of the run there
PROJECT = "cukit"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportedRun:
    """What dashboards are told about a run. resume_step: the step at which a run goes on in its folder, else None."""

    folder: Path
    config: dict
    name: str | None = None
    project: str | None = None
    resume_step: int | None = None

    @property
    def label(self) -> str:
        return self.name or self.folder.resolve().name


class Reporter(ABC):
    """One dashboard: log(step, metrics), log_completions(step, rows), close(). It may raise what it likes.

    Metrics and rows have the dashboard's names already. `id` is what a resumed run is given as `former`.
    """

    package: ClassVar[str]  # what must be installed
    id: str

    @abstractmethod
    def __init__(self, run: ReportedRun, former: str | None): ...

    @abstractmethod
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    @abstractmethod
    def log_completions(self, step: int, rows: list[dict], name: str = "completions") -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Trackio(Reporter):
    """A run there is found by its name, so a name that was not given gets some random letters."""

    package = "trackio"

    def __init__(self, run: ReportedRun, former: str | None):
        import trackio

        self.id = former or run.name or f"{run.label}-{secrets.token_hex(2)}"
        self._module = trackio
        self._run = trackio.init(
            project=run.project or PROJECT,
            name=self.id,
            config=run.config,
            resume="allow" if former else "never",
            embed=False,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def log_completions(self, step: int, rows: list[dict], name: str = "completions") -> None:
        self._run.log({name: self._module.Table(data=rows)}, step=step)

    def close(self) -> None:
        self._module.finish()


class Wandb(Reporter):
    """Its files lie in the run folder. WANDB_PROJECT, WANDB_MODE and wandb's other variables hold as usual."""

    package = "wandb"

    def __init__(self, run: ReportedRun, former: str | None):
        import wandb

        self._module = wandb
        self._run = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.label,
            id=former,
            resume="allow" if former else None,
            config=run.config,
            dir=str(run.folder),
        )
        self.id = self._run.id
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step", step_sync=True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def log_completions(self, step: int, rows: list[dict], name: str = "completions") -> None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        values = [[row.get(key) for key in columns] for row in rows]
        self._run.log({name: self._module.Table(columns=columns, data=values)}, step=step)

    def close(self) -> None:
        self._run.finish()


class Tensorboard(Reporter):
    """Event files in tensorboard/ of the run folder; `tensorboard --logdir runs` shows all runs. Tables are texts."""

    package = "tensorboardX"

    def __init__(self, run: ReportedRun, former: str | None):
        from tensorboardX import SummaryWriter

        self.id = "tensorboard"
        resumed = {}
        if run.resume_step is not None:  # a file of its own; what older ones say of steps that are run again is hidden
            resumed = {"purge_step": run.resume_step + 1, "filename_suffix": f".{run.resume_step}"}
        self._writer = SummaryWriter(str(run.folder / self.id), flush_secs=10, **resumed)
        self._writer.add_text("args", _code(json.dumps(run.config, indent=2, ensure_ascii=False)), run.resume_step or 0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_completions(self, step: int, rows: list[dict], name: str = "completions") -> None:
        texts = []
        for row in rows:
            numbers = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("prompt", "completion"))
            texts += [numbers, _code(str(row.get("prompt"))), _code(str(row.get("completion")))]
        self._writer.add_text(name, "\n\n".join(texts), step)

    def close(self) -> None:
        self._writer.close()


def _code(text: str) -> str:
    """Text as a block of Markdown that is shown as it is."""
    return "\n".join("    " + line for line in text.split("\n"))


REPORTERS: dict[str, type[Reporter]] = {"trackio": Trackio, "wandb": Wandb, "tensorboard": Tensorboard}


def check_packages(names: list[str]) -> None:
    """ValueError with the install command if a dashboard's package is missing."""
    for name in names:
        package = REPORTERS[name].package
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"report_to={name} needs {package}, which is not installed: pip install 'cukit[{name}]'")


class Reporters:
    """All dashboards of a run. One that fails gets one warning and nothing more; it never ends the run.

    With tables=True the newest completions go along with the next row of metrics, as in TRL.
    """

    def __init__(self, names: list[str], run: ReportedRun, tables: bool = False):
        self._open: dict[str, Reporter] = {}
        self._tables, self._newest = tables, list[dict]()
        former = {} if run.resume_step is None else _read_ids(run.folder / IDS)
        for name in names:
            with self._guarded(name):
                self._open[name] = REPORTERS[name](run, former.get(name))
        if self._open:
            ids = former | {name: reporter.id for name, reporter in self._open.items()}
            with suppress(OSError):  # a full disk: a resumed run begins new ones
                write_text(run.folder / IDS, json.dumps(ids) + "\n")

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """A row of metrics.jsonl, without its step."""
        found = dashboard_metrics(metrics) | {"train/global_step": step}
        table = "eval/completions" if any(name.startswith("eval/") for name in found) else "completions"
        rows, self._newest = self._newest, []
        for name, reporter in list(self._open.items()):
            with self._guarded(name):
                reporter.log(step, found)
                if rows:
                    reporter.log_completions(step, rows, table)

    def log_completions(self, step: int, rows: list[dict]) -> None:
        """Rows of completions.jsonl, which have their step; the next log() takes them along."""
        if self._tables:
            self._newest = [_table_row(row) for row in rows]

    def close(self) -> None:
        for name, reporter in list(self._open.items()):
            with self._guarded(name):
                reporter.close()
        self._open = {}

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Around a call of a dashboard: what it raises is said, and the dashboard is dropped."""
        try:
            yield
        except Exception as error:
            text = " ".join(str(error).split())[:300] or type(error).__name__
            logger.warning("%s failed and gets nothing more of this run, which goes on: %s", name, text)
            if (reporter := self._open.pop(name, None)) is not None:
                with suppress(Exception):
                    reporter.close()


def dashboard_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Numbers under transformers' names: eval/NAME stays (eval_NAME becomes it), all else is train/NAME."""
    found = {}
    for name, value in metrics.items():
        if isinstance(value, (int, float)):
            rest = name.removeprefix("eval/") if name.startswith("eval/") else name.removeprefix("eval_")
            found[f"eval/{rest}" if rest != name else f"train/{name}"] = value
    return found


def _table_row(row: dict) -> dict:
    """TRL's columns: prompt, completion, a reward under its function's name; what is no number or text is left out."""
    found = {}
    for name, value in row.items():
        if name in ("prompt", "completion"):
            value = _as_text(value)
        if value is None or isinstance(value, (str, int, float)):
            found[name.removeprefix("rewards/")] = value
    return found


def _as_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)


def _read_ids(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
