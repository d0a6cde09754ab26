"""Rows, masks, packing, sampling; the bundled task is what its script writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from cukit.datasets.demonstrations import encode_prompt, encode_sft, encode_sft_rows
from cukit.datasets.sources import load_rows, prompt_of, prompt_rows, reward_columns
from cukit.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer.from_folder(ROOT / "data" / "tiny-qwen3")


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def learnt(tokenizer, ids, mask):
    """The stretches with mask 1, decoded."""
    pieces, current = [], []
    for token, flag in [*zip(ids, mask, strict=True), (0, 0)]:
        if flag:
            current.append(token)
        elif current:
            pieces.append(tokenizer.decode(current, skip_special_tokens=False))
            current = []
    return pieces


# ---- rows ----


def test_load_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"prompt": "é"}\n\n{"prompt": "2"}', encoding="utf-8")
    assert load_rows(path) == [{"prompt": "é"}, {"prompt": "2"}] == load_rows(load_rows(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b" \n\n", "empty file"),
        (b'{"prompt": "1"}\n{"prompt": }\n', "line 2: malformed JSON"),
        (b'{"prompt": "1"}\n\n[1, 2]\n', "line 3: expected a JSON object, got list '\\[1, 2\\]'"),
        (b'{"prompt": "1"}\n"text"\n', "line 2: expected a JSON object, got str"),
        (b'{"prompt": "\xff"}\n', "line 1: not UTF-8"),
    ],
)
def test_load_rows_errors(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_rows(path)
    assert "\n" not in str(caught.value) and "rows.jsonl" in str(caught.value)


def test_load_rows_other_errors(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_rows(tmp_path / "nothing.jsonl")
    with pytest.raises(ValueError, match="no rows"):
        load_rows([])
    with pytest.raises(ValueError, match="row 1 is not an object but str"):
        load_rows([{}, "x"])


def test_prompts():
    assert prompt_of({"prompt": "a", "question": "b"}) == "a"
    assert prompt_of({"question": "b", "answer": "#### 1"}) == [user("b")] == prompt_of({"problem": "b"})
    rows = prompt_rows([{"question": "b", "answer": "1"}])
    assert rows == [{"prompt": [user("b")], "question": "b", "answer": "1"}]
    with pytest.raises(ValueError, match=r"data row 1: no 'prompt' column \(columns found: query, answer\)"):
        prompt_rows([{"prompt": "1"}, {"query": "2", "answer": "3"}])
    for wrong in (None, 3, [], ["text"], [{"content": "no role"}]):
        with pytest.raises(ValueError, match="column 'prompt' must be text or a list"):
            prompt_of({"prompt": wrong})


def test_reward_columns():
    rows = [{"prompt": "1", "completion": "2", "answer": "3"}, {"prompt": "4", "level": 5}]
    assert reward_columns(rows) == {"answer": ["3", None], "level": [None, 5]}


# ---- ids ----


def test_encode_prompt(tiny, qwen):
    ids = encode_prompt({"prompt": [user("1+1")]}, tiny)
    assert tiny.decode(ids, False) == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert encode_prompt({"prompt": "1+1"}, tiny) == tiny.encode("1+1")
    ids = encode_prompt({"question": "1+1"}, qwen, {"enable_thinking": False})
    assert qwen.decode(ids, False).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(ValueError, match="ends with an assistant message"):
        encode_prompt({"prompt": [user("1"), assistant("2")]}, tiny)
    with pytest.raises(ValueError, match="has no tokens"):
        encode_prompt({"prompt": ""}, tiny)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("1+1")], "completion": [assistant("####2")]},
        {"messages": [user("1+1"), assistant("####2")]},
        {"question": "1+1", "answer": "####2"},
    ],
)
def test_conversational_demonstration(tiny, row):
    ids, mask = encode_sft(row, tiny)
    assert learnt(tiny, ids, mask) == ["####2<|im_end|>"] and mask[-1] == 1
    prompt = encode_prompt({"prompt": [user("1+1")]}, tiny)
    assert ids[: len(prompt)] == prompt and mask[: len(prompt)] == [0] * len(prompt)


def test_standard_demonstration(tiny, qwen):
    ids, mask = encode_sft({"prompt": "1+1=", "completion": "2"}, tiny)
    assert learnt(tiny, ids, mask) == ["2<|im_end|>"] and ids == tiny.encode("1+1=2<|im_end|>")
    assert encode_sft({"prompt": "1+1=", "completion": "2<|im_end|>"}, tiny) == (ids, mask)
    ids, mask = encode_sft({"prompt": "un", "completion": "believable"}, qwen)
    assert ids[:1] == qwen.encode("un") and learnt(qwen, ids, mask) == ["believable<|im_end|>"]
    ids, mask = encode_sft({"text": "1+1"}, tiny)
    assert ids == tiny.encode("1+1<|im_end|>") and mask == [1] * 4


def test_several_turns(tiny, qwen):
    conversation = [user("1"), assistant("2"), user("3"), assistant("4")]
    ids, mask = encode_sft({"messages": conversation}, tiny)
    assert learnt(tiny, ids, mask) == ["2<|im_end|>", "4<|im_end|>"]
    assert ids == tiny.apply_chat_template(conversation)[:-1]
    ids, mask = encode_sft({"prompt": conversation[:3], "completion": conversation[3:]}, tiny)
    assert learnt(tiny, ids, mask) == ["4<|im_end|>"]
    ids, mask = encode_sft({"messages": conversation[:3]}, tiny)
    assert learnt(tiny, ids, mask) == ["2<|im_end|>"] and ids == tiny.apply_chat_template(conversation[:3])


def test_qwen3_template(qwen):
    """Its template drops earlier thoughts and writes an empty think block into the last answer only."""
    conversation = [user("1"), assistant("<think>\na\n</think>\n\n2"), user("3"), assistant("4")]
    think = "<think>\n\n</think>\n\n"
    ids, mask = encode_sft({"messages": conversation}, qwen)
    assert learnt(qwen, ids, mask) == ["2<|im_end|>", think + "4<|im_end|>"]
    ids, mask = encode_sft({"messages": conversation}, qwen, chat_template_kwargs={"enable_thinking": False})
    assert learnt(qwen, ids, mask) == ["2<|im_end|>", "4<|im_end|>"]
    assert ids == qwen.apply_chat_template(conversation)[:-1]
    conversation[1] = assistant("<b>2</b>")
    ids, mask = encode_sft({"messages": conversation}, qwen, chat_template_kwargs={"enable_thinking": False})
    assert learnt(qwen, ids, mask) == ["<b>2</b><|im_end|>", "4<|im_end|>"]


def test_tool_output_is_not_learnt(qwen):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    conversation = [
        user("1"),
        assistant("", tool_calls=[call]),
        {"role": "tool", "content": "5"},
        assistant("It is 5."),
    ]
    ids, mask = encode_sft({"messages": conversation, "tools": tools}, qwen)
    first, second = learnt(qwen, ids, mask)
    assert first == '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    assert second.endswith("It is 5.<|im_end|>") and "tool_response" not in second


def test_template_that_is_not_prefix_preserving(tmp_path, tiny):
    folder = tmp_path / "model"
    tiny.save(folder)
    template = "{{ messages|length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="renders the messages before message 1 differently"):
        encode_sft({"messages": [user("1"), assistant("2")]}, Tokenizer.from_folder(folder))


def test_end_token_is_added_where_the_template_has_none(tmp_path, tiny):
    tiny.save(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    ids, mask = encode_sft({"messages": [user("1"), assistant("2")]}, Tokenizer.from_folder(tmp_path / "model"))
    assert learnt(tiny, ids, mask) == ["2\n<|im_end|>"]


def test_nothing_to_learn_is_refused(tiny):
    with pytest.raises(ValueError, match="nothing to learn"):
        encode_sft({"messages": [user("1"), user("2")]}, tiny)
    with pytest.raises(ValueError, match=r"data row 1: no 'completion' column \(columns found: prompt\)"):
        encode_sft_rows([{"text": "1"}, {"prompt": "1"}], tiny)
    with pytest.raises(ValueError, match="both be text or both be message lists"):
        encode_sft({"prompt": [user("1")], "completion": "2"}, tiny)


def test_truncation_counts_and_skips(tiny):
    rows = [{"prompt": "1" * 9, "completion": "22"}, {"prompt": "1", "completion": "2" * 20}, {"text": "12"}]
    examples, counts = encode_sft_rows(rows, tiny, max_length=9)
    assert counts == {"truncated": 2, "skipped": 1}
    assert [len(ids) for ids, _ in examples] == [9, 3] and examples[0][1] == [0] + [1] * 8
    ids, mask = encode_sft(rows[0], tiny, max_length=9)
    assert ids == tiny.encode("1" * 9) and mask == [0] * 9
    with pytest.raises(ValueError, match="max_length=9 cuts off every completion of the 1 rows"):
        encode_sft_rows(rows[:1], tiny, max_length=9)


# ---- the bundled task ----


def test_bundled_files_are_what_the_scripts_write(tmp_path):
    for script, folder in [("make_arithmetic.py", "arithmetic"), ("make_tiny_tokenizer.py", "tiny-qwen3")]:
        subprocess.run([sys.executable, ROOT / "data" / script, "--output_dir", tmp_path / folder], check=True)
        written = sorted((tmp_path / folder).iterdir())
        assert len(written) == {"arithmetic": 3, "tiny-qwen3": 4}[folder]
        for path in written:
            assert path.read_bytes() == (ROOT / "data" / folder / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_bundled_task(tiny):
    files = {name: load_rows(ROOT / "data" / "arithmetic" / f"{name}.jsonl") for name in ("sft", "train", "test")}
    assert {name: len(rows) for name, rows in files.items()} == {"sft": 16000, "train": 4000, "test": 512}
    questions = [row["prompt"][0]["content"] for rows in files.values() for row in rows]
    assert len(set(questions)) == len(questions)
    for row in files["train"] + files["test"]:
        assert evaluate(row["prompt"][0]["content"]) == int(row["answer"]) >= 0
    right = 0
    for row in files["sft"]:
        steps = row["completion"][0]["content"].split("\n")
        right += int(steps[-1].removeprefix("####")) == evaluate(row["prompt"][0]["content"])
        for step in steps[:-1]:
            left, result = step.split("=")
            assert abs(evaluate(left) - int(result)) in (0, 10) and int(result) >= 0
    assert 0.5 < right / len(files["sft"]) < 0.6
    examples, counts = encode_sft_rows(files["sft"], tiny, max_length=64)
    assert counts == {"truncated": 0, "skipped": 0} and max(len(ids) for ids, _ in examples) < 48
    assert all(tiny.token_to_id("<unk>") not in ids for ids, _ in examples)


def evaluate(expression):
    total = 0
    for term in expression.replace("-", "+-").split("+"):
        total += int(term)
    return total
