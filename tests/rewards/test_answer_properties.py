r"""What must hold for every answer: a gold is right for itself, notation changes nothing, hostile text ends soon."""

import json
import random
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest

from cukit.rewards import boxed, call_reward, exact, gsm8k, gsm8k_strict
from cukit.rewards.answer import read, same_answer
from cukit.rewards.formula import read_formula

GOLDEN = Path(__file__).parents[1] / "golden"


def lines(path):
    return [json.loads(line) for line in path.open(encoding="utf-8")]


MATH = lines(GOLDEN / "boxed_synthetic.jsonl")
GSM8K = [row["answer"] for row in lines(GOLDEN / "gsm8k" / "sample.jsonl")]


def one(reward, completion, answer):
    (score,) = reward(completions=[completion], answer=[answer], prompts=[""], completion_ids=[[]])
    return score


def other_notation(text, rng):
    """The text with spaces, braces and commands changed in ways that typeset the same."""
    pieces = re.findall(r"\\(?:begin|end|text|mathrm)\{[^{}]*\}|\\[a-zA-Z]+|\\.|[0-9][0-9,.]*|.", text, re.DOTALL)
    found = []
    for index, piece in enumerate(pieces):
        before = pieces[index - 1] if index else ""
        is_argument = before.startswith("\\") and before[1:2].isalpha() or before in "^_"
        # TeX takes one digit of a number as a bare argument, so only single characters may be wrapped there.
        if (
            re.fullmatch(r"[0-9a-zA-Z]|[0-9]{2,3}", piece)
            and not (is_argument and len(piece) > 1)
            and rng.random() < 0.4
        ):
            piece = "{" + piece + "}"
        elif piece == r"\frac" and rng.random() < 0.5:
            piece = rng.choice([r"\dfrac", r"\tfrac"])
        space = rng.choice(["", "", " ", "  ", r"\,", r"\;", "~", "\n", r"\!", r"\ ", r"\quad "])
        ends_in_command = re.fullmatch(r"\\[a-zA-Z]+", piece)
        if before in ("^", "_") or re.fullmatch(r"\\[a-zA-Z]+", before):
            space = rng.choice([" ", "  "])
        found.append(space + piece if found and not ends_in_command else piece)
    text = "".join(found)
    if rng.random() < 0.5:
        text = text.replace("(", r"\left(").replace(")", r"\right)")
    return (
        f"{rng.choice(['', ' ', '$'])}{text}{rng.choice(['', ' ', '.', '$'])}"
        if rng.random() < 0.5
        else "{" + text + "}"
    )


FORMS = [r"\frac{A}{B}", r"\sqrt{A}", "A+B", "-A", "x^{A}", "a_{A}", "(A, B)", r"\sqrt[3]{A}", r"A \cdot B"]


def random_formula(rng, depth=0):
    simple = [str(rng.randint(0, 999)), rng.choice("xyab"), r"\pi", f"{rng.randint(0, 99)}.{rng.randint(1, 9)}"]
    form = rng.choice([*FORMS, "leaf", "leaf"]) if depth < 3 else "leaf"
    if form == "leaf":
        return rng.choice(simple)
    first, second = (random_formula(rng, depth + 1) for _ in range(2))
    return form.replace("A", first).replace("B", second)


def test_property_a_gold_is_right_for_itself():
    rng = random.Random(0)
    forms = ["A", "A.50", "A/7", "A%", "A apples", "0A", "A,000", "#### A", "A\\text{ cm}"]
    numbers = [
        rng.choice(forms).replace("A", f"{rng.choice(['', '-', '- ', '$'])}{rng.randint(0, 999)}") for _ in range(500)
    ]
    generated = [random_formula(rng) for _ in range(500)]
    scored = 0
    for gold in GSM8K + numbers + generated + [row["answer"] for row in MATH] + [row["solution"] for row in MATH]:
        completions = [(gsm8k, gold), (exact, gold)]
        if r"\boxed" in gold:
            completions += [(boxed, gold)]
        else:
            marked = "#### " + gold.rpartition("####")[2].strip()
            completions += [(gsm8k, marked), (gsm8k_strict, marked), (boxed, rf"\boxed{{{gold}}}")]
        for reward, completion in completions:
            score = one(reward, completion, gold)
            assert score in (1.0, None), (reward.__name__, completion, gold)
            scored += score is not None
    assert scored > 5000


def test_property_gsm8k():
    wrong = [f"#### {Fraction(text.rpartition('####')[2].replace(',', '').strip()) + 1}" for text in GSM8K]
    assert len(GSM8K) == 200
    for reward in (gsm8k, gsm8k_strict):
        assert reward(completions=GSM8K, answer=GSM8K) == [1.0] * 200
        assert reward(completions=wrong, answer=GSM8K) == [0.0] * 200
    assert boxed(completions=GSM8K, answer=GSM8K) == [None] * 200


def test_property_notation_changes_no_answer():
    rng = random.Random(1)
    texts = [row["answer"] for row in MATH if "text" not in row["answer"]] + [random_formula(rng) for _ in range(1500)]
    for text in texts:
        other = other_notation(text, rng)
        assert same_answer(other, text) and same_answer(text, other), (text, other, read(text), read(other))
        assert one(boxed, rf"\boxed{{{other}}}", text) == 1.0, (text, other)


def test_property_other_formulas_are_other_answers():
    """Formulas that differ by one number are not the same, in any notation."""
    rng = random.Random(2)
    compared = 0
    for _ in range(1500):
        text = random_formula(rng)
        places = list(re.finditer(r"(?<![0-9.])[0-9]+(?![0-9.\]])", text))
        if not places:
            continue
        place = rng.choice(places)
        other = text[: place.start()] + str(int(place[0]) + rng.randint(1, 9)) + text[place.end() :]
        if read(text).value is not None or r"\frac" in text:
            continue  # 0/3 is 0/4
        compared += 1
        assert not same_answer(other_notation(other, rng), text), (text, other)
    assert compared > 300


HOSTILE = {
    "digits": "9" * 100_000,
    "boxed digits": r"\boxed{" + "9" * 100_000 + "}",
    "marked digits": "#### " + "9" * 300_000,
    "open boxes": r"\boxed{" * 50_000,
    "nested boxes": r"\boxed{" * 20_000 + "6" + "}" * 20_000,
    "braces": r"\boxed{" + "{" * 900 + "6" + "}" * 900 + "}",
    "many braces": "{" * 200_000 + "}" * 200_000,
    "brackets": r"\boxed{" + "(" * 1900 + "}",
    "fractions": r"\boxed{" + r"\frac" * 390 + "}",
    "roots": r"\boxed{" + r"\sqrt" * 390 + "6}",
    "powers": r"\boxed{" + "^" * 1990 + "}",
    "slashes": r"\boxed{" + "1/" * 900 + "1}",
    "markers": "####" * 100_000,
    "stars": "#### " + "**" * 100_000,
    "stars and digits": "#### " + "**6" * 600,
    "commas": "1,111" * 100_000,
    "groups": "111" + ",111" * 100_000 + "1",
    "points": "1." * 200_000,
    "slashed": "1/1/" * 100_000,
    "fracs": r"\frac{1}{" * 50_000,
    "spaced fracs": r"\frac" + " " * 300_000 + "12",
    "exponent": "#### 1e999999999",
    "signed exponent": "#### 1e+999",
    "boxed exponent": r"\boxed{1e+999}",
    "power of ten": r"\boxed{6 \times 10^{999999999}}",
    "tower": r"\boxed{10^{10^{10^{10}}}}",
    "empty boxes": r"\boxed{\boxed{}}" * 10_000,
    "backslashes": "\\" * 300_001,
    "surrogate": "#### \ud800 \\boxed{\udfff}",
    "marks": "#### \u200f6\u202e \\boxed{\u20676}",
    "unicode digits": "#### ٦ \\boxed{६}",
    "spaces": " " * 500_000 + "#### " + " " * 500_000,
    "dashes": "-" * 300_000,
    "zeros": "#### 0." + "0" * 5000,
    "nul": "\0" * 1000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_completions_take_bounded_time(name):
    text = HOSTILE[name]
    for reward in (gsm8k, gsm8k_strict, boxed, exact):
        start = time.process_time()
        assert one(reward, text, "6") in (0.0, 1.0) and one(reward, "7", text) in (None, 0.0)
        assert time.process_time() - start < 2, reward.__name__
    assert name in ("nested boxes", "empty boxes") or one(gsm8k_strict, text, "6") == 0.0


@pytest.mark.slow
def test_random_text_is_read_without_an_exception():
    rng = random.Random(3)
    pieces = [
        r"\frac",
        r"\sqrt",
        r"\text",
        r"\boxed",
        r"\left",
        r"\begin",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        "^",
        "_",
        "/",
        "-",
        ",",
        ".",
    ]
    pieces += [
        "1",
        "23",
        "x",
        "cm",
        " ",
        "#### ",
        "$",
        "%",
        "\\",
        "\\\\",
        r"\,",
        "e",
        "²",
        "√",
        "\u202e",
        "\n",
        "=",
        "**",
        "|",
        r"\{",
        "e+05",
    ]
    for _ in range(4000):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 25)))
        for reward in (gsm8k, gsm8k_strict, boxed, exact):
            assert one(reward, text, "6") in (0.0, 1.0)
            assert one(reward, text, text) in (0.0, 1.0, None)
        assert same_answer(text, text) == (read(text) is not None or read(text, grouped=False) is not None)


def test_the_reader_reads_each_character_once():
    """Time grows with the length, not with its square or worse."""
    nested = r"\frac{1}{" * 30 + "x" + "}" * 30
    assert read_formula(nested, True, False) and read(nested) is not None
    start = time.process_time()
    for _ in range(20):
        read("(" * 30 + "1/2+" * 400 + "x")
    assert time.process_time() - start < 2


def test_a_gold_that_can_not_be_read_is_counted_not_compared():
    values = call_reward(boxed, "boxed", [""] * 2, ["a #### 6"] * 2, [[1]] * 2, {"answer": ["a #### 6", r"\boxed{7}"]})
    assert values == [None, 0.0]
