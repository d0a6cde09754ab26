"""Tools: the schemas that a template shows, the calls in a model's text, and what the model reads of their results."""

import json
from typing import Any, Literal, Optional

import numpy as np
import pytest

from cukit.trainers.tools import ToolCall, answer_call, json_schema, parse_tool_calls


def multiply(a: int, b: float = 2.0, unit: str | None = None) -> float:
    """Multiplies two numbers.

    Any two.

    Args:
        a: The first number.
        b: The second number,
            2 unless given.
        unit (str, optional): One of these (choices: ["m", "kg"])

    Returns:
        The product.
    """
    return a * b


def many(items: list[list[int]], table: dict[str, float], kind: Literal["x", "y"], one: int | str, other: Any):
    """Takes many types.

    Args:
        items: i
        table: t
        kind: k
        one: o
        other: a: colon
    """


class Shop:
    def buy(self, what: Optional[list[str]], paid: bool) -> None:  # noqa: UP045
        """Buys.

        Args:
            what: Things.
            paid: Truth.

        Raises:
            ValueError: never.
        """


# what transformers 5.x's get_json_schema gives for the same functions
SCHEMAS = {
    "multiply": {
        "name": "multiply",
        "description": "Multiplies two numbers.\n\nAny two.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first number."},
                "b": {"type": "number", "description": "The second number, 2 unless given."},
                "unit": {"type": "string", "nullable": True, "enum": ["m", "kg"], "description": "One of these"},
            },
            "required": ["a"],
        },
        "return": {"type": "number", "description": "The product."},
    },
    "many": {
        "name": "many",
        "description": "Takes many types.",
        "parameters": {
            "type": "object",
            "properties": {
                "items": {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer"}},
                    "description": "i",
                },
                "table": {"type": "object", "additionalProperties": {"type": "number"}, "description": "t"},
                "kind": {"type": "string", "enum": ["x", "y"], "description": "k"},
                "one": {"type": ["integer", "string"], "description": "o"},
                "other": {"description": "a: colon"},
            },
            "required": ["items", "table", "kind", "one", "other"],
        },
    },
    "buy": {
        "name": "buy",
        "description": "Buys.",
        "parameters": {
            "type": "object",
            "properties": {
                "what": {"type": "array", "items": {"type": "string"}, "nullable": True, "description": "Things."},
                "paid": {"type": "boolean", "description": "Truth."},
            },
            "required": ["what", "paid"],
        },
        "return": {"type": "null"},
    },
}


@pytest.mark.parametrize("function", [multiply, many, Shop().buy], ids=lambda function: function.__name__)
def test_schemas_are_those_of_transformers(function):
    found = json_schema(function)
    assert json.dumps(found) == json.dumps({"type": "function", "function": SCHEMAS[function.__name__]})


def no_doc(a: int):
    pass


def no_hint(a):
    """Does.

    Args:
        a: A.
    """


def not_described(a: int):
    """Does."""


def star(*a: int):
    """Does.

    Args:
        a: A.
    """


def odd(a: bytes):
    """Does.

    Args:
        a: A.
    """


@pytest.mark.parametrize(
    "function, message",
    [
        (no_doc, "'no_doc' needs a docstring"),
        (no_hint, "argument 'a' needs a type hint"),
        (not_described, "does not describe 'a'"),
        (star, "cannot be given by name"),
        (odd, "'odd': a has the type bytes"),
    ],
)
def test_what_has_no_schema_is_refused_in_one_line(function, message):
    with pytest.raises(ValueError, match=message) as error:
        json_schema(function)
    assert "\n" not in str(error.value)


def calls_of(text):
    around, calls = parse_tool_calls(text)
    made = [(call.name, call.arguments) for call in calls if not call.error]
    return around, made, [call.error for call in calls if call.error]


@pytest.mark.parametrize(
    "text, around, calls, num_errors",
    [
        ("4", "4", [], 0),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})], 0),
        ('I ask.\n<tool_call>{"name": "f"}</tool_call>', "I ask.", [("f", {})], 0),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": [1]}"}</tool_call>', "", [("f", {"a": [1]})], 0),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
            "",
            [("f", {}), ("g", {})],
            0,
        ),
        ('<tool_call>{"name": "f"}', "", [("f", {})], 0),
        ('<think>\n<tool_call>{"name": "f"}</tool_call>\n</think>\n\n4', None, [], 0),
        ('<think>\nhm\n</think>\n\n<tool_call>{"name": "f"}</tool_call>', "<think>\nhm\n</think>", [("f", {})], 0),
        ("<tool_call>f(1)</tool_call>", "", [], 1),
        ("<tool_call></tool_call>", "", [], 1),
        ("<tool_call>[1]</tool_call>", "", [], 1),
        ('<tool_call>{"name": 1}</tool_call>', "", [], 1),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "", [], 1),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "", [], 1),
    ],
)
def test_calls_in_a_text(text, around, calls, num_errors):
    found, made, errors = calls_of(text)
    assert found.rstrip() == (text if around is None else around) and made == calls and len(errors) == num_errors


@pytest.mark.parametrize("seed", range(200))
def test_random_texts_never_raise(seed):
    """Pieces of calls in any order: every call has a name or an error, and a text without a call stays as it is."""
    rng = np.random.default_rng(seed)
    pieces = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f"', ', "arguments": ', "{", "}", '"',
              "\\ud800", "1", "\n", "汉", "null", "[", "]"]  # fmt: skip
    text = "".join(rng.choice(pieces, rng.integers(0, 14)))
    around, calls = parse_tool_calls(text)
    assert all(bool(call.error) or call.name == "f" for call in calls)
    assert ("<tool_call>" in text.rpartition("</think>")[2]) == bool(calls)
    for call in calls:
        answer, _ = answer_call(call, {"f": lambda **arguments: arguments})
        answer.encode()
    if not calls:
        assert around == text


def give(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


async def later(value: int) -> int:
    return value + 1


@pytest.mark.parametrize(
    "value, text, worked",
    [
        ("a\nb", "a\nb", True),
        (7, "7", True),
        (None, "null", True),
        ({"x": [1.5, "é"]}, '{"x": [1.5, "é"]}', True),
        ({1, }, "\"{1}\"", True),
        ("\ud800!", "?!", True),
        (ValueError("no\nsuch \ud800 thing"), '{"error": "no such ? thing"}', False),
        (ZeroDivisionError("by 0"), '{"error": "ZeroDivisionError: by 0"}', False),
        (SystemExit(3), '{"error": "SystemExit: 3"}', False),
    ],
)  # fmt: skip
def test_what_the_model_reads(value, text, worked):
    assert answer_call(ToolCall("give", {"value": value}), {"give": give}) == (text, worked)


def test_wrong_calls_are_answered_with_their_error():
    tools = {"give": give, "later": later}
    assert answer_call(ToolCall("later", {"value": 1}), tools) == ("2", True)
    for call, wanted in [
        (ToolCall("take", {}), "there is no tool 'take'; there are give, later"),
        (ToolCall("give", {"other": 1}), "TypeError: give() got an unexpected keyword argument 'other'"),
        (ToolCall(error="the tool call is not JSON"), "the tool call is not JSON"),
    ]:
        answer, worked = answer_call(call, tools)
        assert json.loads(answer) == {"error": wanted} and not worked


def test_an_interrupt_is_no_error_of_the_tool():
    with pytest.raises(KeyboardInterrupt):
        answer_call(ToolCall("give", {"value": KeyboardInterrupt()}), {"give": give})
