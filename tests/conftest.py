"""Shared fixtures. `pytest` runs what needs neither a GPU nor much time; see the markers in pyproject.toml."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def golden() -> Path:
    """The folder of reference values and small models."""
    return Path(__file__).parent / "golden"
