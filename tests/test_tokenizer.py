"""Ids, text and rendered chats equal transformers'; streaming gives whole characters; bad folders are refused."""

import json
import lzma
import shutil
from pathlib import Path

import pytest

from cukit.tokenizer import IncrementalDecoder, Tokenizer

GOLDEN = Path(__file__).parent / "golden"
TINY = Path(__file__).parent.parent / "data" / "tiny-qwen3"
REFERENCE = json.loads((GOLDEN / "tokenizer_qwen3.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3-tokenizer")
    packed = (GOLDEN / "qwen3-tokenizer" / "tokenizer.json.xz").read_bytes()
    (folder / "tokenizer.json").write_bytes(lzma.decompress(packed))
    shutil.copy(GOLDEN / "qwen3-tokenizer" / "tokenizer_config.json", folder)
    return folder


@pytest.fixture(scope="module")
def qwen(qwen_folder):
    return Tokenizer.from_folder(qwen_folder)


@pytest.fixture
def tiny_copy(tmp_path):
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def edit_json(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "<remove>"}))


def test_reference_texts(qwen):
    assert len(REFERENCE["texts"]) == 59
    for case in REFERENCE["texts"]:
        assert qwen.encode(case["text"]) == case["ids"], case["text"]
        assert qwen.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
        assert qwen.decode(case["ids"]) == case["decoded_skip_special"]


def test_reference_chats(qwen):
    assert len(REFERENCE["chats"]) == 12
    for case in REFERENCE["chats"]:
        arguments = {key: value for key, value in case.items() if key not in ("rendered", "ids")}
        assert qwen.apply_chat_template(**arguments, tokenize=False) == case["rendered"]
        assert qwen.apply_chat_template(**arguments) == case["ids"]


def test_reference_texts_streamed(qwen):
    for case in REFERENCE["texts"]:
        decoder = IncrementalDecoder(qwen)
        pieces = [decoder.push(token) for token in case["ids"]]
        if "\N{REPLACEMENT CHARACTER}" not in case["text"]:
            assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert "".join(pieces) + decoder.flush() == case["decoded_skip_special"]


def byte_ids(tokenizer, data):
    """One id a byte: the first ids of a byte-level vocabulary are the bytes, printable ones first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = printable + [byte for byte in range(256) if byte not in printable]
    return [order.index(byte) for byte in data]


@pytest.mark.parametrize("text", ["🙂", "世界", "a🙂b", "é", "👩‍👩‍👧", "x\u00a0y"])
def test_stream_of_single_bytes(qwen, text):
    decoder = IncrementalDecoder(qwen)
    pieces = [decoder.push(token) for token in byte_ids(qwen, text.encode())]
    assert [piece for piece in pieces if piece] == list(text)
    assert decoder.flush() == ""


def test_stream_of_invalid_bytes(qwen):
    for data in (b"\xf0\x9f\x99", b"a\xff\xfe\xfd\xfc\xfbb", b"\xe2\x28\xa1x", b"\xff" * 40, b"ok \xe4\xb8 end"):
        ids = byte_ids(qwen, data)
        decoder = IncrementalDecoder(qwen)
        text = "".join(decoder.push(token) for token in ids) + decoder.flush()
        assert text == qwen.decode(ids) == data.decode("utf-8", errors="replace")


def test_prompt_that_ends_in_half_a_character(qwen):
    first, rest = byte_ids(qwen, "x🙂".encode()[:3]), byte_ids(qwen, "🙂!".encode()[2:])
    decoder = IncrementalDecoder(qwen, prompt_ids=first)
    assert "".join(decoder.push(token) for token in rest) + decoder.flush() == "🙂!"


def test_stream_keeps_the_space_after_a_special_token(tmp_path):
    """A sentencepiece-like decoder strips the first space of a text, which must not happen in the middle of one."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordLevel({"▁one": 0, "▁two": 1, "<s>": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = [0, 2, 2, 1, 0]
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(decoder.push(token) for token in ids) + decoder.flush() == tokenizer.decode(ids) == "one two one"


def test_special_ids(qwen, qwen_folder, tmp_path):
    assert (qwen.eos_token_id, qwen.pad_token_id, qwen.bos_token_id) == (151645, 151643, None)
    assert qwen.eos_token_ids == {151645} and qwen.vocab_size == len(qwen) == 151669
    folder = tmp_path / "base"
    shutil.copytree(qwen_folder, folder)
    (folder / "config.json").write_text('{"eos_token_id": 151643, "pad_token_id": 3}')
    assert Tokenizer.from_folder(folder).eos_token_ids == {151643, 151645}
    (folder / "generation_config.json").write_text('{"eos_token_id": [151645, 151662]}')
    assert Tokenizer.from_folder(folder).eos_token_ids == {151645, 151662}


def test_tiny_tokenizer_round_trip():
    tiny = Tokenizer.from_folder(TINY)
    text = "2+9=11\n11+9=20\n20-6=14\n####14"
    assert len(tiny.encode(text)) == 6 + 1 + 7 + 1 + 7 + 1 + 1 + 2 and tiny.decode(tiny.encode(text)) == text
    assert tiny.decode(tiny.encode("Hello, user?")) == "hello, user?"
    assert tiny.token_to_id("<unk>") in tiny.encode("世")
    prompt = tiny.apply_chat_template([{"role": "user", "content": "2+9+9-6"}], add_generation_prompt=True)
    assert len(prompt) == 15
    assert tiny.decode(prompt, False) == "<|im_start|>user\n2+9+9-6<|im_end|>\n<|im_start|>assistant\n"
    assert tiny.eos_token_ids == {tiny.token_to_id("<|im_end|>"), tiny.token_to_id("<|endoftext|>")}
    assert tiny.eos_token_id == tiny.token_to_id("<|im_end|>") and tiny.vocab_size <= 64
    assert tiny.decode([63, 1000, -1, *tiny.encode("7")]) == "7"


def test_save_round_trip(tmp_path):
    tiny = Tokenizer.from_folder(TINY)
    tiny.save(tmp_path / "saved")
    tiny.save(tmp_path / "saved")
    names = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == names
    assert Tokenizer.from_folder(tmp_path / "saved").eos_token_ids == tiny.eos_token_ids


def test_template_file_and_list_form(tiny_copy):
    edit_json(
        tiny_copy / "tokenizer_config.json",
        chat_template=[
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ messages[0].content }} {{ eos_token }}"},
        ],
    )
    chat = [{"role": "user", "content": "1"}]
    assert Tokenizer.from_folder(tiny_copy).apply_chat_template(chat, tokenize=False) == "1 <|im_end|>"
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    (tiny_copy / "chat_template.jinja").write_text(template + "{{ strftime_now('%Y')|length }}{{ {'ü': 1}|tojson }}")
    assert Tokenizer.from_folder(tiny_copy).apply_chat_template(chat, tokenize=False) == '14{"ü": 1}'


def test_added_tokens_only_in_the_config(tiny_copy):
    path = tiny_copy / "tokenizer_config.json"
    count = Tokenizer.from_folder(tiny_copy).vocab_size
    edit_json(path, added_tokens_decoder={str(count): {"content": "<think>", "special": True}})
    tokenizer = Tokenizer.from_folder(tiny_copy)
    assert tokenizer.encode("<think>1")[0] == count and tokenizer.vocab_size == count + 1
    assert tokenizer.decode(tokenizer.encode("<think>1")) == "1"
    edit_json(path, added_tokens_decoder={"90": {"content": "<think>"}})
    with pytest.raises(ValueError, match=f"'<think>' the id 90, but .* {count}$"):
        Tokenizer.from_folder(tiny_copy)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the chat template failed: roles must alternate"),
        ("{% for m in messages %}", "the chat template failed: .*"),
        ("{{ messages[0].content + 1 }}", "the chat template failed: .*"),
        ("{{ ''.__class__.__mro__ }}", "the chat template failed: access to attribute '__class__'.*"),
        ("{% include '/etc/passwd' %}", "the chat template failed: .*loader.*"),
        ("{{ messages.append(1) }}", "the chat template failed: .*"),
    ],
)
def test_template_errors(tiny_copy, template, message):
    (tiny_copy / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_folder(tiny_copy)
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "1"}])
    assert "\n" not in str(caught.value)


def test_folder_errors(tiny_copy):
    def refused(message):
        with pytest.raises(ValueError, match=message) as caught:
            Tokenizer.from_folder(tiny_copy)
        assert "\n" not in str(caught.value)

    edit_json(tiny_copy / "generation_config.json", eos_token_id="<|im_end|>")
    refused("eos_token_id must be an id or a list of ids, got '<|im_end|>'")
    (tiny_copy / "generation_config.json").write_text('{"eos')
    refused("generation_config.json: malformed JSON")
    (tiny_copy / "generation_config.json").unlink()
    edit_json(tiny_copy / "tokenizer_config.json", eos_token="</s>")
    refused("eos_token '</s>' is not in the vocabulary")
    (tiny_copy / "tokenizer_config.json").write_bytes(b"\xff\xff")
    refused("tokenizer_config.json: not UTF-8")
    (tiny_copy / "tokenizer.json").write_text("{}")
    refused("tokenizer.json: not a tokenizer")
    (tiny_copy / "tokenizer.json").unlink()
    refused("no tokenizer.json")
    shutil.rmtree(tiny_copy)
    refused("does not exist")


def test_chat_argument_errors(tiny_copy):
    edit_json(tiny_copy / "tokenizer_config.json", chat_template="<remove>")
    tokenizer = Tokenizer.from_folder(tiny_copy)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "1"}])
    tokenizer = Tokenizer.from_folder(TINY)
    with pytest.raises(ValueError, match="message 0 must be an object with a 'role'"):
        tokenizer.apply_chat_template(["hello"])
    with pytest.raises(ValueError, match="only text can be encoded, not int 7"):
        tokenizer.encode(7)
    with pytest.raises(ValueError, match="can not be encoded"):
        tokenizer.encode("\ud800")
