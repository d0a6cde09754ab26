"""The reward of the countdown task (TinyZero): reach a target by arithmetic that uses each given number once."""

import re
from collections.abc import Sequence
from fractions import Fraction

from .columns import Column, Completion, completion_text

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")
MAX_EXPRESSION = 500  # characters
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3, "keep": 3}


def countdown(
    completions: Sequence[Completion],
    numbers: Column = None,
    nums: Column = None,
    target: Column = None,
    *,
    partial: float = 0.1,
    **kwargs: object,
) -> list[float | None]:
    """1.0 if the last <answer>…</answer> holds an expression that is the target and uses each of the numbers once.

    `partial` for an answer that is there and wrong; 0.0 without one. Columns: `numbers` (or `nums`, a list of whole
    numbers a row) and `target`. An expression is whole numbers, + - * / and round brackets; fractions are exact. None
    for a row that has no numbers or no target.
    """
    numbers = nums if numbers is None else numbers
    if numbers is None or target is None:
        raise ValueError("the 'countdown' reward needs the columns 'numbers' (or 'nums') and 'target' in the data")
    rows = zip(completions, numbers, target, strict=True)
    return [_score(completion_text(completion), given, wanted, partial) for completion, given, wanted in rows]


def _score(text: str, numbers: Sequence[int] | None, target: int | None, partial: float) -> float | None:
    if numbers is None or target is None:
        return None
    found = ANSWER.findall(text)
    if not found:
        return 0.0
    return 1.0 if _is_right(found[-1], [int(number) for number in numbers], int(target)) else float(partial)


def _is_right(expression: str, numbers: list[int], target: int) -> bool:
    tokens = _tokens(expression)
    if tokens is None or sorted(token for token in tokens if isinstance(token, int)) != sorted(numbers):
        return False
    return evaluate(expression) == target


def evaluate(expression: str) -> Fraction | None:
    """The exact value of an expression; None if it is none, or divides by zero.

    Two stacks (Dijkstra's shunting yard), so that no depth of brackets overflows Python's.
    """
    tokens = _tokens(expression)
    values: list[Fraction] = []
    waiting: list[str] = []
    operand_next = True
    for token in tokens or ():
        if operand_next:
            if isinstance(token, int):
                values.append(Fraction(token))
                operand_next = False
            elif token in ("+", "-"):
                waiting.append("negate" if token == "-" else "keep")
            elif token == "(":
                waiting.append(token)
            else:
                return None
        elif token == ")":
            if not _reduce(values, waiting, 0) or not waiting:
                return None
            waiting.pop()
        elif isinstance(token, int) or token == "(":
            return None
        else:
            if not _reduce(values, waiting, PRECEDENCE[token]):
                return None
            waiting.append(token)
            operand_next = True
    if operand_next or not _reduce(values, waiting, 0) or waiting:
        return None
    return values[0]


def _tokens(expression: str) -> list[int | str] | None:
    """Numbers as int, signs as text; None if anything else is in it."""
    expression = expression.strip()
    if len(expression) > MAX_EXPRESSION:
        return None
    found: list[int | str] = []
    place = 0
    while place < len(expression):
        match = TOKEN.match(expression, place)
        if match is None:
            return None
        found.append(int(match[1]) if match[1] else match[2])
        place = match.end()
    return found


def _reduce(values: list[Fraction], waiting: list[str], precedence: int) -> bool:
    """Apply what waits down to an open bracket and binds at least as strongly; False for a division by zero."""
    while waiting and waiting[-1] != "(" and PRECEDENCE[waiting[-1]] >= precedence:
        sign, right = waiting.pop(), values.pop()
        if sign in ("negate", "keep"):
            values.append(-right if sign == "negate" else right)
            continue
        left = values.pop()
        if sign == "/" and not right:
            return False
        operation = {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}[sign]
        values.append(operation(right))
    return True
