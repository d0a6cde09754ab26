"""The entropy of the tokens: which of them learn, and how much of it the loss asks for."""

from __future__ import annotations

import math

import numpy as np


def high_entropy(entropies: np.ndarray, quantile: float) -> np.ndarray:
    """(N,) bool: the tokens in the top `quantile` of the entropies (Wang et al. 2025, "Beyond the 80/20 rule").

    1 keeps all, 0 the highest alone. TRL's top_entropy_quantile; the border is interpolated linearly.
    """
    if not len(entropies):
        return np.zeros(0, bool)
    return entropies >= np.quantile(entropies, 1 - quantile)


class EntropyBonus:
    """The coefficient of the mean entropy in the loss, loss − coefficient · H; constant, or moved after every step.

    Adaptive (Skywork-OR1, He et al. 2025; as in TRL): after a step with a mean entropy of at most entropy_target the
    coefficient rises by entropy_coef_delta, else it falls by it, within [entropy_coef_min, entropy_coef_max]; it counts
    in a step only if the step before had an entropy of at most the target.
    """

    def __init__(self, options):
        self.options, self.coefficient, self.last_entropy = options, options.entropy_coef, math.inf

    @property
    def applied(self) -> float:
        """The coefficient of the next step."""
        options = self.options
        return self.coefficient if not options.use_adaptive_entropy or self._is_low(self.last_entropy) else 0.0

    def update(self, entropy: float) -> None:
        """Take note of a step's mean entropy; one that is not finite changes nothing."""
        options = self.options
        if options.use_adaptive_entropy and math.isfinite(entropy):
            step = options.entropy_coef_delta if self._is_low(entropy) else -options.entropy_coef_delta
            moved = self.coefficient + step
            self.coefficient = min(max(moved, options.entropy_coef_min), options.entropy_coef_max)
            self.last_entropy = entropy

    def _is_low(self, entropy: float) -> bool:
        return entropy <= self.options.entropy_target

    def state(self) -> dict:
        """What a checkpoint needs, as JSON values; {} for a coefficient that never moved."""
        if self.last_entropy == math.inf:
            return {}
        return {"entropy_coef": self.coefficient, "last_entropy": self.last_entropy}

    def load(self, state: dict) -> None:
        """Take back what state() gave."""
        self.coefficient = state.get("entropy_coef", self.options.entropy_coef)
        self.last_entropy = state.get("last_entropy", math.inf)
