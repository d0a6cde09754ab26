"""Which device `auto` means, and that a card that stays unused is said."""

import ctypes
import importlib.util
import shutil

import pytest

import cukit.backend as backend


@pytest.fixture
def machine(monkeypatch):
    """machine(files, smi, cupy): what a machine has, without a driver call."""

    def set_up(files=(), smi=False, driver=True, cupy="missing", visible=None):
        monkeypatch.setattr(backend, "_said", set())
        monkeypatch.setattr(backend.glob, "glob", lambda pattern: [f for f in files if f.startswith(pattern[:10])])
        monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if smi else None)
        monkeypatch.setattr(backend, "_driver_present", lambda: driver)
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "cupy" and cupy == "missing" else find("json")
        )

        def load(device):
            if device == "cuda":
                raise cupy
            return device

        monkeypatch.setattr(backend, "_load", load)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return set_up


@pytest.mark.parametrize(
    "where", [{"files": ["/dev/nvidia0"]}, {"files": ["/proc/driver/nvidia/gpus/0"]}, {"smi": True}]
)
def test_e11_auto_says_once_why_a_card_stays_unused(machine, caplog, where):
    machine(**where)
    assert [backend.backend_for("auto") for _ in range(3)] == ["cpu"] * 3
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "\n" not in record.message
    assert "CuPy is not installed" in record.message and "pip install 'cukit[cuda" in record.message


@pytest.mark.parametrize("error", [ImportError("libcublas.so.12:\nno such file"), OSError("x"), RuntimeError("driver")])
def test_e11_a_broken_cupy_is_no_traceback(machine, caplog, error):
    machine(files=["/dev/nvidia0"], cupy=error)
    assert backend.backend_for("auto") == "cpu"
    assert "CuPy is installed but does not work" in caplog.text and "pip install" in caplog.text
    with pytest.raises(ValueError, match="does not work.*use --device cpu") as refused:
        backend.backend_for("cuda")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "without", [{}, {"files": ["/dev/nvidia0"], "visible": ""}, {"smi": True, "visible": "-1"}, {"driver": False}]
)
def test_e11_nothing_is_said_without_a_card_or_where_it_is_hidden(machine, caplog, without):
    machine(**without)
    assert backend.backend_for("auto") == "cpu" and caplog.records == []


def test_e11_a_driver_is_found_without_the_helpers_of_find_library(monkeypatch):
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert backend._driver_present()

    def missing(name):
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not backend._driver_present()
