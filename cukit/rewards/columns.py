"""What the built-in rewards read of a row: the text of its completion, and the right answers in its columns."""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from numbers import Real
from typing import TypeVar

import numpy as np

MAX_GOLD_BITS = 1000  # of an integer; about as many digits as the reader of answers takes
MAX_EXPONENT = 400

Completion = str | list[dict]
Column = Sequence | None  # of the data: one entry a completion
T = TypeVar("T")


class NumberText(str):
    """An answer that the data gives as a number, not as text, written without an exponent."""


def completion_text(completion: Completion) -> str:
    """The text of a completion: itself, or what the last assistant message of a message list says."""
    if isinstance(completion, str):
        return completion
    spoken = [message.get("content") for message in completion if message.get("role") == "assistant"]
    return spoken[-1] if spoken and isinstance(spoken[-1], str) else ""


def gold_texts(count: int, answer: Column, solution: Column, name: str) -> list[list[str]]:
    """For each row the texts of its right answers: of the answer column, or where that has none the solution column.

    A list in the data holds several right answers. None, blank text and what is neither text nor a number give none.
    """
    if answer is None and solution is None:
        raise ValueError(f"the {name!r} reward needs an 'answer' or a 'solution' column in the data")
    answers, solutions = (column if column is not None else [None] * count for column in (answer, solution))
    golds = [second if first is None else first for first, second in zip(answers, solutions, strict=True)]
    entries = [list(gold) if isinstance(gold, (list, tuple, np.ndarray)) else [gold] for gold in golds]
    return [[text for gold in row if (text := _text(gold)) is not None] for row in entries]


def score(completion: Completion, golds: Sequence[T], is_right: Callable[[str, T], bool]) -> float | None:
    """1.0 if `is_right(text of the completion, gold)` for any of the golds, None if there are none."""
    text = completion_text(completion)
    return float(any(is_right(text, gold) for gold in golds)) if golds else None


def _text(gold: object) -> str | None:
    if isinstance(gold, str):
        return gold if gold.strip() else None
    if isinstance(gold, (bool, np.bool_)) or not isinstance(gold, (Real, Decimal, np.number)):
        return None
    if isinstance(gold, int):
        return NumberText(gold) if gold.bit_length() <= MAX_GOLD_BITS else None
    if not math.isfinite(gold):
        return None
    number = Decimal(str(gold))
    return NumberText(format(number, "f")) if abs(number.adjusted()) <= MAX_EXPONENT else None
