"""What trainers share that learn from given rows: so many rows a step, and an epoch is each row once."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from ..autograd import no_grad
from ..datasets.sampler import batches_an_epoch
from ..engine.memory import Plan
from ..engine.shapes import ModelUse
from .ranks import merged
from .trainer import Trainer


class RowTrainer(Trainer):
    """See SFTTrainer and RewardTrainer."""

    @abstractmethod
    def row_lengths(self) -> Iterable[int]:
        """Tokens of each training row."""

    @property
    def rows_a_step(self) -> int:
        """Of all ranks together."""
        args = self.args
        return args.per_device_train_batch_size * args.num_processes * args.gradient_accumulation_steps

    def count_steps(self) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        epoch = batches_an_epoch(len(self.train_rows), self.rows_a_step)
        return max(1, math.ceil(self.args.num_train_epochs * epoch))

    def evaluated(self, micro_batches: Iterable) -> dict[str, float]:
        """The sums of compute_loss over these, and of the loss."""
        be, found = self.model.backend, []
        with no_grad():
            for micro_batch in micro_batches:
                self.raise_if_stopped()
                loss, extra = self.compute_loss(micro_batch)
                found.append({name: float(be.to_numpy(x)) for name, x in (extra | {"loss": loss.data}).items()})
        return merged(found)

    def plan_memory(self, *more: ModelUse, **sizes: Any) -> Plan:
        longest = sorted(self.row_lengths())[-self.rows_a_step :]
        tokens = sum(longest)
        sizes = {"packed_tokens": tokens, "longest_sequence": longest[-1], "step_tokens": tokens} | sizes
        return super().plan_memory(*more, **sizes)
