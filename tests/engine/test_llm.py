"""The public face: what a user asks for, gets back, and is told when it cannot be."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cukit import SamplingParams
from cukit.engine.llm import LLM
from cukit.engine.text import CompletionText, StopTexts
from cukit.tokenizer import text_after

from .helpers import (
    GOLDEN,
    ScriptModel,
    byte_tokens,
    qwen_tokenizer,
    random_prompts,
    reciting_llm,
    tiny_llm,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("order")

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def greedy(**options):
    return SamplingParams(**{"temperature": 0, "max_tokens": 30, "ignore_eos": True} | options)


def answer(text, prompt="Q:", **options):
    """Generate `text` token by token from a model that recites it; the sample."""
    ids = qwen_tokenizer().encode(text) if isinstance(text, str) else text
    llm, prompt_ids = reciting_llm(prompt, ids)
    return llm.generate([prompt_ids], greedy(**{"max_tokens": len(ids)} | options))[0].outputs[0]


# ---- stopping ----


def test_stop_string_across_token_borders():
    text = "The answer is 42.\n\nQuestion: what"
    ids = qwen_tokenizer().encode(text)
    sample = answer(text, stop=["zzz", "\n\nQuest", "is 42.\n\nQ"])
    assert sample.text == "The answer "
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "is 42.\n\nQ")
    kept = len(sample.token_ids)
    assert sample.token_ids == ids[:kept] and kept < len(ids)
    assert "Q" not in qwen_tokenizer().decode(ids[: kept - 1])  # it ended with the token that completed the string
    split = answer(byte_tokens("ab STOP cd"), stop="STOP")
    assert split.text == "ab " and len(split.token_ids) == 7


def test_stop_string_that_is_part_of_one_token():
    sample = answer("Hello world, again", stop=["or"])
    assert sample.text == "Hello w" and qwen_tokenizer().decode(sample.token_ids) == "Hello world"


def test_several_stop_ids_and_eos():
    tokenizer = qwen_tokenizer()
    ids = tokenizer.encode("one two<|im_end|>three<|endoftext|>")
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    sample = answer(ids, ignore_eos=False)  # the tokenizer's own eos is <|im_end|>
    assert (sample.text, sample.token_ids) == ("one two", ids[:3])
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    sample = answer(ids)
    assert (sample.finish_reason, len(sample.token_ids)) == ("length", len(ids))
    assert sample.text == "one twothree"
    sample = answer(ids, stop_token_ids=[5, ends[1]])
    assert (sample.finish_reason, sample.stop_reason, sample.token_ids) == ("stop", ends[1], ids)
    sample = answer(ids, stop_token_ids=[ids[1], ends[1]])  # an ordinary word as stop id is cut from the text too
    assert (sample.text, sample.token_ids, sample.stop_reason) == ("one", ids[:2], ids[1])


def test_min_tokens_bans_stop_ids_and_stop_strings():
    llm = tiny_llm()
    first = llm.generate([[1, 2, 3]], greedy(max_tokens=12))[0].outputs[0].token_ids
    stops = [first[0], first[4], first[5]]
    sample = llm.generate([[1, 2, 3]], greedy(max_tokens=12, min_tokens=5, stop_token_ids=stops))[0].outputs[0]
    assert not set(stops) & set(sample.token_ids[:5])
    stopped = answer("a b a b a b a b", stop=["b"], min_tokens=3)
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) == 4


def test_length_ends_at_max_tokens_or_at_max_model_len():
    llm = tiny_llm(max_model_len=16)
    short, long = llm.generate([[1] * 5, [1] * 5], [greedy(max_tokens=3), greedy(max_tokens=50)])
    assert [len(out.outputs[0].token_ids) for out in (short, long)] == [3, 11]
    assert {out.outputs[0].finish_reason for out in (short, long)} == {"length"}
    full = tiny_llm(max_model_len=16, num_kv_blocks=4).generate([[1] * 15], GREEDY)[0]
    assert len(full.outputs[0].token_ids) == 1


# ---- text ----

TEXTS = ["Hi 👋🏽 there 👨‍👩‍👧‍👦!", "汉字とかな", "naïve café — “x”", "\N{GRINNING FACE}" * 5]


@pytest.mark.parametrize("text", TEXTS)
def test_streaming_gives_whole_characters_only(text):
    ids = qwen_tokenizer().encode(text)
    llm, prompt_ids = reciting_llm("Q:", ids)
    pieces = list(llm.generate([prompt_ids], greedy(max_tokens=len(ids)), stream=True))
    deltas = [out.outputs[0].text_delta for out in pieces]
    assert "".join(deltas) == text and "\ufffd" not in "".join(deltas)
    assert [out.outputs[0].text for out in pieces] == ["".join(deltas[: i + 1]) for i in range(len(deltas))]
    assert pieces[-1].finished and not pieces[0].finished


@pytest.mark.parametrize("text", TEXTS)
def test_one_byte_a_token(text):
    ids = byte_tokens(text)
    llm, prompt_ids = reciting_llm("Q:", ids)
    for stop in ([], [text[2:4] + "not there", "never"]):
        deltas = [
            out.outputs[0].text_delta
            for out in llm.generate([prompt_ids], greedy(max_tokens=len(ids), stop=stop), stream=True)
        ]
        assert "".join(deltas) == text
        assert llm.generate([prompt_ids], greedy(max_tokens=len(ids), stop=stop))[0].outputs[0].text == text
    cut = answer(ids, stop=[text[3:5]])
    assert cut.text == text[: text.index(text[3:5])] and cut.stop_reason == text[3:5]


def test_a_character_that_the_prompt_began():
    ids = byte_tokens("x👋y")
    llm, _ = reciting_llm(ids[:3], ids[3:])
    for stop in ([], ["never"]):
        assert llm.generate([ids[:3]], greedy(max_tokens=3, stop=stop))[0].outputs[0].text == "👋y"


def test_unfinished_character_at_the_end():
    ids = byte_tokens("a👋")[:3]
    llm, prompt_ids = reciting_llm("Q:", ids)
    whole = llm.generate([prompt_ids], greedy(max_tokens=3))[0].outputs[0].text
    streamed = list(llm.generate([prompt_ids], greedy(max_tokens=3), stream=True))
    assert whole == "".join(out.outputs[0].text_delta for out in streamed) == "a\ufffd"
    assert [out.outputs[0].text_delta for out in streamed[:2]] == ["a", ""]


def test_streaming_holds_back_what_may_become_a_stop_string():
    text = "ab ST STO STOP cd"
    ids = byte_tokens(text)
    llm, prompt_ids = reciting_llm("Q:", ids)
    outputs = list(llm.generate([prompt_ids], greedy(max_tokens=len(ids), stop=["STOP"]), stream=True))
    shown = ""
    for out in outputs:
        shown += out.outputs[0].text_delta
        assert out.outputs[0].text == shown and "ab ST STO ".startswith(shown)
    assert shown == "ab ST STO "


def test_completion_text_piece_by_piece_equals_at_once():
    rng = np.random.default_rng(0)
    tokenizer = qwen_tokenizer()
    for _ in range(50):
        ids = rng.choice([*range(256), *rng.integers(0, 151_669, 100)], 40).tolist()
        prompt, completion = ids[:10], ids[10:]
        growing = CompletionText(tokenizer, prompt, StopTexts())
        for token in completion:
            growing.push(token)
        growing.finish()
        assert growing.text == text_after(tokenizer, prompt, completion)


def test_text_prompts_chat_and_outputs():
    tokenizer = qwen_tokenizer()
    llm, prompt_ids = reciting_llm("Q:", tokenizer.encode(" yes<|im_end|>"), max_model_len=64)
    (out,) = llm.generate("Q:", greedy(ignore_eos=False, logprobs=True))
    assert (out.prompt, out.prompt_token_ids, out.outputs[0].text) == ("Q:", prompt_ids, " yes")
    assert len(out.outputs[0].logprobs) == 2 and out.finished
    assert llm.generate(prompt_ids, GREEDY)[0].prompt is None
    messages = [{"role": "user", "content": "Hi"}]
    chat_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)
    llm, _ = reciting_llm(chat_ids, tokenizer.encode("Hello!<|im_end|>"))
    (out,) = llm.chat(messages, greedy(ignore_eos=False), enable_thinking=False)
    assert out.prompt_token_ids == chat_ids and out.outputs[0].text == "Hello!"
    assert len(llm.chat([messages, messages], greedy(max_tokens=1))) == 2


def test_ids_beyond_the_tokenizer_are_never_drawn():
    model = ScriptModel([1], vocab_size=151_936)
    model.logits = lambda hidden, plain=model.logits: _raise_padding(plain(hidden))
    llm = LLM.from_model(model, qwen_tokenizer())
    out = llm.generate(
        [[5]], SamplingParams(n=4, temperature=2.0, max_tokens=50, seed=1, ignore_eos=True, logprobs=True)
    )[0]
    assert max(token for sample in out.outputs for token in sample.token_ids) < 151_669
    assert all(
        logprob == pytest.approx(-np.log(151_669), abs=1e-4) for sample in out.outputs for logprob in sample.logprobs
    )


def _raise_padding(logits):
    logits.data[:] = 0
    logits.data[:, 151_669:] = 100
    return logits


def test_works_without_a_tokenizer():
    out = tiny_llm().generate([[1, 2, 3]], GREEDY)[0]
    assert out.outputs[0].text == "" and len(out.outputs[0].token_ids) == 30 and out.outputs[0].logprobs is None
    streamed = tiny_llm().generate([[1]], greedy(max_tokens=3), stream=True)
    assert [out.outputs[0].text_delta for out in streamed] == [""] * 3


# ---- seeds, parameters, life cycle ----


def test_seeds():
    llm = tiny_llm(seed=5)
    params = SamplingParams(n=4, max_tokens=12)
    first, second = (llm.generate([[1, 2, 3]], params)[0] for _ in range(2))
    ids = lambda out: [sample.token_ids for sample in out.outputs]  # noqa: E731
    assert ids(first) != ids(second) and len({tuple(tokens) for tokens in ids(first)}) > 1
    assert ids(tiny_llm(seed=5).generate([[1, 2, 3]], params)[0]) == ids(first)
    assert ids(tiny_llm(seed=6).generate([[1, 2, 3]], params)[0]) != ids(first)
    other = tiny_llm(seed=5)
    (taken,) = other.core.take_seeds(1)
    assert ids(other.generate([[1, 2, 3]], replace(params, seed=taken))[0]) == ids(first)
    seeded = llm.generate([[1, 2, 3]], SamplingParams(n=4, max_tokens=12, seed=2**64 - 2))[0]
    fourth = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12, seed=1))[0]
    assert ids(seeded)[3] == ids(fourth)[0]


def test_repetition_penalty_forbids_repeats_when_extreme():
    llm = tiny_llm()
    prompt = [3, 4, 5]
    penalised, plain = llm.generate(
        [prompt, prompt], [greedy(repetition_penalty=1e9, max_tokens=20), greedy(max_tokens=20)]
    )
    tokens = penalised.outputs[0].token_ids
    assert len(set(tokens + prompt)) == 23
    assert plain.outputs[0].token_ids == tiny_llm().generate([prompt], greedy(max_tokens=20))[0].outputs[0].token_ids
    tight = tiny_llm(num_kv_blocks=16, max_num_batched_tokens=3, max_num_seqs=3)
    many = tight.generate([prompt] * 6, greedy(repetition_penalty=1e9, max_tokens=20))
    assert all(out.outputs[0].token_ids == tokens for out in many)


def test_sleep_wake_close():
    llm = tiny_llm()
    before = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    llm.sleep()
    assert not llm.core.is_awake
    with pytest.raises(ValueError, match="wake_up"):
        llm.generate([[1, 2, 3]], GREEDY)
    assert len(llm.score([[1, 2, 3]])[0]) == 2
    llm.wake_up()
    assert llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids == before
    llm.add_request([1, 2], GREEDY)
    llm.step()
    for refused in (llm.sleep, llm.reset_prefix_cache):
        with pytest.raises(ValueError, match="1 requests run"):
            refused()
    llm.close()
    with tiny_llm() as llm:
        llm.add_request([1, 2], GREEDY)
    assert not llm.core.is_awake
    for refused in (llm.generate, llm.run, partial(llm.generate, stream=True), llm.add_request):
        with pytest.raises(ValueError, match="^this LLM is closed: make a new one, or call close.. later$"):
            refused([1, 2], GREEDY)
    llm.wake_up()
    assert llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids == before
    llm.sleep()
    with pytest.raises(ValueError, match="the engine sleeps: call wake_up"):
        llm.generate([1, 2], GREEDY)


def test_the_text_of_a_request_that_was_looked_at_grows_on():
    llm, prompt = reciting_llm("Say:", byte_tokens(" one two three"))
    request = llm.add_request(prompt, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    seen = []
    while not request.finished:
        llm.step()
        seen.append(llm.output(request).outputs[0])
    assert all(one.text == llm.tokenizer.decode(one.token_ids) for one in seen) and len({one.text for one in seen}) > 5


def test_abort_and_abandoned_stream_leave_a_clean_engine():
    llm = tiny_llm(num_kv_blocks=20)
    request = llm.add_request([1] * 9, SamplingParams(n=3, max_tokens=30))
    waiting = llm.add_request([2] * 9, SamplingParams(n=2, max_tokens=30))
    for _ in range(3):
        llm.step()
    llm.abort(request.request_id)
    llm.abort(waiting.request_id)
    llm.abort(12345)
    assert [sample.finish_reason for sample in llm.output(request).outputs] == ["abort"] * 3
    assert len(llm.output(waiting).outputs) == 2
    for out in llm.generate([[1, 2, 3], [4, 5]], SamplingParams(n=2), stream=True):
        assert not out.finished
        break
    del out
    for _ in llm.generate([[1, 2, 3]], SamplingParams(n=2, max_tokens=2), stream=True):
        pass
    assert llm.core.blocks.num_free == 20 and not llm.core.scheduler.has_work and not llm.core.requests
    llm.sleep()


def test_an_error_in_a_step_leaves_a_clean_engine():
    llm = tiny_llm()
    norm = tiny_model().norm.weight.data
    saved = norm.copy()
    try:
        norm[:] = np.nan
        with pytest.raises(ValueError, match="not finite"):
            llm.generate([[1, 2, 3]], GREEDY)
    finally:
        norm[:] = saved
    llm.reset_prefix_cache()
    assert (
        llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
        == tiny_llm().generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    )


def test_score_edges():
    llm = tiny_llm()
    single, pair = llm.score([[4], [4, 5]])
    assert single.shape == (0,) and pair.shape == (1,)
    assert llm.score([]) == []
    cold = llm.score([[4, 5, 6]], temperature=0.5)[0]
    assert not np.allclose(cold, llm.score([[4, 5, 6]])[0])


def test_no_prompts():
    assert tiny_llm().generate([], GREEDY) == []
    assert list(tiny_llm().generate([], GREEDY, stream=True)) == []


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda: tiny_llm(max_model_len=8).generate([[1], [1] * 8], GREEDY),
            ["prompt 1", "8 tokens", "max_model_len=8"],
        ),
        (lambda: tiny_llm().generate([[]], GREEDY), ["prompt 0 is empty"]),
        (lambda: tiny_llm().generate([[1, 211]], GREEDY), ["211", "0 to 210"]),
        (lambda: tiny_llm().generate([[1, -1]], GREEDY), ["-1"]),
        (lambda: tiny_llm().generate([[1, "a"]], GREEDY), ["prompt 0", "ids"]),
        (lambda: tiny_llm().generate({"prompt": "a"}, GREEDY), ["prompts", "text", "'prompt'"]),
        (lambda: tiny_llm().generate(None, GREEDY), ["prompts", "None"]),
        (lambda: tiny_llm().generate(5, GREEDY), ["prompts", "5"]),
        (lambda: reciting_llm([1], [2])[0].chat({"role": "user", "content": "x"}), ["messages", "'user'"]),
        (lambda: reciting_llm([1], [2])[0].chat(None), ["messages", "None"]),
        (lambda: tiny_llm().generate(["text"], GREEDY), ["no tokenizer.json"]),
        (lambda: tiny_llm().generate([[1]], greedy(stop=["x"])), ["stop_token_ids"]),
        (lambda: tiny_llm().generate([[1], [2]], [GREEDY]), ["1 sampling_params for 2 prompts"]),
        (lambda: tiny_llm().generate([[1]], {"n": 1}), ["SamplingParams", "dict"]),
        (lambda: tiny_llm().chat([{"role": "user", "content": "x"}]), ["chat template"]),
        (lambda: tiny_llm().score([[1, 2], []]), ["sequence 1 is empty"]),
        (lambda: tiny_llm().score([[1] * 300]), ["sequence 0", "300", "256"]),
        (lambda: tiny_llm(max_model_len=999), ["999", "256"]),
        (lambda: tiny_llm(num_kv_blocks=3), ["12 tokens", "max_model_len=64", "num_kv_blocks"]),
        (lambda: tiny_llm(max_batch=3), ["max_batch", "max_num_seqs"]),
        (lambda: LLM(GOLDEN / "qwen3_tiny", device="cpu", gpu_memory=1), ["gpu_memory"]),
        (lambda: tiny_llm(exact="yes"), ["exact", "auto, true, false", "'yes'"]),
        (lambda: tiny_llm(exact=True), ["exact=true", "--device cuda", "exact=auto"]),
    ],
)
def test_refusals_name_the_value_the_limit_and_the_way_out(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


def test_a_small_pool_bounds_the_default_length():
    llm = LLM.from_model(tiny_model(), None, num_kv_blocks=4, block_size=8)
    assert llm.config.max_model_len == 32
    (out,) = llm.generate([[1, 2]], greedy(max_tokens=100))
    assert len(out.outputs[0].token_ids) == 30 and out.outputs[0].finish_reason == "length"


def test_numpy_ids_and_stats():
    llm = tiny_llm()
    prompt = random_prompts(1, 9, 10)[0]
    (out,) = llm.generate([np.array(prompt, np.int32)], greedy(max_tokens=4))
    assert out.prompt_token_ids == prompt and type(out.outputs[0].token_ids[0]) is int
    assert (llm.stats.num_requests, llm.stats.num_prefill_tokens, llm.stats.num_generated_tokens) == (1, 9, 4)
    assert llm.stats.num_steps == 4


def test_an_engine_that_is_dropped_gives_its_cache_back_at_once():
    llm = tiny_llm()
    llm.generate([[1, 2, 3]], greedy(max_tokens=4))
    cache = weakref.ref(llm.core.runner.kv[0][0])
    gc.disable()  # a cycle would keep the cache until the collector happens to run
    try:
        del llm
        assert cache() is None
    finally:
        gc.enable()
