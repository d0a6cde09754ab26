r"""Rewards that compare a completion's final answer with the "answer" (or else "solution") column.

Each returns 1.0 or 0.0, and None for a row whose own answer is missing or can not be read: scoring such a row would
reward or punish at random.
"""

import re
from fractions import Fraction

# A sign counts only where no operand stands before it: the last number of `10-3` is 3.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])[-+])?\$?(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))(?P<rest>\.[0-9]+)?"
)
# What makes a number part of an expression; `**` around a number is only emphasis.
OPERATOR = re.compile(r"[+/=^]|\*(?!\*)|\*\*[0-9]|[-,.][0-9]")
# Python converts digits to integers in quadratic time; no answer is this long.
MAX_NUMBER_LENGTH = 300
MAX_ANSWER_LENGTH = 2000
MARKER = "####"
NO_ANSWER = {"", "n/a", "none", "null", "nan", "unknown"}


# ---- the rewards ----


def exact(completions, answer=None, solution=None, **kwargs) -> list[float | None]:
    """1.0 if the completion, without white space around it, is the answer."""
    golds = _golds(len(completions), answer, solution, "exact")
    return [
        None
        if gold is None or not str(gold).strip()
        else float(completion_text(completion).strip() == str(gold).strip())
        for completion, gold in zip(completions, golds, strict=True)
    ]


def gsm8k(completions, answer=None, solution=None, **kwargs) -> list[float | None]:
    """1.0 if the number after the completion's last `####` (without one: its last number) is the answer's.

    The gold number stands after `####` too, or is the whole column. `1,234`, `$42` and `42.0` are read as numbers;
    what follows the number does not count, unless it makes it an expression (`####7+7`).
    """
    golds = _golds(len(completions), answer, solution, "gsm8k")
    return [
        _score(
            _gold_number(gold), lambda text: _marked_number(text) if MARKER in text else _last_number(text), completion
        )
        for completion, gold in zip(completions, golds, strict=True)
    ]


def gsm8k_strict(completions, answer=None, solution=None, **kwargs) -> list[float | None]:
    """1.0 only if the completion ends in `####` and the answer with nothing after it: form and stopping count too."""
    golds = _golds(len(completions), answer, solution, "gsm8k_strict")

    def last_part(text: str) -> Fraction | None:
        return parse_number(text.rpartition(MARKER)[2]) if MARKER in text else None

    return [_score(_gold_number(gold), last_part, text) for text, gold in zip(completions, golds, strict=True)]


def boxed(completions, answer=None, solution=None, **kwargs) -> list[float | None]:
    r"""1.0 if the completion's last `\boxed{...}` is the answer, up to how it is written (see `same_answer`).

    A gold text that holds a `\boxed{...}` itself (MATH's solutions) stands for what is in it.
    """
    scores: list[float | None] = []
    golds = _golds(len(completions), answer, solution, "boxed")
    for completion, gold in zip(completions, golds, strict=True):
        gold_text = "" if gold is None else str(gold)
        wanted = last_boxed(gold_text)
        wanted = gold_text if wanted is None else wanted
        if wanted.strip().lower() in NO_ANSWER:
            scores.append(None)
            continue
        given = last_boxed(completion_text(completion))
        scores.append(float(given is not None and same_answer(given, wanted)))
    return scores


# ---- what they are made of ----


def completion_text(completion) -> str:
    """The text of a completion: itself, or what the last assistant message of a message list says."""
    if isinstance(completion, str):
        return completion
    spoken = [message.get("content") for message in completion if message.get("role") == "assistant"]
    return spoken[-1] if spoken and isinstance(spoken[-1], str) else ""


def parse_number(text: str) -> Fraction | None:
    r"""The number that `text` as a whole is: 42, -1,234.50, $42, .5, 3/4, 78%; None for anything else.

    A percent sign is dropped (78% is 78), as is a period at the end.
    """
    text = text.strip().replace("−", "-").rstrip(".").removesuffix("%").removesuffix("\\").strip()
    if len(text) > MAX_NUMBER_LENGTH:
        return None
    fraction = re.fullmatch(r"([-+]?[0-9]+)/([0-9]+)", text)
    if fraction:
        return Fraction(int(fraction[1]), int(fraction[2])) if int(fraction[2]) else None
    if re.match(r"\$[-+]", text):  # $-42 as well as -$42
        text = text[1] + "$" + text[2:]
    match = NUMBER.fullmatch(text)
    return _value(match) if match else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` (or `\fbox{...}`) whose braces close; None if there is none."""
    last: tuple[int, int] | None = None
    open_braces: list[tuple[int, bool]] = []
    # An escaped brace is a character like any other; one pass, as a completion may hold thousands of open boxes.
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", text):
        if match[0].endswith("{") and match[0] != "\\{":
            open_braces.append((match.end(), len(match[0]) > 1))
        elif match[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[slice(*last)]


def same_answer(given: str, wanted: str) -> bool:
    r"""Whether two LaTeX answers are the same: equal numbers, or equal text once spacing and notation are unified.

    `1,234` = `1234`, `\$42` = `42.0`, `\dfrac12` = `1/2` = `0.5`, `\text{D}` = `(D)`, `x=5` = `5`, `90^\circ` = `90`.
    Expressions are not rearranged: `x+1` is not `1+x`.
    """
    if max(len(given), len(wanted)) > MAX_ANSWER_LENGTH:
        return given.strip() == wanted.strip()
    first, second = normalise_latex(given), normalise_latex(wanted)
    if first == second:
        return True
    named = [re.fullmatch(r"[a-zA-Z]=(.+)", text) for text in (first, second)]
    if bool(named[0]) != bool(named[1]):
        first, second = (match[1] if match else text for match, text in zip(named, (first, second), strict=True))
    numbers = parse_number(first), parse_number(second)
    if None in numbers:
        return first == second
    return numbers[0] == numbers[1]


def normalise_latex(text: str) -> str:
    """One way of writing for the notations that answers commonly vary in."""
    text = text.strip().replace("−", "-").replace("\\$", "").replace("$", "").replace("{,}", ",")
    text = re.sub(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|displaystyle)(?![a-zA-Z])", "", text)
    text = re.sub(r"(?<=[0-9])\\[!,](?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])", " ", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])|°", "", text)
    text = text.replace("\\%", "%").removesuffix("%")
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*([0-9a-zA-Z])", r"\\frac\1{\2}", text)
    fractions = 1
    while fractions:  # from the inside out
        text, fractions = re.subn(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", _slash, text)
    text = re.sub(r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"([_^])\s*\{([0-9a-zA-Z])\}", r"\1\2", text)
    text = _without_spaces(text).rstrip(".")
    choice = re.fullmatch(r"\(([A-Za-z])\)", text)
    return choice[1] if choice else text


def _without_spaces(text: str) -> str:
    """Spaces go, but not between two digits or two letters, where they separate."""
    text = re.sub(r"(?<=[0-9])\s+(?=[0-9])|(?<=[a-zA-Z])\s+(?=[a-zA-Z])", "\0", text)
    return re.sub(r"\s+", "", text).replace("\0", " ")


def _slash(match: re.Match) -> str:
    r"""a/b, bracketed so that 2\frac12 does not become 21/2, nor \frac{1}{2x} the same as \frac12x."""
    above, below = (_without_spaces(part) for part in match.groups())
    above = above if re.fullmatch(r"-?[\\0-9a-zA-Z]+", above) else f"({above})"
    below = below if re.fullmatch(r"[0-9]+|[a-zA-Z]|\\[a-zA-Z]+", below) else f"({below})"
    follows_factor = re.search(r"[0-9a-zA-Z})]\s*$", match.string[: match.start()])
    return f"({above}/{below})" if follows_factor else f"{above}/{below}"


def _score(wanted: Fraction | None, read, completion) -> float | None:
    if wanted is None:
        return None
    return float(read(completion_text(completion)) == wanted)


def _golds(count: int, answer, solution, name: str) -> list:
    """The rows' own answers: the answer column, or where that has none the solution column."""
    if answer is None and solution is None:
        raise ValueError(f"the {name!r} reward needs an 'answer' or a 'solution' column in the data")
    answers, solutions = (column if column is not None else [None] * count for column in (answer, solution))
    return [second if first is None else first for first, second in zip(answers, solutions, strict=True)]


def _gold_number(gold) -> Fraction | None:
    text = "" if gold is None else str(gold)
    return _marked_number(text) if MARKER in text else parse_number(text)


def _marked_number(text: str) -> Fraction | None:
    """The first number on the line after the last marker, unless an operator makes it part of an expression."""
    line = text.rpartition(MARKER)[2].replace("−", "-").replace("$-", "-$").strip().partition("\n")[0]
    match = NUMBER.search(line[: 2 * MAX_NUMBER_LENGTH])
    if match is None or OPERATOR.match(line, match.end()):
        return None
    return _value(match)


def _last_number(text: str) -> Fraction | None:
    matches = list(NUMBER.finditer(text.replace("−", "-").replace("$-", "-$")))
    return _value(matches[-1]) if matches else None


def _value(match: re.Match) -> Fraction | None:
    if len(match[0]) > MAX_NUMBER_LENGTH:
        return None
    digits = match["digits"].replace(",", "") or "0"
    return Fraction((match["sign"] or "") + digits + (match["rest"] or ""))
