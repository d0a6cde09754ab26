"""The curves of a report: which metrics have one, how long series are thinned, phase times, and plain SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from .read import RunFolder

MAX_POINTS = 1000  # of a curve
MAX_PHASE_POINTS = 200
STATIC_POINTS = 200  # of a curve for readers without JavaScript
DIGITS = 6  # of a value in the page


@dataclass(frozen=True)
class Chart:
    """A curve and the metrics it may show: the first that any run has."""

    title: str
    about: str
    metrics: tuple[str, ...]


CHARTS = (
    Chart("Held-out accuracy", "share of held-out rows that are right", ("eval/accuracy",)),
    Chart("Reward", "mean over the batch", ("reward",)),
    Chart("Loss", "of the training batch", ("loss",)),
    Chart("Held-out loss", "", ("eval/loss",)),
    Chart("Token accuracy", "share of tokens that are the most probable one", ("mean_token_accuracy",)),
    Chart("Pair accuracy", "share of training pairs with the chosen answer ahead", ("accuracy",)),
    Chart("Margin", "chosen minus rejected score, mean", ("margin",)),
    Chart("KL divergence", "to the reference model, a token", ("kl",)),
    Chart("KL of a completion", "to the reference model, of the sampler, nats", ("objective/kl",)),
    Chart("Value loss", "of the critic", ("loss/value_avg",)),
    Chart("Explained variance", "share of the returns' that the critic explains", ("critic/explained_variance",)),
    Chart("Clipped values", "share of tokens whose value loss is the clipped one", ("val/clipfrac_avg",)),
    Chart("Entropy", "of the next-token distribution, nats", ("entropy",)),
    Chart("Completion length", "mean, tokens", ("completions/mean_length",)),
    Chart("Cut-off completions", "share that did not end by itself", ("completions/clipped_ratio",)),
    Chart(
        "Clip ratio",
        "share of tokens without gradient by the clip",
        ("clip_ratio/region_mean", "cispo_clip_ratio", "policy/clipfrac_avg"),
    ),
    Chart("Gradient norm", "before clipping", ("grad_norm",)),
    Chart("Learning rate", "", ("learning_rate",)),
    Chart(
        "Sampling and training",
        "mean difference of a token's log-probs",
        ("sampling/sampling_logp_difference/mean",),
    ),
    Chart("Speed", "tokens a second", ("tokens_per_second",)),
)
ELAPSED = "elapsed seconds"


def charts_of(runs: list[RunFolder]) -> list[dict]:
    """The charts that these runs have something for, each with its metric."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    memory = [name for name in names if "memory" in name]
    charts = [*CHARTS, *(Chart("Memory", name, (name,)) for name in memory[:2])]
    found = []
    for chart in charts:
        metric = next((name for name in chart.metrics if name in names), None)
        if metric is not None:
            found.append({"title": chart.title, "about": chart.about, "metric": metric})
    return found


def series(run: RunFolder) -> dict:
    """{"axes": [steps, …], "metrics": [[name, place of its axis, values], …]} of a run, thinned, for JSON."""
    axes: list[list[int]] = []
    places: dict[bytes, int] = {}
    metrics = []
    for name, (steps, values) in {**run.metrics, **_elapsed(run)}.items():
        chosen_steps, chosen = thinned(steps, values, MAX_POINTS)
        key = chosen_steps.tobytes()
        if key not in places:
            places[key] = len(axes)
            axes.append(chosen_steps.astype(int).tolist())
        metrics.append([name, places[key], [_rounded(value) for value in chosen.tolist()]])
    return {"axes": axes, "metrics": metrics}


def thinned(steps: np.ndarray, values: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """About `limit` points: the first, the last, and the least and greatest of each stretch, so that peaks stay."""
    count = len(values)
    if count <= limit:
        return steps, values
    size = math.ceil(count / ((limit - 2) // 2))
    stretches = math.ceil(count / size)
    padded = np.full(stretches * size, np.nan)
    padded[:count] = values
    table = padded.reshape(stretches, size)
    starts = np.arange(stretches) * size
    finite = np.isfinite(table)
    lowest = starts + np.where(finite, table, np.inf).argmin(axis=1)
    highest = starts + np.where(finite, table, -np.inf).argmax(axis=1)
    chosen = np.unique(np.concatenate([lowest, highest, [0, count - 1]]))
    return steps[chosen], values[chosen]


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{DIGITS}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _elapsed(run: RunFolder) -> dict:
    """Seconds of training up to each logged step: a row's step_time is the mean of the steps since the row before."""
    if "step_time" not in run.metrics or ELAPSED in run.metrics:
        return {}
    steps, times = run.metrics["step_time"]
    return {ELAPSED: (steps, np.cumsum(np.nan_to_num(times) * np.diff(steps, prepend=0)))}


def phases(run: RunFolder) -> dict | None:
    """{"steps", "names", "values": one list a name}: mean seconds a step, with what no phase counts as "other"."""
    named = {name: pair for name, pair in run.metrics.items() if name.startswith("time/")}
    if "step_time" not in run.metrics or not named:
        return None
    steps, whole = run.metrics["step_time"]
    columns = {}
    for name, (at, values) in named.items():
        known = dict(zip(at.tolist(), values.tolist()))
        columns[name.removeprefix("time/")] = np.nan_to_num([known.get(step, 0.0) for step in steps.tolist()])
    columns["other"] = np.maximum(np.nan_to_num(whole) - sum(columns.values()), 0)
    size = math.ceil(len(steps) / MAX_PHASE_POINTS)
    starts = np.arange(0, len(steps), size)
    counts = np.diff(np.append(starts, len(steps)))
    values = [[_rounded(x) for x in (np.add.reduceat(column, starts) / counts).tolist()] for column in columns.values()]
    ends = np.append(starts[1:], len(steps)) - 1
    return {"steps": steps[ends].astype(int).tolist(), "names": list(columns), "values": values}


# ---- without JavaScript ----------------------------------------------------------------------------------------------


def static_charts(runs: list[RunFolder], charts: list[dict]) -> str:
    return "".join(_static_chart(runs, chart) for chart in charts)


def _static_chart(runs: list[RunFolder], chart: dict) -> str:
    found = {place: run.metrics[chart["metric"]] for place, run in enumerate(runs) if chart["metric"] in run.metrics}
    curves = {place: thinned(steps, values, STATIC_POINTS) for place, (steps, values) in found.items()}
    lasts, lows, highs = zip(*((x[-1], np.nanmin(y), np.nanmax(y)) for x, y in curves.values()))
    last, low, high = max(max(lasts), 1), min(lows), max(highs)
    room = high - low or abs(high) or 1
    lines = ""
    for place, (x, y) in curves.items():
        points = np.stack([52 + x / last * 340, 150 - (y - low) / room * 136], axis=1)
        for piece in _pieces(points):
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (piece if len(piece) > 1 else [*piece, *piece]))
            lines += f'<polyline class="line c{place % 8}" points="{path}"/>'
    labels = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
        for x, y, anchor, text in (
            (46, 18, "end", short(high)),
            (46, 154, "end", short(low)),
            (52, 172, "start", "0"),
            (392, 172, "end", f"step {short(last)}"),
        )
    )
    axes = '<path class="axis" d="M52 14V150H392"/>'
    title = escape(chart["title"])
    return (
        f'<figure class="chart"><figcaption><b>{title}</b><span class="about">{escape(chart["about"])}</span>'
        f'</figcaption><svg viewBox="0 0 400 180" role="img" aria-label="{title}">{axes}{lines}{labels}</svg></figure>'
    )


def _pieces(points: np.ndarray) -> list[np.ndarray]:
    """The stretches between values that are not finite."""
    gaps = np.flatnonzero(~np.isfinite(points[:, 1]))
    borders = [-1, *gaps.tolist(), len(points)]
    return [points[a + 1 : b] for a, b in pairwise(borders) if b - a > 1]


def short(value: float | None, digits: int = 4) -> str:
    """A number in few characters: 0.979, 2.6e-07, 12,345, 1.23 M."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.3g}"
    for limit, letter in ((1e9, "G"), (1e6, "M")):
        if size >= limit:
            return f"{value / limit:.3g}\N{NO-BREAK SPACE}{letter}"
    return f"{value:,.0f}" if size >= 1e4 else f"{value:.{digits}g}"
