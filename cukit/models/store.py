"""The one store of a model's weights: flat buckets. The parameters are views of them.

A bucket holds the parameters of one layer that have one dtype and one kind (matrices; vectors: norm weights and
biases), in order of definition: embedding first, final norm and head last. It is cut into PIECES equal pieces, and a
rank's share is a run of whole pieces, so that any usual number of ranks divides it; what is left over is zeros and
stays zero. Tensor parallelism comes before this: a model is built of one rank's rows alone (its heads), and the buckets
of that model are then shared out.

Gradients lie in buffers of the same layout, in float32 (float64 for float64). A bucket's buffer appears, as zeros,
when a backward pass first reaches one of its parameters, and goes after the update. Of several ranks each may keep its
share of the sum alone (ZeRO-2, trainers/zero.py): then the buffer goes as soon as it is summed.

Freezing a parameter (requires_grad = False), at any time, moves nothing: it gets no gradient and no update. If all
parameters of a bucket are frozen, it has neither gradient nor optimizer state. A layer's matrices and vectors lie
apart, so that covers frozen layers, a frozen embedding, and training norms alone. If only some are frozen, their share
of gradient and state lies unused.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..autograd import Parameter

# Divisible by 1 … 10, 12, 14, 15, 16, 18, 20, 21, 24, 28, 30, 32, 36, 40, 42, 45, 48, 56, 60, 63, 64.
PIECES = 20_160
# A parameter begins at a multiple of so many elements: 512 bytes of half types, more than any kernel asks for.
ALIGNMENT = 256
# A piece of at least so many elements is a multiple of it: 16 bytes of half types.
VECTOR = 8


def padded_size(elements: int) -> int:
    """Elements of the bucket that holds so many."""
    piece = -(-elements // PIECES)
    return PIECES * (piece if piece < VECTOR else -(-piece // VECTOR) * VECTOR)


@dataclass(frozen=True)
class Declared:
    """Stands in for a parameter's array until a Store has room for it."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(eq=False, slots=True)
class Slot:
    """A parameter's place in a bucket: elements start … stop − 1."""

    bucket: "Bucket"
    parameter: Parameter
    start: int
    is_summed: bool = False  # its gradient lies in the ranks' shares of the bucket's

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.parameter.shape)

    def view(self, flat):
        """The parameter's share of an array with the bucket's layout, in the parameter's shape."""
        return flat[self.start : self.stop].reshape(self.parameter.shape)

    def gradient(self):
        """The parameter's share of the bucket's gradient."""
        return self.view(self.bucket.grad_buffer())

    @property
    def has_gradient(self) -> bool:
        return self.parameter.grad is not None or self.is_summed


class Bucket:
    """Parameters side by side in one array: data (size,); grad (size,) or None. layer: the name of theirs. share: this
    rank's share of the ranks' sum of gradients, where that is kept in place of grad. own: its share of the weights,
    where data has no memory (ZeRO-3, trainers/sharded_weights.py).
    """

    origin = 0  # where it begins in the whole of which it is a part

    def __init__(self, backend, parameters: list[Parameter], layer: str = ""):
        self.backend, self.dtype, self.layer = backend, np.dtype(parameters[0].dtype), layer
        self.slots, end = [], 0
        for parameter in parameters:
            self.slots.append(Slot(self, parameter, -(-end // ALIGNMENT) * ALIGNMENT))
            end = self.slots[-1].stop
        self.size = padded_size(end)
        self.data, self.grad = backend.zeros((self.size,), self.dtype), None
        self.share = self.own = None
        for slot in self.slots:
            given, slot.parameter.slot = slot.parameter.data, slot
            if not isinstance(given, Declared):
                slot.view(self.data)[...] = given
            slot.parameter.data = slot.view(self.data)

    def grad_buffer(self):
        if self.grad is None:
            self.grad = self.backend.zeros((self.size,), self.backend.accumulator(self.dtype))
        return self.grad

    def free_grad(self):
        self.free_buffer()
        self.share = None
        for slot in self.slots:
            slot.is_summed = False

    def free_buffer(self):
        """Drop the gradient but for this rank's share of the sum."""
        for slot in self.slots:
            slot.parameter.release_grad()
        self.grad = None

    def shard(self, rank: int, ranks: int) -> slice:
        """Elements of rank `rank` of `ranks`: whole pieces, as many for each."""
        if PIECES % ranks:
            raise ValueError(f"{ranks} ranks do not divide a bucket's {PIECES} pieces: use 1 to 10, 12, 16, 32 or 64")
        share = self.size // ranks
        return slice(rank * share, (rank + 1) * share)

    def runs(self, setting: Callable[[Parameter], Any]):
        """(setting, elements) of neighbours that have a gradient and one setting: what one launch can update."""
        found, joins = [], False
        for slot in self.slots:
            if not slot.has_gradient or not slot.parameter.requires_grad:
                joins = False
                continue
            value = setting(slot.parameter)
            if joins and found[-1][0] == value:
                found[-1] = value, slice(found[-1][1].start, slot.stop)
            else:
                found.append((value, slice(slot.start, slot.stop)))
            joins = True
        return found


class Store:
    """The buckets of a model, and its parts by name.

    parameters: dotted name -> Parameter; its array moves into a bucket. parts: name -> (parameter, its rows), the
    names that checkpoints use; by default each parameter is a part under its own name. tensor: the ranks that share the
    model (models.tensor_parallel); what they share out and what each holds whole have buckets of their own.
    """

    def __init__(
        self,
        backend,
        parameters: dict[str, Parameter],
        parts: dict[str, tuple[Parameter, slice]] | None = None,
        tensor: Any = None,
    ):
        self.backend, self.tensor = backend, tensor
        self.parameters = list(parameters.values())
        self.parts = parts or {name: (parameter, slice(None)) for name, parameter in parameters.items()}
        names = [] if tensor is None else [name for name in self.parts if tensor.axis_of(name) is not None]
        shared_out = {id(self.parts[name][0]) for name in names}
        groups: dict = {}
        for name, parameter in parameters.items():
            parameter.name = name
            key = _layer_of(name), np.dtype(parameter.dtype), len(parameter.shape) > 1, id(parameter) in shared_out
            groups.setdefault(key, []).append(parameter)
        self.buckets = [Bucket(backend, group, key[0]) for key, group in groups.items()]
        self.shared_out = [bucket for bucket, key in zip(self.buckets, groups) if key[-1]]

    def part_views(self, flat_of: Callable[[Bucket], Any] = lambda bucket: bucket.data) -> dict[str, Any]:
        """Part name -> its view in the array that flat_of(bucket) gives; left out where that is None."""
        views = {}
        for name, (parameter, rows) in self.parts.items():
            if (flat := flat_of(parameter.slot.bucket)) is not None:
                views[name] = parameter.slot.view(flat)[rows]
        return views

    def zero_grad(self):
        """Drop every gradient and its memory."""
        for bucket in self.buckets:
            bucket.free_grad()

    def copy_from(self, other: "Store"):
        """Take the weights of a store of the same layout."""
        for mine, theirs in self._pairs(other):
            mine.data[...] = theirs.data

    def mix_from(self, other: "Store", alpha: float):
        """weights = alpha · other's + (1 − alpha) · these, summed in float32 or better, rounded as weights are."""
        for mine, theirs in self._pairs(other):
            wide = self.backend.accumulator(mine.dtype)
            mixed = alpha * theirs.data.astype(wide, copy=False) + (1 - alpha) * mine.data.astype(wide, copy=False)
            self.backend.store_weights(mine.data, mixed)

    def _pairs(self, other):
        if self._layout() != other._layout():
            raise ValueError("the two models have different shapes or dtypes: their weights cannot be copied or mixed")
        return zip(self.buckets, other.buckets, strict=True)

    def _layout(self):
        return [(bucket.dtype, [slot.parameter.shape for slot in bucket.slots]) for bucket in self.buckets]

    def non_finite(self, limit: int = 8) -> list[str]:
        """A line for each part that holds NaN or infinity, at most `limit`: name, count, first value, its place."""
        sums = self.backend.sums_of_squares([bucket.data for bucket in self.buckets], PIECES)
        if math.isfinite(self.backend.sum_in_order(sums)):  # no sum of finite float32 squares overflows float64
            return []
        lines = []
        for name, view in self.part_views().items():
            values = self.backend.to_numpy(view)
            wrong = np.argwhere(~np.isfinite(values))
            if len(wrong) and len(lines) < limit:
                first = wrong[0].tolist()
                lines.append(
                    f"{name} has {len(wrong)} of {values.size} (the first is {values[tuple(first)]} at {first})"
                )
        return lines


def _layer_of(name: str) -> str:
    """layers.3.mlp.down_proj.weight -> layers.3; other names: their first word."""
    words = name.split(".")
    return ".".join(words[:2]) if words[1:2] and words[1].isdigit() else words[0]
