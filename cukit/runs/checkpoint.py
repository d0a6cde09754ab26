"""Checkpoints: a Hugging Face model folder plus the trainer's state.

The folder holds config.json, safetensors and tokenizer files (of a run with an adapter: the adapter's files in place of
the model's), and beside them trainer_state.safetensors (arrays) and
trainer_state.json (data position, counters). Further models of a run lie in subfolders. The folder is written under a
temporary name and then renamed, so that a folder named checkpoint-N is whole. No pickle.
"""

import json
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from ..backend import backend_of
from .files import free_name

if TYPE_CHECKING:
    from ..models.decoder import Decoder

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
STATE_ARRAYS, STATE_JSON = "trainer_state.safetensors", "trainer_state.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

logger = logging.getLogger(__name__)


class Saved(Protocol):
    """What writes its own files, as a tokenizer does."""

    def save(self, folder: str | os.PathLike) -> None: ...


class SaveError(OSError):
    """A model or checkpoint could not be written: one line with the path and the system's reason."""


# ---- write -----------------------------------------------------------------------------------------------------------


def checkpoint_folder(run: str | os.PathLike, step: int) -> Path:
    return Path(run) / f"checkpoint-{step}"


def save_checkpoint(
    folder: str | os.PathLike,
    model: "Decoder",
    tokenizer: Saved | None,
    arrays: dict,
    state: dict,
    others: "dict[str, Decoder] | None" = None,
) -> Path:
    """Write model, tokenizer (None: no tokenizer) and trainer state to `folder`, replacing an older one of that name.

    arrays: name -> array of any device. state: JSON values; everything that an exact resume needs and that is no array
    (step, data position). others: name -> a further model, written to the subfolder of that name. SaveError if a file
    cannot be written; then nothing of it stays.
    """
    from ..models.weights import save_model  # late: this module's readers need no model

    folder = Path(folder)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    replaced = folder.with_name(f".{folder.name}.tmp-replaced-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_overs(folder.parent)
        temporary.mkdir()
        save_model(model, temporary)
        for name, other in (others or {}).items():
            save_model(other, temporary / name)
        if tokenizer is not None:
            tokenizer.save(temporary)
        on_host = {name: backend_of(array).to_numpy(array) for name, array in arrays.items()}
        save_file(on_host, temporary / STATE_ARRAYS)
        (temporary / STATE_ARRAYS).chmod(0o644)  # safetensors makes it readable by the owner alone
        (temporary / STATE_JSON).write_text(json.dumps(state, indent=1, default=_number) + "\n", encoding="utf-8")
        _flush_to_disk(temporary)
        if folder.exists():  # both renames lie side by side: only a kill between them would leave no folder of the name
            os.rename(folder, replaced)
        os.rename(temporary, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise SaveError(f"{folder} could not be saved: {reason}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if replaced.exists() and not folder.exists():
            os.rename(replaced, folder)
        shutil.rmtree(replaced, ignore_errors=True)
    return folder


def _flush_to_disk(folder: Path) -> None:
    """Wait until every file is on the disk: some disks say only then that they are full, and a rename that reaches the
    disk before the files would name an empty checkpoint.
    """
    for path in (*folder.rglob("*"), folder):
        descriptor = None
        try:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
        except OSError:
            if not path.is_dir() and os.name == "posix":  # elsewhere folders, and files open for reading, have no fsync
                raise
        finally:
            if descriptor is not None:
                os.close(descriptor)


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint under another name, so that a half-deleted folder never bears its own."""
    removed = folder.with_name(f".{folder.name}.tmp-removed-{os.getpid()}")
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def _remove_left_overs(run: Path) -> None:
    """Delete what killed runs left half saved or half deleted."""
    for path in run.glob(".checkpoint-*.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def rotate_checkpoints(
    run: str | os.PathLike, save_total_limit: int | None, best_step: int | None = None
) -> list[Path]:
    """Delete the oldest checkpoints beyond the limit (None: keep all); returns what was deleted.

    The checkpoint of best_step stays, and is counted; the newest one stays beside it also under a limit of 1.
    """
    if save_total_limit is None:
        return []
    found = list_checkpoints(run)
    best = checkpoint_folder(run, best_step) if best_step is not None else None
    if best in found[:-1]:
        found.remove(best)
        save_total_limit = max(save_total_limit - 1, 1)
    surplus = found[:-save_total_limit]
    for path in surplus:
        remove_checkpoint(path)
    return surplus


def set_aside_later(run: str | os.PathLike, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, where a run goes on in another way: no later resume takes them."""
    moved = []
    for path in list_checkpoints(run):
        if int(path.name.removeprefix("checkpoint-")) > step:
            moved.append(free_name(path.with_name(f"{path.name}.before-{step}")))
            os.rename(path, moved[-1])
    return moved


def _number(value: object) -> Any:
    """NumPy scalars and arrays in the JSON state."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"trainer state holds a {type(value).__name__}, which JSON cannot; keep arrays in `arrays`")


# ---- find and read ---------------------------------------------------------------------------------------------------


def load_checkpoint(folder: str | os.PathLike) -> tuple[dict, dict]:
    """-> (arrays as NumPy arrays, state). Model and tokenizer load from the same folder as any model does."""
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


def stored_dtype(folder: str | os.PathLike) -> str:
    """The dtype's name of the first tensor of a model's files."""
    path = min(Path(folder).glob("*model*.safetensors"))
    with safe_open(path, "numpy") as file:
        kind = file.get_slice(min(file.keys())).get_dtype()
    return {"BF16": "bfloat16"}.get(kind, kind.replace("F", "float"))


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
    """The whole checkpoint of the highest step, or None. One that is not whole is passed over with a warning."""
    for path in reversed(list_checkpoints(run)):
        if (problem := why_not_whole(path)) is None:
            return path
        logger.warning("%s is not whole (%s) and is passed over", path, problem)
    return None


def why_not_whole(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder at first sight: a missing file, or one that a copy cut short."""
    config, weights = "config.json", WEIGHTS
    if (folder / ADAPTER_CONFIG).is_file() or (folder / ADAPTER_WEIGHTS).is_file():
        config, weights = ADAPTER_CONFIG, ADAPTER_WEIGHTS
    for name in (config, STATE_JSON, STATE_ARRAYS):
        if not (folder / name).is_file():
            return f"{name} is missing"
    if not has_model(folder):
        return f"{weights} is missing"
    cut = [path.name for path in sorted(folder.rglob("*.safetensors")) if not _has_its_length(path)]
    return f"{cut[0]} is cut short" if cut else None


def _has_its_length(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header: Any = json.loads(file.read(header_size)) if header_size <= size else None
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False
    return size == 8 + header_size + max(ends, default=0)


def find_checkpoint(resume_from: str | os.PathLike | Literal[True], run: str | os.PathLike | None) -> Path:
    """The folder that resume_from_checkpoint means: a checkpoint or run folder, or "latest" (or True) of `run`."""
    if resume_from is True or resume_from == "latest":
        if run is None:
            raise ValueError("resume_from_checkpoint=latest needs output_dir, the run folder to continue")
        resume_from = run
    folder = Path(os.path.expanduser(resume_from))
    if (folder / STATE_JSON).is_file():
        return folder
    found = latest_checkpoint(folder)
    if found is None:
        raise ValueError(
            f"resume_from_checkpoint: {folder} is neither a checkpoint nor a run folder with a whole checkpoint-N in it"
            "; leave the option out to begin a new run"
        )
    return found


# ---- the final model -------------------------------------------------------------------------------------------------


def has_model(folder: str | os.PathLike) -> bool:
    """Whether a folder is a model folder: config.json and weights, or an adapter's."""
    folder = Path(folder)
    if (folder / ADAPTER_CONFIG).is_file() and (folder / ADAPTER_WEIGHTS).is_file():
        return True
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX))


def newest_model(folder: str | os.PathLike) -> Path | None:
    """The model folder that `folder` stands for: itself, or the newest whole checkpoint of a run that has not ended.

    None if it is neither a model nor a run folder with a checkpoint.
    """
    return Path(folder) if has_model(folder) else latest_checkpoint(folder)


def publish_model(checkpoint: Path, run: Path) -> None:
    """Put a checkpoint's model at the top of its run folder, so that the run folder is a model folder.

    Files are hard links to the checkpoint's where the file system can, copies elsewhere; config.json (an adapter's:
    adapter_config.json) comes last, and without it the folder is no model. SaveError if a file cannot be written.
    """
    files = [path for path in checkpoint.iterdir() if path.is_file() and path.name not in (STATE_ARRAYS, STATE_JSON)]
    for path in sorted(files, key=lambda path: path.name in ("config.json", ADAPTER_CONFIG)):
        temporary = run / f".{path.name}.tmp-{os.getpid()}"
        try:
            temporary.unlink(missing_ok=True)
            try:
                os.link(path, temporary)
            except OSError:
                shutil.copyfile(path, temporary)
            os.replace(temporary, run / path.name)
        except OSError as error:
            raise SaveError(f"the final model could not be saved to {run}: {error.strerror}") from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)  # a rename between two links to one file leaves both


def withdraw_model(run: Path) -> None:
    """Take the final model away from the top of a run that goes on: until it ends, its newest model is a checkpoint."""
    own = ("config.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS, WEIGHTS_INDEX)
    for name in (*own, *(path.name for path in sorted(run.glob("model*.safetensors")))):
        (run / name).unlink(missing_ok=True)
