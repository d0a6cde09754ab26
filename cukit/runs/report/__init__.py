"""The report: one HTML file that shows one run or several, without any other file and without the network."""

from .page import REPORT, write_report, write_report_at_end

__all__ = ["REPORT", "write_report", "write_report_at_end"]
