"""Faults that use has found between a data file and the ids: each row of the list, with other inputs of its kind."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from cukit.datasets.demonstrations import check_ids, encode_prompt, encode_prompts, encode_sft, encode_sft_rows
from cukit.datasets.sources import load_rows
from cukit.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer.from_folder(ROOT / "data" / "tiny-qwen3")


@pytest.fixture
def llama(tmp_path):
    """A tokenizer that puts <s> before every text, with a template that writes <s> too."""
    words = ["<s>", "</s>", "<unk>", "user", "assistant", ":", "one", "two", "three", "\n"]
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path / "llama"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %} {{ m.role }} : {{ m.content }} </s>{% endfor %}"
    template += "{% if add_generation_prompt %} assistant :{% endif %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "1"}\n{"answer": ' + b"9" * 6000 + b"}\n", "line 2: .*6000 digits is too long; write it as text"),
        (b'{"answer": -' + b"1" * 4301 + b"}", "line 1: .*4301 digits"),
        (b'{"answer": NaN}', "line 1: malformed JSON: NaN is no JSON"),
        (b'{"answer": -Infinity}', "line 1: malformed JSON: -Infinity is no JSON"),
        (b'{"answer": 1e999}', "line 1: malformed JSON: the number 1e999 is too large"),
        (b'{"a": 1}\r\n{"a": 1, "b": {"c": 1, "c": 2}}\r\n', "line 2: malformed JSON: the key 'c' stands twice"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 1: malformed JSON: nested too deep"),
        (b'{"prompt": "\\ud83d"}', r"line 1: malformed JSON: \\ud83d is half a character"),
        (b'{"\\udc00": 1}', r"line 1: malformed JSON: \\udc00 is half a character"),
        (b'{"a": 1}\n\xef\xbb\xbf{"a": 1}', "line 2: malformed JSON: .*BOM"),
        (b'{"a": 1}\n\n{"a": "\xe4"}', "line 3: not UTF-8 text"),
        ('{"a": 1}'.encode("utf-16"), "line 1: not UTF-8 text"),
        (b'{"a": 1', "line 1: malformed JSON"),
        (b'{"a": 1} {"a": 2}', "line 1: malformed JSON: Extra data"),
        (b"12", "line 1: expected a JSON object, got int '12'"),
        (b'"' + b"x" * 5_000_000, "line 1: malformed JSON"),
        (b"\0", "line 1: malformed JSON"),
    ],
)
def test_c10_odd_json_is_refused_with_file_and_line(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_rows(path)
    text = str(caught.value)
    assert text.startswith(f"{path}, line ") and "\n" not in text and len(text) < 400


def test_c10_what_json_allows(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"prompt": "é\u2028\x85 🙂", "answer": 10**4000, "nested": [[[[[{}]]]]], "e": 1e300, "long": "x" * 3_000_000}
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(row).encode() + b"\r\n\r\n" + json.dumps(row, ensure_ascii=False).encode()
    )
    assert load_rows(path) == [row, row]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1+1", "answer": 2}, "column 'answer' is what the assistant says here and must be text, got 2"),
        ({"problem": "1+1", "solution": ["2"]}, r"column 'solution' .* must be text, got \['2'\]"),
        (
            {"prompt": [user("1")], "completion": [{"role": "assistant", "content": 2}]},
            "content must be text, got int 2",
        ),
        ({"prompt": "1", "completion": 2}, "column 'completion' must be text or a list .*, got 2"),
        ({"text": 2}, "column 'text' must be text, got 2"),
        ({"question": "1+1", "answer": None}, "no 'completion' column"),
    ],
)
def test_c10_a_number_where_text_must_stand(tiny, row, message):
    with pytest.raises(ValueError, match="^data row 1: .*" + message) as caught:
        encode_sft_rows([{"text": "1"}, row], tiny)
    assert "\n" not in str(caught.value)


def test_t5_one_beginning_of_text_token(llama):
    tokenizer = Tokenizer.from_folder(llama)
    start, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    chat = [user("one two")]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    wanted = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert wanted[0] == start and wanted.count(start) == 1
    assert encode_prompt({"prompt": rendered}, tokenizer) == wanted == encode_prompt({"prompt": chat}, tokenizer)
    assert encode_prompts([{"prompt": rendered}, {"prompt": chat}], tokenizer) == [wanted, wanted]
    assert tokenizer.encode(rendered, add_special_tokens=True) == wanted == tokenizer.encode(rendered)
    assert tokenizer.encode("one", add_special_tokens=True) == [start, *tokenizer.encode("one")]
    assert tokenizer.encode("", add_special_tokens=True) == [start] == tokenizer.encode("<s>", add_special_tokens=True)
    assert tokenizer.encode("one <s> <s>", True) == [start, *tokenizer.encode("one <s> <s>")]
    ids, mask = encode_sft({"text": rendered + " three </s>"}, tokenizer)
    assert ids == [*wanted, tokenizer.token_to_id("three"), end] and mask == [1] * len(ids)
    ids, mask = encode_sft({"prompt": rendered, "completion": " three"}, tokenizer)
    assert ids == [*wanted, tokenizer.token_to_id("three"), end] and mask == [0] * len(wanted) + [1, 1]


@pytest.mark.parametrize(("single", "text"), [("<s> $A </s>", "<s> one </s>"), ("$A </s>", "one </s>")])
def test_t5_no_second_end_token_either(llama, single, text):
    backend = Backend.from_file(str(llama / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    backend.save(str(llama / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(llama)
    assert tokenizer.encode(text, True) == tokenizer.encode(text) == tokenizer.encode("one", True)
    assert tokenizer.encode_batch([text, "one", "two"], True)[:2] == [tokenizer.encode(text)] * 2
    assert tokenizer.encode(text + " two", True)[-2:] == tokenizer.encode("two </s>")


def test_t7_a_token_without_a_row_in_the_model(tmp_path, tiny):
    folder = Path(shutil.copytree(ROOT / "data" / "tiny-qwen3", tmp_path / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(tiny.vocab_size): {"content": "<extra>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == tiny.vocab_size + 1
    rows = [{"prompt": "1", "completion": "2"}, {"prompt": "1<extra>", "completion": "2"}]
    message = f"^data row 1: token id {tiny.vocab_size} has no row in the model, which has {tiny.vocab_size};"
    for encode in (encode_prompts, encode_sft_rows):
        with pytest.raises(ValueError, match=message) as caught:
            encode(rows, tokenizer, model_rows=tiny.vocab_size)
        assert "\n" not in str(caught.value)
        encode(rows, tokenizer, model_rows=tiny.vocab_size + 1)
    check_ids([], 3, "row")
    check_ids([0, 2], 3, "row")
    with pytest.raises(ValueError, match="^train_dataset, data row 7: token id 3 .* has 3"):
        check_ids([0, 3, 1], 3, "train_dataset, data row 7")


def test_rows_encode_together_as_alone(tiny, llama):
    rows = [
        {"prompt": "1+1=", "completion": "2"},
        {"text": "1+1=2"},
        {"messages": [user("1"), {"role": "assistant", "content": "2"}, user("3")]},
        {"question": "1+1", "answer": "#### 2"},
        {"prompt": [user("1+1")], "completion": [{"role": "assistant", "content": "####2"}]},
    ] * 3
    for tokenizer in (tiny, Tokenizer.from_folder(llama)):
        examples, counts = encode_sft_rows(rows, tokenizer)
        assert examples == [encode_sft(row, tokenizer) for row in rows] and counts == {"truncated": 0, "skipped": 0}
        prompts = [row for row in rows if "prompt" in row or "question" in row]
        assert encode_prompts(prompts, tokenizer) == [encode_prompt(row, tokenizer) for row in prompts]
    with pytest.raises(ValueError, match="^data row 2: the prompt '' has no tokens"):
        encode_prompts([{"prompt": "1"}, {"prompt": "1"}, {"prompt": ""}], tiny)
    with pytest.raises(ValueError, match=r"^data row 1: .* can not be encoded"):
        encode_prompts([{"prompt": "1"}, {"prompt": "\ud800"}], tiny)


# ---- found by use ----------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": 'it\'s "1+1"\n[]'}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize("text", [str(MESSAGES), json.dumps(MESSAGES), json.dumps(MESSAGES, indent=2) + "\n"])
def test_message_lists_that_a_csv_made_text_are_refused(tiny, text):
    """pandas' and datasets' to_csv write them so; before, a run learnt the brackets."""
    said = (
        "data row 1: column 'prompt' holds a message list as text.*a CSV holds no lists; write the rows as JSON lines"
    )
    with pytest.raises(ValueError, match=said):
        encode_prompts([{"prompt": "1+1"}, {"prompt": text}], tiny)
    with pytest.raises(ValueError, match="column 'completion' holds a message list as text"):
        encode_sft({"prompt": "1+1", "completion": text}, tiny)
    with pytest.raises(ValueError, match="column 'messages' holds a message list as text"):
        encode_sft({"messages": text}, tiny)


@pytest.mark.parametrize("text", ["[1, 2]", "[{'a': 1}]", "[{'role': 1}", "see [{'role': 'user'}]", "[{role}]"])
def test_other_text_in_brackets_is_text(tiny, text):
    assert encode_prompts([{"prompt": text}], tiny) == [tiny.encode(text)]


def test_bytes_that_are_no_text_are_named(tiny):
    with pytest.raises(ValueError, match="can not be encoded: it is not valid UTF-8"):
        tiny.encode("a\udcff")
