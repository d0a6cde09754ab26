"""A folder that holds a critic's head alone."""

import json

import pytest

from cukit.models.value_head import KIND, ValueHead


def test_which_folders_hold_one(tmp_path):
    path = tmp_path / "config.json"
    assert not ValueHead.is_in(tmp_path)
    for value, held in (
        ({"architectures": [KIND]}, True),
        ({"architectures": ["Qwen3ForCausalLM"]}, False),
        ({}, False),
    ):
        path.write_text(json.dumps(value))
        assert ValueHead.is_in(tmp_path) is held


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"^{tmp_path}/config.json is damaged: "):
        ValueHead.is_in(tmp_path)
