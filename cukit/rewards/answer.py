r"""The one reader of answers, for golds and for completions: text or LaTeX -> Answer, and whether two are the same.

Texts are the same answer if they are the same number, or if they typeset to the same formula once spacing, braces and
notation are unified. Formulas are not rearranged: `x+1` is not `1+x`. A text that can not be read is the same as no
other.
"""

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

from .formula import DIGITS, Formula, UnreadableError, Word, read_formula
from .units import LETTER_UNITS, NO_UNITS

# No answer is longer. Python converts digits to integers in quadratic time, so numbers have a limit of their own.
MAX_ANSWER_LENGTH = 2000
MAX_NUMBER_LENGTH = 300
NUM_READ = 4096  # readings that are kept: a gold stands in every row of a group, and answers repeat


@dataclass(frozen=True)
class Answer:
    """name: the x of `x = 5`, or None. body: the formula. unit: words such as `cm` or `dollars per day` behind it."""

    name: str | None
    body: Formula
    unit: Formula

    @functools.cached_property
    def value(self) -> Fraction | None:
        """The number that the body is, whatever its unit; None if it is no number (an expression is none)."""
        return _value(self.body)

    @property
    def is_division(self) -> bool:
        """A whole number written as a fraction, as 6/2 is."""
        return self.value is not None and self.value.denominator == 1 and any(item[0] == "frac" for item in self.body)


@functools.lru_cache(NUM_READ)
def read(text: str, grouped: bool = True, words: bool = False) -> Answer | None:
    """The answer that `text` as a whole is (see `read_formula`); None if it is empty, too long or can not be read."""
    if len(text) > MAX_ANSWER_LENGTH:
        return None
    try:
        items = read_formula(text, grouped, words)
    except UnreadableError:
        return None
    name = None
    if len(items) > 2 and _is_letter(items[:1]) and items[1] == "=":
        name, items = str(items[0]), items[2:]
    body, unit = _split_unit(_without_end_marks(items))
    body = _flat(_without_end_marks(body))
    if len(body) == 1 and body[0][0] == "(" and body[0][-1] == ")" and _is_letter(body[0][1]):
        body = body[0][1]  # (D) is choice D
    return Answer(name, body, _flat(unit)) if body else None


def same_answer(given: str, wanted: str) -> bool:
    r"""Whether two texts are the same answer.

    `1,234` = `1234`, `\$42` = `42.0`, `\dfrac12` = `1/2` = `0.5`, `\text{D}` = `(D)`, `90^\circ` = `90`, `78\%` = `78`.
    A name or a unit that only one of them has does not count: `x=5` = `5`, `14\text{ cm}` = `14`.
    """
    return any(_same(read(given, grouped), read(wanted, grouped)) for grouped in (True, False))


def parse_number(text: str) -> Fraction | None:
    r"""The number that `text` as a whole is: 42, -1,234.50, $42, .5, 3/4, \frac34, 78%, 2e-05; None for anything else.

    A percent sign is dropped (78% is 78), as is a period at the end.
    """
    answer = read(text, words=True)
    return answer.value if answer is not None and answer.name is None and not answer.unit else None


# A box without braces holds one character: in `\boxed 72` the 7 alone, which nothing that wrote it meant.
BOX = re.compile(
    r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(?:(?P<brace>\{)|(?P<one>[0-9a-zA-Z])"
    r"(?=[.,;]?(?:\s|\$|\\[)\]]|$))|(?P<unclear>[^\s{]))|\\.|[{}]",
    re.DOTALL,
)


def last_boxed(text: str) -> str | None:
    r"""The content of the last box: `\boxed{...}` or `\fbox{...}` with braces that close, or `\boxed 7`.

    None if there is none, or if the last one has no braces and holds more than one character.
    """
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    last: tuple[int, int] | None = None
    open_braces: list[tuple[int, bool]] = []
    # An escaped brace is a character like any other; one pass, as a completion may hold thousands of open boxes.
    for match in BOX.finditer(text):
        if match["one"] or match["unclear"]:
            last = match.span("one") if match["one"] else (match.end(), -1)
        elif match["brace"] or match[0] == "{":
            open_braces.append((match.end(), bool(match["brace"])))
        elif match[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None or last[1] < 0 else text[slice(*last)]


# ---- what is read ----


def _without_end_marks(items: Formula) -> Formula:
    while items and items[-1] in (".", "%"):
        items = items[:-1]
    return items


def _split_unit(items: Formula) -> tuple[Formula, Formula]:
    """(what is measured, its unit): the words at the end, with powers and slashes between them (`cm^2`, `km/h`).

    Only behind a number, and not if a word says more than a unit does (`or`, `thousand`, `squared`).
    """
    end = len(items)
    while end and (
        isinstance(items[end - 1], Word) or items[end - 1] in ("/", ".", "-", "'", "’") or items[end - 1][0] == "^"
    ):
        end -= 1
    while end < len(items) and not isinstance(items[end], Word):
        end += 1
    unit = items[end:]
    if any(isinstance(word, Word) and not _measures(word, word is unit[-1]) for word in unit):
        return items, ()
    return (items[:end], unit) if any(map(_is_numeric, items[:end])) else (items, ())


def _measures(word: Word, is_last: bool) -> bool:
    if len(word) == 1:
        return word in LETTER_UNITS or (word == "a" and not is_last)  # dollars a day
    return word.lower() not in NO_UNITS


def _is_letter(formula: Formula) -> bool:
    return len(formula) == 1 and isinstance(formula[0], str) and len(formula[0]) == 1 and formula[0].isalpha()


def _is_numeric(item: str | tuple) -> bool:
    return item[0] in ("frac", "sqrt", "(", "[") if isinstance(item, tuple) else item[0] in DIGITS


def _flat(formula: Formula) -> Formula:
    """Words as their letters."""
    found: list = []
    for item in formula:
        if isinstance(item, tuple):
            found.append(tuple(_flat(part) if isinstance(part, tuple) else part for part in item))
        else:
            found += item if isinstance(item, Word) else [item]
    return tuple(found)


# ---- comparison ----


def _same(given: Answer | None, wanted: Answer | None) -> bool:
    if given is None or wanted is None:
        return False
    if given.name and wanted.name and given.name != wanted.name:
        return False
    if given.body + given.unit == wanted.body + wanted.unit:
        return True
    if given.unit and wanted.unit and given.unit != wanted.unit:
        return False
    return given.body == wanted.body or (given.value is not None and given.value == wanted.value)


def _value(body: Formula) -> Fraction | None:
    if body[:1] in (("-",), ("+",)):
        value = _unsigned_value(body[1:])
        return -value if value is not None and body[0] == "-" else value
    return _unsigned_value(body)


def _unsigned_value(body: Formula) -> Fraction | None:
    r"""A number, a fraction of two numbers, or 3 \times 10^{16}."""
    if len(body) == 1 and body[0][0] == "frac":
        over, under = _value(body[0][1]), _value(body[0][2])
        return over / under if over is not None and under else None
    if len(body) == 1 and body[0][0] in DIGITS and len(body[0]) <= MAX_NUMBER_LENGTH:
        return Fraction(body[0])
    if len(body) == 4 and body[1:3] == ("\\cdot", "10") and body[3][0] == "^":
        factor, power = _unsigned_value(body[:1]), _value(body[3][1])
        if factor is not None and power is not None and power.denominator == 1 and abs(power) <= MAX_NUMBER_LENGTH:
            return factor * Fraction(10) ** int(power)
    return None
