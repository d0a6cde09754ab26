"""What happens within the backward pass, layer by layer; updates that do: each layer is updated as soon as its
gradients are complete, and they go.

As torchtune's optimizer_in_bwd, and LOMO before it (Lv et al. 2023). A gradient's norm over all layers is not known at
that time, so nothing is clipped; and one pass must be the whole update.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..autograd import Parameter, when_done
from ..models.store import Bucket
from ..optim import AdamW


class Leaving:
    """Calls left(layer) as soon as the backward pass inside `telling()` has left a layer, in that order; at its end for
    the layers that it did not reach, too. layers: anything that can be a key -> its parameters that are trained.
    """

    def __init__(self, layers: dict[Any, Iterable[Parameter]], left: Callable[[Any], None]):
        self._layer_of = {parameter: layer for layer, parameters in layers.items() for parameter in parameters}
        self._named = Counter(self._layer_of.values())  # parameters of a layer that the backward pass still names
        self._left = left
        self._complete: list = []  # but for what a rule may still add to it
        self._open = list(layers)

    @contextmanager
    def telling(self) -> Iterator[None]:
        with when_done(self._done):
            yield
        for layer in [*self._complete, *self._open]:
            self._left(layer)

    def _done(self, parameter: Parameter) -> None:
        """A layer whose rules have all run waits for the next one: a product's gradient may come as late as the rule
        that made its input, which is the layer's first.
        """
        if parameter not in self._layer_of:
            return
        layer = self._layer_of[parameter]
        self._named[layer] -= 1
        if not self._named[layer]:
            for before in self._complete:
                self._left(before)
            self._complete = [layer]
            self._open.remove(layer)


class UpdateInBackward:
    """The update of these optimizers, each with its learning rate, by the next backward pass inside `updating()`."""

    def __init__(self, rates: list[tuple[AdamW, float]]):
        self._rates = rates
        layers: dict[tuple[AdamW, float, str], list[Parameter]] = {}
        for optimizer, rate in rates:
            for parameter in optimizer.parameters:
                layers.setdefault((optimizer, rate, parameter.slot.bucket.layer), []).append(parameter)
        self._leaving = Leaving(layers, self._update)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the backward pass. What it does not reach is updated at its end, if it has a gradient."""
        with self._leaving.telling():
            yield

    def end(self) -> dict[AdamW, tuple[float, bool]]:
        """(gradient norm, whether weights were updated) of each optimizer, as AdamW.step() gives them."""
        return {optimizer: optimizer.end_layers() for optimizer, _ in self._rates}

    @staticmethod
    def _update(layer: tuple[AdamW, float, str]) -> None:
        optimizer, rate, name = layer
        buckets: dict[Bucket, None] = {one.slot.bucket: None for one in optimizer.parameters}
        optimizer.step_layer([bucket for bucket in buckets if bucket.layer == name], rate)
