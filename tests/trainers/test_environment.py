"""What users give: environments, the texts of reset, replies, tools."""

import json

import pytest

from cukit import Environment, SamplingParams
from cukit.datasets.demonstrations import encode_prompts
from cukit.engine.llm import LLM
from cukit.trainers.environment import EnvironmentMaker, ToolEnvironment
from cukit.trainers.episodes import Episodes
from cukit.trainers.tools import ToolCall

from ..engine.helpers import ScriptModel, qwen_tokenizer
from .playing import ROWS, Asking

# ---- what users may give ----


def with_reset(text):
    class Resets(Asking):
        def reset(self, **columns):
            super().reset()
            return text(self)

    return Resets


def test_the_text_of_reset_ends_the_last_user_message(play, tokenizer):
    samples, _ = play(with_reset(lambda own: f" {own.seed}"))
    wanted = [
        {"prompt": [{"role": "user", "content": f"{row['prompt'][0]['content']} {100 + 7 * i}"}]}
        for i, row in enumerate(ROWS)
    ]
    assert samples.prompt_ids[::3] == encode_prompts(wanted, tokenizer)
    assert samples.environments[-1].own.seen[0][0] == wanted[-1]["prompt"][0]
    assert ROWS[0]["prompt"][0]["content"] == "0", "the data stay as they are"
    with pytest.raises(ValueError, match="different texts for the completions of prompt 0"):
        play(with_reset(lambda own: str(own.index)))
    with pytest.raises(ValueError, match=r"reset\(\) of Resets must return a text or None, got tuple \('1', {}\)"):
        play(with_reset(lambda own: ("1", {})))  # as Gymnasium's does


def test_a_factory_that_fails_is_one_line():
    class Wants(Environment):
        def __init__(self, key):
            self.key = key

        def respond(self, conversation):
            return None

    with pytest.raises(ValueError, match=r"environment_factory\(\) raised TypeError: .*positional argument: 'key'"):
        EnvironmentMaker(Wants)


@pytest.mark.parametrize(
    "replies, message",
    [
        ("more", "must return a list of messages or None, got str 'more'"),
        ([{"role": "assistant", "content": "1"}], "of others than the assistant"),
        ([{"role": "user"}], "must return messages"),
        ([{"role": "user", "content": 3}], "must return messages"),
    ],
)
def test_wrong_replies_are_named(play, replies, message):
    class Wrong(Asking):
        def respond(self, conversation):
            return replies

    with pytest.raises(ValueError, match=message) as error:
        play(Wrong)
    assert "Wrong" in str(error.value) and "\n" not in str(error.value)


class Nothing:
    pass


class RespondsAlone:
    def respond(self, conversation):
        return None


@pytest.mark.parametrize(
    "factory, tools, message",
    [
        (3, None, "must be a class or a function, got int"),
        (Nothing, None, "gave Nothing, which is no cukit.Environment"),
        (RespondsAlone, None, "derive it from cukit.Environment"),
        (Environment, None, "gave Environment, which"),
        (None, [3], "tools must be functions, got 3"),
        (Asking, [print], "give it the tools"),
    ],
)
def test_what_is_no_environment_is_refused_in_one_line(factory, tools, message):
    with pytest.raises(ValueError, match=message) as error:
        EnvironmentMaker(factory, tools)
    assert "\n" not in str(error.value)


def test_a_prompt_that_is_text_is_refused(play):
    with pytest.raises(ValueError, match="data row 1: the prompt is text"):
        play(rows=[ROWS[0], {"prompt": "1+1"}])


# ---- tools ----


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Two.
    """
    if a == 13:
        raise ValueError("unlucky")
    return a + b


class Counter:
    """As TRL has it: reset() and public methods as tools."""

    def __init__(self):
        self.value = None

    def reset(self, start, **columns):
        self.value = start

    def increment(self, by: int) -> int:
        """Counts on.

        Args:
            by: How far.
        """
        self.value += by
        return self.value

    def get_reward(self):
        return float(self.value)


def scripted(tokenizer, maker, rows, turns, max_iterations=None, **params):
    """An engine that writes the given turns to row 0, played; turns are texts, None for what the template writes."""
    (ids,) = encode_prompts(maker.with_tools(rows), tokenizer)
    said, script = list(rows[0]["prompt"]), list(ids)
    for text, replies in turns:
        script += [*tokenizer.encode(text), tokenizer.eos_token_id]
        said.append({"role": "assistant", "content": text})
        if replies:
            script += tokenizer.encode_continuation(said, replies, script[-1], maker.schemas)
            said += replies
    llm = LLM.from_model(ScriptModel(script, max_position_embeddings=4096), tokenizer, max_model_len=2048)
    (group,) = Episodes(llm, maker, None, max_iterations).play(
        [ids], rows.__getitem__, [SamplingParams(temperature=0, max_tokens=1000, **params)]
    )
    (episode,) = group
    return episode, script


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def result(name, text):
    return {"role": "tool", "name": name, "content": text}


ASK = [{"prompt": [{"role": "user", "content": "What is 12+34+56?"}], "start": 5}]


def test_tools_are_called_and_answered():
    tokenizer = qwen_tokenizer()
    turns = [
        ("<think>\nFirst 12+34.\n</think>\n\n" + call("add", a=12, b=34), [result("add", "46")]),
        (call("add", a=46, b=56) + "\n" + call("add", a=13, b=1),
         [result("add", "102"), result("add", '{"error": "unlucky"}')]),
        (call("sub", a=1), [result("sub", '{"error": "there is no tool \'sub\'; there are add"}')]),
        ("It is 102.", None),
    ]  # fmt: skip
    maker = EnvironmentMaker(None, [add])
    episode, script = scripted(tokenizer, maker, ASK, turns)
    assert episode.token_ids.tolist() == script and episode.finish_reason == "stop"
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == [
        reply["content"] for _, replies in turns[:-1] for reply in replies
    ]
    first, last = episode.messages[0], episode.messages[-1]
    assert first["content"] == "<think>\nFirst 12+34.\n</think>"
    assert first["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 34}}}]
    assert last == {"role": "assistant", "content": "It is 102."}
    responder = episode.made.responder
    assert (responder.num_calls, responder.num_failed_calls) == (4, 2)
    assert '"name": "add"' in tokenizer.decode(script[: episode.prompt_length]), "the prompt shows the schema"


def test_calls_beyond_the_limit_are_not_made():
    turns = [(call("add", a=1, b=2), [result("add", "3")]), (call("add", a=3, b=4), None)]
    episode, script = scripted(qwen_tokenizer(), EnvironmentMaker(None, [add]), ASK, turns, max_iterations=1)
    assert episode.token_ids.tolist() == script and episode.finish_reason == "stop"
    assert episode.made.responder.num_calls == 1 and episode.messages[-1]["content"].startswith("<tool_call>")


def test_methods_of_an_environment_are_tools_as_in_trl():
    turns = [(call("increment", by=3), [result("increment", "8")]), (call("increment", by=2) + call("add", a=1, b=1),
             [result("increment", "10"), result("add", "2")]), ("10", None)]  # fmt: skip
    maker = EnvironmentMaker(Counter, [add])
    assert [schema["function"]["name"] for schema in maker.schemas] == ["add", "increment"]
    assert maker.gives_rewards and maker.name == "Counter"
    episode, script = scripted(qwen_tokenizer(), maker, ASK, turns)
    assert episode.token_ids.tolist() == script
    assert isinstance(episode.made.own, Counter) and episode.made.own.value == 10
    assert maker.reward_function()(environments=[episode.made.own], other=[1]) == [10.0]


def test_another_parser_takes_another_form():
    class Plain(ToolEnvironment):
        def __init__(self):
            def parse(text):
                found = text.removeprefix("add ")
                return (
                    ("", [ToolCall("add", dict(zip("ab", map(int, found.split()), strict=True)))])
                    if (found != text)
                    else (text, [])
                )

            super().__init__([add], parse)

    turns = [("add 3 4", [result("add", "7")]), ("7", None)]
    episode, script = scripted(qwen_tokenizer(), EnvironmentMaker(Plain), ASK, turns)
    assert episode.token_ids.tolist() == script and episode.messages[-1]["content"] == "7"


def test_a_template_without_tools_is_refused(tokenizer, make_model):
    llm = LLM.from_model(make_model(), tokenizer, max_model_len=96)
    with pytest.raises(ValueError, match="the chat template does not show tools"):
        Episodes(llm, EnvironmentMaker(None, [add]))
