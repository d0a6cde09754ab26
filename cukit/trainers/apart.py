"""Ranks apart (rollout_gpus): some draw and reward completions, the others train, and the policy's weights travel.

Every rank runs the same steps. One that only trains has no engine; one that only draws has neither optimizer nor
gradients, and holds the policy alone. Before completions are drawn, the first rank sends the weights that have changed.

With max_staleness=1 the next generation batch is drawn while this one is trained on, one step off-policy (Noukhovitch
et al. 2024): it comes from the weights of before these updates. Ranks meet between two generation batches, where the
weights go one way and the completions the other, and for evaluations and checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..runs.signals import RunStopped


class Apart:
    """What a PolicyTrainer does as one of ranks that are apart. Counts of seconds begin anew with each batch."""

    def __init__(self, trainer: Any):
        self.trainer, self.ranks = trainer, trainer.ranks
        self.stale = trainer.args.max_staleness > 0
        self._ahead: tuple | None = None  # data rows of the next generation batch, what drawing it gave, or its error
        self._drew = self._waited = self._sending = 0.0
        self._bytes = 0
        self._metrics: dict[str, float] = {}

    # ---- weights ----

    def send_weights(self) -> None:
        """Every rank has the newest weights afterwards, and knows how many updates there were. Collective."""
        trainer, ranks, run = self.trainer, self.ranks, self.trainer.run
        if ranks.weights_step in (None, trainer.global_step):
            return
        ranks.weights_step = trainer.global_step
        if ranks.sending is None or run is None:
            return
        with self.waiting():
            updates = ranks.sending.gather_values((run.applied, run.skipped), "weights")[0]
        start, backend = time.perf_counter(), trainer.model.backend
        group = ranks.sending.on(backend)
        for bucket in trainer.model.trained_store.buckets:
            if any(slot.parameter.requires_grad for slot in bucket.slots):
                group.broadcast(bucket.data, what="weights")
                self._bytes += bucket.data.nbytes
        if ranks.draws:
            run.applied, run.skipped = updates
            if trainer.model.adapter is not None:
                trainer.model.adapter.refresh()
            trainer.weights_changed()
        backend.synchronize()
        self._sending += time.perf_counter() - start

    # ---- completions ----

    def draw_ahead(self, data_rows: list[int], draw: Callable[[], Any]) -> None:
        """Draw this rank's part of the next generation batch before it is asked for."""
        try:
            with self.ranks.being_alone():
                self._ahead = data_rows, self.drawn(draw), None
        except (Exception, RunStopped) as error:
            self._ahead = data_rows, None, error

    def part_of(self, data_rows: list[int], draw: Callable[[], Any]) -> Any:
        """This rank's part of a generation batch: drawn ahead, with the error that this had, or now."""
        if self._ahead is None:
            return self.drawn(draw)
        (rows, found, error), self._ahead = self._ahead, None
        assert rows == data_rows
        if error is not None:
            raise error
        return found

    def forget(self) -> None:
        """Drop what was drawn ahead: the run goes on from a checkpoint."""
        self._ahead = None

    def drawn(self, draw: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return draw()
        finally:
            self._drew += time.perf_counter() - start

    # ---- seconds ----

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a collective: what is not drawing is waiting for others."""
        start, before = time.perf_counter(), self._drew
        yield
        self._waited += time.perf_counter() - start - (self._drew - before)

    def exchange_times(self) -> None:
        """With each batch that was gathered: the seconds and bytes since the one before."""
        own = (self._drew, self._waited, self._sending, self._bytes)
        found = self.ranks.group.gather_values(own, "times")
        self._drew = self._waited = self._sending = 0.0
        self._bytes = 0
        drawing = [one for rank, one in enumerate(found) if self.ranks.is_drawing(rank)]
        training = [one for rank, one in enumerate(found) if not self.ranks.is_drawing(rank)]
        times = {
            "time/rollout": max(drew for drew, *_ in drawing),
            "time/rollout_wait": sum(waited for _, waited, *_ in drawing) / len(drawing),
            "time/wait": sum(waited for _, waited, *_ in training) / len(training),
            "time/weights": found[0][2],
            "weights/bytes": found[0][3],
        }
        for name, value in times.items():  # of a batch that is drawn in rounds: of all of them
            self._metrics[name] = self._metrics.get(name, 0) + value

    def take_metrics(self) -> dict[str, float]:
        """Of the batch that was gathered last."""
        found, self._metrics = self._metrics, {}
        return found
