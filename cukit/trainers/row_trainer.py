"""What trainers share that learn from given rows: so many rows a step, and an epoch is each row once."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from ..datasets.sampler import batches_an_epoch
from ..engine.memory import Plan
from ..engine.shapes import ModelUse
from .trainer import Trainer


class RowTrainer(Trainer):
    """See SFTTrainer and RewardTrainer."""

    @abstractmethod
    def row_lengths(self) -> Iterable[int]:
        """Tokens of each training row."""

    @property
    def rows_a_step(self) -> int:
        return self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps

    def count_steps(self) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        epoch = batches_an_epoch(len(self.train_rows), self.rows_a_step)
        return max(1, math.ceil(self.args.num_train_epochs * epoch))

    def plan_memory(self, *more: ModelUse, **sizes: Any) -> Plan:
        longest = sorted(self.row_lengths())[-self.rows_a_step :]
        tokens = sum(longest)
        sizes = {"packed_tokens": tokens, "longest_sequence": longest[-1], "step_tokens": tokens} | sizes
        return super().plan_memory(*more, **sizes)
