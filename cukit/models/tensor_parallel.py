"""A model that several ranks share (tensor parallelism): each holds a part of every large weight, and its heads.

Shoeybi et al. 2019, "Megatron-LM": q, k, v, gate and up are shared out by rows (heads, columns of the MLP), o and down
by columns, so that a layer adds up twice over the ranks; embedding and head by ids. Norms and score heads lie whole on
every rank.

invariant: o and down are shared out by rows too, and what goes into them and comes out is gathered. Then no sum of a
forward pass crosses ranks: an element is one product of one rank, whatever their number. Its bits are those of a model
on one rank wherever a product's do not depend on how many rows the weight has. That holds for the product that adds in
order (kernels/linear.cu); of cuBLAS it is not promised, and a test compares.
"""

import math
from typing import Any

import numpy as np

from ..ops.tensor_parallel import (
    Columns,
    add_rms_norm_over_ranks,
    copy_to_ranks,
    embedding_of_ranks,
    gather_columns,
    sum_over_ranks,
)
from .config import ModelConfig
from .modules import Embedding, Linear

BY_ROWS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"}
BY_COLUMNS = {"o_proj", "down_proj"}  # by rows in invariant mode
PARTIAL = (".q_norm.weight", ".k_norm.weight")  # whole on every rank, but a rank's heads give a part of their gradient


class TensorParallel:
    """The ranks that share a model. group: theirs (parallel/group.py), for values and arrays of the host."""

    def __init__(self, group: Any, invariant: bool = False):
        self.group, self.invariant = group, invariant
        self.rank, self.size = group.rank, group.size

    def on(self, backend: Any) -> Any:
        """The group for a backend's arrays, of training and of an engine's steps. Every rank calls it."""
        group = self.group.on(backend)
        group.prepare_steps()
        return group

    def borders(self, count: int) -> tuple[int, ...]:
        """(size + 1) borders of the ranks' shares of so many rows or columns."""
        return tuple(count * rank // self.size for rank in range(self.size + 1))

    def columns(self, backend: Any, count: int) -> Columns:
        return Columns(self.on(backend), self.borders(count))

    def part_of(self, config: ModelConfig) -> ModelConfig:
        """The shape of a rank's part of a model; ValueError in one line where so many ranks cannot share it."""
        if self.invariant and config.hidden_size % self.size:
            raise ValueError(
                f"tensor_parallel_invariant shares hidden_size={config.hidden_size} out, which {self.size} ranks do "
                "not divide: leave it out, or take another tensor_parallel_size"
            )
        return config.part_of(self.size)

    # ---- parts of weights, by the names of checkpoints ----

    def axis_of(self, part: str) -> int | None:
        """Along which axis a part is shared out: 0 rows, 1 columns; None: it lies whole on every rank."""
        module = part.split(".")[-2]
        if module in BY_COLUMNS and not self.invariant:
            return 1
        return 0 if module in BY_ROWS | BY_COLUMNS else None

    def own(self, part: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Where this rank's share lies in the whole part of this shape."""
        found, axis = [slice(None)] * len(shape), self.axis_of(part)
        if axis is not None:
            borders = self.borders(shape[axis])
            found[axis] = slice(borders[self.rank], borders[self.rank + 1])
        return tuple(found)

    def whole(self, part: str, own: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
        """The whole part of this shape on the first rank, of the shares that the ranks hold; None on the others. Every
        rank calls it.
        """
        if (axis := self.axis_of(part)) is not None:
            ahead = np.moveaxis(own, axis, 0)
            others = ahead.shape[1:]
            borders = [border * math.prod(others) for border in self.borders(shape[axis])]
            flat = np.empty(math.prod(shape), own.dtype)
            flat[borders[self.rank] : borders[self.rank + 1]] = ahead.reshape(-1)
            self.group.all_gather(flat, borders, "weights")
            own = np.ascontiguousarray(np.moveaxis(flat.reshape(shape[axis], *others), 0, axis))
        return None if self.rank else own

    # ---- gradients ----

    def complete_gradients(self, store: Any) -> None:
        """Add up over the ranks what each has a part of: the gradients of the norms of heads. Once, after the last
        backward pass of an update.
        """
        found = [parameter for parameter in store.parameters if parameter.name.endswith(PARTIAL)]
        found = [parameter for parameter in found if parameter.grad is not None]
        if found:
            flat = store.backend.empty((sum(math.prod(x.shape) for x in found),), found[0].grad.dtype)
            places = np.cumsum([0, *(math.prod(x.shape) for x in found)]).tolist()
            for parameter, start, stop in zip(found, places, places[1:]):
                flat[start:stop] = parameter.grad
            self.on(store.backend).all_reduce(flat, "gradients of norms")
            for parameter, start, stop in zip(found, places, places[1:]):
                parameter.grad[...] = flat[start:stop]

    def sum_of_squares(self, store: Any, pieces: int) -> float:
        """Of the whole model's gradients, the same bits on every rank: what ranks share out is added up in order of
        ranks, and what each holds whole counts once.
        """
        be, sums = store.backend, []
        for shared_out in (True, False):
            found = [bucket for bucket in store.buckets if (bucket in store.shared_out) is shared_out]
            grads = [bucket.grad for bucket in found if bucket.grad is not None]
            sums.append(be.sum_in_order(be.sums_of_squares(grads, pieces)) if grads else 0.0)
        return sum(self.group.gather_values(sums[0], "gradient norm")) + sums[1]


class ByRows(Linear):
    """A linear layer of which each rank holds rows: it takes what every rank holds, and gives its own columns."""

    def __init__(self, tensor: TensorParallel, backend, *given, **more):
        super().__init__(backend, *given, **more)
        self._ranks = tensor.on(backend)

    def __call__(self, x):
        return super().__call__(copy_to_ranks(x, self._ranks))


class ByColumns(Linear):
    """A linear layer of which each rank holds columns: it takes its own columns, and every rank gets the sum."""

    def __init__(self, tensor: TensorParallel, backend, *given, **more):
        super().__init__(backend, *given, **more)
        self._ranks = tensor.on(backend)

    def __call__(self, x):
        return sum_over_ranks(super().__call__(x), self._ranks)

    def add_norm(self, x, residual, norm):
        return add_rms_norm_over_ranks(super().__call__(x), residual, norm.weight, norm.eps, self._ranks)


class Gathered(Linear):
    """A linear layer of which each rank holds rows: it takes a rank's columns, and every rank gets all of them."""

    def __init__(self, tensor: TensorParallel, backend, dtype, in_features: int, parts: dict[str, int]):
        ((name, rows),) = parts.items()
        ins, outs = in_features * tensor.size, rows // tensor.size
        super().__init__(backend, dtype, ins, {name: outs})
        self._ins, self._outs = tensor.columns(backend, ins), tensor.columns(backend, rows)

    def __call__(self, x):
        return gather_columns(super().__call__(gather_columns(x, self._ins, multiplied=True)), self._outs)


class EmbeddingOfRanks(Embedding):
    """An embedding of which each rank holds the rows of a run of ids."""

    def __init__(self, tensor: TensorParallel, backend, dtype, num_embeddings, size):
        first, last = tensor.borders(num_embeddings)[tensor.rank : tensor.rank + 2]
        super().__init__(backend, dtype, last - first, size)
        self._first, self._ranks = first, tensor.on(backend)

    def __call__(self, ids):
        return embedding_of_ranks(self.weight, ids, self._first, self._ranks)


def first_linear(tensor: TensorParallel | None, backend, *given, **more) -> Linear:
    """The first product of a half of a layer: qkv_proj, gate_up_proj."""
    return Linear(backend, *given, **more) if tensor is None else ByRows(tensor, backend, *given, **more)


def last_linear(tensor: TensorParallel | None, backend, dtype, in_features: int, parts: dict[str, int]) -> Linear:
    """The last product of a half of a layer, which gives what every rank holds: o_proj, down_proj. in_features: this
    rank's.
    """
    if tensor is None:
        return Linear(backend, dtype, in_features, parts)
    kind = Gathered if tensor.invariant else ByColumns
    return kind(tensor, backend, dtype, in_features, parts)
