"""Writes the page of a report: one HTML file with its style, script and data inside.

Text of models, data and files goes through html.escape, or into a JSON block in which no character can end the block;
the script sets it as text. The content security policy allows the page's own style and script by their hashes, and
nothing else: no network, no inline handler.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
from html import escape
from importlib import resources
from pathlib import Path

from ... import __version__
from ..files import write_text
from ..metrics import METRICS
from . import facts
from .curves import charts_of, phases, series, static_charts
from .read import RunFolder, read_run

REPORT = "report.html"
COMPLETION_BYTES = 4_000_000  # of completions.jsonl in a page, over all runs
MAX_RUNS = 64
SLOT = re.compile(r"\{\{(\w+)\}\}")

logger = logging.getLogger(__name__)


def write_report(folders: list[str], output: str | os.PathLike | None = None) -> Path:
    """Write the page of these run folders; returns its path.

    output: default report.html, in the run folder if there is one run, else in the working directory. ValueError for a
    folder that is no run, OSError if the page cannot be written.
    """
    paths = list(dict.fromkeys(Path(folder) for folder in folders))
    if not paths:
        raise ValueError("report needs a run folder: cukit report RUN [RUN …]")
    if len(paths) > MAX_RUNS:
        raise ValueError(f"report shows at most {MAX_RUNS} runs, got {len(paths)}")
    runs = [read_run(path, COMPLETION_BYTES // len(paths)) for path in paths]
    target = Path(output) if output is not None else (paths[0] if len(paths) == 1 else Path()) / REPORT
    if target.is_dir():
        raise ValueError(f"output {target} is a folder; give a file, for example {target / REPORT}")
    if not target.parent.is_dir():
        raise ValueError(f"output {target}: the folder {target.parent} does not exist")
    write_text(target, page(runs))
    return target


def write_report_at_end(folder: Path) -> None:
    """The report of a run that ends now, if it has logged anything. What goes wrong is a warning."""
    try:
        if (folder / METRICS).is_file():
            write_report([str(folder)])
    except Exception as error:  # a page that fails must not fail the run that it is about
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.warning("the report of %s could not be written: %s", folder, reason)


def page(runs: list[RunFolder]) -> str:
    """The HTML of these runs."""
    names = _names(runs)
    charts = charts_of(runs)
    style, script = (_part(name) for name in ("page.css", "page.js"))
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    notes = [f"{name}: {note}" for run, name in zip(runs, names) for note in run.notes]
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    filled = {
        "policy": policy,
        "version": escape(__version__),
        "title": escape(title),
        "headline": escape(facts.headline(runs[0]) if len(runs) == 1 else ", ".join(names)),
        "style": style,
        "script": script,
        "summary": facts.summary(runs, names),
        "notes": "".join(f'<p class="note">{escape(note)}</p>' for note in notes),
        "static_charts": static_charts(runs, charts),
        "machine": facts.machine_table(runs, names),
        "options": facts.options_table(runs, names),
        "history": "".join(facts.history(run, name) for run, name in zip(runs, names)),
        "data": _json({"charts": charts, "runs": [_data(run, name) for run, name in zip(runs, names)]}),
    }
    return SLOT.sub(lambda match: filled[match[1]], _part("page.html"))


def _data(run: RunFolder, name: str) -> dict:
    return {
        "name": name,
        "phases": phases(run),
        "resumed": sorted({start["first_step"] for start in run.starts[1:] if type(start.get("first_step")) is int}),
        "completions": run.completions,
        "completion_steps": run.completion_steps,
    } | series(run)


def _names(runs: list[RunFolder]) -> list[str]:
    """run_name or the folder's name; the whole path where two would be equal."""
    names = [str(run.config.get("run_name") or run.path.resolve().name) for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({run.path})" if run.config.get("run_name") else str(run.path)
        for run, name in zip(runs, names)
    ]


def _part(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value) -> str:
    """JSON in ASCII that can stand inside a script element: no <, > or &, and no line separator."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
