"""A chat goes on from the ids that were sampled: only what follows an answer is rendered."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cukit.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2] / "data" / "tiny-qwen3"
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROUNDS = (  # what it writes depends on how much was said before, and a blank stands before its end token
    "{% for m in messages %}[{{ loop.index }}]{{ m.content }}{% if m.role == 'assistant' %} <|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[{{ messages | length + 1 }}]{% endif %}"
)
HIDES = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
TWICE = "{% for m in messages %}{{ m.content }}|{{ m.content }}|{% endfor %}"
TOOLS_FIRST = (
    "{% for m in messages if m.role == 'tool' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
)


def say(role, text):
    return {"role": role, "content": text}


@pytest.fixture
def chatml():
    return Tokenizer.from_folder(FOLDER)


@pytest.fixture
def with_template(tmp_path):
    def build(template):
        folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
        config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.from_folder(folder)

    return build


def played(tokenizer, prompt, turns, **template):
    """(ids of a conversation that was sampled turn by turn, the messages). turns: (the answer, the replies)."""
    ids, said = tokenizer.apply_chat_template(prompt, True, **template), list(prompt)
    for answer, replies in turns:
        ids = [*ids, *tokenizer.encode(answer), tokenizer.eos_token_id]
        said.append(say("assistant", answer))
        before = list(ids)
        ids = ids + tokenizer.encode_continuation(said, replies, ids[-1], **template)
        assert ids[: len(before)] == before
        said += replies
    return ids, said


TURNS = [
    ("one and two", [say("user", "3 more")]),
    ("three", [say("tool", "4"), say("tool", "5")]),
    ("", [say("user", " 6\n\n")]),
]


def test_chatml_equals_the_rendered_chat(chatml):
    ids, said = played(chatml, [say("system", "be short"), say("user", "1")], TURNS)
    assert ids == chatml.apply_chat_template(said, True)


def test_smollm2_equals_the_rendered_chat(with_template):
    tokenizer = with_template(SMOLLM2)
    ids, said = played(tokenizer, [say("user", "1")], TURNS)
    assert ids == tokenizer.apply_chat_template(said, True)
    assert ids.count(tokenizer.encode("system")[0]) == 1


def test_qwen3_equals_the_rendered_chat_where_that_keeps_all(qwen):
    ids, said = played(qwen, [say("user", "1")], [TURNS[0], TURNS[2]])
    assert ids == qwen.apply_chat_template(said, True)


@pytest.mark.parametrize("template", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_qwen3_keeps_thoughts_that_a_new_rendering_drops(qwen, template):
    thought = "<think>\nTwo and three.\n</think>\n\nIt is 5."
    ids, said = played(qwen, [say("user", "2+3?")], [(thought, [say("user", "and 1?")])], **template)
    text = qwen.decode(ids, skip_special_tokens=False)
    assert thought in text and text.endswith(qwen.render_chat([say("user", "x")], True, **template)[-30:])
    rendered = qwen.render_chat(said, True, **template)
    assert thought not in rendered
    after = "It is 5.<|im_end|>\n<|im_start|>user\nand 1?<|im_end|>\n<|im_start|>assistant\n"
    assert text.partition(thought)[2] == rendered[rendered.index("It is 5.") + len("It is 5.") :]
    assert after in text


def test_qwen3_tool_results_share_a_turn(qwen):
    ids, _ = played(qwen, [say("user", "1")], [("<think>\nx\n</think>\n\ncall", [say("tool", "4"), say("tool", "5")])])
    assert qwen.decode(ids, skip_special_tokens=False).endswith(
        "call<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_without_the_templates_end_token_gets_it(chatml):
    """A stop string, or another end token, ended the answer."""
    said = [say("user", "1"), say("assistant", "2")]
    end = chatml.eos_token_id
    whole = chatml.encode_continuation(said, [say("user", "3")], chatml.encode("2")[0])
    assert whole[0] == end and whole[1:] == chatml.encode_continuation(said, [say("user", "3")], end)


def test_blanks_before_the_end_token_and_counted_turns(with_template):
    tokenizer = with_template(ROUNDS)
    said = [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")]
    found = tokenizer.encode_continuation(said, [say("user", "e")], tokenizer.eos_token_id)
    assert found == tokenizer.encode("[5]e[6]")


@pytest.mark.parametrize("template", [HIDES, TWICE, TOOLS_FIRST])
def test_a_template_that_cannot_go_on_is_refused_in_one_line(with_template, template):
    tokenizer = with_template(template)
    with pytest.raises(ValueError, match="the chat template (leaves out|does not show an assistant's)") as error:
        tokenizer.encode_continuation([say("user", "1"), say("assistant", "2")], [say("tool", "3")], 2)
    assert "\n" not in str(error.value) and str(tokenizer.name) in str(error.value)


def test_a_role_that_the_template_leaves_out_is_refused(qwen):
    with pytest.raises(ValueError, match="leaves out what it says"):
        qwen.encode_continuation([say("user", "1"), say("assistant", "2")], [say("critic", "3")], 2)


def test_texts_that_look_like_marks(chatml):
    mark = "314159260100053589793"
    said = [say("user", mark), say("assistant", mark * 2)]
    found = chatml.encode_continuation(said, [say("user", mark)], chatml.eos_token_id)
    assert chatml.decode(found, False) == f"\n<|im_start|>user\n{mark}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("seed", range(20))
def test_random_chats(chatml, seed):
    """What was sampled stays as it is, however odd; without special tokens it is the rendered chat."""
    rng = np.random.default_rng(seed)
    letters = [*"ab 0\n+", "user", "####"]

    def text():
        return "".join(rng.choice(letters, rng.integers(0, 12)))

    turns = [
        (text(), [say(str(rng.choice(["user", "tool", "system"])), text()) for _ in range(rng.integers(1, 4))])
        for _ in range(rng.integers(1, 5))
    ]
    ids, said = played(chatml, [say("user", text())], turns)
    assert ids == chatml.apply_chat_template(said, True)
