"""AdamW over a store of weights: float32 master weights, gradient clipping, loss scaling for float16; learning-rate
schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .autograd import Parameter
from .models.store import PIECES, Bucket, Store

GROWTH_INTERVAL = 400  # finite steps after which the loss scale of float16 doubles (Precision-RL's value)
MAX_LOSS_SCALE = 2.0**24
COUNTERS = "optimizer.counters"


@dataclass(slots=True)
class _State:
    """What AdamW keeps of a bucket, arrays of its layout; master is the weights themselves if they are wide enough."""

    exp_avg: Any
    exp_avg_sq: Any
    master: Any


class AdamW:
    """AdamW on float32 master weights (the weights themselves if they are float32 or float64), moments of that dtype.

    decay(parameter) says which parameters weight_decay applies to (default: matrices, not norm weights and biases). A
    parameter without a gradient stays as it is, its moments too. scales_loss: move loss_scale (default: if weights are
    float16; an adapter's are float32, and its model's activations may be float16).
    """

    def __init__(
        self,
        store: Store,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        decay: Callable[[Parameter], bool] | None = None,
        scales_loss: bool | None = None,
    ):
        self.store = store
        self.lr, self.betas, self.eps, self.max_grad_norm = lr, betas, eps, max_grad_norm
        self.weight_decay = weight_decay
        self._decays = decay or (lambda parameter: len(parameter.shape) > 1)
        self.step_count = 0  # updates that were applied
        self.skipped = 0  # updates that were not, because the gradient was not finite
        half = scales_loss
        if half is None:
            half = any(parameter.dtype == np.float16 for parameter in self.parameters)
        self.loss_scale = 2.0**16 if half else 1.0  # multiply the loss by this before backward()
        self._dynamic_scale, self._finite_in_a_row = half, 0
        self._states: dict[Bucket, _State] = {}
        for parameter in self.parameters:
            self._state(parameter.slot.bucket)

    @property
    def parameters(self) -> list[Parameter]:
        """Those that are trained."""
        return [parameter for parameter in self.store.parameters if parameter.requires_grad]

    def _state(self, bucket: Bucket) -> _State:
        if bucket not in self._states:
            be, wide = self.store.backend, self.store.backend.accumulator(bucket.dtype)
            moments = be.zeros((bucket.size,), wide), be.zeros((bucket.size,), wide)
            master = bucket.data if bucket.dtype == wide else bucket.data.astype(wide)
            self._states[bucket] = _State(*moments, master)
        return self._states[bucket]

    @property
    def scales_loss(self) -> bool:
        """Whether float16 weights make it move loss_scale."""
        return self._dynamic_scale

    def zero_grad(self):
        self.store.zero_grad()

    def step(self, lr: float | None = None) -> tuple[float, bool]:
        """One update from the gradients, clipped by min(1, max_grad_norm / (norm + 1e-6)) as torch does, then
        zero_grad().

        Returns (gradient norm before clipping, whether weights were updated). Where nothing has a gradient, nothing
        changes, counters included: (0.0, False). A norm that is not finite changes no weight: the update is counted in
        `skipped`, and float16 halves its loss scale.
        """
        if all(parameter.grad is None for parameter in self.parameters):
            return 0.0, False
        norm = self._grad_norm()
        finite = math.isfinite(norm)
        if finite:
            clip = min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm > 0 else 1.0
            self._update(self.lr if lr is None else lr, clip / self.loss_scale)
        else:
            self.skipped += 1
        self._adapt_loss_scale(finite)
        self.zero_grad()
        return norm, finite

    def _grad_norm(self) -> float:
        """Global L2 norm of the gradients of the unscaled loss; NaN or infinity where a gradient is not finite.

        Each piece of a bucket is summed, then the pieces in order. So ranks that hold whole pieces get the bits of one
        that holds all.
        """
        be = self.store.backend
        grads = [bucket.grad for bucket in self.store.buckets if bucket.grad is not None]
        return math.sqrt(be.sum_in_order(be.sums_of_squares(grads, PIECES))) / self.loss_scale

    def _update(self, lr: float, grad_scale: float):
        self.step_count += 1
        for bucket in self.store.buckets:
            for decays, part in bucket.runs(self._decays):
                state = self._state(bucket)
                weights = bucket.data[part]
                self.store.backend.adamw_step(
                    weights if state.master is bucket.data else state.master[part],
                    state.exp_avg[part],
                    state.exp_avg_sq[part],
                    bucket.grad[part],
                    weights,
                    lr,
                    *self.betas,
                    self.eps,
                    self.weight_decay if decays else 0.0,
                    self.step_count,
                    grad_scale,
                )

    def _adapt_loss_scale(self, finite: bool):
        if not self._dynamic_scale:
            return
        self._finite_in_a_row = self._finite_in_a_row + 1 if finite else 0
        if not finite:
            self.loss_scale = max(self.loss_scale / 2, 1.0)
        elif self._finite_in_a_row == GROWTH_INTERVAL:
            self.loss_scale, self._finite_in_a_row = min(self.loss_scale * 2, MAX_LOSS_SCALE), 0

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """name -> array: for each trained part its moments and, where the weights are half-precision, its master
        weights, in the part's shape (views, free of the store's layout); and the counters as one host array.
        """
        counters = [self.step_count, self.skipped, self._finite_in_a_row, self.loss_scale]
        return {COUNTERS: np.array(counters, np.float64)} | self._arrays()

    def _arrays(self) -> dict[str, Any]:
        """Part name and kind of state -> the view."""
        trained = {parameter.slot.bucket for parameter in self.parameters}
        found = {}
        for kind in ("exp_avg", "exp_avg_sq", "master"):

            def flat(bucket, kind=kind):
                if bucket not in trained or (kind == "master" and self._state(bucket).master is bucket.data):
                    return None
                return getattr(self._state(bucket), kind)

            for name, view in self.store.part_views(flat).items():
                if self.store.parts[name][0].requires_grad:
                    found[f"{name}.{kind}"] = view
        return found

    def load_state_dict(self, state: dict[str, Any]):
        """Take back what state_dict() gave, host arrays included; ValueError for a missing or wrongly shaped one.

        Older checkpoints hold whole parameters (layers.0.self_attn.qkv_proj.weight.exp_avg); they are read too.
        """
        state, own = self._by_part(state), self._arrays()
        missing, foreign = sorted((own.keys() | {COUNTERS}) - state.keys()), sorted(state.keys() - own.keys())
        foreign = [name for name in foreign if name != COUNTERS]
        if missing or foreign:
            raise ValueError(
                f"optimizer state does not fit this model: missing {missing[:3]}, unexpected {foreign[:3]}"
            )
        for name, array in own.items():
            _check_shape(name, state[name], array.shape)
        for name, array in own.items():
            array[...] = self.store.backend.array(state[name], array.dtype)
        counters = np.asarray(state[COUNTERS])
        self.step_count, self.skipped, self._finite_in_a_row = (int(count) for count in counters[:3])
        self.loss_scale = float(counters[3])

    def _by_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with arrays of whole parameters cut into parts."""
        cut = dict(state)
        for part, (parameter, rows) in self.store.parts.items():
            for kind in ("exp_avg", "exp_avg_sq", "master"):
                whole = f"{parameter.name}.{kind}"
                if part != parameter.name and whole in state:
                    _check_shape(whole, state[whole], parameter.shape)
                    cut.pop(whole, None)
                    cut[f"{part}.{kind}"] = state[whole][rows]
        return cut


def _check_shape(name, array, shape):
    if tuple(array.shape) != tuple(shape):
        raise ValueError(
            f"optimizer state {name} has shape {tuple(array.shape)}, this model needs {tuple(shape)}: "
            "resume with the model that the checkpoint was made from"
        )


def learning_rate_factor(schedule: str, step: int, num_steps: int, warmup_steps: int = 0) -> float:
    """What the peak learning rate is multiplied with in update `step` (from 0) of `num_steps`.

    Shapes as in transformers (constant, constant_with_warmup, linear, cosine), except that warm-up is (step + 1) /
    warmup_steps: their first update has a learning rate of 0 and is lost.
    """
    if schedule == "constant":
        return 1.0
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(1, num_steps - warmup_steps), 1.0)
    if schedule == "constant_with_warmup":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(
        f"lr_scheduler_type {schedule!r} is not known: choose constant, constant_with_warmup, linear or cosine"
    )
