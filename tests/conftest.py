"""Shared fixtures. `pytest` runs what needs neither a GPU nor much time; see the markers in pyproject.toml."""

import importlib
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest
from hub_server import HubServer

from cukit.tokenizer import Tokenizer


def pytest_collection_modifyitems(config, items):
    """`-m slow` and the like need no GPU: tests of the GPU run where the expression names them. Long tests go first."""
    if "gpu" not in config.getoption("markexpr"):
        chosen = [item for item in items if item.get_closest_marker("gpu") is None]
        if dropped := [item for item in items if item.get_closest_marker("gpu") is not None]:
            config.hook.pytest_deselected(items=dropped)
        items[:] = chosen
    # the long ones first: in a run of several workers none waits at its end for another's long test
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ("slow", "compile"))))


@pytest.fixture
def datasets_library():
    """Hugging Face's package datasets; the test is skipped without it."""
    pytest.importorskip("datasets.arrow_dataset")  # `datasets` alone also finds the folder of these tests
    return importlib.import_module("datasets")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def golden() -> Path:
    """The folder of reference values and small models."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory) -> Path:
    """A folder with the files of Qwen3's tokenizer."""
    folder = tmp_path_factory.mktemp("qwen3-tokenizer")
    source = Path(__file__).parent / "golden" / "qwen3-tokenizer"
    (folder / "tokenizer.json").write_bytes(lzma.decompress((source / "tokenizer.json.xz").read_bytes()))
    shutil.copy(source / "tokenizer_config.json", folder)
    return folder


@pytest.fixture(scope="session")
def qwen(qwen_folder) -> Tokenizer:
    return Tokenizer.from_folder(qwen_folder)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of this machine with an empty cache, which huggingface_hub uses instead of the real one."""
    from huggingface_hub import constants, file_download

    server = HubServer()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (constants, file_download):  # some versions have a copy of it
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.close()
