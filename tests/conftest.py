"""Shared fixtures. `pytest` runs what needs neither a GPU nor much time; see the markers in pyproject.toml."""

from pathlib import Path

import numpy as np
import pytest


def pytest_collection_modifyitems(config, items):
    """`-m slow` and the like need no GPU: tests of the GPU run where the expression names them."""
    if "gpu" not in config.getoption("markexpr"):
        chosen = [item for item in items if item.get_closest_marker("gpu") is None]
        if dropped := [item for item in items if item.get_closest_marker("gpu") is not None]:
            config.hook.pytest_deselected(items=dropped)
        items[:] = chosen


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def golden() -> Path:
    """The folder of reference values and small models."""
    return Path(__file__).parent / "golden"
