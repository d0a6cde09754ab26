"""A report of measurements: where they were made, and their rows. Printed as a table, written as JSON."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

from .. import __version__
from .subject import Subject

# benchmark -> (key of a row, heading, format)
COLUMNS = {
    "kernels": (
        ("name", "function", "{}"),
        ("shape", "shape", "{}"),
        ("microseconds", "µs", "{:,.1f}"),
        ("host_microseconds", "host µs", "{:,.1f}"),
        ("gb_per_s", "GB/s", "{:,.1f}"),
        ("tflop_per_s", "TFLOP/s", "{:,.2f}"),
        ("share_of_limit", "of limit", "{:.1%}"),
        ("limit", "limit", "{}"),
        ("note", "", "{}"),
    ),
    "generate": (
        ("workload", "workload", "{}"),
        ("requests", "requests", "{:,}"),
        ("samples", "samples", "{:,}"),
        ("prompt_tokens", "prompt tokens", "{:,}"),
        ("output_tokens", "output tokens", "{:,}"),
        ("seconds", "s", "{:,.3f}"),
        ("output_tokens_per_s", "output tok/s", "{:,.0f}"),
        ("ms_per_token", "ms per token", "{:,.3f}"),
        ("steps", "steps", "{:,}"),
        ("preemptions", "preemptions", "{:,}"),
    ),
    "train": (
        ("pass", "pass", "{}"),
        ("gradient_checkpointing", "recompute", "{}"),
        ("tokens", "tokens", "{:,}"),
        ("completion_tokens", "of them in the loss", "{:,}"),
        ("seconds", "s", "{:,.3f}"),
        ("tokens_per_s", "tok/s", "{:,.0f}"),
        ("peak_gb", "peak GB allocated", "{:,.2f}"),
        ("driver_gb", "by the driver", "{:,.2f}"),
        ("note", "", "{}"),
    ),
    "grpo": (
        ("samples", "completions", "{:,}"),
        ("tokens", "tokens", "{:,}"),
        ("seconds", "s", "{:,.3f}"),
        ("generate_seconds", "generate", "{:,.3f}"),
        ("reward_seconds", "reward", "{:,.3f}"),
        ("reference_seconds", "reference", "{:,.3f}"),
        ("train_seconds", "train", "{:,.3f}"),
        ("wait_seconds", "wait", "{:,.3f}"),
        ("weights_seconds", "weights sent", "{:,.3f}"),
        ("other_seconds", "other", "{:,.3f}"),
        ("largest_difference", "log-prob difference", "{:g}"),
        ("peak_gb", "peak GB allocated", "{:,.2f}"),
        ("driver_gb", "by the driver", "{:,.2f}"),
    ),
    "ppo": (
        ("critic", "critic", "{}"),
        ("gradient_checkpointing", "recompute", "{}"),
        ("tokens", "tokens", "{:,}"),
        ("completion_tokens", "of them learnt", "{:,}"),
        ("micro_batches", "passes", "{:,}"),
        ("seconds", "s", "{:,.3f}"),
        ("least_seconds", "least", "{:,.3f}"),
        ("most_seconds", "most", "{:,.3f}"),
        ("tokens_per_s", "tok/s", "{:,.0f}"),
        ("peak_gb", "peak GB", "{:,.2f}"),
        ("note", "", "{}"),
    ),
    "scale": (
        ("gpus", "GPUs", "{:,}"),
        ("prompts", "prompts", "{:,}"),
        ("rollout_mean_seconds", "rollout, mean", "{:,.2f}"),
        ("rollout_seconds", "slowest", "{:,.2f}"),
        ("train_seconds", "train", "{:,.2f}"),
        ("exposed_seconds", "waits for links", "{:,.3f}"),
        ("update_seconds", "update", "{:,.4f}"),
        ("seconds", "step s", "{:,.2f}"),
        ("tokens_per_s", "tok/s", "{:,.0f}"),
        ("efficiency", "of N x one GPU", "{:.0%}"),
        ("nvlink_gb", "GB sent a GPU: NVLink", "{:,.2f}"),
        ("network_gb", "network", "{:,.2f}"),
        ("state_gb", "GB of weights, states", "{:,.1f}"),
        ("note", "", "{}"),
    ),
}

# columns of a table of rows that have them: of bench grpo with processes that are apart
AT_TIMES = ("wait_seconds", "weights_seconds")


def new_report(benchmark: str, subject: Subject, options) -> dict:
    """A report without rows."""
    return origin(benchmark) | {
        "device": subject.backend.name,
        "device_name": subject.backend.device_name(),
        "dtype": subject.dtype.name,
        "model": subject.name,
        "weights": subject.weights,
        "inputs": "random",
        "options": asdict(options),
        "rows": [],
    }


def origin(benchmark: str) -> dict:
    """Which code a report comes from."""
    commit, changed = _commit()
    return {"benchmark": benchmark, "version": __version__, "commit": commit, "uncommitted_changes": changed}


def _commit() -> tuple[str | None, bool | None]:
    """(commit of the checkout that this file lies in, whether files differ from it); (None, None) for an installed
    package.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # a folder above may be someone else's repository
        return None, None
    try:
        commit, status = (
            subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, bool(status)


def cells(benchmark: str, row: dict) -> list[str]:
    """A row as the table shows it."""
    return [_cell(row[key], form) for key, _, form in columns(benchmark, [row])]


def columns(benchmark: str, rows: list[dict]) -> list[tuple[str, str, str]]:
    """Those of the table of these rows."""
    return [one for one in COLUMNS[benchmark] if one[0] not in AT_TIMES or any(one[0] in row for row in rows)]


def _cell(value, form: str) -> str:
    if value is None:
        return "–"
    return ("yes" if value else "no") if isinstance(value, bool) else form.format(value)


def headline(report: dict) -> str:
    """Where the numbers come from, in one line."""
    commit = (report["commit"] or "unknown")[:12] + (" with changes" if report["uncommitted_changes"] else "")
    if about := report.get("about"):
        return f"bench {report['benchmark']}: {about}, cukit {report['version']}, commit {commit}"
    if report["weights"] == "random":
        model = f"{report['model']}'s shape with RANDOM weights"
    else:
        model = f"weights of {report['weights']}"
    lora = report["options"].get("lora") or {}
    if lora.get("use_peft"):
        where = ", base on the host" if lora.get("lora_base_on_host") else ""
        model += f" and an adapter ({lora['lora_way']}, rank {lora['lora_r']}{where})"
    return (
        f"bench {report['benchmark']}: {model}, random inputs, {report['dtype']}, {report['device']} "
        f"({report['device_name']}), "
        f"cukit {report['version']}, commit {commit}"
    )


def print_report(report: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no edge to wrap at
    console.print(headline(report))
    if limits := report.get("limits"):
        console.print(
            f"limits, measured here: copy {limits['copy_gb_per_s']:,.0f} GB/s read and written, "
            f"square product {limits['product_tflop_per_s']:,.2f} TFLOP/s"
        )
    table = Table()
    for key, heading, _ in columns(report["benchmark"], report["rows"]):
        numeric = any(isinstance(row[key], (int, float)) and not isinstance(row[key], bool) for row in report["rows"])
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in report["rows"]:
        table.add_row(*cells(report["benchmark"], row))
    console.print(table)


def write_report(report: dict, path: str) -> None:
    """JSON, under a temporary name first."""
    temporary = Path(f"{path}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
