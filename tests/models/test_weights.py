"""Reading and writing Hugging Face checkpoints: every key accounted for, one line an error."""

import json
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
