"""The reward that compares answers as formulas, by the package math-verify (sympy)."""

from collections.abc import Callable, Sequence

from .columns import Column, Completion, completion_text, gold_texts
from .final_box import NO_ANSWER
from .final_number import MARKER

NEEDS_MATH_VERIFY = "the 'math' reward needs the package math-verify: pip install 'cukit[math]'; 'boxed' needs none"


def math(
    completions: Sequence[Completion], answer: Column = None, solution: Column = None, **kwargs: object
) -> list[float | None]:
    r"""1.0 if math-verify finds the completion's answer equal to one of the row's: `1+x` = `x+1`, `\sqrt8` = `2\sqrt2`.

    math-verify looks for the answer: a box first, then formulas and numbers at the end. What it can not read, or not
    compare within its five seconds, is wrong. None for a row with an answer that it cannot read.
    """
    from math_verify import parse, verify

    golds = gold_texts(len(completions), answer, solution, "math")
    scores: list[float | None] = []
    for completion, texts in zip(completions, golds, strict=True):
        wanted = [gold for text in texts if (gold := _gold(text, parse))]
        given = parse(completion_text(completion)) if wanted else []
        scores.append(float(any(verify(gold, given) for gold in wanted)) if wanted else None)
    return scores


def _gold(text: str, parse: Callable[[str], list]) -> list:
    """What math-verify reads of a right answer, which may stand without the signs that mark a formula."""
    if text.strip().lower() in NO_ANSWER:
        return []
    text = text.rpartition(MARKER)[2]  # GSM8K's solutions, in which $ is a dollar
    marked = any(sign in text for sign in ("$", "\\boxed", "\\(", "\\["))
    return parse(text if marked else f"${text}$")
