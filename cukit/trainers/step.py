"""One optimizer step, which every method shares: micro-batches, clipping, the update, its metrics.

A method says what a batch is and what its loss is (the hooks below).
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..autograd import Tensor
from ..datasets.sampler import EpochSampler
from ..models.decoder import Decoder
from ..optim import AdamW
from ..options import say_once
from ..runs.metrics import Timer
from .config import TrainerConfig
from .gradient_sums import GradientSums
from .in_backward import UpdateInBackward
from .loss import compute_and_backward
from .ranks import Ranks
from .schedule import learning_rate_factor
from .state import POLICY, TrainedModel

if TYPE_CHECKING:
    from .loop import Run

logger = logging.getLogger(__name__)


class Steps(ABC):
    """The steps of a Trainer, which holds what they work on."""

    args: TrainerConfig
    also_named: ClassVar[dict[str, str]] = {}  # a metric's second name in TRL -> the metric
    upstream: Any = None  # what the backward pass of compute_loss's loss will begin with, where that is known before
    ranks: Ranks
    models: dict[str, TrainedModel]
    sampler: EpochSampler
    timer: Timer
    run: Run | None
    global_step: int
    total_steps: int
    num_tokens: int
    evaluation_due: bool

    @property
    @abstractmethod
    def model(self) -> Decoder:
        """The policy."""

    @abstractmethod
    def raise_if_stopped(self) -> None:
        """RunStopped if the run is to end soon: for phases that change no weight, between their parts."""

    @property
    def _optimizers(self) -> dict[str, AdamW]:
        """Those of all models, by the models' names; none before the run begins."""
        return {name: one.optimizer for name, one in self.models.items() if one.optimizer is not None}

    # ---- hooks of a method ----

    def learns(self, name: str) -> bool:
        """Whether the model of this name is updated by the step that comes next."""
        return True

    def served_by(self, micro_batch: Any) -> Iterable[str]:
        """The names of the models that a pass reads and trains."""
        return self.models

    @abstractmethod
    def make_batch(self, step: int) -> tuple[list, dict]:
        """The micro-batches of optimizer step `step` (from 0), and metrics known before training on them.

        A stop may cut it short (raise_if_stopped()): then the data position is put back, and the resumed run makes the
        batch again.
        """

    @abstractmethod
    def compute_loss(self, micro_batch: Any) -> tuple[Tensor, dict[str, np.ndarray]]:
        """(loss Tensor, {name: array}) of one micro-batch. A step adds them up; of names max/… it takes the largest."""

    @abstractmethod
    def step_metrics(self, sums: dict) -> dict:
        """Metrics of a step from the added-up arrays of compute_loss (now on the host)."""

    def weights_changed(self) -> None:
        """Called after every update and after a checkpoint was loaded."""
        return None

    def send_weights(self) -> None:
        """Every rank has the newest weights afterwards; where each trains, it has them anyway."""
        return None

    def after_update(self) -> None:
        """Called after every update."""
        return None

    # ---- one step ----

    def train_step(self) -> dict:
        """One optimizer step; returns its metrics. Whatever ends it before the update leaves the state of before it."""
        run, before = self.run, (self.sampler.state_dict(), self.num_tokens)
        assert run is not None
        epochs_before = int(self.sampler.epochs_done)
        try:
            micro_batches, metrics = self.make_batch(self.global_step)
            self.raise_if_stopped()  # the batch may be cut short
            with self.timer("train"), self._updates_in(run, micro_batches) as in_backward:
                loss, sums, has_gradient = self._accumulate(micro_batches, in_backward)
        except BaseException:
            self.sampler.load_state(before[0])
            self.num_tokens = before[1]
            for optimizer in self._optimizers.values():
                optimizer.zero_grad()
            raise
        with self.timer("train"), run.update():
            update = self._update(run, has_gradient, in_backward)
            self.global_step += 1
        self.evaluation_due = self._evaluates_now(int(self.sampler.epochs_done) > epochs_before)
        metrics |= self.step_metrics(sums) | {"loss": loss} | update
        metrics |= {"num_tokens": self.num_tokens, "epoch": self.sampler.epochs_done}
        metrics |= {second: metrics[name] for second, name in self.also_named.items()}
        times = self.timer.pop()
        tokens = metrics.pop("step_tokens", 0)
        return metrics | times | {"tokens_per_second": tokens / max(times["step_time"], 1e-9)}

    @contextmanager
    def _updates_in(self, run: Run, micro_batches: list) -> Iterator[UpdateInBackward | None]:
        """The update that the backward pass makes layer by layer, None where it makes none."""
        if not self.args.optimizer_in_bwd:
            yield None
            return
        if len(micro_batches) > 1:
            say_once(
                logger,
                f"an update of {len(micro_batches)} passes keeps its gradients to the last one, as without "
                "optimizer_in_bwd; with a larger max_tokens_per_batch it is one pass",
            )
            yield None
            return
        chosen = [one for name, one in self.models.items() if self.learns(name) and one.optimizer is not None]
        with run.update():  # what it leaves half done cannot be saved
            yield UpdateInBackward([(one.optimizer, self._rate_of(one)) for one in chosen])

    def _rate_of(self, one: TrainedModel) -> float:
        """A model's learning rate in this step."""
        args, warmup = self.args, self.args.num_warmup_steps(self.total_steps)
        factor = learning_rate_factor(args.lr_scheduler_type, self.global_step, self.total_steps, warmup)
        return one.peak_rate(args) * factor

    def _accumulate(self, micro_batches: list, in_backward: UpdateInBackward | None = None) -> tuple[float, dict, bool]:
        """Forward and backward of every micro-batch -> (loss, sums of the arrays on the host, was there a gradient).

        micro_batches: this rank's; the rest is of all ranks.
        """
        sums, has_gradient = self.ranks.training.total(
            lambda gradients: self._passes(micro_batches, in_backward, gradients),
            self.models,
            {name for name in self.models if self.learns(name)},
            [self.served_by(micro_batch) for micro_batch in micro_batches],
            self.args.fast_reduction,
        )
        for one in self.models.values():
            if (store := one.model.trained_store).tensor is not None:
                store.tensor.complete_gradients(store)
        return float(sums.pop("loss", 0.0)), sums, has_gradient

    def _passes(
        self, micro_batches: list, in_backward: UpdateInBackward | None, gradients: GradientSums | None
    ) -> tuple[dict, bool]:
        """Forward and backward of each -> (sums of the arrays on the host, was there a gradient)."""
        around = in_backward.updating if in_backward else gradients.summing if gradients else nullcontext
        be, has_gradient, scale = self.model.backend, False, self._loss_scale
        sums: dict[str, Any] = {}
        for micro_batch in micro_batches:
            loss, extra = compute_and_backward(self, micro_batch, scale, around())
            if gradients is not None:
                gradients.end_pass()
            has_gradient |= loss.requires_grad
            for name, value in (extra | {"loss": loss.data}).items():
                combine = np.maximum if name.startswith("max/") else np.add
                sums[name] = combine(sums[name], value) if name in sums else value
        # the step's one wait for the device
        return {name: be.to_numpy(value).astype(np.float64) for name, value in sums.items()}, has_gradient

    def _update(self, run: Run, has_gradient: bool, in_backward: UpdateInBackward | None) -> dict:
        """Step every optimizer that has not been stepped in_backward; returns the metrics of the update.

        A step with nothing to learn changes nothing: no weight, no moment, no count of Adam's. The learning rate goes
        by the steps of the run all the same, so that it ends where the schedule says.
        """
        optimizers, stepped = self._optimizers, {} if in_backward is None else in_backward.end()
        metrics = {"grad_norm": 0.0, "learning_rate": self._rate_of(self.models[POLICY])}
        applied, skipped, scale = False, False, self._loss_scale
        for name, one in self.models.items() if has_gradient else ():
            optimizer = one.optimizer
            assert optimizer is not None
            if not self.learns(name):
                optimizer.zero_grad()
                continue
            optimizer.loss_scale = scale
            norm, updated = stepped.get(optimizer) or optimizer.step(self._rate_of(one))
            applied |= updated
            skipped |= not math.isfinite(norm)
            metrics["grad_norm" if name == POLICY else f"grad_norm/{name}"] = norm
            if not math.isfinite(norm):
                what = "such layers were not updated" if optimizer in stepped else "the update was skipped"
                logger.warning("step %d: the gradient is not finite (norm %s); %s", self.global_step + 1, norm, what)
        if applied:
            if self.model.adapter is not None:
                self.model.adapter.refresh()
            self.weights_changed()
            self.after_update()
        run.count_update(applied, skipped)
        metrics["skipped_updates"] = optimizers[POLICY].skipped
        if self._loss_scale != 1:
            metrics["loss_scale"] = self._loss_scale
        return metrics

    @property
    def _loss_scale(self) -> float:
        """Of all models, since one backward pass serves them: the smallest that a float16 model asks for."""
        return min((one.loss_scale for one in self._optimizers.values() if one.scales_loss), default=1.0)

    def _evaluates_now(self, epoch_ended: bool) -> bool:
        """Whether an evaluation is due after the step that just ended."""
        args, step = self.args, self.global_step
        by_steps = args.evaluates == "steps" and args.eval_steps is not None and step % args.eval_steps == 0
        by_epoch = args.evaluates == "epoch" and epoch_ended
        return by_steps or by_epoch or (args.eval_on_start and step == self.total_steps)
