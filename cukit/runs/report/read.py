"""Reads a run folder for its report. What is missing or damaged is left out and said in `notes`.

Everything here is untrusted: a model wrote the completions, and anything may have written the files.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml

from ..metrics import COMPLETIONS, METRICS
from ..record import RECORD, read_starts

LARGEST_STEP = 2**53  # what a number of JavaScript holds exactly
MAX_METRICS = 500
MAX_TEXT, MAX_TOKENS = 20_000, 4_000  # of one completion
BEGINS_WITH_STEP = re.compile(rb'\s*\{\s*"step"\s*:\s*(\d{1,16})\s*[,}]')
EARLIER_OPTIONS = re.compile(r"config\.step-(\d+)(?:-\d+)?\.yaml")


@dataclass
class RunFolder:
    """What a report shows of a run. metrics: name -> (steps, values), NaN for a value that is not finite."""

    path: Path
    config: dict = field(default_factory=dict)
    earlier_options: list[tuple[int, dict]] = field(default_factory=list)  # (a step, the options up to it)
    starts: list[dict] = field(default_factory=list)
    metrics: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    completions: list[dict] = field(default_factory=list)
    completion_steps: int = 0  # of the file; those shown may be fewer
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return int(max((steps[-1] for steps, _ in self.metrics.values()), default=0))


def read_run(folder: Path, completion_bytes: int) -> RunFolder:
    """ValueError if it is no run folder. completion_bytes: how much of completions.jsonl is taken, evenly by step."""
    if not folder.is_dir():
        raise ValueError(f"run folder {folder} " + ("is a file" if folder.exists() else "does not exist"))
    names = ("config.yaml", METRICS, COMPLETIONS, RECORD)
    if not any((folder / name).is_file() for name in names):
        raise ValueError(f"{folder} is no run folder: it has none of {', '.join(names)}")
    run = RunFolder(folder)
    run.config = _options(folder / "config.yaml", run.notes)
    earlier = sorted(
        (int(match[1]), path) for path in folder.iterdir() if (match := EARLIER_OPTIONS.fullmatch(path.name))
    )
    run.earlier_options = [(step, _options(path, run.notes)) for step, path in earlier]
    run.starts = read_starts(folder / RECORD)
    if not run.starts and (folder / RECORD).is_file():
        run.notes.append(f"{RECORD} is damaged or empty")
    _read_metrics(run)
    _read_completions(run, completion_bytes)
    return run


def _options(path: Path, notes: list[str]) -> dict:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({type(error).__name__})")
        return {}
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


# ---- metrics.jsonl ---------------------------------------------------------------------------------------------------


def _read_metrics(run: RunFolder) -> None:
    found: dict[str, tuple[array, array]] = {}
    for row in _rows(run, METRICS):
        step = row["step"]
        for name, value in row.items():
            if name == "step" or type(value) not in (int, float, type(None)):
                continue
            if name not in found:
                if len(found) == MAX_METRICS:
                    continue
                found[name] = array("d"), array("d")
            steps, values = found[name]
            steps.append(step)
            values.append(value if type(value) is float else number(value))
    for name, columns in found.items():
        steps, values = map(np.asarray, columns)
        values[~np.isfinite(values)] = np.nan
        if not np.isnan(values).all():
            order = np.argsort(steps, kind="stable")
            run.metrics[name] = steps[order], values[order]
    if not run.metrics:
        run.notes.append("no metrics were logged")


def number(value) -> float:
    """A finite float, or NaN."""
    try:
        value = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _rows(run: RunFolder, name: str) -> Iterator[dict]:
    """The rows of a log file that have a step."""
    bad = 0
    try:
        with open(run.path / name, "rb") as file:
            for line in file:
                if (row := _row(line)) is not None:
                    yield row
                elif line.strip():
                    bad += 1
    except FileNotFoundError:
        return
    except OSError as error:
        run.notes.append(f"{name} cannot be read ({error.strerror})")
    _say_bad(run, name, bad)


def _say_bad(run: RunFolder, name: str, bad: int) -> None:
    if bad:
        run.notes.append(f"{bad} damaged line{'s' if bad > 1 else ''} of {name} left out")


def _row(line: bytes) -> dict | None:
    """A line's row, or None if it is no object with a step."""
    try:
        row = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < LARGEST_STEP:
        return None
    return row


# ---- completions.jsonl -----------------------------------------------------------------------------------------------


def _read_completions(run: RunFolder, most_bytes: int) -> None:
    """Rows of steps that lie evenly over the run, the first and the last among them."""
    places, bad = _places(run)
    run.completion_steps = len(places)
    total = sum(size for rows in places.values() for _, size in rows)
    steps = sorted(places)
    if total > most_bytes:
        count = max(2, len(steps) * most_bytes // total)
        chosen = {round(i * (len(steps) - 1) / (count - 1)) for i in range(count)}
        steps = [steps[i] for i in sorted(chosen)]
    left = {step: most_bytes // max(len(steps), 1) for step in steps}
    if steps:
        with open(run.path / COMPLETIONS, "rb") as file:
            for step in steps:
                for count, (start, size) in enumerate(places[step]):
                    left[step] -= size
                    if left[step] < 0 and count and total > most_bytes:
                        break
                    file.seek(start)
                    if (row := _row(file.read(size))) is not None:
                        run.completions.append(_completion(row))
                    else:
                        bad += 1
    _say_bad(run, COMPLETIONS, bad)


def _places(run: RunFolder) -> tuple[dict[int, list[tuple[int, int]]], int]:
    """(step -> (first byte, bytes) of its lines, number of lines without a step). Lines are not parsed: a file may have
    gigabytes.
    """
    places: dict[int, list[tuple[int, int]]] = {}
    bad = start = 0
    try:
        with open(run.path / COMPLETIONS, "rb") as file:
            for line in file:
                match = BEGINS_WITH_STEP.match(line)
                step = int(match[1]) if match else (_row(line) or {}).get("step")
                if step is not None and step < LARGEST_STEP:
                    places.setdefault(step, []).append((start, len(line)))
                elif line.strip():
                    bad += 1
                start += len(line)
    except FileNotFoundError:
        pass
    except OSError as error:
        run.notes.append(f"{COMPLETIONS} cannot be read ({error.strerror})")
    return places, bad


def _completion(row: dict) -> dict:
    """A row of completions.jsonl as the page's script takes it."""
    text = _plain_text(row.get("completion"))
    found = {
        "step": row["step"],
        "eval": "advantage" not in row,
        "prompt": _messages(row.get("prompt")),
        "text": text[:MAX_TEXT],
        "rewards": [
            [name.removeprefix("rewards/"), None if math.isnan(value := number(given)) else value]
            for name, given in row.items()
            if name == "reward" or name.startswith("rewards/")
        ],
    }
    for name in ("advantage", "length"):
        if not math.isnan(value := number(row.get(name))):
            found[name] = value
    if isinstance(row.get("finish_reason"), str):
        found["reason"] = row["finish_reason"][:40]
    tokens, logprobs = row.get("tokens"), _floats(row.get("logprobs"))
    is_text = isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
    if is_text and logprobs is not None and len(tokens) == len(logprobs):
        found["tokens"], found["logprobs"] = tokens[:MAX_TOKENS], logprobs[:MAX_TOKENS]
    if len(text) > MAX_TEXT or ("tokens" in found and len(tokens) > MAX_TOKENS):
        found["cut"] = True
    return found


def _floats(values) -> list | None:
    """A list of numbers, rounded, with None for what is not finite; None if it is no list of numbers."""
    try:
        found = np.array(values, np.float64).round(3) if isinstance(values, list) else None
    except (ValueError, TypeError, OverflowError):
        return None
    if found is None or found.ndim != 1:
        return None
    return found.tolist() if np.isfinite(found).all() else [x if math.isfinite(x) else None for x in found.tolist()]


def _messages(prompt) -> list[list[str]]:
    """A prompt as [[role, text], …]; a plain text has the role ""."""
    if not isinstance(prompt, list):
        return [["", _plain_text(prompt)[:MAX_TEXT]]]
    return [
        [str(message.get("role", ""))[:40], _plain_text(message.get("content"))[:MAX_TEXT]]
        if isinstance(message, dict)
        else ["", _plain_text(message)[:MAX_TEXT]]
        for message in prompt[:100]
    ]


def _plain_text(value) -> str:
    """What a prompt or completion says: a text itself, messages' contents, and JSON for what is neither."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        parts = [part.get("content", part.get("text")) for part in value]
        if all(isinstance(part, str) for part in parts):
            return "\n".join(parts)
    try:
        return "" if value is None else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "(nested too deep to be shown)"
