"""Reading and writing Hugging Face checkpoints: every key accounted for, one line an error."""

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cukit.models.logprobs import token_logprobs
from cukit.models.weights import load_config, load_model, save_model

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = ("qwen3_tiny", "qwen2_tiny", "llama_tiny", "llama3_rope_tiny", "qwen3_tiny_bf16_sharded")


@pytest.fixture
def copy(tmp_path):
    """A writable copy of qwen3_tiny, and a function that rewrites its tensors."""
    folder = Path(shutil.copytree(GOLDEN / "qwen3_tiny", tmp_path / "model"))

    def rewrite(change):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return folder, rewrite


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_keeps_names_values_and_logprobs(name, dtype, tmp_path):
    model = load_model(GOLDEN / name, dtype=dtype)
    save_model(model, tmp_path)
    again = load_model(tmp_path, dtype=dtype)
    stored = load_file(tmp_path / "model.safetensors")
    original = [path for path in (GOLDEN / name).glob("*.safetensors")]
    assert stored.keys() == {key for path in original for key in load_file(path)}
    for key, value in model.parts().items():
        np.testing.assert_array_equal(value, again.parts()[key])
    ids = [[5, 9, 100, 7], [8]]
    for first, second in zip(token_logprobs(model, ids), token_logprobs(again, ids)):
        np.testing.assert_array_equal(first, second)
    assert load_config(tmp_path).torch_dtype == dtype
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen2_tiny", "llama_tiny", "llama3_rope_tiny"])
def test_both_styles_of_config_mean_the_same_model(name):
    hub, transformers5 = (
        json.loads((GOLDEN / name / file).read_text()) for file in ("config.json", "config_transformers5.json")
    )
    from cukit.models.config import ModelConfig

    assert ModelConfig.from_json(hub) == ModelConfig.from_json(transformers5)


def test_half_checkpoint_widens_exactly():
    narrow, wide = (load_model(GOLDEN / "qwen3_tiny_bf16_sharded", dtype=d) for d in ("bfloat16", "float32"))
    assert narrow.embed_tokens.weight.dtype == ml_dtypes.bfloat16
    for key, value in narrow.parts().items():
        np.testing.assert_array_equal(value.astype(np.float32), wide.parts()[key])


def test_every_wrong_key_is_named_in_one_error(copy):
    folder, rewrite = copy

    def change(tensors):
        tensors["model.layers.0.mlp.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
        tensors["model.norm.weight"] = np.ones(7, np.float32)

    rewrite(change)
    with pytest.raises(ValueError) as error:
        load_model(folder)
    for part in (
        "missing: model.layers.1.mlp.up_proj.weight",
        "unexpected: model.layers.0.mlp.extra.weight",
        "model.norm.weight has shape [7], config.json says [48]",
    ):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_stored_tied_head_must_equal_the_embedding(copy):
    folder, rewrite = copy
    before = load_model(folder)
    rewrite(
        lambda t: t.update(
            {
                "lm_head.weight": t["model.embed_tokens.weight"].copy(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
            }
        )
    )
    model = load_model(folder)
    np.testing.assert_array_equal(model.lm_head.weight.data, before.lm_head.weight.data)
    assert model.lm_head.weight is model.embed_tokens.weight
    rewrite(lambda t: t["lm_head.weight"].__setitem__((0, 0), 9))
    with pytest.raises(ValueError, match="lm_head.weight differs from the embedding"):
        load_model(folder)


def test_unreadable_folders_end_in_one_line(copy, tmp_path):
    folder, _ = copy
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ValueError, match="truncated or not safetensors"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="convert to safetensors"):
        load_model(folder)
    with pytest.raises(ValueError, match="does not exist|neither a folder"):
        load_model(tmp_path / "nowhere")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_model(folder)


@pytest.mark.parametrize("file", ["../qwen3_tiny/model.safetensors", "gone.safetensors"])
def test_an_index_cannot_leave_its_folder(tmp_path, file):
    folder = Path(shutil.copytree(GOLDEN / "qwen3_tiny_bf16_sharded", tmp_path / "model"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="not a file of this folder"):
        load_model(folder)


def test_index_and_shards_must_agree(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "qwen3_tiny_bf16_sharded", tmp_path / "model"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="disagree on: model.norm.weight"):
        load_model(folder)


def test_random_weights_are_those_of_the_seed():
    model = load_model(GOLDEN / "qwen3_tiny")
    model.init_weights(3)
    first = {k: v.copy() for k, v in model.parts().items()}
    model.init_weights(3)
    for key, value in model.parts().items():
        np.testing.assert_array_equal(value, first[key])
    assert abs(first["model.layers.0.mlp.gate_proj.weight"].std() * 48**0.5 - 1) < 0.05


# ---- a folder that held a model ----


def sharded(folder, source="qwen3_tiny_bf16_sharded"):
    for path in (GOLDEN / source).iterdir():
        shutil.copy(path, folder / path.name)


def single(folder):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "llama_tiny" / name, folder / name)


def same_shapes(folder):
    """The very model that is saved over it, with other numbers and another meaning of them."""
    model = load_model(GOLDEN / "qwen3_tiny")
    model.init_weights(5)
    save_model(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 77.0}))


def index_of_one(folder):
    same_shapes(folder)
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damaged_index(folder):
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text("{")


def two_models(folder):
    sharded(folder)
    single(folder)


def interrupted(folder):
    sharded(folder)
    for name in ("model.safetensors.tmp", "config.json.tmp"):
        (folder / name).write_bytes(b"half of a file")


HELD = (sharded, single, same_shapes, index_of_one, damaged_index, two_models, interrupted, lambda folder: None)


def fingerprint(folder):
    """What the folder loads as: its configuration and its weights; None if it is refused."""
    try:
        model = load_model(folder)
    except ValueError as error:
        assert "\n" not in str(error)
        return None
    parts = {name: np.asarray(part, np.float32).tobytes() for name, part in model.parts().items()}
    return model.config.rope_theta, model.config.model_type, parts


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_t2_save_replaces_whatever_model_the_folder_held(held, dtype, tmp_path):
    held(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    model = load_model(GOLDEN / "qwen3_tiny")
    save_model(model, tmp_path, dtype)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "notes.txt"}
    again = load_model(tmp_path)
    for name, part in again.parts().items():
        if dtype is None:
            np.testing.assert_array_equal(part, model.parts()[name])
        else:
            np.testing.assert_allclose(part, model.parts()[name], rtol=2**-8)


@pytest.mark.parametrize("held", HELD)
def test_t2_an_interrupted_save_never_leaves_a_mixture(held, tmp_path, monkeypatch):
    """Stopped before each of its renames and removals, the folder loads as before, as the new model, or not at all."""
    model = load_model(GOLDEN / "qwen3_tiny")
    wanted = tmp_path / "wanted"
    save_model(model, wanted)
    new, allowed_steps = fingerprint(wanted), 0
    while True:
        folder = tmp_path / str(allowed_steps)
        folder.mkdir()
        held(folder)
        old = fingerprint(folder)
        with monkeypatch.context() as patch:
            left = [allowed_steps]
            for owner, name in ((os, "replace"), (Path, "unlink")):
                patch.setattr(owner, name, _stopping(getattr(owner, name), left))
            try:
                save_model(model, folder)
                finished = True
            except InterruptedError:
                finished = False
        found = fingerprint(folder)
        assert found in (None, old, new), allowed_steps
        if finished:
            assert found == new and allowed_steps >= 2
            return
        save_model(model, folder)  # the same again goes through
        assert fingerprint(folder) == new
        allowed_steps += 1


def _stopping(function, left):
    def call(*args, **kwargs):
        if left[0] == 0:
            raise InterruptedError
        left[0] -= 1
        return function(*args, **kwargs)

    return call


def test_t2_two_models_in_a_folder_are_refused(tmp_path):
    two_models(tmp_path)
    with pytest.raises(ValueError, match="holds two models: model.safetensors, and the shards"):
        load_model(tmp_path)


# ---- numbers that are not finite ----


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_e13_weights_that_are_not_finite_are_named(copy, bad, dtype):
    folder, rewrite = copy

    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][2, 3:5] = bad
        tensors["model.norm.weight"][47] = bad

    rewrite(change)
    with pytest.raises(ValueError) as error:
        load_model(folder, dtype=dtype)
    assert f"model.layers.1.mlp.up_proj.weight has 2 of 4608 (the first is {bad} at [2, 3])" in str(error.value)
    assert f"model.norm.weight has 1 of 48 (the first is {bad} at [47])" in str(error.value)
    assert "\n" not in str(error.value)


def test_e13_what_a_narrower_dtype_cannot_hold_is_named(copy):
    folder, rewrite = copy
    rewrite(lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].__setitem__((1, 1), 70_000.0))
    load_model(folder, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"not finite in float16: model.layers.0.mlp.down_proj.weight has 1 of"):
        load_model(folder, dtype="float16")


def test_a_float32_file_is_rounded_as_an_update_rounds(copy):
    """Halves away from zero, and what is finite stays finite."""
    folder, rewrite = copy
    halves = np.array([0x3F808000, 0xBF808000, 0x3F818000, 0x7F7FFFFF], np.uint32).view(np.float32)
    rewrite(lambda tensors: tensors["model.embed_tokens.weight"].__setitem__((0, slice(0, 4)), halves))
    found = load_model(folder, dtype="bfloat16").embed_tokens.weight.data[0, :4].view(np.uint16)
    assert [hex(x) for x in found] == ["0x3f81", "0xbf81", "0x3f82", "0x7f7f"]
