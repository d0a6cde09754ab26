"""Parameters by name. A module holds them and applies an op; everything that computes is in ops/."""

from ..autograd import Parameter
from ..ops import linear, rms_norm


class Module:
    """Finds the parameters among its attributes, and in the modules among them (or in lists of modules), in order of
    definition.
    """

    def named_parameters(self) -> dict[str, Parameter]:
        """Dotted name -> Parameter; a parameter that stands in two places is listed once, under the first."""
        found, seen = {}, set()
        for name, parameter in self._walk(""):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[name] = parameter
        return found

    def parameters(self) -> list[Parameter]:
        return list(self.named_parameters().values())

    def _walk(self, prefix):
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield prefix + name, value
            elif isinstance(value, Module):
                yield from value._walk(f"{prefix}{name}.")
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, Module):
                        yield from item._walk(f"{prefix}{name}.{index}.")


class Linear(Module):
    """y = x weightᵀ + bias; weight (out, in)."""

    def __init__(self, backend, dtype, in_features, out_features, bias=False):
        self.weight = Parameter(backend.zeros((out_features, in_features), dtype))
        self.bias = Parameter(backend.zeros((out_features,), dtype)) if bias else None

    def __call__(self, x):
        return linear(x, self.weight, self.bias)


class RMSNorm(Module):
    """weight (C,), always float32 or better: it costs nothing and loses nothing."""

    def __init__(self, backend, dtype, size, eps):
        self.weight = Parameter(backend.zeros((size,), backend.accumulator(dtype)))
        self.eps = eps

    def __call__(self, x):
        return rms_norm(x, self.weight, self.eps)


class Embedding(Module):
    """weight (V, C)."""

    def __init__(self, backend, dtype, num_embeddings, size):
        self.weight = Parameter(backend.zeros((num_embeddings, size), dtype))
