"""What `from cukit import …` gives."""

import ast
import importlib
from pathlib import Path

import pytest

import cukit


def test_every_public_name_loads_and_editors_know_it():
    stub = ast.parse(Path(cukit.__file__).with_name("__init__.pyi").read_text())
    named = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert named == set(cukit.__all__) and {"TrainerCallback", "EngineConfig", "Tensor", "policy_loss"} <= named
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert getattr(cukit, alias.name) is getattr(
                    importlib.import_module(f"cukit.{node.module}"), alias.name
                )
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = cukit.Nothing
