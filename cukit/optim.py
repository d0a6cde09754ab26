"""AdamW on float32 master weights, gradient clipping, loss scaling for float16, learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .autograd import Parameter
from .backend import backend_of

GROWTH_INTERVAL = 400  # finite steps after which the loss scale of float16 doubles (Precision-RL's value)
MAX_LOSS_SCALE = 2.0**24


class AdamW:
    """AdamW on float32 master weights (the parameter itself if it is float32 or float64), moments of the same dtype.

    decay(parameter) says which parameters weight_decay applies to (default: matrices, not norm weights and biases).
    """

    def __init__(
        self,
        parameters: list[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        decay: Callable[[Parameter], bool] | None = None,
    ):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.lr, self.betas, self.eps, self.max_grad_norm = lr, betas, eps, max_grad_norm
        decays = decay or (lambda parameter: len(parameter.shape) > 1)
        self.weight_decay = [weight_decay if decays(parameter) else 0.0 for parameter in self.parameters]
        self.step_count = 0  # updates that were applied
        self.skipped = 0  # updates that were not, because the gradient was not finite
        half = any(parameter.dtype == np.float16 for parameter in self.parameters)
        self.loss_scale = 2.0**16 if half else 1.0  # multiply the loss by this before backward()
        self._dynamic_scale, self._finite_in_a_row = half, 0
        self._moments, self._masters = [], []
        for parameter in self.parameters:
            be = backend_of(parameter.data)
            dtype = be.accumulator(parameter.dtype)
            self._masters.append(parameter.data if parameter.dtype == dtype else parameter.data.astype(dtype))
            self._moments.append((be.zeros(parameter.shape, dtype), be.zeros(parameter.shape, dtype)))

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.zero_grad()

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients of the unscaled loss; NaN or infinity where a gradient is not finite."""
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not grads:
            return 0.0
        return math.sqrt(backend_of(grads[0]).sum_of_squares(grads)) / self.loss_scale

    def step(self, lr: float | None = None) -> tuple[float, bool]:
        """One update from Parameter.grad, clipped by min(1, max_grad_norm / (norm + 1e-6)) as torch does, then
        zero_grad().

        Returns (gradient norm before clipping, whether weights were updated). A norm that is not finite changes no
        weight: the update is counted in `skipped`, and float16 halves its loss scale.
        """
        norm = self.grad_norm()
        finite = math.isfinite(norm)
        if finite:
            clip = min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm > 0 else 1.0
            self._update(self.lr if lr is None else lr, clip / self.loss_scale)
        else:
            self.skipped += 1
        self._adapt_loss_scale(finite)
        self.zero_grad()
        return norm, finite

    def _update(self, lr: float, grad_scale: float):
        self.step_count += 1
        for parameter, master, (m, v), weight_decay in zip(
            self.parameters, self._masters, self._moments, self.weight_decay, strict=True
        ):
            if parameter.grad is not None:
                backend_of(master).adamw_step(
                    master,
                    m,
                    v,
                    parameter.grad,
                    parameter.data,
                    lr,
                    *self.betas,
                    self.eps,
                    weight_decay,
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

    def state_dict(self) -> dict[str, object]:
        """name -> array: moments, master weights of half-precision parameters, and the counters as one host array."""
        state = {
            "optimizer.counters": np.array(
                [self.step_count, self.skipped, self._finite_in_a_row, self.loss_scale], np.float64
            )
        }
        for parameter, master, (m, v) in zip(self.parameters, self._masters, self._moments, strict=True):
            state[f"{parameter.name}.exp_avg"], state[f"{parameter.name}.exp_avg_sq"] = m, v
            if master is not parameter.data:
                state[f"{parameter.name}.master"] = master
        return state

    def load_state_dict(self, state: dict[str, object]):
        """Take back what state_dict() gave, host arrays included; ValueError for a missing or wrongly shaped one."""
        own = self.state_dict()
        missing, foreign = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or foreign:
            raise ValueError(
                f"optimizer state does not fit this model: missing {missing[:3]}, unexpected {foreign[:3]}"
            )
        for name, array in own.items():
            if tuple(state[name].shape) != tuple(array.shape):
                raise ValueError(
                    f"optimizer state {name} has shape {tuple(state[name].shape)}, "
                    f"this model needs {tuple(array.shape)}"
                )
            if name != "optimizer.counters":
                array[...] = backend_of(array).array(state[name], array.dtype)
        counters = np.asarray(state["optimizer.counters"])
        self.step_count, self.skipped, self._finite_in_a_row = (int(count) for count in counters[:3])
        self.loss_scale = float(counters[3])


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
