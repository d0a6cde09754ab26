"""Updates within the backward pass: each layer is updated as soon as its gradients are complete, and they go.

As torchtune's optimizer_in_bwd, and LOMO before it (Lv et al. 2023). A gradient's norm over all layers is not known at
that time, so nothing is clipped; and one pass must be the whole update.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from ..autograd import Parameter, when_done
from ..models.store import Bucket
from ..optim import AdamW


class UpdateInBackward:
    """The update of these optimizers, each with its learning rate, by the next backward pass inside `updating()`."""

    def __init__(self, rates: list[tuple[AdamW, float]]):
        self._rates, self._layers = rates, {}
        self._complete: list[_Layer] = []  # but for what a rule may still add to it
        self._open: list[_Layer] = []
        for optimizer, rate in rates:
            layers: dict[str, _Layer] = {}
            for parameter in optimizer.parameters:
                bucket = parameter.slot.bucket
                layer = layers.setdefault(bucket.layer, _Layer(optimizer, rate))
                layer.left += 1
                layer.buckets[bucket] = None
                self._layers[parameter] = layer
            self._open += layers.values()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the backward pass. What it does not reach is updated at its end, if it has a gradient."""
        with when_done(self._done):
            yield
        for layer in [*self._complete, *self._open]:
            layer.update()

    def end(self) -> dict[AdamW, tuple[float, bool]]:
        """(gradient norm, whether weights were updated) of each optimizer, as AdamW.step() gives them."""
        return {optimizer: optimizer.end_layers() for optimizer, _ in self._rates}

    def _done(self, parameter: Parameter) -> None:
        """A layer whose rules have all run waits for the next one: a product's gradient may come as late as the rule
        that made its input, which is the layer's first.
        """
        layer = self._layers.get(parameter)
        if layer is None:
            return
        layer.left -= 1
        if not layer.left:
            for before in self._complete:
                before.update()
            self._complete = [layer]
            self._open.remove(layer)


class _Layer:
    """The buckets of a layer. left: its parameters that the backward pass still names."""

    def __init__(self, optimizer: AdamW, rate: float):
        self.optimizer, self.rate, self.left = optimizer, rate, 0
        self.buckets: dict[Bucket, None] = {}

    def update(self) -> None:
        self.optimizer.step_layer(list(self.buckets), self.rate)
