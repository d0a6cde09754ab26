"""A run folder on disk: config.yaml, metrics.jsonl, completions.jsonl, checkpoint-N/.

A checkpoint is a Hugging Face model folder (config.json, safetensors, tokenizer files) plus the trainer's state as
trainer_state.safetensors (arrays) and trainer_state.json (RNG, data position, counters). It is written under a
temporary name and then renamed, so that a folder named checkpoint-N is always whole. No pickle.
"""

import json
import os
import re
import shutil
from pathlib import Path

import yaml
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from .backend import backend_of

STATE_ARRAYS, STATE_JSON = "trainer_state.safetensors", "trainer_state.json"
_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


# ---- run folders -----------------------------------------------------------------------------------------------------


def open_run_folder(output_dir: str | os.PathLike | None, label: str, resume: bool = False) -> Path:
    """Make and return the run folder.

    Without `output_dir` a fresh one: runs/<label>-001, -002, ... Raises ValueError if `output_dir` holds another run
    and this one does not resume it.
    """
    if output_dir is None:
        return _fresh_run_folder(label)
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir {folder} is a file; give a folder")
    if not resume and folder.is_dir() and _holds_run(folder):
        raise ValueError(
            f"output_dir {folder} already holds a run; choose another folder, or continue that run with "
            f"--resume_from_checkpoint latest"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fresh_run_folder(label: str) -> Path:
    base = Path("runs")
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


def _holds_run(folder: Path) -> bool:
    return any(
        path.name in ("config.yaml", "metrics.jsonl") or _CHECKPOINT_NAME.fullmatch(path.name)
        for path in folder.iterdir()
    )


def write_run_config(folder: str | os.PathLike, config: dict) -> None:
    """Write the resolved configuration to config.yaml, readable by --config."""
    write_text(Path(folder) / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint_folder(run: str | os.PathLike, step: int) -> Path:
    return Path(run) / f"checkpoint-{step}"


def save_checkpoint(folder: str | os.PathLike, model, tokenizer, optimizer_state: dict, state: dict) -> Path:
    """Write model, tokenizer (None: no tokenizer) and trainer state to `folder`, replacing an older one of that name.

    optimizer_state: name -> array of any device. state: JSON values; everything that an exact resume needs and that is
    no array (step, RNG, data position).
    """
    from .models.weights import save_model  # late: this module's readers need no model

    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left_over in folder.parent.glob(".checkpoint-*.tmp-*"):  # of a run that was killed while it saved
        shutil.rmtree(left_over)
    temporary = folder.with_name(f".checkpoint-{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        save_model(model, temporary)
        if tokenizer is not None:
            tokenizer.save(temporary)
        arrays = {name: backend_of(array).to_numpy(array) for name, array in optimizer_state.items()}
        save_file(arrays, temporary / STATE_ARRAYS)
        (temporary / STATE_ARRAYS).chmod(0o644)  # safetensors makes it readable by the owner alone
        (temporary / STATE_JSON).write_text(json.dumps(state, indent=1, default=_number) + "\n", encoding="utf-8")
        if folder.exists():  # renamed away first, so that no half-deleted folder ever bears the name
            replaced = folder.with_name(f".checkpoint-{folder.name}.tmp-old")
            os.rename(folder, replaced)
            os.rename(temporary, folder)
            shutil.rmtree(replaced)
        else:
            os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def load_checkpoint(folder: str | os.PathLike) -> tuple[dict, dict]:
    """-> (optimizer_state as NumPy arrays, state). Model and tokenizer load from the same folder as any model does."""
    folder = Path(folder)
    for name in (STATE_ARRAYS, STATE_JSON):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no checkpoint to resume from: it has no {name}")
    try:
        state = json.loads((folder / STATE_JSON).read_text(encoding="utf-8"))
        return load_file(folder / STATE_ARRAYS), state
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / STATE_JSON} is damaged: {error}") from error
    except SafetensorError as error:
        raise ValueError(f"{folder / STATE_ARRAYS} is damaged: {error}") from error


def list_checkpoints(run: str | os.PathLike) -> list[Path]:
    """The checkpoint folders of a run, oldest step first."""
    run = Path(run)
    found = []
    for path in run.iterdir() if run.is_dir() else ():
        match = _CHECKPOINT_NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def latest_checkpoint(run: str | os.PathLike) -> Path | None:
    """The checkpoint of the highest step, or None."""
    return next(reversed(list_checkpoints(run)), None)


def find_checkpoint(resume_from: str | os.PathLike | bool, run: str | os.PathLike | None) -> Path:
    """The folder that resume_from_checkpoint means: a checkpoint or run folder, or "latest" (or True) of `run`."""
    if resume_from is True or resume_from == "latest":
        if run is None:
            raise ValueError("resume_from_checkpoint=latest needs output_dir, the run folder to continue")
        resume_from = run
    folder = Path(resume_from)
    if (folder / STATE_JSON).is_file():
        return folder
    found = latest_checkpoint(folder)
    if found is None:
        raise ValueError(
            f"resume_from_checkpoint: {folder} is neither a checkpoint nor a run folder with checkpoint-N in it"
        )
    return found


def rotate_checkpoints(run: str | os.PathLike, save_total_limit: int | None) -> list[Path]:
    """Delete the oldest checkpoints beyond the limit (None: keep all); returns what was deleted."""
    surplus = [] if save_total_limit is None else list_checkpoints(run)[:-save_total_limit]
    for path in surplus:
        shutil.rmtree(path)
    return surplus


def _number(value):
    """NumPy scalars and arrays in the JSON state."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"trainer state holds a {type(value).__name__}, which JSON cannot; keep arrays in optimizer_state")
