"""The engine's tokens and log-probabilities: against golden values, and independent of how the work was scheduled."""

from dataclasses import replace

import numpy as np
import pytest

from cukit import SamplingParams
from cukit.engine.llm import LLM
from cukit.models.decoder import Decoder
from cukit.models.weights import load_model

from .helpers import GOLDEN, TINY_MODELS, random_prompts, tiny_llm, tiny_model

pytestmark = pytest.mark.usefixtures("order")

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=20, seed=7, logprobs=True)


def results(outputs):
    return [[(sample.token_ids, sample.logprobs) for sample in out.outputs] for out in outputs]


def assert_same(got, expected):
    for samples, their_samples in zip(got, expected, strict=True):
        for (tokens, logprobs), (their_tokens, their_logprobs) in zip(samples, their_samples, strict=True):
            assert tokens == their_tokens
            np.testing.assert_allclose(logprobs, their_logprobs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_golden_greedy_tokens(name):
    golden = np.load(GOLDEN / f"{name}.npz", allow_pickle=False)
    prompts = [row[:length].tolist() for row, length in zip(golden["input_ids"], golden["lengths"], strict=True)]
    for dtype, tolerance in (("float64", 2e-5), ("float32", 5e-5)):
        llm = LLM(GOLDEN / name, device="cpu", dtype=dtype, max_model_len=48)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=True))
        assert [out.outputs[0].token_ids for out in outputs] == golden["gen/tokens"].tolist()
        np.testing.assert_allclose([out.outputs[0].logprobs for out in outputs], golden["gen/logprobs"], atol=tolerance)
    eos = int(golden["gen/eos_token"])
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[eos]))
    for out, tokens, length in zip(
        outputs, golden["gen/eos_tokens"].tolist(), golden["gen/eos_lengths"].tolist(), strict=True
    ):
        sample = out.outputs[0]
        assert sample.token_ids == tokens[:length]
        stopped = sample.token_ids[-1] == eos
        assert (sample.finish_reason, sample.stop_reason) == (("stop", eos) if stopped else ("length", None))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_score_gives_the_engines_logprobs(name):
    llm = tiny_llm(name)
    for temperature in (0.6, 1.0, 1.3):
        params = SamplingParams(n=3, temperature=temperature, top_k=40, max_tokens=20, seed=1, logprobs=True)
        for out in llm.generate(random_prompts(5, 1, 30), params):
            for sample in out.outputs:
                (scores,) = llm.score([out.prompt_token_ids + sample.token_ids], temperature)
                np.testing.assert_allclose(scores[len(out.prompt_token_ids) - 1 :], sample.logprobs, rtol=0, atol=1e-10)
    greedy = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9, logprobs=True))[0]
    (scores,) = llm.score([[1, 2, 3] + greedy.outputs[0].token_ids])
    np.testing.assert_allclose(scores[2:], greedy.outputs[0].logprobs, atol=1e-10)


def test_contexts_beyond_one_attention_chunk():
    """270 to 330 tokens, so two chunks of 256 keys: prefilled in pieces as at once, and as the scoring pass."""
    model = Decoder(replace(tiny_model().config, max_position_embeddings=340), tiny_model().backend, "float64")
    model.init_weights(0)
    prompts = random_prompts(3, 240, 300, seed=4)
    params = SamplingParams(max_tokens=30, seed=3, logprobs=True)
    llm = LLM.from_model(model)
    whole = llm.generate(prompts, params)
    pieces = LLM.from_model(model, max_num_batched_tokens=37).generate(prompts, params)
    assert_same(results(pieces), results(whole))
    for out in whole:
        (scores,) = llm.score([out.prompt_token_ids + out.outputs[0].token_ids])
        np.testing.assert_allclose(scores[len(out.prompt_token_ids) - 1 :], out.outputs[0].logprobs, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(9, 1, 40)


@pytest.fixture(scope="module")
def alone(prompts):
    """Each prompt in an engine of its own, three samples one after the other."""
    found = []
    for number, prompt in enumerate(prompts):
        samples = []
        for j in range(3):
            params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=14, seed=number * 100 + j, logprobs=True)
            samples.append(results(tiny_llm().generate([prompt], params))[0][0])
        found.append(samples)
    return found


SCHEDULES = {
    "together": {},
    "few rows": {"max_num_seqs": 4},
    "one row": {"max_num_seqs": 1},
    "chunked prefill": {"max_num_batched_tokens": 7},
    "chunks of one": {"max_num_batched_tokens": 1},
    "room for few": {"num_kv_blocks": 17},  # 68 tokens: about two of the longer ones
    "room for few, no cache": {"num_kv_blocks": 16, "enable_prefix_caching": False},
    "room for few, chunked": {"num_kv_blocks": 20, "max_num_batched_tokens": 11, "max_num_seqs": 5},
    "blocks of one": {"block_size": 1},
    "large blocks": {"block_size": 32},
    "large blocks, room for few": {"block_size": 32, "num_kv_blocks": 4},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_do_not_depend_on_the_schedule(schedule, prompts, alone):
    llm = tiny_llm(**SCHEDULES[schedule])
    params = [
        SamplingParams(n=3, temperature=0.9, top_p=0.95, max_tokens=14, seed=number * 100, logprobs=True)
        for number in range(len(prompts))
    ]
    assert_same(results(llm.generate(prompts, params)), alone)
    if "room for few" in schedule:
        assert llm.stats.num_preemptions > 0
    order = np.random.default_rng(3).permutation(len(prompts)).tolist()[:4]
    again = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    assert_same(results(again), [alone[i] for i in order])
    assert llm.core.blocks.num_free == llm.config.num_kv_blocks
    assert not llm.core.scheduler.has_work and llm.core.rows.count == 0


@pytest.mark.parametrize("schedule", ["together", "chunked prefill", "room for few"])
def test_rows_that_only_fill_a_step_up_change_nothing(schedule, prompts, alone, monkeypatch):
    """As on a device that runs steps at rounded row counts."""
    from cukit.backend import numpy as backend

    monkeypatch.setattr(backend, "row_bucket", lambda rows: -(-rows // 8) * 8)
    llm = tiny_llm(**SCHEDULES[schedule])
    params = [
        SamplingParams(n=3, temperature=0.9, top_p=0.95, max_tokens=14, seed=number * 100, logprobs=True)
        for number in range(len(prompts))
    ]
    assert_same(results(llm.generate(prompts, params)), alone)
    out = llm.generate(
        [prompts[0]], SamplingParams(temperature=0, max_tokens=3, min_tokens=3, stop_token_ids=[5], logprobs=True)
    )[0]
    (scores,) = llm.score([out.prompt_token_ids + out.outputs[0].token_ids])
    np.testing.assert_allclose(scores[len(prompts[0]) - 1 :], out.outputs[0].logprobs, atol=1e-10)
    assert {rows % 8 for rows, *_ in llm.core.runner._steps} == {0}


def test_512_requests_with_room_for_50():
    prompts = random_prompts(512, 4, 12, seed=5)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=True)
    free = tiny_llm(max_model_len=24, max_num_seqs=512).generate(prompts, params)
    tight = tiny_llm(max_model_len=24, max_num_seqs=512, num_kv_blocks=50 * 6)
    assert_same(results(tight.generate(prompts, params)), results(free))
    assert tight.core.blocks.num_free == 300


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_same_prompt_twice_around_a_whole_number_of_blocks(length):
    llm = tiny_llm()
    prompt = random_prompts(1, length, length + 1, seed=length)[0]
    first = llm.generate([prompt], SAMPLED)
    second = llm.generate([prompt], SAMPLED)
    assert_same(results(second), results(first))
    assert second[0].num_cached_tokens == (length - 1) // 4 * 4
    both = llm.generate([prompt, prompt], SAMPLED)
    assert_same(results(both), results(first) * 2)


def test_prefix_hit_after_a_shared_beginning():
    system = random_prompts(1, 22, 23, seed=8)[0]
    prompts = [system + tail for tail in random_prompts(6, 1, 9, seed=9)]
    llm = tiny_llm()
    llm.generate([system + [5]], SamplingParams(max_tokens=1))
    hits = llm.generate(prompts, SAMPLED)
    assert all(out.num_cached_tokens == 20 for out in hits)
    assert_same(results(hits), results(tiny_llm(enable_prefix_caching=False).generate(prompts, SAMPLED)))


@pytest.mark.parametrize("length", [6, 8])
def test_samples_share_the_prompt_and_copy_the_last_block(length):
    """8 samples of a prompt: it is computed once; a partly filled last block is copied by all but the last to write."""
    llm = tiny_llm()
    prompt = random_prompts(1, length, length + 1, seed=2)[0]
    request = llm.add_request(prompt, SamplingParams(n=8, max_tokens=10, seed=4))
    llm.step()
    assert llm.stats.num_prefill_tokens == length
    assert llm.config.num_kv_blocks - llm.core.blocks.num_free == 2
    tables = [seq.block_table for seq in request.sequences]
    assert all(table == tables[0] for table in tables)
    llm.step()
    tables = [seq.block_table for seq in request.sequences]
    shared = length // 4
    assert len({tuple(table[:shared]) for table in tables}) == 1
    assert len({table[shared] for table in tables}) == 8
    assert llm.config.num_kv_blocks - llm.core.blocks.num_free == shared + 8
    while not request.finished:
        llm.step()
    assert len({tuple(seq.completion_ids) for seq in request.sequences}) > 1
    assert llm.stats.num_prefill_tokens == length


def test_more_samples_than_rows():
    prompt = [3, 1, 4, 1, 5, 9]
    params = SamplingParams(n=10, max_tokens=8, seed=11, logprobs=True)
    wide = tiny_llm().generate([prompt, prompt[:3]], params)
    narrow_llm = tiny_llm(max_num_seqs=3)
    assert_same(results(narrow_llm.generate([prompt, prompt[:3]], params)), results(wide))
    assert narrow_llm.stats.num_prefill_tokens == 9


def test_weights_that_changed_need_a_reset():
    """After an update and reset_prefix_cache() the output is that of a fresh engine."""
    model = tiny_model()
    llm = tiny_llm()
    prompt = random_prompts(1, 20, 21, seed=1)[0]
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=True)
    before = results(llm.generate([prompt], params))
    weight = model.layers[0].mlp.down_proj.weight.data
    saved = weight.copy()
    try:
        weight *= -3
        llm.reset_prefix_cache()
        after = results(llm.generate([prompt], params))
        assert_same(after, results(tiny_llm().generate([prompt], params)))
        assert after != before
    finally:
        weight[...] = saved


def test_e18_an_engine_in_bfloat16_follows_new_weights():
    """On a CPU it keeps float32 copies of them until reset_prefix_cache(), which an update demands."""
    model = load_model(GOLDEN / "qwen3_tiny", device="cpu", dtype="bfloat16")
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = random_prompts(3, 4, 9)

    def completions(llm):
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    llm = LLM.from_model(model, None, max_model_len=64, num_kv_blocks=32)
    first = completions(llm)
    for parameter in model.parameters():
        parameter.data[...] = parameter.data[::-1]
    llm.reset_prefix_cache()
    fresh = completions(LLM.from_model(model, None, max_model_len=64, num_kv_blocks=32))
    assert completions(llm) == fresh != first
