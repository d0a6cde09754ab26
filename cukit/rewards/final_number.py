"""Rewards for problems with a number as their answer, written behind `####` (GSM8K's form)."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction

from .answer import MAX_ANSWER_LENGTH, last_boxed, read
from .columns import Column, Completion, gold_texts, score

Reader = Callable[[str], Fraction | None]

MARKER = "####"
# A number in running text: with separators and a sign (where no operand stands before it), or a fraction. What is
# glued to it (6e3, 6^2, 1,2345, 6 400) is taken along, so that no part of it is read as the number.
FREE_NUMBER = re.compile(
    r"(?:(?<![A-Za-z0-9_)\]}])[-+])?\\?\$?"
    r"(?:\\[dtc]?frac\s{0,3}(?:[0-9]{2}|\{[^{}]{0,40}\}\s{0,3}\{[^{}]{0,40}\})"
    r"|(?<![A-Za-z0-9_.^])\.?[0-9]"
    r"(?:[0-9.,/]|\{,\}|\\[,!]|(?:[ \u00a0\u2009\u202f~'_]|\\[ ;:])(?=[0-9]{3}(?![0-9]))|\^\{?-?[0-9]|[eE][-+]?[0-9])*)"
)
DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"))
EMPHASIS = re.compile(r"\*\*([^*]+)\*\*")


def gsm8k(
    completions: Sequence[Completion], answer: Column = None, solution: Column = None, **kwargs: object
) -> list[float | None]:
    r"""1.0 if the number after the completion's last `####` is the answer; None where the row's own can not be read.

    The line after `####` holds the answer and nothing that an answer may not carry: `$1,234`, `42.0`, `5/8`, `- 8`,
    `42 dollars.` are numbers; `6 + 6`, `6e3`, `6 or 7`, `6/2` are not. Without a marker the last `\boxed{...}` counts;
    without a box, the last number of the text. The row's answer is read in the same way, but it must mark its number
    or be one as a whole.
    """
    golds = gold_texts(len(completions), answer, solution, "gsm8k")
    return _scores(completions, golds, _marked_number, lambda text: _marked_number(text, guess=True))


def gsm8k_strict(
    completions: Sequence[Completion], answer: Column = None, solution: Column = None, **kwargs: object
) -> list[float | None]:
    """1.0 only if the completion ends in `####` and the number with nothing after it: form and stopping count too."""

    def bare_number(text: str) -> Fraction | None:
        return _number(text.rpartition(MARKER)[2], bare=True)

    golds = gold_texts(len(completions), answer, solution, "gsm8k_strict")
    return _scores(completions, golds, bare_number, lambda text: bare_number(text) if MARKER in text else None)


def _scores(
    completions: Sequence[Completion], golds: list[list[str]], read_gold: Reader, read_completion: Reader
) -> list[float | None]:
    found = []
    for completion, texts in zip(completions, golds, strict=True):
        numbers = [number for text in texts if (number := read_gold(text)) is not None]
        found.append(score(completion, numbers, lambda text, number: read_completion(text) == number))
    return found


def _marked_number(text: str, guess: bool = False) -> Fraction | None:
    if MARKER in text:
        return _number(text.rpartition(MARKER)[2].strip().partition("\n")[0])
    box = last_boxed(text)
    if box is not None:
        return _number(box)
    number = _number(text)
    return _last_number(text) if number is None and guess else number


def _number(text: str, bare: bool = False) -> Fraction | None:
    """The number that `text` as a whole is; with a unit and emphasis unless `bare`.

    None for a whole number that is written as a fraction: `6/2` is a division left to the reader.
    """
    if len(text) > MAX_ANSWER_LENGTH:
        return None
    answer = read(text if bare else EMPHASIS.sub(r" \1 ", text), words=True)
    if answer is None or answer.name is not None or answer.is_division or (bare and answer.unit):
        return None
    return answer.value


def _last_number(text: str) -> Fraction | None:
    found = deque(FREE_NUMBER.finditer(text.translate(DASHES).replace("$-", "-$")), maxlen=1)
    return _number(found[0][0].rstrip(".,/")) if found else None
