"""A critic that is only a head: it values tokens from the hidden states of another model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from safetensors.numpy import load_file

from .heads import ScoreHead
from .hub import WEIGHTS
from .modules import Module
from .store import Store

KIND = "ValueHead"  # as config.json names it


class ValueHead(Module):
    """score.weight (1, C), zeros at first: every value is 0. As a folder: config.json and model.safetensors."""

    def __init__(self, backend, dtype, hidden_size: int):
        self.backend, self.dtype = backend, backend.dtype_of(dtype)
        self.config = SimpleNamespace(raw={"architectures": [KIND], "hidden_size": hidden_size})
        self.score = ScoreHead(backend, self.dtype, hidden_size)
        self.store = Store(backend, self.named_parameters())

    @property
    def trained_store(self) -> Store:
        """What training updates."""
        return self.store

    def scores(self, hidden):
        """hidden (N, C), a Tensor -> values (N,), float32 or better."""
        return self.score(hidden)

    def parts(self) -> dict:
        """Name -> the array of its weights."""
        return self.store.part_views()

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder holds such a head, and no model."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            return False
        try:
            return json.loads(path.read_text(encoding="utf-8")).get("architectures") == [KIND]
        except (ValueError, AttributeError) as error:  # not UTF-8, not JSON, no object
            raise ValueError(f"{path} is damaged: {error}") from None

    @staticmethod
    def stored_parts(folder: Path) -> dict:
        """What parts() gave when the folder was written, on the host."""
        path = Path(folder) / WEIGHTS
        if not path.is_file():
            raise ValueError(f"{folder} holds no {WEIGHTS}")
        return load_file(path)
