"""Built-in rewards with parameters or more columns: countdown, length, overlong, boxed_partial, format, math."""

import ast
import random
from fractions import Fraction

import pytest

from cukit.rewards import call_reward, load_reward
from cukit.rewards.countdown import evaluate


def call(spec, completions, columns=None, lengths=None):
    ids = [[1] * length for length in lengths] if lengths else [[1]] * len(completions)
    return call_reward(load_reward(spec), "mine", ["p"] * len(ids), completions, ids, columns or {})


# ---- countdown ----


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<answer>(8 - 2) * 4</answer>", 1.0),
        ("<think>6*4 = 24 <answer> </think>\n<answer>\n4*(8-2)\n</answer>", 1.0),
        ("<answer>8*2</answer> no: <answer>8/2*4+8</answer>", 0.1),  # 8 twice
        ("<answer>8*2</answer> no: <answer>(8-2)*4</answer> done", 1.0),
        ("<answer>(8-2)*4</answer><answer>8*4-2</answer>", 0.1),  # the last counts
        ("<answer>(8-2)*4 = 24</answer>", 0.1),
        ("<answer>24</answer>", 0.1),
        ("<answer>(8-2)*4*1</answer>", 0.1),
        ("<answer>8*4</answer>", 0.1),  # not all numbers
        ("<answer>82-4</answer>", 0.1),
        ("<answer>8//2*4</answer>", 0.1),
        ("<answer>__import__('os').abort()</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("<answer>(8-2)*4", 0.0),
        ("(8-2)*4", 0.0),
        ("", 0.0),
    ],
)
def test_countdown(completion, score):
    for columns in ({"numbers": [[2, 4, 8]]}, {"nums": [[2, 4, 8]]}):
        assert call("countdown", [completion], columns | {"target": [24]}) == [score]
        wanted = 0.25 if score == 0.1 else score
        assert call("countdown(partial=0.25)", [completion], columns | {"target": [24]}) == [wanted]


def test_countdown_is_exact_and_asks_for_its_columns():
    columns = {"numbers": [[3, 3, 8, 8]] * 2, "target": [24, None]}
    assert call("countdown", ["<answer>8/(3-8/3)</answer>"] * 2, columns) == [1.0, None]
    with pytest.raises(ValueError, match="needs the columns 'numbers' .* and 'target'"):
        call("countdown", ["x"], {"answer": ["24"]})


def by_python(expression):
    """The value by Python's own grammar and fractions; None for another expression or a division by zero."""
    operators = {ast.Add: "__add__", ast.Sub: "__sub__", ast.Mult: "__mul__", ast.Div: "__truediv__"}

    def value(node):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            inner = value(node.operand)
            return -inner if isinstance(node.op, ast.USub) else inner
        if isinstance(node, ast.BinOp) and type(node.op) in operators:
            return getattr(value(node.left), operators[type(node.op)])(value(node.right))
        raise ValueError

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def random_expression(rng, depth):
    if depth == 0 or rng.random() < 0.25:
        return str(rng.randrange(12))
    first, second = random_expression(rng, depth - 1), random_expression(rng, depth - 1)
    whole = f"{first}{rng.choice(['', ' '])}{rng.choice('+-*/')}{rng.choice(['', ' '])}{second}"
    return rng.choice([whole, f"({whole})", f"-({whole})", f"( {whole})", f"+{whole}"])


def test_expressions_have_the_value_that_python_gives_them():
    rng, values, nothing = random.Random(5), 0, 0
    for _ in range(4000):
        expression = random_expression(rng, rng.randrange(5))
        if rng.random() < 0.4:  # damage
            place = rng.randrange(len(expression) + 1)
            expression = expression[:place] + rng.choice("()+-*/x. 5=") + expression[place + rng.randrange(2) :]
        if any(text[0] == "0" and len(text) > 1 for text in digits(expression)):
            continue  # Python refuses 05
        wanted = by_python(expression)
        assert evaluate(expression) == wanted, expression
        values, nothing = values + (wanted is not None), nothing + (wanted is None)
    assert values > 1000 and nothing > 500


def digits(expression):
    return "".join(sign if sign.isdigit() else " " for sign in expression).split()


def test_deep_brackets_are_read():
    assert evaluate("(" * 200 + "7" + ")" * 200) == 7 and evaluate("-" * 300 + "7") == 7
    assert evaluate("(" * 400) is None and evaluate("1+" * 300 + "1") is None  # too long


# ---- length, overlong ----


def test_length_and_overlong_are_their_formulas():
    assert call("length(target=4)", ["x"] * 5, lengths=[4, 2, 6, 1, 40]) == [0.0, -0.5, -0.5, -0.75, -1.0]
    found = call("overlong(max_length=100, buffer=20)", ["x"] * 6, lengths=[1, 80, 81, 90, 100, 101])
    assert found == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0], abs=1e-15)
    assert call("length(target=4)", ["x"], {"target": [9]}, lengths=[4]) == [0.0]  # the parameter, not the column


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("length", r"reward 'length' needs parameters: write length\(target=…\)"),
        ("overlong()", r"write overlong\(max_length=…, buffer=…\)"),
        ("length(taget=3)", r"has no parameter 'taget' \(it has: target\)"),
        ("length(3)", "written as name"),
        ("length(target=x)", "written as name"),
        ("length(target=3", "unknown reward 'length"),
        ("length(target=__import__('os'))", "written as name"),
        ("length(target='3')", "target must be a number, at least 0, got '3'"),
        ("length(target=-3)", "target must be a number, at least 0, got -3"),
        ("length(target=1e999)", "target must be a number"),
        ("format(answer_tags=1)", "answer_tags must be True or False, got 1"),
        ("exact(a=1)", r"has no parameter 'a' \(it has: none\)"),
    ],
)
def test_parameters_of_a_name(spec, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_reward(spec)
    assert "\n" not in str(caught.value)


# ---- form and answer ----


def test_boxed_partial():
    r"""Dr. GRPO's 1 / 0.1 / 0: right in a box, in a box, else."""
    completions = [r"so \boxed{7}", r"so \boxed{8}", "7", r"\boxed{7", r"\boxed{}", r"\boxed{7}"]
    answers = {"answer": ["7"] * 5 + [None]}
    assert call("boxed_partial", completions, answers) == [1.0, 0.1, 0.0, 0.0, 0.1, None]
    assert call("boxed_partial(partial=0.5)", completions, answers) == [1.0, 0.5, 0.0, 0.0, 0.5, None]


def test_format_can_want_answer_tags():
    completions = ["<think>a</think>b", "<think>a</think><answer>b</answer>"]
    assert call("format", completions) == [1.0, 1.0]
    assert call("format(answer_tags=True)", completions) == [0.0, 1.0]


PIECES = ("<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n", "<th", "think>")


def test_tags_are_read_as_by_another_way():
    """Against a scan of the tags in their order."""
    rng, right = random.Random(3), 0
    for _ in range(5000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(8)))
        if rng.random() < 0.5:
            text = "<think>a</think>" + text
        wanted = by_scan(text)
        right += wanted
        assert call("format", [text]) == [float(wanted)], text
    assert right > 200


def by_scan(text):
    tags, between, place = [], [], 0
    while place < len(text):
        tag = next((tag for tag in PIECES[:4] if text.startswith(tag, place)), None)
        if tag and not (tag == "</think>" and tag in tags):  # as in TRL, a second </think> is text
            tags.append(tag)
            between.append("")
        elif between:
            between[-1] += tag or text[place]
        else:
            return False  # text before the first tag
        place += len(tag or "x")
    if tags == ["<think>", "</think>"]:
        return True
    return tags == ["<think>", *PIECES[1:4]] and not between[1].strip() and not between[3].strip()


# ---- math ----


def test_math_without_its_package_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"^the 'math' reward needs the package math-verify: pip install 'cukit\[math\]'"
    ):
        load_reward("math")


def test_math_compares_formulas():
    pytest.importorskip("math_verify")
    rows = [
        (r"\boxed{x+1}", "1+x", 1.0),
        (r"so it is $2\sqrt{2}$.", r"\sqrt{8}", 1.0),
        ("#### 42", "some $ words #### 42", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{3}", "4", 0.0),
        ("", "4", 0.0),
        (r"\boxed{4}", None, None),
        (r"\boxed{4}", "N/A", None),
        ([{"role": "assistant", "content": r"\boxed{4}"}], 4.0, 1.0),
    ]
    completions, answers, scores = map(list, zip(*rows, strict=True))
    assert call("math", completions, {"answer": answers}) == scores
