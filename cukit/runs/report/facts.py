"""The parts of a report that need no JavaScript: key figures, what ran where, how it went on, the options.

Every function returns HTML in which what a file said is escaped, or plain text where it says so.
"""

from __future__ import annotations

import math
import shlex
from datetime import UTC, datetime
from html import escape
from reprlib import Repr

import numpy as np

from ..metrics import METRICS
from ..progress import format_seconds
from .curves import short
from .read import RunFolder, number

BOUNDED = Repr()  # a YAML file of few bytes can mean gigabytes, or contain itself
BOUNDED.maxlevel, BOUNDED.maxdict, BOUNDED.maxlist, BOUNDED.maxstring, BOUNDED.maxother = 4, 20, 20, 500, 500
MAX_TEXT = 5_000


def show(value) -> str:
    """A value of a configuration as text, of bounded length."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and not any(isinstance(part, (list, dict)) for part in value):
        return ", ".join(map(show, value[:100]))[:MAX_TEXT]
    return (value if isinstance(value, str) else BOUNDED.repr(value))[:MAX_TEXT]


def headline(run: RunFolder) -> str:
    """What ran, in a line: method, model, device, day."""
    start = run.starts[-1] if run.starts else {}
    parts = [start.get("method"), start.get("model") or run.config.get("model"), start.get("device")]
    day = run.starts[0].get("started") if run.starts else None
    return " · ".join(str(part) for part in [*parts, day and _moment(day)] if part)


def status(run: RunFolder) -> str:
    if not run.starts:
        return "unknown"
    return str(run.starts[-1].get("status") or "has not ended, or was killed")


def duration(run: RunFolder) -> str:
    """Seconds of all starts. One that did not say when it ended lasted at least until the last metrics."""
    if not run.starts:
        return "–"
    known = [number(start.get("seconds")) for start in run.starts]
    total, missing = sum(seconds for seconds in known if not math.isnan(seconds)), any(map(math.isnan, known))
    if math.isnan(known[-1]):
        try:
            began = datetime.fromisoformat(str(run.starts[-1].get("started"))).timestamp()
            total += max((run.path / METRICS).stat().st_mtime - began, 0)
        except (ValueError, OSError, OverflowError):
            pass
    return ("at least " if missing else "") + format_seconds(total)


# ---- key figures -----------------------------------------------------------------------------------------------------


def figures(run: RunFolder) -> list[tuple[str, str, str]]:
    """(label, value, what stands below it) of the numbers that say most about a run."""
    found = []
    for name, label in (("eval/accuracy", "held-out accuracy"), ("eval/loss", "held-out loss")):
        if name in run.metrics:
            steps, values = run.metrics[name]
            first = f"{short(values[0], 3)} at step {short(steps[0])}" if len(values) > 1 else ""
            found.append((label, short(values[-1], 3), first))
    main = next((name for name in ("reward", "loss") if name in run.metrics), None)
    if main:
        values = run.metrics[main][1]
        part = max(len(values) // 10, 1)
        found.append((main, short(_mean(values[-part:]), 3), f"{short(_mean(values[:part]), 3)} in the first tenth"))
    total = next((start["total_steps"] for start in reversed(run.starts) if "total_steps" in start), None)
    found.append(("steps", short(run.last_step), f"of {show(total)}, {status(run)}" if total else status(run)))
    step_time = f"{short(_mean(run.metrics['step_time'][1]), 3)} s a step" if "step_time" in run.metrics else ""
    found.append(("duration", duration(run), step_time))
    if "num_tokens" in run.metrics:
        speed = run.metrics.get("tokens_per_second")
        below = f"{short(_mean(speed[1]))} a second in training" if speed else ""
        found.append(("tokens", short(run.metrics["num_tokens"][1][-1]), below))
    if difference := run.metrics.get("sampling/sampling_logp_difference/max"):
        below = "between sampling and training, over the run"
        found.append(("largest log-prob difference", short(float(np.nanmax(difference[1]))), below))
    return found


def _mean(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else math.nan


def summary(runs: list[RunFolder], names: list[str]) -> str:
    """Tiles for one run, a table for several."""
    if len(runs) == 1:
        tiles = "".join(
            f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(value)}</dd>'
            f'<dd class="below">{escape(below)}</dd></div>'
            for label, value, below in figures(runs[0])
        )
        return f'<dl class="tiles">{tiles}</dl>'
    per_run = [{label: (value, below) for label, value, below in figures(run)} for run in runs]
    labels = list(dict.fromkeys(label for found in per_run for label in found))
    rows = [(label, [found.get(label, ("–", "")) for found in per_run], False) for label in labels]
    return _table(names, rows, heading=True)


# ---- tables ----------------------------------------------------------------------------------------------------------


def machine_table(runs: list[RunFolder], names: list[str]) -> str:
    """Command line, device, versions, times."""
    columns = [_machine(run) for run in runs]
    return _compared(columns, names, marks=False)


def _machine(run: RunFolder) -> dict[str, str]:
    found = {"folder": str(run.path)}
    if run.starts:
        start = run.starts[-1]
        found["command"] = command(start)
        found["status"] = status(run)
        found["started"] = _moment(run.starts[0].get("started"))
        found["duration"] = duration(run)
        for name in ("device", "model", "parameters", "dtype"):
            if start.get(name) is not None:
                value = start[name]
                found[name] = f"{value:,}" if type(value) is int else show(value)
        versions = start.get("versions")
        found |= {name: show(value) for name, value in versions.items()} if isinstance(versions, dict) else {}
    return found


def command(start: dict) -> str:
    words = start.get("command")
    return shlex.join(map(str, words)) if isinstance(words, list) else ""


def options_table(runs: list[RunFolder], names: list[str]) -> str:
    """config.yaml of each run; rows that differ are marked."""
    columns = [{name: show(value) for name, value in run.config.items()} for run in runs]
    return _compared(columns, names) if any(columns) else '<p class="none">There is no config.yaml.</p>'


def _compared(columns: list[dict[str, str]], names: list[str], marks: bool = True) -> str:
    """A row for each label; with `marks`, rows that differ are marked."""
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = []
    for label in labels:
        values = [column.get(label, "–") for column in columns]
        rows.append((label, values, marks and len(set(values)) > 1))
    return _table(names, rows, heading=len(columns) > 1)


def _table(names: list[str], rows: list[tuple[str, list, bool]], heading: bool) -> str:
    """rows: (label, a cell for each run, whether it is marked)."""
    dots = "".join(
        f'<th scope="col"><i class="dot c{place % 8}"></i>{escape(name)}</th>' for place, name in enumerate(names)
    )
    head = f"<thead><tr><th></th>{dots}</tr></thead>" if heading else ""
    body = "".join(
        f'<tr class="{"differs" if marked else "same"}"><th scope="row">{escape(label)}</th>'
        + "".join(f"<td>{_cell(cell)}</td>" for cell in cells)
        + "</tr>"
        for label, cells, marked in rows
    )
    return f'<div class="scrolls"><table>{head}<tbody>{body}</tbody></table></div>'


def _cell(value: str | tuple[str, str]) -> str:
    """A text, or a text and what stands below it."""
    if isinstance(value, str):
        return escape(value)
    return f'{escape(value[0])}<span class="below">{escape(value[1])}</span>'


def history(run: RunFolder, name: str) -> str:
    """The starts of a run that was resumed, and the options that changed on the way; "" for a run of one start."""
    if len(run.starts) < 2 and not run.earlier_options:
        return ""
    items = []
    for start in run.starts:
        first, last = (show(start.get(key)) for key in ("first_step", "last_step"))
        how = show(start["status"]) if start.get("status") else "did not say how it ended"
        text = f"{_moment(start.get('started'))}: steps {first} to {last}, {how}"
        items.append(f"<li>{escape(text)}<code>{escape(command(start))}</code></li>")
    versions = [*run.earlier_options, (None, run.config)]
    for (step, before), (_, after) in zip(versions, versions[1:]):
        changed = [
            f"{key} {show(before.get(key))} → {show(after.get(key))}"
            for key in dict.fromkeys([*before, *after])
            if show(before.get(key)) != show(after.get(key)) and key != "output_dir"
        ]
        if changed:
            items.append(f"<li>{escape(f'options changed at step {step}: ' + '; '.join(changed))}</li>")
    return f"<h3>How {escape(name)} went on</h3><ol>{''.join(items)}</ol>"


def _moment(text) -> str:
    """An ISO time as 2026-11-28 17:25 UTC."""
    try:
        return datetime.fromisoformat(str(text)).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError):
        return str(text)
