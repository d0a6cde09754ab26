"""Streamed text of every kind of tokenizer: the pieces join to what the ids decode to, in whole characters."""

import random
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from cukit.tokenizer import IncrementalDecoder, Tokenizer, text_after

ROOT = Path(__file__).parents[2]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXTS = [
    "猫猫",
    "Hi, 猫🙂!",
    "👩‍👩‍👧‍👦 e\u0301 ê",
    "a  b\n c",
    "한국어 текст",
    "🇩🇪🇫🇷",
    "\u200f\u202eab",
    "x\u00a0y",
    " lead",
    "trail ",
    "",
]
KINDS = ["llama", "byte level", "word piece", "metaspace", "unigram", "bpe suffix", "qwen", "tiny"]
WORDS = ["one", "two", "▁one", "▁two", "▁", "a", "b", "猫", "▁a", ".", "##ing", "##s", "!", "é"]


def saved(backend, folder):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def llama(folder):
    """Byte fallback as in Llama 2: the decoder turns a run of byte tokens into text as a whole."""
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *WORDS,
        "<think>",
        "t",
        "w",
        "o",
        "n",
        "e",
    ]
    backend = Backend(
        models.BPE(
            {name: index for index, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    backend.add_tokens(["<tool>"])
    return saved(backend, folder)


def byte_level(folder):
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({name: index for index, name in enumerate(names)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["<think>", "猫"])
    return saved(backend, folder)


def plain(model, decoder, folder):
    backend = Backend(model)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoder
    backend.add_special_tokens(["<s>"])
    return saved(backend, folder)


@pytest.fixture(scope="module")
def make(tmp_path_factory, qwen):
    def build(kind):
        folder = tmp_path_factory.mktemp("tokenizer")
        ids = {name: index for index, name in enumerate(["<unk>", *WORDS])}
        if kind == "llama":
            return llama(folder)
        if kind == "byte level":
            return byte_level(folder)
        if kind == "word piece":
            return plain(models.WordPiece(ids, unk_token="<unk>"), decoders.WordPiece(), folder)
        if kind == "metaspace":
            return plain(models.WordLevel(ids, unk_token="<unk>"), decoders.Metaspace(), folder)
        if kind == "unigram":
            scores = [("<unk>", 0.0), *((name, -1.0) for name in WORDS), *((f"<0x{b:02X}>", -9.0) for b in range(256))]
            steps = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
            return plain(models.Unigram(scores, 0, byte_fallback=True), steps, folder)
        if kind == "bpe suffix":
            ids = {name: index for index, name in enumerate(["<unk>", "a", "b", "a</w>", "b</w>", "猫</w>"])}
            return plain(
                models.BPE(ids, [], unk_token="<unk>", end_of_word_suffix="</w>"), decoders.BPEDecoder("</w>"), folder
            )
        if kind == "qwen":
            return qwen
        return Tokenizer.from_folder(ROOT / "data" / "tiny-qwen3")

    made: dict = {}
    return lambda kind: made.setdefault(kind, None) or made.update({kind: build(kind)}) or made[kind]


def random_ids(tokenizer, rng):
    """Ids of random texts, special tokens, single random ids and ids that no token has."""
    ids = []
    for _ in range(rng.randint(1, 6)):
        choice = rng.random()
        if choice < 0.4:
            ids += tokenizer.encode(rng.choice(TEXTS))
        elif choice < 0.5:
            ids += [
                tokenizer.token_to_id(name) or 0 for name in rng.choices(["<s>", "</s>", "<|im_end|>", "<think>"], k=2)
            ]
        elif choice < 0.6:
            ids += [tokenizer.vocab_size + rng.randint(0, 9), -1]
        elif tokenizer.byte_ids and choice < 0.8:
            ids += rng.choices(list(tokenizer.byte_ids), k=rng.randint(1, 5))
        else:
            ids += rng.choices(range(min(tokenizer.vocab_size, 260)), k=rng.randint(1, 9))
    return ids


def streamed(tokenizer, ids, prompt=(), skip=True):
    decoder = IncrementalDecoder(tokenizer, prompt, skip)
    return [decoder.push(token) for token in ids] + [decoder.flush()]


def as_bytes(tokenizer, data):
    """One id a byte."""
    by_byte = {byte: token for token, byte in tokenizer.byte_ids.items()}
    return [by_byte[byte] for byte in data]


@pytest.mark.parametrize("text", ["猫猫", "猫", "a猫b🙂", "👩‍👩‍👧", "é\n"])
def test_t1_bytes_of_a_byte_fallback_tokenizer(make, text):
    tokenizer = make("llama")
    ids = as_bytes(tokenizer, text.encode())
    assert tokenizer.decode(ids) == text == "".join(streamed(tokenizer, ids))
    for end in (["two"], ["</s>", "two"]):
        following = [tokenizer.token_to_id(name) for name in end]
        pieces = streamed(tokenizer, ids + following)
        assert "".join(pieces) == tokenizer.decode(ids + following) == text + "two"
        assert REPLACEMENT not in "".join(pieces)
    assert make("llama").byte_ids.keys() >= set(ids) and len(tokenizer.byte_ids) == 256
    assert not make("byte level").byte_ids and not make("tiny").byte_ids and not make("qwen").byte_ids


@pytest.mark.parametrize("kind", KINDS)
def test_t1_pieces_join_to_the_decoded_ids(make, kind):
    tokenizer = make(kind)
    rng = random.Random(0)
    for case in range(150 if kind == "qwen" else 600):
        ids = random_ids(tokenizer, rng)
        for skip in (True, False):
            pieces = streamed(tokenizer, ids, skip=skip)
            assert "".join(pieces) == tokenizer.decode(ids, skip), (case, ids)
            # Whole characters: what U+FFFD a piece holds, the decoded ids hold at that place too; the join shows it.
            assert text_after(tokenizer, [], ids, skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_t1_text_that_the_tokenizer_knows_is_never_shown_in_halves(make, kind, text):
    tokenizer = make(kind)
    ids = tokenizer.encode(text)
    decoded = tokenizer.decode(ids)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == decoded and (REPLACEMENT in decoded or not any(REPLACEMENT in piece for piece in pieces))


@pytest.mark.parametrize("kind", KINDS)
def test_t1_a_completion_goes_on_where_its_prompt_ended(make, kind):
    """Prompt and completion are cut at every place of a text; a character that the prompt began is completed."""
    tokenizer = make(kind)
    rng = random.Random(1)
    for case in range(60 if kind == "qwen" else 200):
        ids = random_ids(tokenizer, rng) if case % 2 else tokenizer.encode(rng.choice(TEXTS) * 3)
        for cut in range(len(ids) + 1):
            prompt, completion = ids[:cut], ids[cut:]
            text = "".join(streamed(tokenizer, completion, prompt))
            assert text == text_after(tokenizer, prompt, completion)
            whole = tokenizer.decode(ids)
            if REPLACEMENT not in whole and kind != "bpe suffix":  # its last token shows less than one in the middle
                assert whole.endswith(text), (case, cut)
                head, shown = whole[: len(whole) - len(text)], tokenizer.decode(prompt)
                if not tokenizer.byte_ids or REPLACEMENT not in shown:
                    assert head == shown.rstrip(REPLACEMENT), (case, cut)
                else:  # the prompt ends within a character, and the decoder shows none of its run
                    assert shown.startswith(head[: shown.index(REPLACEMENT)]) and len(head) <= len(shown)


@pytest.mark.parametrize("kind", ["llama", "byte level", "unigram", "qwen"])
def test_t1_with_stop_strings_the_text_is_cut_at_the_first(make, kind):
    """What an engine does with the pieces: it looks for a stop string in the text so far, and once more at the end."""
    tokenizer = make(kind)
    rng = random.Random(2)
    stopped = 0
    for _ in range(300):
        ids = random_ids(tokenizer, rng)
        whole = tokenizer.decode(ids)
        stops = [stop for stop in ("猫", "b", "🙂!", "👩‍", "o", "  ", "猫猫") if rng.random() < 0.3]
        wanted = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
        text = ""
        for piece in streamed(tokenizer, ids):
            text += piece
            if any(stop in text for stop in stops):
                stopped += 1
                break
        text = text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
        assert text == whole[:wanted]
    assert stopped > 20


def test_t1_wrong_bytes_spoil_their_whole_run_as_the_decoder_has_it(make):
    tokenizer = make("llama")
    ids = as_bytes(tokenizer, "猫".encode() + b"\xff") + [tokenizer.token_to_id("two")]
    pieces = streamed(tokenizer, ids)
    assert pieces == ["", "", "", "", REPLACEMENT * 4 + "two", ""] and "".join(pieces) == tokenizer.decode(ids)
    assert streamed(tokenizer, ids[:2]) == ["", "", REPLACEMENT * 2]


def test_long_runs_of_bytes_take_linear_time(make):
    tokenizer = make("llama")
    ids = as_bytes(tokenizer, "猫".encode() * 20_000)
    start = time.process_time()
    assert "".join(streamed(tokenizer, ids)) == "猫" * 20_000 == text_after(tokenizer, ids[:9], ids[9:]) + "猫" * 3
    assert time.process_time() - start < 5
