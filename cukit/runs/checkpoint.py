"""Checkpoints: a Hugging Face model folder plus the trainer's state.

The folder holds config.json, safetensors and tokenizer files, and beside them trainer_state.safetensors (arrays) and
trainer_state.json (RNG, data position, counters). It is written under a temporary name and then renamed, so that a
folder named checkpoint-N is always whole. No pickle.
"""

import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ..backend import backend_of
from .folder import CHECKPOINT_NAME

STATE_ARRAYS, STATE_JSON = "trainer_state.safetensors", "trainer_state.json"


def checkpoint_folder(run: str | os.PathLike, step: int) -> Path:
    return Path(run) / f"checkpoint-{step}"


def save_checkpoint(folder: str | os.PathLike, model, tokenizer, optimizer_state: dict, state: dict) -> Path:
    """Write model, tokenizer (None: no tokenizer) and trainer state to `folder`, replacing an older one of that name.

    optimizer_state: name -> array of any device. state: JSON values; everything that an exact resume needs and that is
    no array (step, RNG, data position).
    """
    from ..models.weights import save_model  # late: this module's readers need no model

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
        match = CHECKPOINT_NAME.fullmatch(path.name)
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
