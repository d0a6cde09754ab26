"""Models by name: the real huggingface_hub against a server of this machine."""

import io
import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled

from cukit import LLM
from cukit.models.adapter_config import AdapterConfig
from cukit.models.adapter_files import merge_into, save_adapter
from cukit.models.adapters import Adapter
from cukit.models.weights import load_config, load_model, model_folder

OTHERS = {"README.md": b"# x", "pytorch_model.bin": b"x", "onnx/model.onnx": b"x", "consolidated.safetensors": b"x"}
OTHERS |= {"vocab.json": b"{}", "training_args.bin": b"x", "original/tokenizer.model": b"x"}
ROOT = Path(__file__).parents[2]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def tiny(hub):
    """A model in one file, with a tokenizer and files that are not needed."""
    files = files_of(ROOT / "data" / "tiny-qwen3")
    hub.files = {name: data for name, data in files.items() if not name.endswith(".md")}
    hub.commit = hub.add("model", "cukit/tiny", hub.files | OTHERS)
    return hub


@pytest.fixture
def sharded(hub, golden):
    files = files_of(golden / "qwen3_tiny_bf16_sharded")
    hub.add("model", "cukit/sharded", files | OTHERS | {"model.safetensors": b"another one"})
    hub.files = files
    return hub


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_only_the_needed_files_are_fetched(tiny):
    folder = model_folder("cukit/tiny")
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert (
        wanted <= names(folder) <= wanted | {"generation_config.json", "special_tokens_map.json", "chat_template.jinja"}
    )
    assert (folder / "model.safetensors").read_bytes() == tiny.files["model.safetensors"]


def test_the_index_says_which_shards(sharded, golden):
    folder = model_folder("cukit/sharded")
    assert {name for name in names(folder) if "model" in name} == {name for name in sharded.files if "model" in name}
    here, there = load_model("cukit/sharded").parts(), load_model(golden / "qwen3_tiny_bf16_sharded").parts()
    assert here.keys() == there.keys() and all(np.array_equal(here[name], there[name]) for name in here)


def test_the_public_face_takes_a_name(tiny):
    found = LLM("cukit/tiny", device="cpu", max_model_len=64, num_kv_blocks=32, max_num_seqs=2)
    assert found.tokenizer is not None and found.vocab_size > 1


def test_a_configuration_needs_no_weights(tiny):
    assert load_config("cukit/tiny").hidden_size > 0
    folder = model_folder("cukit/tiny", weights=False)
    assert "tokenizer.json" in names(folder) and "model.safetensors" not in names(folder)


def test_a_second_time_only_the_commit_is_asked_for(tiny, monkeypatch):
    folder = model_folder("cukit/tiny")
    tiny.requests.clear()
    assert model_folder("cukit/tiny") == folder and tiny.requests == [("GET", "/api/models/cukit/tiny")]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    tiny.requests.clear()
    assert model_folder("cukit/tiny") == folder == model_folder(f"cukit/tiny@{tiny.commit}") and not tiny.requests


def test_a_revision_is_pinned(tiny):
    old = json.loads(tiny.files["config.json"])
    new = json.dumps(old | {"rms_norm_eps": 0.5}).encode()
    tiny.add("model", "cukit/tiny", tiny.files | {"config.json": new})
    tiny.add("model", "cukit/tiny", tiny.files, "v1")
    assert load_config("cukit/tiny").rms_norm_eps == 0.5
    assert load_config(f"cukit/tiny@{tiny.commit}").rms_norm_eps == old["rms_norm_eps"]
    assert load_config("cukit/tiny@v1").rms_norm_eps == old["rms_norm_eps"]
    with pytest.raises(ValueError, match="^model 'cukit/tiny' has no revision 'v2': give a branch, a tag or a commit$"):
        load_config("cukit/tiny@v2")


def test_offline_without_the_model(tiny, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="^model 'cukit/tiny' is no file or folder .* HF_HUB_OFFLINE is set") as caught:
        model_folder("cukit/tiny")
    assert "\n" not in str(caught.value) and tiny.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    model_folder("cukit/tiny", weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_config("cukit/tiny")
    with pytest.raises(ValueError, match="in the cache; HF_HUB_OFFLINE is set"):
        model_folder("cukit/tiny")


def test_what_another_program_left_in_the_cache_is_used(tiny, monkeypatch):
    from huggingface_hub import snapshot_download

    folder = snapshot_download("cukit/tiny", allow_patterns=["*.json", "*.safetensors"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_folder("cukit/tiny") == Path(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "has neither .* on the hub; .bin checkpoints are not read"),
        ({"config.json": b"{}"}, "has neither model.safetensors nor model.safetensors.index.json on the hub$"),
        ({"README.md": b"x"}, "has no config.json on the hub"),
        ({"config.json": b"{}", "model.safetensors.index.json": b"[]"}, "is not a safetensors index"),
        (
            {"config.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {"a": "../../x.safetensors"}}'},
            "names ../../x.safetensors, which it does not have",
        ),
    ],
)
def test_repositories_that_are_no_model_here(hub, files, message):
    hub.add("model", "a/b", files)
    with pytest.raises(ValueError, match=message) as caught:
        model_folder("a/b")
    assert "\n" not in str(caught.value)


def test_refusals(tiny):
    tiny.add("model", "meta/gated", tiny.files)
    tiny.gated.add("meta/gated")
    for name, message in (
        ("meta/gated", "^model 'meta/gated' is gated: accept its terms"),
        ("cukit/tyni", f"^model 'cukit/tyni' is no file or folder here, and {tiny.url} has none of that name"),
        ("runs/grpo-001/checkpoint-5", "^model folder '.*checkpoint-5' does not exist, and it is no name of the hub"),
        ("./tiny", "does not exist, and it is no name of the hub"),
    ):
        with pytest.raises(ValueError, match=message):
            model_folder(name)


def test_a_large_download_is_said(tiny, caplog):
    with caplog.at_level(logging.INFO, "cukit"):
        model_folder("cukit/tiny")
    size = len(tiny.files["model.safetensors"])
    assert size > 1e6 and f"cukit/tiny: fetching 1 file, {size / 1e6:.1f} MB" in caplog.text


def test_without_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="'a/b' is no file or folder here, .* needs: pip install huggingface_hub"):
        model_folder("a/b")


@pytest.mark.parametrize("terminal", [False, True])
def test_bars_are_drawn_on_terminals_alone(tiny, monkeypatch, terminal):
    shown = io.StringIO()
    shown.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", shown)
    model_folder("cukit/tiny")
    assert ("Fetching" in shown.getvalue()) == terminal
    assert not are_progress_bars_disabled()


def test_an_adapter_comes_whole_and_brings_its_base(tiny, tmp_path):
    """Its base by the name and revision that adapter_config.json gives."""
    base = load_model(ROOT / "data" / "tiny-qwen3")
    adapter = Adapter(base, AdapterConfig(2, 4, base="cukit/tiny"))
    for view in adapter.parts().values():
        view[...] = 0.1
    save_adapter(adapter, tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    tiny.add("model", "cukit/adapter", files | {"README.md": b"# x", "adapter_model.bin": b"x"})
    folder = model_folder("cukit/adapter", weights=False)
    assert names(folder) == {"adapter_config.json", "adapter_model.safetensors"}
    found, expected = load_model("cukit/adapter"), load_model(ROOT / "data" / "tiny-qwen3")
    merge_into(expected, tmp_path)
    assert all(np.array_equal(view, expected.parts()[name]) for name, view in found.parts().items())
    assert load_config("cukit/adapter") == expected.config
    llm = LLM("cukit/adapter", device="cpu", max_model_len=64, num_kv_blocks=32, max_num_seqs=2)
    assert llm.tokenizer is not None and llm.eos_token_ids
    values = json.loads(files["adapter_config.json"]) | {"revision": "no-such"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="no-such"):
        load_model(tmp_path)
