"""Stop strings that are, or hold, special tokens."""

import numpy as np
import pytest

from cukit import SamplingParams
from cukit.engine.text import CompletionText, StopTexts
from cukit.tokenizer import text_after

from .helpers import byte_tokens, qwen_tokenizer, reciting_llm

pytestmark = pytest.mark.usefixtures("order")


def generate(text, stop, stream=False, **options):
    """(the sample that recites `text`, its deltas)."""
    ids = qwen_tokenizer().encode(text) if isinstance(text, str) else text
    llm, prompt_ids = reciting_llm("Q:", ids)
    params = SamplingParams(**{"temperature": 0, "max_tokens": len(ids), "ignore_eos": True, "stop": stop} | options)
    outputs = list(llm.generate([prompt_ids], params, stream=stream))
    return outputs[-1].outputs[0], [out.outputs[0].text_delta for out in outputs]


@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("token", ["<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|vision_pad|>"])
def test_t4_a_stop_text_that_is_one_special_token(token, ignore_eos):
    for stream in (False, True):
        sample, deltas = generate(f"one two{token}three", [token], stream, ignore_eos=ignore_eos)
        assert (sample.text, sample.finish_reason, sample.stop_reason) == ("one two", "stop", token)
        assert sample.token_ids == qwen_tokenizer().encode(f"one two{token}")
        assert not stream or "".join(deltas) == "one two"


def test_t4_other_stop_texts_beside_it():
    sample, _ = generate("one two<|im_end|>three", ["<|im_end|>", "two"])
    assert (sample.text, sample.stop_reason) == ("one ", "two")
    sample, _ = generate("one two<|im_end|>three", ["<|im_end|>", "three"])
    assert (sample.text, sample.stop_reason) == ("one two", "<|im_end|>")
    sample, _ = generate("one two<|im_end|>three four", ["<|endoftext|>", "three"])
    assert (sample.text, sample.stop_reason) == ("one two", "three")


def test_t4_min_tokens_holds_for_it_too():
    sample, _ = generate("a<|im_end|>b<|im_end|>c", ["<|im_end|>"], min_tokens=2)
    assert sample.finish_reason == "stop" and len(sample.token_ids) > 2


@pytest.mark.parametrize(
    "text, stop, shown",
    [
        ("yes<|im_end|>\nuser", "<|im_end|>\n", "yes"),
        ("yes<|im_end|> no<|im_end|>\nuser", "<|im_end|>\n", "yes no"),
        ("some code<|im_end|>!", "code<|im_end|>", "some "),
        ("a b<|im_end|><|endoftext|>c", "<|im_end|><|endoftext|>", "a b"),
        ("one<|im_start|>assistant two", "ne<|im_start|>assis", "o"),
        ("汉字<|im_end|>👋 x", "字<|im_end|>👋", "汉"),
    ],
)
def test_t4_a_special_token_within_a_stop_text(text, stop, shown):
    """It is found, although the text that the user sees has no special tokens; the text is cut where it begins."""
    for given in ([stop], ["never<|im_end|>", stop, "nor this"]):
        for stream in (False, True):
            sample, deltas = generate(text, given, stream)
            assert (sample.text, sample.finish_reason, sample.stop_reason) == (shown, "stop", stop)
            assert not stream or "".join(deltas) == shown
    assert generate(text, ["never<|im_end|>at all"])[0].finish_reason == "length"


def test_t4_text_that_only_looks_like_a_special_token():
    """The model writes "<|im_end|>" letter by letter: no special token, and no stop."""
    ids = byte_tokens("a<|im_end|>b")
    sample, _ = generate(ids, ["<|im_end|>"])
    assert (sample.finish_reason, sample.text) == ("length", "a<|im_end|>b")
    sample, _ = generate("a <tool_call>b</tool_call> c", ["</tool_call>"])  # a token of its own, but not a special one
    assert (sample.text, sample.stop_reason) == ("a <tool_call>b", "</tool_call>")


def test_t4_random_texts_and_stop_texts():
    """Against a search in the whole text with special tokens; nothing that a stop string would cut is ever shown."""
    rng, tokenizer = np.random.default_rng(1), qwen_tokenizer()
    special = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|im_start|>")]
    words = tokenizer.encode("a b ab ba <|\n") + special
    found = 0
    for _ in range(400):
        ids = rng.choice(words, 14).tolist()
        start, length = rng.integers(0, 10), rng.integers(2, 4)
        stop = tokenizer.decode(rng.choice(words, 2).tolist(), skip_special_tokens=False)
        if rng.random() < 0.6:
            stop = tokenizer.decode(ids[start : start + length], skip_special_tokens=False)
        texts = StopTexts.of([stop], tokenizer)
        growing, shown = CompletionText(tokenizer, [], texts), ""
        for count, token in enumerate(ids):
            whole = tokenizer.decode(ids[: count + 1], skip_special_tokens=False)
            stopped = token in texts.ids or growing.push(token)
            shown += growing.take_delta() if token not in texts.ids else ""
            if texts.ids:
                assert stopped == (token in texts.ids)
            elif texts.raw:
                assert stopped == (stop in whole)
            if stopped:
                break
        growing.finish()
        shown += growing.take_delta()
        assert shown == growing.text
        if stopped and texts.raw:
            found += 1
            whole = tokenizer.decode(ids, skip_special_tokens=False)
            before = whole[: whole.index(stop)]
            for token in ("<|im_end|>", "<|im_start|>"):
                before = before.replace(token, "")
            assert shown == before
        elif not stopped:
            assert shown == text_after(tokenizer, [], ids)
    assert found > 40
