"""Parameters by name. A module declares them and applies an op; everything that computes is in ops/.

A declared parameter has a shape and a dtype, but no memory: a Store (store.py) gives it its memory.
"""

import threading
from abc import ABC, abstractmethod

import numpy as np

from ..autograd import Parameter, Tensor
from ..ops import add_rms_norm, embedding, linear, rms_norm
from .row_adapters import adapter_at
from .store import Declared


class Module:
    """Finds the parameters among its attributes, and in the modules among them (or in lists of modules), in order of
    definition.
    """

    def named_parameters(self) -> dict[str, Parameter]:
        """Dotted name -> Parameter; a parameter that stands in two places is listed once, under the first."""
        return {name: parameter for name, parameter, _ in self.walk_parameters()}

    def parameters(self) -> list[Parameter]:
        return list(self.named_parameters().values())

    def named_parts(self) -> dict[str, tuple[Parameter, slice]]:
        """Dotted name of each part -> (Parameter, its rows): q_proj, k_proj and v_proj of a fused qkv_proj."""
        return {
            part: (parameter, rows)
            for name, parameter, owner in self.walk_parameters()
            for part, rows in owner._parts_of(name).items()
        }

    def walk_parameters(self):
        """(dotted name, parameter, the module that holds it), each parameter once."""
        seen = set()
        for name, parameter, owner in self._walk(""):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter, owner

    def _walk(self, prefix):
        """(dotted name, parameter, the module that holds it) for every place of a parameter."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield prefix + name, value, self
            elif isinstance(value, Module):
                yield from value._walk(f"{prefix}{name}.")
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, Module):
                        yield from item._walk(f"{prefix}{name}.{index}.")

    def _parts_of(self, name):
        """Part name -> rows, for this module's own parameter of that dotted name."""
        return {name: slice(None)}


class _Thread(threading.local):
    products: "Products | None" = None  # those in use in this thread


_thread = _Thread()


class Products(ABC):
    """What may take the place of linear layers' products: `with products:` does so in this thread."""

    @abstractmethod
    def __call__(self, linear: "Linear", x: Tensor) -> Tensor | None:
        """The layer's output (T, O) of x (T, I), None for a layer whose product stays."""

    def __enter__(self):
        _thread.products = self
        return self

    def __exit__(self, *_):
        _thread.products = None


class Linear(Module):
    """y = x weightᵀ + bias; weight (out, in). parts: name -> rows, which lie one after the other in weight and bias.

    adapter: computes the layer in place of the plain product (models.adapters), None without one. A pass may have
    others (models.row_adapters).
    """

    def __init__(self, backend, dtype, in_features: int, parts: dict[str, int], bias: bool = False):
        ends = np.cumsum(list(parts.values())).tolist()
        self.part_rows = {name: slice(end - rows, end) for (name, rows), end in zip(parts.items(), ends)}
        self.weight = declare((ends[-1], in_features), dtype)
        self.bias = declare((ends[-1],), dtype) if bias else None
        self.adapter = None

    def __call__(self, x):
        if (products := _thread.products) is not None and (y := products(self, x)) is not None:
            return y
        adapter = adapter_at(self)
        return self.plain(x) if adapter is None else adapter(x, self)

    def add_norm(self, x, residual, norm: "RMSNorm") -> tuple[Tensor, Tensor]:
        """The end of a half of a layer: (norm(y + residual), y + residual) of the layer's output y."""
        return add_rms_norm(self(x), residual, norm.weight, norm.eps)

    def plain(self, x):
        """The product without an adapter."""
        weight = self.weight if self.adapter is None else self.adapter.base_weight(self)
        return linear(x, weight, self.bias)

    def _parts_of(self, name):
        """A part's name takes the place of the module's: self_attn.qkv_proj.bias -> self_attn.q_proj.bias, …"""
        *path, _, kind = name.split(".")
        return {".".join([*path, part, kind]): rows for part, rows in self.part_rows.items()}


class RMSNorm(Module):
    """weight (C,), always float32 or better: it costs nothing and loses nothing."""

    def __init__(self, backend, dtype, size, eps):
        self.weight = declare((size,), backend.accumulator(dtype))
        self.eps = eps

    def __call__(self, x):
        return rms_norm(x, self.weight, self.eps)


class Embedding(Module):
    """weight (V, C); a row for each id."""

    def __init__(self, backend, dtype, num_embeddings, size):
        self.weight = declare((num_embeddings, size), dtype)

    def __call__(self, ids):
        return embedding(self.weight, ids)


def declare(shape, dtype) -> Parameter:
    """A Parameter without memory yet."""
    return Parameter(Declared(tuple(shape), np.dtype(dtype)))
