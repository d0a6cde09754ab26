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


WORKLOADS = {
    "roomy": {},
    "preemption": {"num_kv_blocks": 20},
    "few rows": {"max_num_seqs": 5},
    "chunks": {"max_num_batched_tokens": 30, "enable_prefix_caching": False},
    "eager": {"enforce_eager": True},
}


def random_workload(llm, seed):
    """Requests of many kinds, some of which come or are aborted while others run; the outcome of all but the aborted
    ones, and how many steps were launched ahead.
    """
    rng, requests, ahead = np.random.default_rng(seed), [], 0
    launch = llm.core.runner.launch

    def counting(step, before=None):
        nonlocal ahead
        ahead += before is not None
        return launch(step, before)

    llm.core.runner.launch = counting
    beginning = rng.integers(12, 200, 40).tolist()

    def add():
        number, length = len(requests), int(rng.integers(1, 40))
        prompt = (beginning[:length] if rng.random() < 0.4 else []) + rng.integers(12, 200, length).tolist()
        given = params(
            n=int(rng.choice([1, 1, 2, 5])),
            temperature=float(rng.choice([0, 0.8, 1.0])),
            top_k=int(rng.choice([0, 0, 9])),
            max_tokens=int(rng.integers(1, 40)),
            stop_token_ids=rng.integers(0, 200, int(rng.choice([0, 3, 20]))).tolist(),
            min_tokens=int(rng.choice([0] * 9 + [1])),
            repetition_penalty=float(rng.choice([1] * 19 + [1.3])),
            seed=number,
        )
        requests.append(llm.add_request(prompt, given))

    for _ in range(12):
        add()
    aborted = set()
    for turn in range(2000):
        llm.step()
        if turn % 7 == 0 and len(requests) < 40:
            add()
        if turn % 23 == 11:
            aborted.add(5 * (turn // 23))
            llm.abort(5 * (turn // 23))
        check_engine(llm)
        if len(requests) == 40 and not llm.core.requests:
            break
    del llm.core.runner.launch
    assert all(request.finished for request in requests) and llm.core.blocks.num_free == llm.config.num_kv_blocks
    return [None if number in aborted else found for number, found in enumerate(outcome(requests))], ahead


@pytest.mark.parametrize("options", WORKLOADS.values(), ids=WORKLOADS)
def test_steps_that_run_ahead_change_no_bit(model, options):
    for seed in range(3):
        expected, none = random_workload(make_llm(model, async_scheduling=False, **options), seed)
        found, ahead = random_workload(make_llm(model, **options), seed)
        assert found == expected
        assert none == 0 < ahead
    llm = make_llm(model, **options)
    for seed in range(2):  # one engine: its graphs are captured with a step in flight, and replayed after a sleep
        expected, _ = random_workload(make_llm(model, async_scheduling=False, **options), seed)
        assert random_workload(llm, seed)[0] == expected
        llm.sleep()
        llm.wake_up()


def test_an_engine_may_be_dropped_with_a_step_in_flight(model):
    """Page-locked memory that its copies still need does not go to the next engine."""
    expected = outcome(make_llm(model).run(PROMPTS, params()))
    for _ in range(20):
        llm = make_llm(model)
        for prompt in PROMPTS:
            llm.add_request(prompt, params())
        for _ in range(4):
            llm.step()
        assert llm.core._flight is not None
        del llm
    assert outcome(make_llm(model).run(PROMPTS, params())) == expected
