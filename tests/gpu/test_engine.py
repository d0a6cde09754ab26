"""The engine on a card: rows that fail, callers in turn, small pools. Run: pytest -m gpu tests/gpu/test_engine.py"""

import threading
from pathlib import Path

import numpy as np
import pytest
from engine.helpers import check_engine, check_sample

from cukit.backend import backend_for
from cukit.engine.config import SamplingParams
from cukit.engine.llm import LLM
from cukit.models.weights import load_model

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def model():
    return load_model(GOLDEN / "llama_tiny", device="cuda", dtype="bfloat16")


def make_llm(model, **options):
    return LLM.from_model(model, None, **{"max_model_len": 128, "max_num_seqs": 24} | options)


def params(**options):
    return SamplingParams(**{"max_tokens": 30, "seed": 5, "ignore_eos": True, "logprobs": True} | options)


def outcome(requests):
    return [
        [(seq.token_ids.tolist(), seq.logprobs.tobytes(), seq.finish_reason) for seq in request.sequences]
        for request in requests
    ]


PROMPTS = [[number, 7, 9 + number] for number in range(12, 24)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fault", ["nan", "one nan", "inf", "two inf", "-inf"])
def test_e4_sample_gives_ids_within_range(fault, dtype):
    check_sample(backend_for("cuda"), fault, dtype)


@pytest.mark.parametrize("eager", [False, True])
def test_e4_one_row_ends_with_error_and_the_others_keep_their_bits(model, eager):
    """The embedding of one id is NaN (the head is a matrix of its own): a prompt that holds it fails, and so does a
    sample that draws it; every other row has the bits that it has without the fault.
    """
    llm = make_llm(model, enforce_eager=eager)
    llm.run(PROMPTS, params(n=2))  # kernels are compiled, products compared
    fine = outcome(llm.run(PROMPTS, params(n=2)))
    drawn = [tokens[3 + 10] for samples in fine for tokens, *_ in samples]
    faulty = next(token for token in drawn if all(token not in prompt for prompt in PROMPTS))
    model.embed_tokens.weight.data[faulty] = np.nan
    llm.reset_prefix_cache()
    for _ in range(3):  # plainly, captured, replayed
        requests = llm.run([*PROMPTS, [5, faulty]], params(n=2))
        for samples, wanted in zip(outcome(requests), fine, strict=False):
            for (tokens, logprobs, reason), (all_tokens, all_logprobs, all_reason) in zip(samples, wanted, strict=True):
                ends = all_tokens.index(faulty) + 1 if faulty in all_tokens[:-1] else len(all_tokens)
                assert tokens == all_tokens[:ends] and logprobs == all_logprobs[: 4 * (ends - 3)]
                assert reason == ("error" if faulty in all_tokens[:-1] else all_reason)
        assert [seq.finish_reason for seq in requests[-1].sequences] == ["error"] * 2
        check_engine(llm)
    with pytest.raises(ValueError, match="not finite"):
        llm.generate([[faulty]], params())


@pytest.mark.parametrize(
    "options", [{"num_kv_blocks": 20}, {"num_kv_blocks": 8, "block_size": 16}, {"max_num_seqs": 3}]
)
def test_e2_small_pools_have_the_bits_of_roomy_ones(model, options):
    params_of = [params(n=1 + number % 5, seed=number, max_tokens=20 + number) for number in range(len(PROMPTS))]
    expected = outcome(make_llm(model).run(PROMPTS, params_of))
    llm = make_llm(model, **options)
    assert outcome(llm.run(PROMPTS, params_of)) == expected
    check_engine(llm)
    assert llm.core.blocks.num_free == llm.config.num_kv_blocks


def test_e1_streams_in_turn_and_threads(model):
    llm, found = make_llm(model), {}
    expected = [outcome(make_llm(model).run(PROMPTS[:4], params(seed=number))) for number in range(4)]
    streams = [llm.generate(PROMPTS[:4], params(seed=number), stream=True) for number in range(2)]
    last = [{}, {}]
    for pair in zip(*streams, strict=False):
        for one, out in zip(last, pair, strict=True):
            one[out.index] = out
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: llm.run(PROMPTS[:4], params(seed=n))})) for n in (2, 3)
    ]
    for thread in threads:
        thread.start()
    for one, stream in zip(last, streams, strict=True):
        one.update({out.index: out for out in stream})
    for thread in threads:
        thread.join(60)
    for number in (0, 1):
        for index, samples in enumerate(expected[number]):
            tokens = last[number][index].prompt_token_ids + last[number][index].outputs[0].token_ids
            assert last[number][index].finished and tokens == samples[0][0]
    assert [outcome(found[number]) for number in (2, 3)] == expected[2:]


def test_a_further_turn_has_the_bits_of_a_fresh_prompt(model):
    llm = make_llm(model, enable_prefix_caching=False)
    first = llm.core.add(np.array(PROMPTS[0], np.int32), None, params(n=3), keeps_cache=True)
    while not first.finished:
        llm.step()
    turns = []
    for seq in first.sequences:
        ids = np.append(seq.token_ids, [3, 4]).astype(np.int32)
        turns.append(llm.core.add(ids, None, params(seed=9), after=seq))
    while llm.core.requests:
        llm.step()
    fresh = make_llm(model).run([turn.prompt_ids for turn in turns], params(seed=9))
    assert outcome(turns) == outcome(fresh)
