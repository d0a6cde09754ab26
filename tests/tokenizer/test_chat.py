"""Rendered chats lose nothing that a message says, and the right template renders them."""

import json
import shutil
import time
from pathlib import Path

import pytest

from cukit.datasets.demonstrations import encode_prompt, encode_sft
from cukit.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
REFERENCE = json.loads((GOLDEN / "tokenizer_qwen3.json").read_text(encoding="utf-8"))
# As later Qwen and Llama templates do: content that is no text is not shown.
TEXT_ONLY = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}"
    "{% if m.content is string %}{{ m.content | trim }}{% endif %}{% endfor %}"
)
IN_PARTS = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
PRINTED = "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content }}{% endfor %}"
MERGED = (  # as Llama 2's: the system message within the first user message, roles must alternate
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n' %}{% set chat = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set chat = messages %}{% endif %}"
    "{% for m in chat %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}"
    "{% endif %}[{{ (system if loop.first else '') + m.content | upper }}]{% endfor %}"
)


@pytest.fixture
def with_template(tmp_path):
    def build(template=None, **config):
        folder = Path(shutil.copytree(ROOT / "data" / "tiny-qwen3", tmp_path / "model", dirs_exist_ok=True))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return Tokenizer.from_folder(folder)

    return build


def user(text, role="user"):
    return {"role": role, "content": text}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def render(tokenizer, messages, **more):
    return tokenizer.apply_chat_template(messages, tokenize=False, **more)


def test_t3_roles_that_the_template_does_not_know(qwen):
    with pytest.raises(
        ValueError, match=r"message 0 \(role 'human'\): .*leaves out what it says; write the role 'user'"
    ):
        qwen.apply_chat_template([user("Good day", "human")])
    with pytest.raises(ValueError, match=r"message 1 \(role 'gpt'\): .* write the role 'assistant'"):
        qwen.apply_chat_template([user("a"), user("b", "gpt")])
    with pytest.raises(ValueError, match=r"message 0 \(role 'User'\): .* leaves out what it says"):
        qwen.apply_chat_template([user("a", "User")], add_generation_prompt=True)
    with pytest.raises(ValueError, match=r"message 0 \(role 'human'\)") as caught:
        encode_prompt({"prompt": [user("Good day", "human")]}, qwen)
    assert "\n" not in str(caught.value)
    # A text that the rendered chat holds by chance anyway.
    for text in ("user", "a", "<|im_start|>", "1", "assistant"):
        with pytest.raises(ValueError, match="leaves out what it says"):
            qwen.apply_chat_template([user("hello"), user(text, "human")], add_generation_prompt=True)
    with pytest.raises(ValueError, match=r"message 2 \(role 'human'\)"):
        encode_sft({"messages": [user("1"), user("2", "assistant"), user("3", "human"), user("4", "assistant")]}, qwen)


def test_t3_what_must_still_pass(qwen, with_template):
    for case in REFERENCE["chats"]:
        arguments = {key: value for key, value in case.items() if key not in ("rendered", "ids")}
        assert render(qwen, **arguments) == case["rendered"]
    thought = user("<think>\nlong\n</think>\n\n2", "assistant")
    text = render(qwen, [user("1"), thought, user("3")])
    assert "long" not in text and "2<|im_end|>" in text  # earlier thoughts are dropped on purpose
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    chat = [
        user("1"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        user("5", "tool"),
        user("ok", "assistant"),
    ]
    assert '"add"' in render(qwen, chat) and "5" in render(qwen, chat)
    assert "<|im_start|>system\n<|im_end|>" in render(qwen, [user("", "system"), user("a")])
    assert render(qwen, [user("  ")]) == "<|im_start|>user\n  <|im_end|>\n"
    merged = with_template(MERGED)
    assert render(merged, [user("be", "system"), user("a"), user("b", "assistant")]) == "[BE\nA][B]".replace(
        "BE\n", "be\n"
    )
    with pytest.raises(ValueError, match="the chat template failed: must alternate"):
        render(merged, [user("a"), user("b")])
    assert render(with_template(TEXT_ONLY), [user("  a  ")]) == "<user>a"
    assert (
        render(with_template("{{ messages | tojson }}"), [user('"ü"\n')])
        == '[{"role": "user", "content": "\\"ü\\"\\n"}]'
    )


def test_t3_a_template_that_skips_a_message(with_template):
    last_only = with_template("{{ messages[-1].content }}")
    assert render(last_only, [user("a")]) == "a"
    with pytest.raises(
        ValueError, match=r"message 0 \(role 'system'\): .* leaves out what it says; it knows no such role"
    ):
        render(last_only, [user("b", "system"), user("a")])
    with pytest.raises(ValueError, match="message 0"):
        render(with_template("nothing"), [user("a")])


def test_t3_content_in_parts(qwen, with_template):
    chat = [user(parts("Good ", "day")), user("hi", "assistant")]
    assert render(with_template(IN_PARTS), chat) == "<user>Good day<assistant>hi"
    assert render(with_template(IN_PARTS), [user("Good day")]) == "<user>Good day"
    for template in (TEXT_ONLY, PRINTED, None, "{% for m in messages %}{{ m.content + '' }}{% endfor %}"):
        tokenizer = with_template(template)
        with pytest.raises(
            ValueError, match=r"message 0 \(role 'user'\): the chat template does not take content in parts"
        ):
            render(tokenizer, chat)
    with pytest.raises(ValueError, match="does not take content in parts"):
        render(qwen, chat)
    for wrong in (
        [1],
        ["text"],
        [{"type": "image"}],
        [{"type": "text"}],
        [{"text": "a"}],
        [{"type": "text", "text": 1}],
    ):
        with pytest.raises(ValueError, match=r"message 1 \(role 'user'\): a part of its content must be"):
            render(with_template(IN_PARTS), [user("a"), user(wrong)])
    assert render(with_template(IN_PARTS), [user(parts(" "))]) == "<user> "


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (user(5), r"message 1 \(role 'user'\): its content must be text, got int 5"),
        (user(1.5), "must be text, got float 1.5"),
        (user(True), "must be text, got bool True"),
        (user({"text": "a"}), "must be text, got dict"),
        (user([]), r"message 1 \(role 'user'\) has no content"),
        (user(None), r"message 1 \(role 'user'\) has no content"),
        ({"role": "user"}, r"message 1 \(role 'user'\) has no content"),
        ({"role": "assistant", "tool_calls": []}, r"message 1 \(role 'assistant'\) has no content"),
        ({"role": 3, "content": "a"}, "message 1 must be an object with a 'role'"),
        ({"content": "a"}, "message 1 must be an object with a 'role'"),
        ("hello", "message 1 must be an object with a 'role'"),
    ],
)
def test_t3_content_that_is_no_text(qwen, message, error):
    with pytest.raises(ValueError, match=error) as caught:
        render(qwen, [user("a"), message])
    assert "\n" not in str(caught.value)


def test_t3_the_check_costs_one_rendering_a_shape(with_template):
    tokenizer = with_template(PRINTED)
    count = 0
    original = tokenizer._chat._render

    def counting(*arguments):
        nonlocal count
        count += 1
        return original(*arguments)

    tokenizer._chat._render = counting
    start = time.process_time()
    for index in range(3000):
        render(tokenizer, [user(f"question {index}"), user("answer", "assistant")])
    assert count == 3001 and time.process_time() - start < 5
    render(tokenizer, [user("question", "system"), user("answer", "assistant")])
    assert count == 3003


def test_t6_the_template_for_tools(with_template):
    tools = [{"type": "function", "function": {"name": "add"}}]
    named = [
        {"name": "default", "template": PRINTED},
        {"name": "tool_use", "template": "{{ tools[0].function.name }} " + PRINTED},
    ]
    tokenizer = with_template(chat_template=named)
    assert render(tokenizer, [user("a")]) == "<user>a"
    assert render(tokenizer, [user("a")], tools=tools) == "add <user>a"
    ids = encode_prompt({"prompt": [user("1")], "tools": tools}, tokenizer)
    assert tokenizer.decode(ids) == "add user1"  # the bundled tokenizer has no <
    assert render(with_template(chat_template=named[:1]), [user("a")], tools=tools) == "<user>a"
    only_tools = with_template(chat_template=named[1:])
    assert render(only_tools, [user("a")], tools=tools) == "add <user>a"
    with pytest.raises(ValueError, match=r"none of its chat templates \(tool_use\) is named 'default'"):
        render(only_tools, [user("a")])
    with pytest.raises(ValueError, match="chat_template must be text or a list"):
        with_template(chat_template=[{"name": "default"}])
    with pytest.raises(ValueError, match="chat_template must be text or a list"):
        with_template(chat_template=5)


def test_t6_templates_in_files(with_template, tmp_path):
    """transformers 5 saves the default template as chat_template.jinja and the others in a folder."""
    with_template(PRINTED)
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("tools " + PRINTED)
    tokenizer = Tokenizer.from_folder(tmp_path / "model")
    tokenizer.save(tmp_path / "saved")
    for folder in ("model", "saved"):
        tokenizer = Tokenizer.from_folder(tmp_path / folder)
        assert render(tokenizer, [user("a")]) == "<user>a"
        assert render(tokenizer, [user("a")], tools=[{"name": "add"}]) == "tools <user>a"
