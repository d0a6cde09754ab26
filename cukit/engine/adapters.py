"""The adapters that requests name: read once from their folders, and on the device while steps use them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from ..models.request_adapters import RequestAdapter
from ..models.row_adapters import AllRows, RowsByOwner, RowsInOrder
from ..models.weights import model_folder
from .calls import Adapters, LoRARequest
from .config import EngineConfig


class RequestAdapters:
    """At most max_cpu_loras on the host and max_loras on the device; the scheduler sees to it that no more are needed
    at once. Those that were used least recently go first.
    """

    def __init__(self, model: Any, config: EngineConfig):
        self._model, self._config = model, config
        self._lock = threading.Lock()  # any thread may name an adapter; one at a time computes
        self._known: OrderedDict[int, tuple[LoRARequest, RequestAdapter]] = OrderedDict()
        self._loaded: OrderedDict[int, RequestAdapter] = OrderedDict()  # by number

    def own(self) -> Any:
        """The adapter that is trained on the model, None where it is off in this thread or there is none."""
        adapter = getattr(self._model, "adapter", None)
        return self._served(adapter if adapter is not None and adapter.on else None)

    def _served(self, adapter: Any) -> Any:
        """The adapter itself; ValueError for another than the trained one where the base's products are not at hand."""
        trained = getattr(self._model, "adapter", None)
        if trained is not None and adapter is not trained and (trained.base_on_host or self._config.quantization):
            option = "lora_base_on_host" if trained.base_on_host else "quantization"
            raise ValueError(f"with {option} an engine serves the trained adapter alone: leave out {option}")
        return adapter

    def chosen(self, given: Adapters, count: int) -> list[Any]:
        """The adapter of each of `count` prompts. ValueError in one line for one that cannot be used."""
        requests = given if isinstance(given, list) else [given] * count
        if len(requests) != count:
            raise ValueError(f"{len(requests)} lora_requests for {count} prompts: give one for all, or one for each")
        return [self.own() if request is None else self._served(self.get(request)) for request in requests]

    def get(self, request: LoRARequest) -> RequestAdapter:
        """Read its folder, unless it is known. ValueError in one line for one that does not fit."""
        _check(request, self._config)
        with self._lock:
            if request.lora_int_id in self._known:
                known, adapter = self._known[request.lora_int_id]
                if str(known.lora_path) != str(request.lora_path):
                    raise ValueError(
                        f"lora_int_id={request.lora_int_id} is {known.lora_path} already: give {request.lora_path} "
                        "another one"
                    )
            else:
                adapter = self._read(request)
                self._known[request.lora_int_id] = request, adapter
            self._known.move_to_end(request.lora_int_id)
            while len(self._known) > (self._config.max_cpu_loras or self._config.max_loras):
                self._known.popitem(last=False)  # its requests hold it
            return adapter

    def _read(self, request: LoRARequest) -> RequestAdapter:
        adapter = RequestAdapter(self._model, model_folder(request.lora_path, False, "lora_path"))
        if adapter.config.r > self._config.max_lora_rank:
            raise ValueError(
                f"{request.lora_path} has rank {adapter.config.r}: give max_lora_rank={adapter.config.r} or more"
            )
        return adapter

    def load(self, adapters: Iterable[Any]) -> list[int]:
        """Bring to the device those of these that are not there; returns the numbers of those that had to go."""
        gone, wanted = [], {one.number: one for one in adapters if one is not None and one.for_requests}
        if missing := [one for number, one in wanted.items() if number not in self._loaded]:
            others = [number for number in self._loaded if number not in wanted]
            gone = others[: max(0, len(self._loaded) + len(missing) - self._config.max_loras)]
            if gone:
                self._model.backend.synchronize()  # a graph in flight may read them
        for number in gone:
            self._loaded.pop(number).unload()
        for number, one in wanted.items():
            if number not in self._loaded:
                one.load()
                self._loaded[number] = one
            self._loaded.move_to_end(number)
        return gone


def by_owner(adapters: tuple, owners: Any) -> Any:
    """What the rows of a step have. owners: their adapters' numbers on the device; adapters: all that rows have, None
    among them for the base.
    """
    return (
        RowsByOwner([one for one in adapters if one is not None], owners) if len(adapters) > 1 else AllRows(*adapters)
    )


def in_order(adapters: list, borders: Any) -> Any:
    """What packed sequences have, each the rows from its border to the next one."""
    if len(set(map(number_of, adapters))) == 1:
        return AllRows(adapters[0])
    parts: list[tuple[Any, slice]] = []
    for adapter, start, stop in zip(adapters, borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        if parts and parts[-1][0] is adapter:
            start = parts.pop()[1].start
        parts.append((adapter, slice(start, stop)))
    return RowsInOrder([part for part in parts if part[0] is not None])


def number_of(adapter: Any) -> int:
    """An adapter's number; -1 for the base."""
    return -1 if adapter is None else adapter.number


def cache_key(adapter: Any) -> bytes:
    """What sets the KV that an adapter's rows make apart from others' of the same tokens; nothing for the base."""
    return b"" if adapter is None else adapter.number.to_bytes(8, "little")


def _check(request: Any, config: EngineConfig) -> None:
    if not isinstance(request, LoRARequest):
        raise ValueError(f"lora_request must be a LoRARequest, got {type(request).__name__}")
    if not config.enable_lora:
        raise ValueError(f"the engine takes no lora_request ({request.lora_name!r}): make it with enable_lora=True")
    number = request.lora_int_id
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"lora_int_id must be a whole number of at least 1, got {number!r}")
    if not isinstance(request.lora_path, (str, os.PathLike)) or not str(request.lora_path):
        raise ValueError(f"lora_path must be an adapter's folder or its name on the hub, got {request.lora_path!r}")
