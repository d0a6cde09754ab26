r"""Faults that use has found in reading answers: each row of the list, with other inputs of its kind."""

import json

import numpy as np
import pytest

from cukit.rewards import boxed, exact, gsm8k, gsm8k_strict
from cukit.rewards.answer import last_boxed, same_answer


def one(reward, completion, answer):
    (score,) = reward(completions=[completion], answer=[answer], prompts=[""], completion_ids=[[]])
    return score


@pytest.mark.parametrize(
    "texts",
    [
        [
            r"\frac{\sqrt3}{2}",
            r"\frac{\sqrt{3}}{2}",
            r"\sqrt{3}/2",
            r"\sqrt3/2",
            r"\dfrac{\sqrt 3}2",
            r"\frac{{\sqrt{3}}}{2}",
        ],
        [r"\frac{\pi^2}{8}", r"\frac{\pi^{2}}{8}", r"\pi^2/8", r"\tfrac{\pi ^ {2}}8", r"\frac{π²}{8}"],
        [r"-\frac{\sqrt3}{2}", r"\frac{-\sqrt{3}}{2}", r"-\sqrt{3}/2", r"−\frac{\sqrt3}2"],
        [r"\frac{x_1^2}{3}", r"\frac{x^{2}_{1}}{3}", r"x_{1}^2/3"],
        [r"\frac{\frac{1}{2}}{x+1}", r"\frac{1/2}{(x+1)}", r"\frac{\frac12}{x+1}"],
        [r"\sqrt[3]{2}", r"\sqrt[3]2", r"\sqrt[{3}]{2}"],
        [r"\frac{x+1}{2}", r"(x+1)/2", r"\frac{(x+1)}2"],
        [r"\frac{4\pi}{3}", r"4\pi/3", r"\frac{4 \pi}3"],
        [r"2\frac{1}{2}", r"2\frac12", r"2 1/2"],
        [r"3\cdot 10^{5}", r"3\times10^5", r"300,000", r"300{,}000", r"3*10^5"],
    ],
)
def test_r1_one_formula_in_several_notations(texts):
    for given in texts:
        for wanted in texts:
            assert same_answer(given, wanted), (given, wanted)
            assert one(boxed, rf"so $\boxed{{{given}}}$", rf"hence $\boxed{{{wanted}}}$") == 1.0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (r"1/2x", r"\frac{1}{2x}"),
        (r"1/2x", r"\frac{1}{2}x"),
        (r"a/b/c", r"\frac{a}{b/c}"),
        (r"2\frac{-1}{3}", r"2-\frac{1}{3}"),
        (r"\frac{\sqrt3}{2}", r"\sqrt{\frac32}"),
        (r"x^12", r"x^{12}"),
        (r"2\frac12", r"1"),
        (r"(1,234)", r"1234"),
        (r"160, 890", r"160890"),
        (r"2e-1", r"0.2"),
        (r"\frac{x+1}{2}", r"x+1/2"),
        (r"3!", r"3"),
        (r"14x", r"14"),
        (r"14m", r"14"),
        ("٣", "3"),
        ("\u202e41", "14"),
        ("４2", "42"),
    ],
)
def test_r1_what_is_ambiguous_or_another_formula(given, wanted):
    assert not same_answer(given, wanted) and not same_answer(wanted, given)
    assert same_answer(given, given) and same_answer(wanted, wanted)


@pytest.mark.parametrize(
    ("gold", "completion", "score"),
    [
        (r"Adding both gives $x=7$, hence $\boxed 7$.", r"$\boxed{7}$", 1.0),
        (r"Adding both gives $x=7$, hence $\boxed 7$.", r"$\boxed 7$", 1.0),
        (r"Adding both gives $x=7$, hence $\boxed{7}$.", r"$\boxed{x = 7}$", 1.0),
        (r"Adding both gives $x=7$, hence $\boxed{ 7 }$.", r"\boxed{8}", 0.0),
        (r"so it is $\boxed 72$", r"$\boxed{7}$", None),
        ("She sold 48/2 = 24 and 48+24 = 72.\n#### 72", r"$\boxed{72}$", None),
        ("She sold 48/2 = 24 and 48+24 = 72.\n#### 72", "She sold 48/2 = 24 and 48+24 = 72.\n#### 72", None),
        (r"Adding both gives $x=7$, hence $7$.", r"$\boxed{7}$", None),
        ("The answer is 7", r"$\boxed{7}$", None),
        (r"so $\boxed{7$", r"$\boxed{7}$", None),
        (r"\frac{1}{2", r"\boxed{\frac{1}{2}}", None),
        ("word " * 1000, r"\boxed{7}", None),
        ("no real solutions", r"\boxed{\text{no real solutions}}", 1.0),
        (r"$x = 7$", r"\boxed{7}", 1.0),
        (r"14 square feet", r"\boxed{14\text{ square feet}}", 1.0),
    ],
)
def test_r2_a_gold_that_is_a_solution(gold, completion, score):
    assert one(boxed, completion, gold) == score
    assert boxed(completions=[completion], solution=[gold]) == [score]


def test_r2_boxes_without_braces():
    assert last_boxed(r"$\boxed 7$") == "7" == last_boxed(r"\boxed 7.") == last_boxed(r"\boxed7")
    for unclear in (r"\boxed 72", r"\boxed\frac12", r"\boxed{7} or \boxed 8x", r"\boxed 7.5", r"\boxed $7$"):
        assert last_boxed(unclear) is None, unclear
    assert last_boxed(r"\boxed{7} \boxed") == "7"


@pytest.mark.parametrize(
    ("completion", "gold", "score"),
    [
        ("The total is $6{,}400.", "6400", 1.0),
        ("The total is $6{,}400.", "400", 0.0),
        ("The total is $6{,}400$.", "6400", 1.0),
        (r"The total is \$6\,400 a day", "6400", 1.0),
        (r"The total is 6,\!400", "6400", 1.0),
        (r"The total is $-6{,}400.50$", "-6400.5", 1.0),
        ("#### 6{,}400", "6400", 1.0),
        ("#### 6{,}400", "6", 0.0),
        ("The total is 1,2345", "2345", 0.0),
        ("so 6e3", "6", 0.0),
        ("so 6e3", "3", 0.0),
        ("so 6^2", "2", 0.0),
        ("on 12/25/2024", "2024", 0.0),
        ("版本是42。", "42", 1.0),
        (r"it is \frac{5}{8}", "5/8", 1.0),
        (r"it is \frac{5}{8}", "8", 0.0),
        (r"so it is \boxed{6}; I checked it 2 times", "6", 1.0),
    ],
)
def test_r3_numbers_in_running_text(completion, gold, score):
    assert one(gsm8k, completion, gold) == score


EXPRESSIONS = (
    [
        "6 + 6",
        "6 × 6",
        "6e3",
        r"\frac{6}{5}",
        "6 (or 7)",
        "6 or 7",
        "6, 7",
        "6 and 7",
        "6 - 6",
        "6 – 6",
        "6x",
        "6 x 6",
        "6!",
    ]
    + ["6^2", "6²", "6:7", "6=6", "(6)", "x=6", "6 mod 7", "6 times 7", "6 plus half", "6 thousand", "6k", "6√2", "6²"]
    + [
        r"6\sqrt{2}",
        r"6 \cdot 7",
        "6*6",
        "6**2",
        "6 / 1",
        "12/2",
        r"\frac{12}{2}",
        "6 6",
        "6' 2\"",
        "6.5.4",
        "6,40",
        "6th",
    ]
    + [
        "6 apples and 7 pears",
        "6 dozen",
        "6 squared",
        "6 more than x",
        "6 ± 1",
        "6 < 7",
        "six",
        "6 ÷ 1",
        "6 · 1",
        "6%6",
        "..6",
    ]
    + [
        "The answer is 6",
        "6 → 7",
        "6\\",
        "6}",
        "{6",
        "6; 7",
        "6 | 7",
        "6 in base 7",
        "6 over 5",
        "6 (mod 7)",
        "6 e",
        "６",
    ]
)


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_r4_an_expression_behind_the_marker_is_no_answer(text):
    for form in ("#### " + text, "6 apples\n####" + text + "\n6"):
        assert one(gsm8k, form, "6") == 0.0 and one(gsm8k, form, 6) == 0.0
    assert one(gsm8k_strict, "#### " + text, "6") == 0.0
    assert one(gsm8k, "#### 6", "#### " + text) in (None, 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "6",
        "$6",
        "6.",
        "6.00",
        "6%",
        "6 apples",
        "6 dollars per day.",
        "**6**",
        "**$6** a week",
        "$6$",
        r"\$6",
        "06",
        "6\u00a0km/h",
    ]
    + [
        "6 cups of flour",
        "6 m^2",
        "€6",
        r"\(6\)",
        r"6\text{ cm}",
        "6 people",
        "6 left-handed people",
        r"\boxed{6}",
        "+6",
        "6 hours",
    ],
)
def test_r4_what_an_answer_may_carry(text):
    assert one(gsm8k, "work\n#### " + text, "6") == 1.0 and one(gsm8k, "#### 6", "#### " + text) == 1.0
    assert one(gsm8k, "#### " + text, "60") == 0.0


def test_r5_signs():
    for sign in ("-", "- ", "–", "– ", "−", "−  ", "\u2010", "\u2011", "-$", "$-", "-\\$"):
        assert one(gsm8k, f"#### {sign}8", "-8") == 1.0, sign
        assert one(gsm8k, f"#### {sign}8", "8") == 0.0, sign
        assert one(gsm8k, "#### -8", f"{sign}8") == 1.0, sign
        assert one(gsm8k_strict, f"#### {sign}8", "-8") == 1.0, sign
        assert one(boxed, rf"\boxed{{{sign}8}}", "-8") == 1.0, sign
    assert one(gsm8k, "pages 6–8", "8") == 1.0 and one(gsm8k, "it is –8", "-8") == 1.0


def test_r6_fractions():
    for reward in (gsm8k, gsm8k_strict):
        for text in ("5/8", r"\frac{5}{8}", r"\frac58", "0.625", "5 / 8", "10/16"):
            assert one(reward, "#### " + text, "5/8") == 1.0, text
            assert one(reward, "#### 5/8", text) == 1.0, text
        assert one(reward, "#### 5/9", "5/8") == 0.0 == one(reward, "#### 8/5", "5/8") == one(reward, "#### 5/0", "5/8")
        assert one(reward, "#### -5/8", "-5/8") == 1.0 and one(reward, "#### 5/8", "5/0") is None
    assert one(gsm8k, "5/8", "5/8") == 1.0 == one(gsm8k, "That leaves 5/8.", "5/8")
    assert one(boxed, r"\boxed{5/8}", "5/8") == 1.0


def test_r7_golds_that_are_numbers_or_lists():
    row = json.loads('{"small": 0.00002, "large": 3e16, "list": ["6"]}')
    for reward in (gsm8k, gsm8k_strict):
        for text in ("0.00002", "2e-05", r"2\times 10^{-5}"):
            assert one(reward, "#### " + text, row["small"]) == 1.0, text
        for text in ("30000000000000000", "3e+16", "30,000,000,000,000,000"):
            assert one(reward, "#### " + text, row["large"]) == 1.0, text
        assert one(reward, "#### 6", row["list"]) == 1.0 and one(reward, "#### 7", row["list"]) == 0.0
        assert one(reward, "#### 7", ["6", 7]) == 1.0 and one(reward, "#### 7", ["n/a", "7"]) == 1.0
        assert (
            one(reward, "#### 14", 14.0)
            == 1.0
            == one(reward, "#### 14", np.int64(14))
            == one(reward, "#### 0.1", np.float32(0.1))
        )
        for nothing in ([], ["n/a"], [None], float("nan"), float("inf"), True, {"a": 1}, b"6", [["6"]], 10**5000):
            assert one(reward, "#### 6", nothing) is None, nothing
    assert one(boxed, r"\boxed{0.00002}", row["small"]) == 1.0 == one(boxed, r"\boxed{3\cdot10^{16}}", row["large"])
    assert one(boxed, r"\boxed{\frac12}", ["1/3", r"\frac{1}{2}"]) == 1.0 and one(boxed, r"\boxed{6}", []) is None
    assert one(exact, "0.00002", row["small"]) == 1.0 == one(exact, "6", row["list"]) == one(exact, "14", 14.0)
    assert one(exact, "14.0", "14") == 0.0 and one(exact, "unknown", "unknown") == 1.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"14\text{ cm}", 1.0),
        (r"14 \text{cm}", 1.0),
        (r"14\,\mathrm{cm}^2", 1.0),
        (r"14\text{ cm}^{3}", 1.0),
        (r"14 cm", 1.0),
        (r"14\text{ m}", 1.0),
        (r"14 \text{ km/h}", 1.0),
        (r"14\text{ square units.}", 1.0),
        (r"x = 14\text{ inches}", 1.0),
        (r"\$14", 1.0),
        (r"14\%", 1.0),
        (r"14^{\circ}", 1.0),
        (r"14\text{ or }15", 0.0),
        (r"14\text{ thousand}", 0.0),
        (r"14\text{ dozen}", 0.0),
        (r"14\text{ x}", 0.0),
        (r"14\text{ (mod 3)}", 0.0),
        (r"15\text{ cm}", 0.0),
        (r"\text{cm}", 0.0),
    ],
)
def test_r8_units(text, score):
    assert one(boxed, rf"\boxed{{{text}}}", "14") == score
    assert one(boxed, r"\boxed{14}", text) == score


def test_r8_two_units_must_agree():
    assert not same_answer(r"14\text{ cm}", r"14\text{ km}") and same_answer(r"14\text{ cm}", r"14 cm")
    assert same_answer(r"3\sqrt{2}\text{ cm}", r"3\sqrt2") and not same_answer(r"A\text{ cm}", "A")
