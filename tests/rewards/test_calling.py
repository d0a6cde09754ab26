"""What a reward is given, how its faults are reported, and the reward that reads what the template began."""

import copy
import functools
import sys

import pytest

from cukit.rewards import BUILTIN_REWARDS, call_reward, format, load_reward

# From Python 3.12 on a comprehension leaves none of its variables behind.
LEFT_BEHIND = ", with completion 2: ''" if sys.version_info < (3, 12) else ""
THINK = "<|im_start|>assistant\n<think>\n"


def call(function, completions, columns=None, **more):
    count = len(completions)
    return call_reward(function, "mine", ["p"] * count, completions, [[1]] * count, columns or {}, **more)


def message(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("completion", "prompt", "score"),
    [
        ("<think>a</think>b", "", 1.0),
        ("<think>\na\nb\n</think>\n\nc", "", 1.0),
        ("<think></think>b", "", 1.0),  # as TRL has it
        ("<think>a</think>", "", 1.0),
        ("a</think>b", "", 0.0),
        ("<think>a", "", 0.0),
        ("x<think>a</think>b", "", 0.0),
        ("<think><think>a</think>b", "", 0.0),
        ("<think>a</think>b<think>c</think>", "", 0.0),
        ("", "", 0.0),
        ("a</think>b", THINK, 1.0),
        ("a</think>b", "user: <think>\n", 1.0),
        ("a", THINK, 0.0),
        ("<think>a</think>b", THINK, 0.0),
        ("b", "<|im_start|>assistant\n<think>\n\n</think>\n\n", 1.0),
        ("a</think>b", "say <think> now\n", 0.0),
        ("<think>a</think>\n<answer>b</answer>\n", "", 1.0),
        ("a</think>\n<answer>b</answer>", THINK, 1.0),
        ("<think>a</think>\n<answer>b", "", 0.0),
        ("<think>a</think>\n<answer>b</answer> c", "", 0.0),
        ("<think>a</think>\nb <answer>c</answer>", "", 0.0),
        ("<think>a <answer>b</answer></think>", "", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", "", 0.0),
    ],
)
def test_t9_format(completion, prompt, score):
    for form in (completion, message(completion)):
        assert call(format, [form], prompt_text=[prompt]) == [score]
        assert call(load_reward("format"), [form]) == [
            score if not prompt else call(format, [form], prompt_text=[""])[0]
        ]


def test_t9_prompt_keywords():
    seen = {}

    def takes_all(completions, **kwargs):
        seen.update(kwargs)
        return [0.0]

    def takes_text(completions, prompts, completion_ids, prompt_text):
        seen["text"] = prompt_text
        return [0.0]

    def takes_neither(completions, prompts, completion_ids):
        return [0.0]

    call(takes_all, ["c"], prompt_ids=[[5, 6]], prompt_text=[THINK])
    assert seen["prompt_ids"] == [[5, 6]] and seen["prompt_text"] == [THINK]
    call(takes_text, ["c"], prompt_ids=[[5, 6]], prompt_text=["x"])
    assert seen["text"] == ["x"]
    assert call(takes_neither, ["c"], prompt_ids=[[5, 6]], prompt_text=["x"]) == [0.0]
    call(functools.partial(takes_text), ["c"], {"prompt_text": ["a column"]}, prompt_text=["y"])
    assert seen["text"] == ["y"]
    columns = {"answer": ["6"], "numbers": [[2, 3]], "target": [6], "tests": [["assert True"]]}
    parameters = {"length": "target=3", "overlong": "max_length=4, buffer=2"}
    for name in BUILTIN_REWARDS:
        if name != "math":  # it needs a package of its own
            reward = load_reward(f"{name}({parameters.get(name, '')})")
            call(reward, ["#### 6"], columns, prompt_ids=[[5]], prompt_text=["x"])


REWARDS = """
import json

def loop(completions, **kwargs):
    scores = []
    for text in completions:
        scores.append(helper(text))
    return scores

def helper(text):
    return 1 / (len(text) - 3)

def comprehension(completions, answer, **kwargs):
    return [float(a) / len(c) for c, a in zip(completions, answer)]

def library(completions, **kwargs):
    return [len(json.loads(text)) for text in completions]

def whole(completions, **kwargs):
    raise KeyError("a\\nb")

def leaves(completions, **kwargs):
    raise SystemExit(3)

class Judge:
    def __call__(self, completions, **kwargs):
        return [1.0, "no", 1.0]

judge = Judge()

def huge(completions, **kwargs):
    return [1.0, 10**400, 1.0]

def short(completions, **kwargs):
    return [1.0]
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("loop", r"raised ZeroDivisionError: division by zero \(PATH, line 11, with completion 1: '\[1\]'\)"),
        ("comprehension", rf"raised ZeroDivisionError: .* \(PATH, line 14{LEFT_BEHIND}\)"),
        ("library", r"raised JSONDecodeError: .* \(PATH, line 17, with completion 2: ''\)"),
        ("whole", r"raised KeyError: 'a\\nb' \(PATH, line 20\)"),
        ("leaves", r"raised SystemExit: 3 \(PATH, line 23\)"),
        ("judge", r"value 1 must be a number or None, got str 'no' \(completion: '\[1\]'\) \(PATH, line 26\)"),
        ("huge", r"value 1 is inf; .* \(completion: '\[1\]'\) \(PATH, line 31\)"),
        ("short", r"returned 1 values for 3 completions \(PATH, line 34\)"),
    ],
)
def test_c14_a_failing_reward_is_reported_with_file_and_line(tmp_path, name, message):
    path = tmp_path / "mine.py"
    path.write_text(REWARDS)
    with pytest.raises(ValueError, match="^reward 'mine':? " + message.replace("PATH", str(path)) + "$") as caught:
        call(load_reward(f"{path}:{name}"), ["[1, 2]", "[1]", ""], {"answer": ["1", "2", "3"]})
    assert "\n" not in str(caught.value)


def test_c14_the_message_stays_short():
    def broken(completions, **kwargs):
        for text in completions:
            text.nothing()

    with pytest.raises(ValueError, match="with completion 0: ") as caught:
        call(broken, ["x\n" * 100_000])
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\nimport no_such_module\n", r"raised ModuleNotFoundError: .* \(PATH, line 3\)$"),
        ("def f():\n    return 1 / 0\nf()\n", r"raised ZeroDivisionError: division by zero \(PATH, line 2\)$"),
        ("x = 1\ndef h(:\n", r"raised SyntaxError: .*mine.py, line 2\)$"),
    ],
)
def test_c14_a_file_that_fails_to_load_is_reported_with_its_line(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message.replace("PATH", str(path))):
        load_reward(f"{path}:h")


# ---- found by use ----------------------------------------------------------------------------------------------------


def test_a_reward_may_change_what_it_is_given():
    def changes(prompts, completions, completion_ids, prompt_ids, answer, **kwargs):
        for place, prompt in enumerate(prompts):
            prompt.append("more")
            completions[place][0]["content"] = "gone"
            completion_ids[place].append(7)
            prompt_ids[place].clear()
        answer.clear()
        return [1.0] * 2

    prompts, completions = [message("p"), message("q")], [message("a"), message("b")]
    ids, prompt_ids, columns = [[1], [2]], [[3], [4]], {"answer": [["x"], None]}
    assert call_reward(changes, "r", prompts, completions, ids, columns, prompt_ids=prompt_ids) == [1.0, 1.0]
    assert prompts == [message("p"), message("q")] and completions == [message("a"), message("b")]
    assert (ids, prompt_ids, columns) == ([[1], [2]], [[3], [4]], {"answer": [["x"], None]})


def test_a_wrapper_of_a_built_in_reward_may_change_what_it_is_given():
    @functools.wraps(BUILTIN_REWARDS["exact"])
    def changes(completions, **kwargs):
        completions[:] = ["gone"] * len(completions)
        return [0.0] * len(completions)

    completions = ["6", "7"]
    assert call(changes, completions, {"answer": ["6", "6"]}) == [0.0, 0.0] and completions == ["6", "7"]


class AfterThought:
    """A reward of what comes behind the thought; everything else is the inner reward's."""

    def __init__(self, reward):
        self.reward = reward

    def __call__(self, completions, **columns):
        completions[:] = [text.partition("</think>")[2] for text in completions]
        return self.reward(completions, **columns)

    def __getattr__(self, name):
        return getattr(self.reward, name)


def test_an_object_around_a_built_in_reward_may_change_what_it_is_given():
    completions = ["<think>?</think>6", "7"]
    reward = AfterThought(BUILTIN_REWARDS["exact"])
    assert call(reward, completions, {"answer": ["6", "6"]}) == [1.0, 0.0]
    assert completions == ["<think>?</think>6", "7"]


@pytest.mark.parametrize("name", [name for name in BUILTIN_REWARDS if name != "math"])
@pytest.mark.parametrize("conversational", [False, True])
def test_built_in_rewards_change_nothing_that_they_are_given(name, conversational):
    """They get the lists themselves, which other rewards get copies of afterwards."""
    text = "<think>a</think> 2*3 = \\boxed{6}\n#### 6"
    completions = [message(text)] if conversational else [text]
    columns = {"answer": [["6", "7"]], "solution": ["6"], "numbers": [[2, 3]], "target": [6], "tests": [["assert 1"]]}
    given = {"columns": columns, "prompts": [message("p")], "completions": completions}
    before = copy.deepcopy(given)
    parameters = {"length": "target=3", "overlong": "max_length=4, buffer=2"}
    reward = load_reward(f"{name}({parameters.get(name, '')})")
    call_reward(reward, name, given["prompts"], completions, [[5]], columns, [[4]], ["p"])
    assert given == before


class OfAnotherLibrary:
    """What a tensor of any library has."""

    def __init__(self, values):
        self.values, self.ndim = values, isinstance(values, list)

    def item(self):
        return self.values

    tolist = item


def test_tensors_count_as_numbers_and_lists():
    assert call(lambda **kwargs: [OfAnotherLibrary(0.5), 1], ["a", "b"]) == [0.5, 1.0]
    assert call(lambda **kwargs: OfAnotherLibrary([0.5, 2]), ["a", "b"]) == [0.5, 2.0]
    with pytest.raises(ValueError, match="value 0 is nan"):
        call(lambda **kwargs: [OfAnotherLibrary(float("nan")), 1], ["a", "b"])


def test_a_missing_argument_says_what_there_is():
    def positional(completions, answers, **kwargs):
        return []

    keywords = "; a reward is called by keyword, with prompts, completions, completion_ids, gold "
    with pytest.raises(ValueError, match=f"positional argument: 'answers'{keywords}"):
        call(positional, ["a"], {"gold": ["1"]})
    with pytest.raises(ValueError, match=r"positional argument: 'answers' \("):  # a call of its own
        call(lambda **kwargs: positional("a"), ["a"], {"gold": ["1"]})


def test_a_class_is_no_reward(tmp_path):
    (tmp_path / "mine.py").write_text("class Right:\n    def __call__(self, **kwargs): pass\nright = Right()\n")
    with pytest.raises(ValueError, match=r"'Right' is a class: give an object of it, such as reward = Right\(…\)"):
        load_reward(f"{tmp_path / 'mine.py'}:Right")
    assert callable(load_reward(f"{tmp_path / 'mine.py'}:right"))
    with pytest.raises(ValueError, match="'OfAnotherLibrary' is a class"):
        load_reward(OfAnotherLibrary)
