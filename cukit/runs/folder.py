"""A run folder on disk: config.yaml, metrics.jsonl, completions.jsonl, run.json, checkpoint-N/; the final model and the
report at its top.
"""

import logging
import os
import re
from pathlib import Path

import yaml

from .checkpoint import has_model, latest_checkpoint, list_checkpoints
from .files import free_name, write_text
from .metrics import last_logged_step
from .record import RECORD

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)


def open_run_folder(output_dir: str | os.PathLike | None, label: str, resume: bool = False) -> Path:
    """Make and return the run folder.

    Without `output_dir` a fresh one: runs/<label>-001, -002, ... Raises ValueError if `output_dir` cannot be made, or
    holds another run (a step or a checkpoint) or a model and this run does not resume it.
    """
    folder = Path("runs" if output_dir is None else output_dir)
    try:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"output_dir {folder} is a file; give a folder")
        if output_dir is None:
            return _fresh_run_folder(folder, label)
        if not resume and folder.is_dir():
            _check_free(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output_dir {folder} cannot be made: {_reason(error, folder)}") from error
    return folder


def _reason(error: OSError, folder: Path) -> str:
    """The system's reason, or the file that stands where a folder must."""
    above = next((path for path in folder.parents if path.exists()), None)
    return f"{above} is a file" if above is not None and not above.is_dir() else str(error.strerror or error)


def _fresh_run_folder(base: Path, label: str) -> Path:
    base.mkdir(exist_ok=True)
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "run"
    taken = [
        int(match[1]) for path in base.iterdir() if (match := re.fullmatch(re.escape(label) + r"-(\d+)", path.name))
    ]
    number = max(taken, default=0) + 1
    while True:
        folder = base / f"{label}-{number:03d}"
        try:
            folder.mkdir()  # fails if another run took the number meanwhile
            return folder
        except FileExistsError:
            number += 1


def _check_free(folder: Path) -> None:
    """Refuse a folder with something to protect; only advice that works is given."""
    steps = last_logged_step(folder)
    if list_checkpoints(folder) or steps > 0:
        way_out = (
            "continue that run with --resume_from_checkpoint latest"
            if latest_checkpoint(folder)
            else f"delete it (it logged {steps} steps and has no checkpoint to continue from)"
        )
        raise ValueError(f"output_dir {folder} already holds a run; choose another folder, or {way_out}")
    if has_model(folder):
        raise ValueError(
            f"output_dir {folder} holds a model, which the run's final model would replace; choose another folder"
        )


def leave_run_folder(folder: Path) -> None:
    """Remove the folder of a run that ended before it had anything to keep, so that nothing is claimed."""
    about = {"config.yaml", RECORD}
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= about:
        for name in about:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


# ---- config.yaml -----------------------------------------------------------------------------------------------------


def write_run_config(folder: str | os.PathLike, config: dict, resume_step: int | None = None) -> None:
    """Write the resolved configuration to config.yaml, readable by --config.

    config.yaml says what runs now. A run resumed at `resume_step` with other options keeps the former file as
    config.step-N.yaml, the options up to step N, and a line says which are others.
    """
    path = Path(folder) / "config.yaml"
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    if resume_step is not None and path.is_file():
        before = path.read_text(encoding="utf-8")
        if before == text:
            return
        old, new = _without_place(before), _without_place(text)
        if old != new:
            kept = free_name(path.with_name(f"config.step-{resume_step}.yaml"))
            os.replace(path, kept)
            logger.info("other options from here on, the former ones are in %s: %s", kept.name, _changes(old, new))
    write_text(path, text)


def _without_place(text: str):
    """The options of a config.yaml but for output_dir, which changes when a folder is moved."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return {name: value for name, value in config.items() if name != "output_dir"} if isinstance(config, dict) else None


def _changes(old: dict | None, new: dict | None) -> str:
    """`name old -> new` of each option that differs, in characters that a terminal may get. None: it is not in the
    file.
    """
    before, now = old or {}, new or {}
    pairs = ((repr(str(name))[1:-1], before.get(name), now.get(name)) for name in before | now)
    return ", ".join(f"{name} {a!r:.60} -> {b!r:.60}" for name, a, b in pairs if a != b)


# ---- one run a folder ------------------------------------------------------------------------------------------------


class RunLock:
    """One run at a time in a folder: .lock holds the process id of the run.

    The lock itself is the system's, and is freed however the process ends: the file of a killed run
    locks nothing. Where the file system knows no locks, nothing is locked.
    """

    def __init__(self, folder: Path):
        self.path = folder / ".lock"
        self._descriptor = None
        while self._descriptor is None:
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise ValueError(f"output_dir {folder} cannot be written to: {error.strerror}") from error
            if not _lock(descriptor):
                owner = os.read(descriptor, 32).decode("ascii", "replace").strip()
                os.close(descriptor)
                raise ValueError(
                    f"output_dir {folder} is in use by another run (process {owner or 'unknown'}); "
                    "wait for it, or choose another folder"
                )
            if self._is_current(descriptor):
                self._descriptor = descriptor
            else:  # its owner ended and deleted it between open and lock
                os.close(descriptor)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._descriptor is not None:
            if fcntl is not None:
                self.path.unlink(missing_ok=True)  # before the lock is given up: afterwards it may be another run's
            os.close(self._descriptor)
            self._descriptor = None
            if fcntl is None:
                self._unlink_closed()

    def _unlink_closed(self) -> None:
        """Windows deletes no open file."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError:  # another run has opened it meanwhile
            logger.debug("%s was taken by another run", self.path)


def _lock(descriptor: int) -> bool:
    """Whether the lock is ours now (or the file system has none)."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # a byte beyond the file, so that others can read the file
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
    except BlockingIOError:
        return False
    except OSError:
        return fcntl is not None  # Windows reports a lock that is held as OSError
    return True
