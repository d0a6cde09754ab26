"""Copies of a decoder's linear layers in 8 bits, for forward passes that only read: an engine's.

The embedding, the head and the norms stay as they are, and so do the weights that training updates.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np

from ..autograd import Tensor
from .modules import Linear, Module, Products

KINDS = {"int8": np.int8, "fp8": np.uint8}  # fp8: E4M3 codes


class QuantizedWeights(Products):
    """`with copies:` a thread's linear layers of `model` multiply with the copies. After the weights have changed,
    refresh() makes them anew, in place: captured steps know their addresses.

    kind: int8 or fp8, with a scale for each output channel. An adapter that is merged is in the copies. Of one beside
    the weight, the product with its factors is added in the model's dtype, so that no update of it is lost.
    """

    def __init__(self, model: Module, kind: str):
        self.backend = model.backend
        self._linears = linear_layers(model)
        self._copies: dict[Linear, tuple] = {}
        for linear in self._linears:
            outs, ins = linear.weight.shape
            q, scale = self.backend.zeros((outs, ins), KINDS[kind]), self.backend.zeros((outs,), np.float32)
            self._copies[linear] = q, scale
        self.others: AbstractContextManager = nullcontext()  # copies of what stays, in use with these
        self.refresh()

    def __enter__(self):
        self.others.__enter__()
        return super().__enter__()

    def __exit__(self, *_):
        super().__exit__()
        self.others.__exit__(*_)

    def refresh(self) -> None:
        for linear, (q, scale) in self._copies.items():
            self.backend.quantize_weight(q, scale, _weight_in_use(linear))

    def __call__(self, linear: Linear, x: Tensor) -> Tensor | None:
        copy, own = self._copies.get(linear), linear.adapter
        if copy is None:
            return None
        bias = None if linear.bias is None else linear.bias.data
        beside = None if own is None or own.merged is not None else own.change(x.data, linear)[0]
        return Tensor(self.backend.quantized_linear_forward(x.data, *copy, bias, beside))

    def replaced(self) -> set[int]:
        """id() of the arrays that products no longer read."""
        return {id(_weight_in_use(linear)) for linear in self._linears}


def linear_layers(model: Module) -> list[Linear]:
    return [
        owner for name, _, owner in model.walk_parameters() if isinstance(owner, Linear) and name.endswith(".weight")
    ]


def quantized_sizes(layer: Module) -> tuple[int, int, int]:
    """(numbers, output channels, numbers of the largest weight) of the linear layers of a layer."""
    shapes = [linear.weight.shape for linear in linear_layers(layer)]
    return sum(o * i for o, i in shapes), sum(o for o, _ in shapes), max(o * i for o, i in shapes)


def _weight_in_use(linear: Linear):
    adapter = linear.adapter
    return linear.weight.data if adapter is None or adapter.merged is None else adapter.merged
