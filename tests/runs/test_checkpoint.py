"""Run folders and checkpoints: whole or not there, found again, rotated, resumable."""

import json

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from cukit.models.weights import load_model
from cukit.runs.checkpoint import (
    checkpoint_folder,
    find_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    rotate_checkpoints,
    save_checkpoint,
)
from cukit.runs.folder import open_run_folder, write_run_config


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
    with pytest.raises(ValueError, match="neither a checkpoint nor a run folder"):
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


def test_a_run_folder_is_fresh_or_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [str(open_run_folder(None, "grpo tiny/x")) for _ in range(2)] == [
        "runs/grpo-tiny-x-001",
        "runs/grpo-tiny-x-002",
    ]
    named = open_run_folder("mine", "grpo")
    write_run_config(named, {"learning_rate": 1e-4, "reward_funcs": ["gsm8k"]})
    assert yaml.safe_load((named / "config.yaml").read_text()) == {"learning_rate": 1e-4, "reward_funcs": ["gsm8k"]}
    with pytest.raises(ValueError, match="already holds a run"):
        open_run_folder("mine", "grpo")
    assert open_run_folder("mine", "grpo", resume=True) == named
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        open_run_folder("file", "grpo")
