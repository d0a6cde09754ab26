"""report: one HTML page about one run or several."""

from typing import Any

from ..options import Options, option
from .parser import make


class ReportOptions(Options):
    group = "files"
    runs: list[str] | None = option(None, "run folders; several are drawn over one another")
    output: str | None = option(
        None, "the file to write; default: report.html, in the run folder or, for several runs, here"
    )


def report(values: dict[str, Any]) -> None:
    from ..runs.report import write_report

    options = make(ReportOptions, values)
    print(f"report: {write_report(options.runs or [], options.output)}")
