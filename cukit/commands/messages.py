"""What the library logs, shown on stderr."""

import logging
import sys


class LogHandler(logging.Handler):
    """Log lines as a command line shows them: a warning begins with "warning: "."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.WARNING and not text.lower().startswith("warning"):
            text = f"{record.levelname.lower()}: {text}"
        print(text, file=sys.stderr, flush=True)  # today's stderr, which tests and displays replace


def show_log_lines(level: int = logging.INFO) -> None:
    """Show what cukit logs from `level` on; a second call changes nothing but the level."""
    logger = logging.getLogger("cukit")
    if not any(isinstance(handler, LogHandler) for handler in logger.handlers):
        logger.addHandler(LogHandler())
    logger.setLevel(level)
