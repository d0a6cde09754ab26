"""ZeRO: a rank keeps AdamW's states of its share of each bucket alone, and updates that share.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". Stage 1: the sum of
gradients is scattered, so that each rank gets its share of it; then each gathers the others' new weights. A share is a
run of whole pieces of a bucket, and sums are made piece by piece: the numbers are those of the plain optimizer, bit for
bit. Stage 2: the gradients of each pass are scattered as it leaves them, and a rank keeps its share of their sum
(gradient_sums.py). Stage 3: it keeps its share of the weights alone, too (sharded_weights.py).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..models.store import PIECES, Bucket
from ..optim import AdamW
from ..parallel.group import Group


class Shard:
    """A rank's share of a bucket, as AdamW's states know buckets: data and grad (size,) are views of the whole."""

    def __init__(self, bucket: Bucket, rank: int, ranks: int):
        self.whole, self.part = bucket, bucket.shard(rank, ranks)
        self.backend, self.dtype, self.slots = bucket.backend, bucket.dtype, bucket.slots
        self.size, self.origin = self.part.stop - self.part.start, self.part.start

    @property
    def data(self) -> Any:
        return self.whole.data[self.part] if self.whole.own is None else self.whole.own

    @property
    def grad(self) -> Any:
        return self.whole.grad[self.part] if self.whole.share is None else self.whole.share

    def own(self, elements: slice) -> slice:
        """Which of these elements of the bucket are in the share, counted from its own begin; perhaps none."""
        first = min(max(elements.start - self.origin, 0), self.size)
        return slice(first, max(min(elements.stop - self.origin, self.size), first))


class _Whole:
    """Stands in for the slot of a part that is the share itself."""

    @staticmethod
    def view(flat: Any) -> Any:
        return flat


class ShardedAdamW(AdamW):
    """AdamW of which each rank holds a share. step() and state_dict() are collective: every rank calls them.

    group: of the ranks, for arrays of the store's device; host: for arrays of the host. Before step(), each bucket's
    gradient holds the sum over the ranks in this rank's share (reduce_scatter); in stage 2 bucket.share is that.
    """

    def __init__(self, store: Any, *settings: Any, group: Group, host: Group, stage: int = 1, **more: Any):
        if more.get("state_form") == "int8":
            raise ValueError(
                f"zero_stage={stage} would cut the blocks of optimizer_state=int8; give optimizer_state=bfloat16"
            )
        self.stage = stage
        self._group, self._host = group, host
        self._shards = {bucket: Shard(bucket, group.rank, group.size) for bucket in store.buckets}
        super().__init__(store, *settings, **more)

    def _state(self, bucket: Any) -> Any:
        return super()._state(self._shards[bucket])  # type: ignore[arg-type]

    def _grad_norm(self) -> float:
        be, ranks = self.store.backend, self._group.size
        buckets = [bucket for bucket in self.store.buckets if bucket.grad is not None or bucket.share is not None]
        shards = [self._shards[bucket] for bucket in buckets]
        sums = be.empty((ranks, len(shards), PIECES // ranks), np.float64)
        sums[self._group.rank] = be.sums_of_squares([shard.grad for shard in shards], PIECES // ranks)
        self._group.all_gather(sums.reshape(-1), what="gradient norm")
        in_order = sums.swapaxes(0, 1).reshape(len(shards), PIECES)
        return math.sqrt(be.sum_in_order(in_order)) / self.loss_scale

    def _runs(self, bucket: Bucket) -> list[tuple[bool, slice]]:
        own = [(decays, self._shards[bucket].own(elements)) for decays, elements in super()._runs(bucket)]
        return [(decays, part) for decays, part in own if part.start < part.stop]

    def _update_buckets(self, buckets: list[Bucket], lr: float, grad_scale: float, ready: Any = None) -> None:
        super()._update_buckets(buckets, lr, grad_scale, ready)
        for bucket in buckets:
            if super()._runs(bucket) and bucket.own is None:
                self._group.all_gather(bucket.data, what="weights")

    # ---- checkpoints ----

    def _flat(self, bucket: Bucket, kind: str) -> Any:
        """The whole on the first rank's host; nothing on the others, which hold a bucket at a time."""
        if (part := super()._flat(bucket, kind)) is None:
            return None
        part = bucket.backend.to_numpy(part)
        whole = np.empty((bucket.size,), part.dtype)
        whole[self._shards[bucket].part] = part
        self._host.all_gather(whole, what="optimizer states")
        return whole if self._host.rank == 0 else None

    def _load(self, bucket: Bucket, kind: str, found: list) -> None:
        be, shard = bucket.backend, self._shards[bucket]
        # a master is the weight itself where the checkpoint has none: of parameters that are not trained
        whole = be.to_numpy(bucket.data).astype(np.float64 if bucket.dtype == np.float64 else np.float32)
        whole *= kind == "master"
        for slot, rows, array in found:
            slot.view(whole)[rows] = be.to_numpy(array)
        self._state(bucket).load(kind, [(_Whole, slice(None), whole[shard.part])])
