"""Rewards that count the tokens of a completion, its stop token included. To be added to one that judges the answer."""

from collections.abc import Sequence


def length(completion_ids: Sequence[Sequence[int]], *, target: float, **kwargs: object) -> list[float]:
    """-|tokens - target| / target, at least -1: 0 at `target` tokens, -1 at none and at twice as many."""
    if target <= 0:
        raise ValueError(f"the 'length' reward needs a target above 0, got {target}")
    return [-min(abs(len(ids) - target) / target, 1.0) for ids in completion_ids]


def overlong(
    completion_ids: Sequence[Sequence[int]], *, max_length: float, buffer: float, **kwargs: object
) -> list[float]:
    """The soft overlong penalty of DAPO (Yu et al. 2025, equation 13).

    0 up to max_length - buffer tokens, then down in a straight line to -1 at max_length, -1 above.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"the 'overlong' reward needs a buffer above 0 and at most max_length={max_length}, got {buffer}"
        )
    return [-min(max(len(ids) - (max_length - buffer), 0) / buffer, 1.0) for ids in completion_ids]
