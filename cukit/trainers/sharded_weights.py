"""ZeRO-3: while it trains, a rank keeps its share alone of a decoder's matrices. A layer's are gathered from all ranks
before its forward pass and go after it, and again for its backward pass (which may compute the layer once more).

Norm weights and biases are few and stay whole. Rollouts, evaluations and files need whole weights on each rank:
whole() gathers them, and the next training pass drops them. Their memory keeps its addresses meanwhile, which captured
graphs know (backend.Reservation).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..autograd import Tensor, on_the_way_back
from ..models.decoder import Decoder
from ..models.store import Bucket
from ..parallel.group import Group

ENDS = "embed_tokens", "lm_head"
FORWARD, BACKWARD = "forward", "backward"


class ShardedWeights:
    """The matrices of a decoder without an adapter. whole() and gather() are collective.

    order: buckets in the order in which a forward pass needs them: embedding, layers, and the head, if it has one.
    """

    def __init__(self, model: Decoder, group: Group):
        self.model, self._group, self.is_whole = model, group, True
        matrices = {bucket.layer: bucket for bucket in model.store.buckets if _is_sharded(bucket)}
        head = [model.lm_head.weight.slot.bucket] if model.config.head == "lm_head" else []
        self.layers = [matrices[f"layers.{index}"] for index in range(len(model.layers))]
        self.order = [matrices["embed_tokens"], *self.layers, *head]
        self._held: dict[Bucket, Any] = {}  # gathered for a pass, and the moment after that
        self._places: dict[Bucket, tuple[Any, list]] = {}  # the memory of the whole, and the parameters' views of it
        for bucket in matrices.values():
            memory = bucket.backend.Reservation(bucket.data.nbytes)
            flat = memory.array(0, bucket.data.shape, bucket.dtype)
            flat[...] = bucket.data
            bucket.data, views = flat, [slot.view(flat) for slot in bucket.slots]
            self._places[bucket] = memory, views
            _bind(bucket, views)

    def whole(self) -> None:
        """Every rank holds all weights, at their addresses."""
        if self.is_whole:
            return
        for bucket, (memory, _) in self._places.items():
            memory.restore()
            bucket.data[self._part(bucket)], bucket.own = bucket.own, None
            self._group.all_gather(bucket.data, what="weights")
        self.is_whole, self.model.around_layers = True, None

    def drop(self) -> None:
        """Keep this rank's share alone."""
        if not self.is_whole:
            return
        for bucket, (memory, _) in self._places.items():
            bucket.own = bucket.data[self._part(bucket)].copy()
            memory.release()
        self.is_whole, self.model.around_layers = False, _Refusing()

    def _part(self, bucket: Bucket) -> slice:
        return bucket.shard(self._group.rank, self._group.size)

    # ---- in a pass ----

    def holds(self, bucket: Bucket) -> bool:
        return bucket in self._held

    def use(self, bucket: Bucket) -> None:
        """What the device is told from now on comes after the gathering of this bucket."""
        self._group.join(self._held[bucket])

    def gather(self, bucket: Bucket) -> None:
        """Whole weights of a bucket in memory of their own, for use()."""
        with self._group.beside():
            flat = bucket.backend.empty((bucket.size,), bucket.dtype)
            flat[self._part(bucket)] = bucket.own
            self._group.all_gather(flat, what="weights")
        _bind(bucket, [slot.view(flat) for slot in bucket.slots])
        self._held[bucket] = self._group.moment()

    def release(self, *buckets: Bucket) -> None:
        """Drop these, where they are gathered."""
        for bucket in self._held.keys() & set(buckets):
            del self._held[bucket]
            _bind(bucket, self._places[bucket][1])

    def release_all(self) -> None:
        self.release(*self._held)

    def begin_passes(self, need: Callable[[str, int], None]) -> None:
        """Training passes come. need(FORWARD or BACKWARD, place in order or in layers) is called before a bucket is
        used, and gathers it.
        """
        self.drop()
        self.model.around_layers = _LayerByLayer(self, need)

    def end_passes(self) -> None:
        self.release_all()
        self.model.around_layers = _Refusing()


class _LayerByLayer:
    """What a decoder calls on the way through its layers."""

    def __init__(self, weights: ShardedWeights, need: Callable[[str, int], None]):
        self._weights, self._need = weights, need

    def begin(self) -> None:
        self._need(FORWARD, 0)

    def enter(self, index: int, h: Tensor) -> Tensor:
        """Before a layer, with its input."""
        weights = self._weights
        if index == 0:
            weights.release(weights.order[0])
        self._need(FORWARD, index + 1)
        return on_the_way_back(h, lambda: weights.release(weights.layers[index]))

    def leave(self, index: int, y: Tensor) -> Tensor:
        """After its last product, with what it gave."""
        self._weights.release(self._weights.layers[index])
        return on_the_way_back(y, lambda: self._again(index))

    def end(self) -> None:
        """Before the head."""
        if len(self._weights.order) > len(self._weights.layers) + 1:
            self._need(FORWARD, len(self._weights.layers) + 1)

    def _again(self, index: int) -> None:
        if index == len(self._weights.layers) - 1:
            self._weights.release(self._weights.order[-1])  # the head
        self._need(BACKWARD, index)


class _Refusing:
    """Where a rank holds its share alone, and no training pass is under way."""

    def begin(self) -> None:
        raise ValueError(
            "zero_stage=3: this process holds a share of the model's weights; call trainer.whole_weights() before a "
            "forward pass, on every process"
        )


def _is_sharded(bucket: Bucket) -> bool:
    is_matrix = len(bucket.slots[0].parameter.shape) > 1
    return is_matrix and (bucket.layer in ENDS or bucket.layer.startswith("layers."))


def _bind(bucket: Bucket, views: list) -> None:
    for slot, view in zip(bucket.slots, views, strict=True):
        slot.parameter.data = view
