"""run.json of a run folder: each start of the run, with its command line, versions, device, times and how it ended."""

import json
import logging
import os
import platform
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from .. import __version__
from ..backend import cuda_versions
from .files import write_text

RECORD = "run.json"

logger = logging.getLogger(__name__)


class RunRecord:
    """Writes run.json: {"starts": [a start, …]}. A resumed run adds its start to those of before.

    A start that was killed has no "ended", "seconds", "status" and "last_step". A file that cannot be written is a
    warning and no error: a run does not depend on it.
    """

    def __init__(self, folder: Path, goes_on: bool):
        self.path = folder / RECORD
        self.starts = read_starts(self.path) if goes_on else []
        self._began = time.monotonic()

    def begin(self, step: int, facts: dict) -> None:
        """A start at `step` finished steps. facts: JSON values about the run (method, model, device, …)."""
        self.starts.append({"started": _now(), "command": list(sys.argv), "first_step": step} | facts)
        self._write()

    def end(self, status: str, step: int) -> None:
        """The start that began last has ended after `step` steps. status: "finished", "stopped" or "error: …"."""
        seconds = round(time.monotonic() - self._began, 3)
        self.starts[-1] |= {"ended": _now(), "seconds": seconds, "status": status, "last_step": step}
        self._write()

    def _write(self) -> None:
        try:
            write_text(self.path, json.dumps({"starts": self.starts}, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.path, error.strerror or error)


def read_starts(path: str | os.PathLike) -> list[dict]:
    """The starts that a run.json holds; [] without one, and with a warning for one that is damaged."""
    try:
        starts = json.loads(Path(path).read_text(encoding="utf-8"))["starts"]
        return [start for start in starts if isinstance(start, dict)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s is damaged and is left out: %s", path, " ".join(str(error).split()))
        return []


def check_method(run: str | os.PathLike, method: str) -> None:
    """ValueError if run.json says that another method made this run folder; one that says nothing passes."""
    try:
        made = json.loads((Path(run) / RECORD).read_text(encoding="utf-8"))["starts"][-1]["method"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return
    if made != method:
        place = shlex.quote(str(run))
        # a reward model's head is no language model's
        new = "" if made == "reward" else f"; a new run with its model: cukit {method} --model {place}"
        raise ValueError(
            f"resume_from_checkpoint: {run} was made by {made}, not {method}; to go on with it: cukit {made} "
            f"--resume_from_checkpoint {place}{new}"
        )


def machine(backend) -> dict:
    """{"device": its name and memory, "versions": {library: version}} of the machine that a run uses."""
    versions = {"cukit": __version__, "Python": platform.python_version(), "NumPy": np.__version__}
    if backend.name == "cuda":
        versions |= cuda_versions()
    _, total = backend.memory_info()
    return {
        "device": f"{backend.device_name()}, {total / 2**30:.0f} GiB",
        "versions": versions | {"system": platform.platform()},
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
