r"""Built-in rewards on real answer forms, the loader, and the checks on what a reward returns."""

import json
from pathlib import Path

import numpy as np
import pytest

from cukit.rewards import boxed, call_reward, exact, gsm8k, gsm8k_strict, load_reward, reward_name
from cukit.rewards.answer import last_boxed, parse_number, same_answer

ROWS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "golden" / "boxed_synthetic.jsonl").open(encoding="utf-8")
]


def one(reward, completion, answer):
    (score,) = reward(completions=[completion], answer=[answer], prompts=[""], completion_ids=[[]])
    return score


def message(text):
    return [{"role": "assistant", "content": text}]


def test_exact():
    assert one(exact, " 14\n", "14") == 1.0 == one(exact, message("14"), 14)
    assert one(exact, "14.", "14") == 0.0 and one(exact, "", "14") == 0.0
    assert one(exact, "", "") is None and one(exact, "x", None) is None
    assert exact(completions=["a", "b"], answer=[None, "b"], solution=["a", "c"]) == [1.0, 1.0]
    with pytest.raises(ValueError, match="needs an 'answer' or a 'solution' column"):
        exact(completions=["a"], level=[1])


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("so 20-6=14\n####14", "14", 1.0),
        ("so 20-6=14\n####14", "work\n#### 14", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### $42", "#### 42", 1.0),
        ("#### -$42.50", "-42.5", 1.0),
        ("#### $-42", "-42", 1.0),
        ("#### 42.0", "42", 1.0),
        ("#### 42.", 42, 1.0),
        ("#### **42**", "42", 1.0),
        ("#### 007", "7", 1.0),
        ("#### .5", "0.50", 1.0),
        ("#### 42 dollars", "42", 1.0),
        ("#### 42\n" + "and more 7 words. " * 40, "42", 1.0),
        ("#### 41\n#### 42", "42", 1.0),
        ("#### 42\n#### 41", "42", 0.0),
        ("#### 42\n####", "42", 0.0),
        ("#### -42", "42", 0.0),
        ("####7+7", "7", 0.0),
        ("####14-7", "14", 0.0),
        ("####145", "14", 0.0),
        ("#### 1,2345", "1", 0.0),
        ("The answer is 42.", "42", 1.0),
        ("The answer is $1,234.", "1234", 1.0),
        ("It is 10-3", "3", 1.0),
        ("First 42, then 43", "42", 0.0),
        ("no number", "42", 0.0),
        ("", "42", 0.0),
        ("#### 42", "n/a", None),
        ("#### n/a", "n/a", None),
        ("#### 42", "", None),
        ("#### 42", None, None),
        ("#### 42", "#### n/a", None),
        ("#### " + "9" * 5000, "42", 0.0),
    ],
)
def test_gsm8k(completion, answer, score):
    assert one(gsm8k, completion, answer) == score
    assert one(gsm8k, message(completion), answer) == score


def test_gsm8k_strict():
    assert one(gsm8k_strict, "20-6=14\n####14", "14") == 1.0 == one(gsm8k_strict, message("#### 1,400.0 "), "#### 1400")
    for wrong in ("20-6=14", "####14\n14", "####14 14", "####", "####14####", "####15", "14####"):
        assert one(gsm8k_strict, wrong, "14") == 0.0, wrong
    assert one(gsm8k_strict, "####14", "") is None


def test_boxed_solutions_are_right():
    assert len(ROWS) == 320
    solutions, answers = [row["solution"] for row in ROWS], [row["answer"] for row in ROWS]
    assert boxed(completions=solutions, answer=answers) == [1.0] * 320
    assert boxed(completions=[message(text) for text in solutions], solution=solutions) == [1.0] * 320


@pytest.mark.slow
def test_boxed_other_answers_are_wrong():
    """Every row's solution against every different answer of its kind, and against other kinds."""
    kinds = {row["unique_id"].split("/")[1] for row in ROWS}
    answers = {kind: {row["answer"] for row in ROWS if row["unique_id"].split("/")[1] == kind} for kind in kinds}
    assert len(kinds) == 16
    others = {row["answer"] for row in ROWS[::20]}
    for row in ROWS:
        candidates = sorted(answers[row["unique_id"].split("/")[1]] | others)
        scores = boxed(completions=[row["solution"]] * len(candidates), answer=candidates)
        right = [answer for answer, score in zip(candidates, scores, strict=True) if score == 1.0]
        # 78\\% and 78 are the same answer to this reward.
        assert {answer.removesuffix("\\%") for answer in right} == {row["answer"].removesuffix("\\%")}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("1,234", "1234"),
        ("\\$42", "42"),
        ("$42.0$", "42"),
        ("160{,}890", "160,890"),
        ("160\\,890", "160,\\!890"),
        ("1{,}234.50", "1234.5"),
        ("007", "7"),
        ("5.", "5"),
        (" 3,4 ", "3, 4"),
        ("\\frac{1}{2}", "1/2"),
        ("\\dfrac{1}{2}", "0.5"),
        ("\\frac12", "\\tfrac{1}{2}"),
        ("\\frac{3}4", "3/4"),
        ("-\\frac{13}{88}", "\\frac{-13}{88}"),
        ("\\pi/9", "\\frac{\\pi}{9}"),
        ("\\frac{4 \\pi}{3}", "\\frac{4\\pi}{3}"),
        ("D", "\\text{D}"),
        ("\\text{(D)}", "\\mathrm{D}"),
        ("x = 5", "5"),
        ("-4x+9", "y=-4x+9"),
        ("90^\\circ", "90"),
        ("78\\%", "78"),
        ("8 \\sqrt6", "8\\sqrt{6}"),
        ("\\left(-\\infty, 0\\right]", "(-\\infty,0]"),
        ("475_{8}", "475_8"),
        ("\\frac{\\frac{1}{2}}{x+1}", "\\frac{1/2}{x + 1}"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("5\\, \\text{cm}", "5 \\text{ cm}"),
        ("x^{2}+1", "x^2 + 1"),
        ("\u22125", "-5"),
        ("\\begin{pmatrix}20&-4\\\\10&-2\\end{pmatrix}", "\\begin{pmatrix} 20 & -4 \\\\ 10 & -2 \\end{pmatrix}"),
    ],
)
def test_same_answer(given, wanted):
    assert same_answer(given, wanted) and same_answer(wanted, given)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("1 1/2", "11/2"),
        ("2\\frac{1}{2}", "\\frac{21}{2}"),
        ("\\frac{1}{2}x", "\\frac{1}{2x}"),
        ("12", "1, 2"),
        ("(1, 2)", "[1, 2]"),
        ("y=-4x+9", "z=-4x+9"),
        ("1/0", "0"),
        ("475_8", "475"),
        ("5", "-5"),
        ("", "5"),
        ("0.33", "1/3"),
        ("9" * 400, "9" * 401),
    ],
)
def test_different_answer(given, wanted):
    assert not same_answer(given, wanted) and not same_answer(wanted, given)


def test_last_boxed():
    assert last_boxed("\\boxed{1} then \\boxed{\\frac{2}{3}}.") == "\\frac{2}{3}"
    assert last_boxed("\\boxed{1} then \\boxed{\\frac{2}{3") == "1"
    assert last_boxed("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert (
        last_boxed("\\fbox{7}") == "7" == last_boxed("\\boxed{\\boxed{7}}") == last_boxed("{ } } \\frac{2 \\boxed{7}")
    )
    assert last_boxed("\\boxed{" * 20000) is None and last_boxed("\\boxed{1\\\\}") == "1\\\\"
    assert last_boxed("boxed{7} \\boxed") is None
    assert one(boxed, "the answer is 5", "5") == 0.0
    assert one(boxed, "\\boxed{5}", "\\boxed{5}") == 1.0
    assert one(boxed, "\\boxed{}", "") is None and one(boxed, "\\boxed{n/a}", "n/a") is None


def test_parse_number():
    assert parse_number("1,234.5") * 2 == 2469 and parse_number("-.5") * 2 == -1
    for wrong in ("", ".", "-", "1,23", "1,2345", "1 2", "12a", "--1", "1/0", "1e5", "٣"):
        assert parse_number(wrong) is None, wrong


# ---- the loader ----


def write(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return path


def test_load_reward(tmp_path):
    assert load_reward("gsm8k") is gsm8k and load_reward(one) is one
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    path = write(
        tmp_path,
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport beside\n"
        "@dataclass\nclass Score:\n    value: float\n"
        "def length(completions, **kwargs):\n    return [Score(beside.VALUE).value for _ in completions]\n",
    )
    function = load_reward(f"{path}:length")
    assert reward_name(function) == "length"
    assert call_reward(function, "length", ["p"], ["c"], [[1]], {"answer": ["a"]}) == [3.0]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def f(): pass\ndef g(): pass\n", "h", r"mine.py has no 'h' \(it has: f, g\)"),
        ("h = 3\n", "h", "'h' is int, not a function"),
        ("import no_such_module\n", "h", "importing it raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("def h(:\n", "h", "importing it raised SyntaxError"),
        ("raise SystemExit(3)\n", "h", "importing it raised SystemExit: 3"),
    ],
)
def test_load_reward_file_errors(tmp_path, text, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_reward(f"{write(tmp_path, text)}:{name}")
    assert "\n" not in str(caught.value)


def test_load_reward_name_errors(tmp_path):
    with pytest.raises(ValueError, match="unknown reward 'boxd'; use one of exact, boxed, gsm8k"):
        load_reward("boxd")
    with pytest.raises(ValueError, match="file 'nothing.py' does not exist"):
        load_reward("nothing.py:f")
    with pytest.raises(ValueError, match="unknown reward ':f'"):
        load_reward(":f")
    with pytest.raises(ValueError, match="not int"):
        load_reward(3)
    (tmp_path / "mine.txt").write_text("def f(): pass")
    with pytest.raises(ValueError, match="is not a Python file"):
        load_reward(f"{tmp_path / 'mine.txt'}:f")


# ---- calling ----


def call(values, count=2):
    return call_reward(lambda **kwargs: values, "mine", ["p"] * count, ["c"] * count, [[1]] * count, {})


def test_call_reward_values():
    assert call([1, None]) == [1.0, None] and call((True, np.float32(0.5))) == [1.0, 0.5]
    assert call(np.array([1, 2])) == [1.0, 2.0] and call([np.array(3), np.bool_(False)]) == [3.0, 0.0]
    assert all(type(value) is float for value in call(np.array([1, 2], dtype=np.int8)))
    assert call([], count=0) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "reward 'mine' returned 1 values for 2 completions"),
        ([1.0] * 3, "reward 'mine' returned 3 values for 2 completions"),
        (1.0, "reward 'mine' must return a list of numbers, one a completion, not float"),
        (None, "not NoneType"),
        ([1.0, "2"], "reward 'mine': value 1 must be a number or None, got str '2'"),
        ([[1.0], [2.0]], "value 0 must be a number or None, got list"),
        ([1.0, 1j], "value 1 must be a number or None, got complex"),
        ([1.0, np.complex64(1)], "value 1 must be a number or None, got complex64"),
        ([float("nan"), 1.0], "reward 'mine': value 0 is nan"),
        ([1.0, np.inf], "reward 'mine': value 1 is inf"),
    ],
)
def test_call_reward_wrong_values(values, message):
    with pytest.raises(ValueError, match=message):
        call(values)


def test_call_reward_raises():
    def broken(completions, **kwargs):
        return [len(None) for _ in completions]

    def narrow(completions, prompts, completion_ids):
        return [0.0]

    with pytest.raises(ValueError, match="reward 'broken' raised TypeError: object of type 'NoneType'") as caught:
        call_reward(broken, "broken", ["p"], ["c"], [[1]], {})
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(ValueError, match=r"'answer'; end its signature with \*\*kwargs"):
        call_reward(narrow, "narrow", ["p"], ["c"], [[1]], {"answer": ["1"]})


def test_call_reward_keywords():
    seen = {}

    def reward(**kwargs):
        seen.update(kwargs)
        return [0.0]

    call_reward(reward, "r", ["p"], [message("c")], [[1, 2]], {"answer": ["a"], "prompts": ["column of that name"]})
    assert seen == {"prompts": ["p"], "completions": [message("c")], "completion_ids": [[1, 2]], "answer": ["a"]}
