"""Checkpoints: whole or not there, found again, rotated, resumable; the final model."""

import errno
import json
import os

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from cukit.models.weights import load_model
from cukit.runs import checkpoint
from cukit.runs.checkpoint import (
    SaveError,
    checkpoint_folder,
    find_checkpoint,
    has_model,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_model,
    publish_model,
    rotate_checkpoints,
    save_checkpoint,
    why_not_whole,
    withdraw_model,
)


@pytest.fixture
def model(golden):
    return load_model(golden / "qwen3_tiny", device="cpu")


def test_checkpoint_is_a_model_folder_and_the_state(tmp_path, golden, model, rng):
    arrays = {"adam.m": rng.standard_normal((3, 4)).astype(np.float32), "adam.step": np.array(7)}
    state = {"global_step": 3, "rng": rng.bit_generator.state, "place": np.int64(12)}
    folder = save_checkpoint(checkpoint_folder(tmp_path, 3), model, None, arrays, state)
    assert folder == tmp_path / "checkpoint-3"
    stored, original = (load_file(place / "model.safetensors") for place in (folder, golden / "qwen3_tiny"))
    assert stored.keys() == original.keys() and all(np.array_equal(stored[name], original[name]) for name in stored)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    read_arrays, read_state = load_checkpoint(folder)
    assert all(np.array_equal(read_arrays[name], arrays[name]) for name in arrays)
    again = np.random.default_rng()
    again.bit_generator.state = read_state["rng"]
    assert again.integers(1 << 62) == rng.integers(1 << 62)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_saving_again_replaces_and_clears_what_a_killed_run_left(tmp_path, model):
    (tmp_path / ".checkpoint-checkpoint-1.tmp-99").mkdir()
    for value in (1, 2):
        save_checkpoint(tmp_path / "checkpoint-1", model, None, {}, {"value": value})
    assert load_checkpoint(tmp_path / "checkpoint-1")[1] == {"value": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, model):
    save_checkpoint(tmp_path / "checkpoint-1", model, None, {}, {"value": 1})
    with pytest.raises(TypeError, match="object"):
        save_checkpoint(tmp_path / "checkpoint-1", model, None, {}, {"value": object()})
    assert load_checkpoint(tmp_path / "checkpoint-1")[1] == {"value": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_latest_is_by_number_and_rotation_drops_the_oldest(tmp_path, model):
    for step in (9, 100, 20):
        save_checkpoint(tmp_path / f"checkpoint-{step}", model, None, {}, {})
    (tmp_path / "checkpoint-best").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-100"
    assert rotate_checkpoints(tmp_path, None) == []
    assert rotate_checkpoints(tmp_path, 2) == [tmp_path / "checkpoint-9"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-20", "checkpoint-100"]
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_rotation_keeps_the_best(tmp_path, model):
    def rotate(steps, limit, best):
        for step in steps:
            save_checkpoint(tmp_path / f"checkpoint-{step}", model, None, {}, {})
        rotate_checkpoints(tmp_path, limit, best)
        return [int(path.name.partition("-")[2]) for path in list_checkpoints(tmp_path)]

    assert rotate((1, 2, 3, 4), 3, 2) == [2, 3, 4]
    assert rotate((5,), 3, 2) == [2, 4, 5]
    assert rotate((6,), 1, 2) == [2, 6]  # the newest stays beside it
    assert rotate((7,), 1, 7) == [7]
    assert rotate((8, 9), 2, 1) == [8, 9]  # a best that is not there takes no place
    assert rotate((), None, 8) == [8, 9]


def test_resume_from_checkpoint_may_be_a_checkpoint_a_run_or_latest(tmp_path, model):
    folder = save_checkpoint(tmp_path / "checkpoint-5", model, None, {}, {})
    assert (
        find_checkpoint(folder, None)
        == find_checkpoint(tmp_path, None)
        == find_checkpoint("latest", tmp_path)
        == folder
    )
    with pytest.raises(ValueError, match="output_dir"):
        find_checkpoint("latest", None)
    with pytest.raises(
        ValueError, match="neither a checkpoint nor a run folder.*; leave the option out to begin a new run$"
    ):
        find_checkpoint(tmp_path / "elsewhere", None)


def test_damaged_state_is_named(tmp_path, model):
    folder = save_checkpoint(tmp_path / "checkpoint-1", model, None, {"m": np.zeros(9)}, {})
    whole = (folder / "trainer_state.safetensors").read_bytes()
    (folder / "trainer_state.safetensors").write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=r"trainer_state\.safetensors is damaged"):
        load_checkpoint(folder)
    (folder / "trainer_state.safetensors").write_bytes(whole)
    (folder / "trainer_state.json").write_text("{")
    with pytest.raises(ValueError, match=r"trainer_state\.json is damaged"):
        load_checkpoint(folder)
    (folder / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"has no trainer_state\.json"):
        load_checkpoint(folder)


# ---- whole or not there ----------------------------------------------------------------------------------------------


def test_c8_a_checkpoint_that_is_partly_there_is_passed_over(tmp_path, model, caplog):
    """A file is missing or cut short (a copy that broke off): the one before is taken, and that is said."""
    before = save_checkpoint(tmp_path / "checkpoint-1", model, None, {"m": np.zeros(9)}, {})
    files = ("config.json", "model.safetensors", "trainer_state.json", "trainer_state.safetensors")
    for name in files:
        for cut in (0, 8, -1, None):
            folder = save_checkpoint(tmp_path / "checkpoint-2", model, None, {"m": np.zeros(9)}, {})
            assert why_not_whole(folder) is None
            whole = (folder / name).read_bytes()
            if cut is None:
                (folder / name).unlink()
            elif name.endswith(".json"):
                continue  # damage inside a text is found when it is read
            else:
                (folder / name).write_bytes(whole[:cut])
            caplog.clear()
            assert latest_checkpoint(tmp_path) == before == find_checkpoint("latest", tmp_path), (name, cut)
            assert name in caplog.text and "checkpoint-2 is not whole" in caplog.text
            assert newest_model(tmp_path) == before


def test_c8_a_save_that_fails_is_one_line_with_the_path(tmp_path, model, monkeypatch):
    """Whatever fails, wherever: nothing of it stays."""
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="file/checkpoint-1 could not be saved: "):
        save_checkpoint(tmp_path / "file" / "checkpoint-1", model, None, {}, {})
    for name in ("save_file", "_flush_to_disk"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, name, raising(OSError(errno.ENOSPC, "No space left on device")))
            with pytest.raises(SaveError, match="checkpoint-1 could not be saved: No space left on device$"):
                save_checkpoint(tmp_path / "checkpoint-1", model, None, {}, {})
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
    monkeypatch.setattr(checkpoint, "save_file", raising(SafetensorError("Error while serializing: I/O error\nx")))
    with pytest.raises(SaveError, match="could not be saved: Error while serializing: I/O error x"):
        save_checkpoint(tmp_path / "checkpoint-1", model, None, {}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_c8_a_checkpoint_that_cannot_be_replaced_stays(tmp_path, model, monkeypatch):
    save_checkpoint(tmp_path / "checkpoint-1", model, None, {}, {"value": 1})
    rename = os.rename
    left = iter([rename, raising(OSError(errno.EIO, "Input/output error"))])
    monkeypatch.setattr("os.rename", lambda *names: next(left, rename)(*names))
    with pytest.raises(SaveError, match="checkpoint-1 could not be saved: Input/output error"):
        save_checkpoint(tmp_path / "checkpoint-1", model, None, {}, {"value": 2})
    assert load_checkpoint(tmp_path / "checkpoint-1")[1] == {"value": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def raising(error):
    def function(*_, **__):
        raise error

    return function


def test_a_half_deleted_checkpoint_never_bears_its_name(tmp_path, model, monkeypatch):
    for step in (1, 2):
        save_checkpoint(tmp_path / f"checkpoint-{step}", model, None, {}, {})
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed at the beginning
    rotate_checkpoints(tmp_path, 1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]


# ---- the final model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("links", [True, False])
def test_c12_the_final_model_stands_at_the_top(tmp_path, model, monkeypatch, links):
    folder = save_checkpoint(tmp_path / "checkpoint-1", model, None, {}, {})
    if not links:
        monkeypatch.setattr("os.link", raising(OSError(errno.EPERM, "no links here")))
    assert newest_model(tmp_path) == folder and not has_model(tmp_path)
    for _ in range(2):
        publish_model(folder, tmp_path)
        names = ["checkpoint-1", "config.json", "model.safetensors"]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert newest_model(tmp_path) == tmp_path
    assert (tmp_path / "model.safetensors").samefile(folder / "model.safetensors") == links
    assert find_checkpoint(tmp_path, None) == folder  # a resume still finds the trainer's state
    withdraw_model(tmp_path)
    assert newest_model(tmp_path) == folder and [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert newest_model(tmp_path / "nothing") is None


def test_c12_a_final_model_is_whole_or_not_there(tmp_path, model, monkeypatch):
    """config.json comes last, and without it a folder is no model."""
    folder, replace = save_checkpoint(tmp_path / "checkpoint-1", model, None, {}, {}), os.replace
    (folder / "tokenizer.json").write_text("{}")

    def fails(source, target):
        if str(target).endswith("tokenizer.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(SaveError, match="the final model could not be saved to .*: No space left"):
        publish_model(folder, tmp_path)
    assert newest_model(tmp_path) == folder and not list(tmp_path.glob(".*"))
    assert not (tmp_path / "config.json").exists()
