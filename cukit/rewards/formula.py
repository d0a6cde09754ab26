r"""From text or LaTeX to a formula: a tuple of items in one notation, however it was spaced, braced and spelled.

An item is a number ("42", without separators or needless zeros), a letter, a command or another character, a Word of
\text, or one of the nodes ("frac", over, under), ("sqrt", index, radicand), ("^", script), ("_", script), (command,
arguments) and (opening bracket, inside, closing bracket), each part again a formula.
"""

import re
from decimal import Decimal

from .units import UNITS

MAX_NESTING = 40

Formula = tuple


class Word(str):
    r"""A word of running text, as in \text{no solution}; compared letter by letter, as in a formula."""


SPACE = re.compile(
    r"\s+|~|\\[,;:!\s]|\\?\$|\\[()\[\]]|[°€£¥]|\\(?:left|right)\s*\.|"
    r"\\(?:quad|qquad|left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|degree|thinspace)(?![a-zA-Z])"
)
TOKEN = re.compile(r"(?P<command>\\(?:[a-zA-Z]+|.))|(?P<letters>[a-zA-Z]+)|(?P<other>.)", re.DOTALL)
SEPARATOR = r"\{,\}|,?\\[!,]|,?[\u00a0\u2009\u202f]"
FLOAT = r"[0-9]+(?:\.[0-9]+)?e[-+][0-9]{2,3}(?![0-9])"  # as Python and JSON write 2e-05; `2e-1` is a formula
PLAIN = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
TYPESET = re.compile(PLAIN)


def _number(separator: str) -> re.Pattern:
    return re.compile(rf"{FLOAT}|[0-9]{{1,3}}(?:(?:{separator})[0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?|{PLAIN}")


GROUPED = _number(f",|{SEPARATOR}")
GROUPED_IN_BRACKETS = _number(SEPARATOR)  # a plain comma separates there: (1,200) is a pair

# What stands for one sign -> the ways to write it.
SIGNS = {
    "-": "\u2010 \u2011 \u2012 \u2013 \u2212 \ufe63 \uff0d",
    "\\cdot": r"* · × \times \ast",
    "\\leq": r"\le ≤ \leqslant",
    "\\geq": r"\ge ≥ \geqslant",
    "\\neq": r"\ne ≠",
    "<": r"\lt",
    ">": r"\gt",
    "%": r"\%",
    "\\div": "÷",
    "\\pm": "±",
    "\\infty": "∞",
    "\\pi": "π",
    "\\sqrt": "√",
    "\\frac": r"\dfrac \tfrac \cfrac",
    "\\binom": r"\dbinom \tbinom",
    "\\emptyset": r"\varnothing ∅",
    "\\ldots": r"\dots \cdots …",
    "\\cup": "∪",
    "\\cap": "∩",
    "\\in": "∈",
    "|": r"\vert \lvert \rvert \mid",
    "\\{": r"\lbrace",
    "\\}": r"\rbrace",
    "[": r"\lbrack",
    "]": r"\rbrack",
    "^2": "²",
    "^3": "³",
}
ALIASES = {other: sign for sign, others in SIGNS.items() for other in others.split()}
DIGITS = frozenset("0123456789")
CLOSERS = {"(": ")", "[": "]", "\\{": "\\}"}
TEXT = {
    f"\\{name}" for name in "text textbf textit textrm textsf texttt textnormal mathrm mbox hbox operatorname".split()
}
WRAPPERS = {f"\\{name}" for name in "mathbf mathit mathsf mathtt boldsymbol bm bold boxed fbox".split()}
# Other commands with arguments -> how many. What follows any further command in braces is read as if it had none.
ARITY = {"\\binom": 2} | {
    f"\\{name}": 1
    for name in """overline underline bar hat widehat vec tilde widetilde dot ddot overrightarrow overleftarrow mathbb
    mathcal mathfrak pmod bmod underbrace overbrace cancel""".split()
}
SYMBOLS = {
    f"\\{name}"
    for name in "pi theta alpha beta gamma delta epsilon lambda mu phi varphi psi rho sigma tau omega infty".split()
}


class UnreadableError(Exception):
    """Braces that do not balance, a command without its arguments, too many levels."""


def read_formula(text: str, grouped: bool, words: bool) -> Formula:
    r"""The items of `text`; UnreadableError.

    grouped: `1,234`, `1{,}234` and `1\,234` are one number; else the digits stand as they are typeset.
    words: running text, where letters are words; else a formula, where they are variables.
    """
    parser = _Parser(text, grouped, words)
    items = parser.sequence()[0]
    if parser.position < len(text):  # a brace that nothing opened
        raise UnreadableError
    return items


class _Parser:
    """A recursive reader without look-back: every character is read once."""

    def __init__(self, text: str, grouped: bool, words: bool):
        self.text, self.grouped, self.words = text, grouped, words
        self.position = self.nesting = self.brackets = 0

    def sequence(self, closers: tuple = (), folded: bool = True) -> tuple[Formula, str | None]:
        """(items up to one of `closers`, which is read too, or else up to a closing brace or the end; that closer)"""
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise UnreadableError
        items: list = []
        while True:
            before, (kind, token) = self.position, self._next()
            if token in closers or token in ("", "}"):
                break
            for item in self._items(kind, token):
                behind_power = len(items) > 0 and items[-1][0] == "^" and item[0] == "_"
                items.insert(len(items) - int(behind_power), item)  # x^2_1 is typeset as x_1^2
        if token not in closers:
            self.position = before if token else len(self.text)
        self.nesting -= 1
        return _folded(items) if folded else tuple(items), token if token in closers else None

    def _skip_space(self) -> None:
        while space := SPACE.match(self.text, self.position):
            self.position = space.end()

    def _next(self) -> tuple[str, str]:
        """(kind, token) with aliases resolved; the token is "" at the end."""
        self._skip_space()
        numbers = TYPESET if not self.grouped else GROUPED_IN_BRACKETS if self.brackets else GROUPED
        match, kind = numbers.match(self.text, self.position), "number"
        if match is None and (match := TOKEN.match(self.text, self.position)):
            kind = str(match.lastgroup)
        if match is None:
            return "end", ""
        self.position = match.end()
        return kind, ALIASES.get(match[0], match[0])

    def _items(self, kind: str, token: str) -> tuple:
        if kind == "number":
            return (_normal_number(token),)
        if kind == "letters":
            return self._letters(token)
        if token == "{":
            return self._until_brace(folded=False)
        if token in CLOSERS:
            return self._bracket(token)
        if token in TEXT:
            return self._running_text()
        if token in WRAPPERS:
            return self._argument()
        if token == "\\frac":
            return (_fraction(self._argument(), self._argument()),)
        if token in ARITY:
            return ((token, *(self._argument() for _ in range(ARITY[token]))),)
        if token == "\\sqrt":
            return (("sqrt", self._root_index(), self._argument()),)
        if token in ("^2", "^3"):
            return (("^", (token[1],)),)
        if token in ("^", "_"):
            script = self._argument()
            if token == "^" and script in (("\\circ",), ("\\prime",)):
                return ("'",) if script == ("\\prime",) else ()
            return ((token, script),)
        return (token,)

    def _letters(self, token: str) -> tuple:
        """One word, or a variable a letter. A single letter that touches a digit is a variable: 6x, 6k, 6m."""
        start = self.position - len(token)
        touches = start > 0 and self.text[start - 1] in DIGITS
        is_word = not (touches and len(token) == 1) if self.words else len(token) > 1 and token.lower() in UNITS
        return (Word(token),) if is_word else tuple(token)

    def _argument(self) -> Formula:
        r"""What a command takes: a group, one digit or letter (\frac12), or one command with its own arguments."""
        self._skip_space()
        character = self.text[self.position : self.position + 1]
        if character.isascii() and character.isalnum():
            self.position += 1
            return (Word(character) if self.words and character.isalpha() else character,)
        kind, token = self._next()
        if token in ("", "}"):
            raise UnreadableError
        if token == "{":
            return self._until_brace()
        if kind == "number" or token in ("^", "_"):  # \frac.5 and x^^2 are no LaTeX
            raise UnreadableError
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise UnreadableError
        items = self._items(kind, token)
        self.nesting -= 1
        return items

    def _until_brace(self, folded: bool = True) -> Formula:
        items, closer = self.sequence(("}",), folded)
        if closer is None:
            raise UnreadableError
        return items

    def _bracket(self, opening: str) -> tuple:
        """(opening, inside, closing), or where nothing closes it, its parts as they stand. [0, 1) is a bracket too."""
        self.brackets += 1
        items, closing = self.sequence(tuple(CLOSERS.values()))
        self.brackets -= 1
        return (opening, *items) if closing is None else ((opening, items, closing),)

    def _running_text(self) -> Formula:
        outer, self.words = self.words, True
        items = self._argument()
        self.words = outer
        return items

    def _root_index(self) -> Formula:
        self._skip_space()
        if self.text[self.position : self.position + 1] != "[":
            return ()
        self.position += 1
        items, closing = self.sequence(("]",))
        if closing is None:
            raise UnreadableError
        return items


def _normal_number(text: str) -> str:
    """Digits and at most one point, without separators and needless zeros: 1{,}234.50 -> 1234.5."""
    text = format(Decimal(text), "f") if "e" in text else re.sub(r"[^0-9.]", "", text)
    whole, _, part = text.partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    return f"{whole}.{part}" if part else whole


# ---- one notation ----


def _fraction(over: Formula, under: Formula) -> tuple:
    """A fraction; brackets around a whole part say nothing."""
    parts = [
        part[0][1] if len(part) == 1 and part[0][0] == "(" and part[0][-1] == ")" else part for part in (over, under)
    ]
    return ("frac", *parts)


def _is_factor(item: str | tuple) -> bool:
    if isinstance(item, tuple):
        return True
    is_letter = len(item) == 1 and item.isascii() and item.isalpha() and not isinstance(item, Word)
    return is_letter or item[0] in DIGITS or item in SYMBOLS or item in ("!", "'", "/")


def _folded(items: list) -> Formula:
    """The items with every a/b that can mean only one thing made a fraction; its leading minus comes before it."""
    found: list = []
    term: list = []
    for item in items:
        if _is_factor(item):
            term.append(item)
        else:
            found += [*_slash_folded(term), item]
            term = []
    found += _slash_folded(term)
    result: list = []
    for index, item in enumerate(found):
        negative = item[0] == "frac" and item[1][:1] == ("-",) and not {"+", "-", "\\pm", ","} & set(item[1][1:])
        if negative and (index == 0 or found[index - 1] in (",", "=")):
            result += ["-", ("frac", item[1][1:], item[2])]
        else:
            result.append(item)
    return tuple(result)


def _slash_folded(term: list) -> list:
    """A product with one slash: what stands before it over the one factor behind it. `1/2x` and `a/b/c` stay."""
    if term.count("/") != 1:
        return term
    place = term.index("/")
    over, under = term[:place], term[place + 1 :]
    scripts = [item for item in under[1:] if item[0] in ("^", "_", "!", "'")]
    if not over or not under or len(scripts) != len(under) - 1 or "^" in (over[0][0], under[0][0]):
        return term
    mixed = len(over) > 1 and over[-1][0] in DIGITS and over[-2][0] in DIGITS  # 1 1/2
    whole, over = (over[:-1], over[-1:]) if mixed else ([], over)
    return [*whole, _fraction(tuple(over), tuple(under))]
