"""An adapter that requests of an engine name: the factors of a PEFT folder beside a model's weights, never trained.

Its numbers for products are made as those of an adapter that is trained (adapters.Adapter, beside), so that sampling
has the bits of the training that made it.
"""

from typing import Any

import numpy as np

from .adapter_config import AdapterConfig
from .adapter_files import adapter_config, check_factors, is_adapter, read_factors
from .adapters import (
    BESIDE,
    LinearAdapter,
    adapted_linears,
    declared_factors,
    fill_copies,
    make_room,
    next_number,
    peft_name,
)
from .modules import Linear


class RequestAdapter:
    """On the host from the start, on the device between load() and unload(). The model stays as it is.

    number: tells its rows, and its KV, from those of others. ValueError in one line for a folder that is no adapter of
    this model.
    """

    for_requests, way, on = True, BESIDE, True

    def __init__(self, model: Any, folder: Any):
        if not is_adapter(folder):
            raise ValueError(
                f"{folder} is no adapter folder: it needs adapter_config.json, and no config.json of its own"
            )
        self.backend, self.number = model.backend, next_number()
        self.config: AdapterConfig = adapter_config(folder)
        self._linears = adapted_linears(model, self.config)
        self._stored = read_factors(folder)
        check_factors(folder, self._stored, model, self.config)
        self._at: dict[int, LinearAdapter] = {}

    @property
    def is_loaded(self) -> bool:
        return bool(self._at)

    def load(self) -> None:
        """Take memory on the device."""
        for name, linear in self._linears:
            self._at[id(linear)] = LinearAdapter(self, linear, self._factors(name, linear))

    def unload(self) -> None:
        """Give it back; what the device was told to compute has been done."""
        self._at.clear()

    def at(self, linear: Linear) -> LinearAdapter | None:
        """Its part at a layer."""
        return self._at.get(id(linear))

    def _factors(self, name: str, linear: Linear) -> Any:
        be, chosen = self.backend, [part for part in linear.part_rows if part in self.config.targets]
        factors: Any = declared_factors(linear, chosen, self.config, be)
        for kind, factor in (("A", factors.a), ("B", factors.b)):
            arrays = [self._stored[f"{peft_name(name, part)}.lora_{kind}.weight"] for part in chosen]
            factor.data = be.array(np.concatenate(arrays).astype(factor.dtype))
        make_room(factors, linear, be)
        fill_copies(factors, be)
        factors.a = factors.b = None  # only products are made with them
        return factors
