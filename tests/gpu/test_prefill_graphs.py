"""Short passes over prompts as CUDA graphs have the bits of plain ones.

Run on a machine with a GPU: pytest -m gpu tests/gpu/test_prefill_graphs.py
"""

from pathlib import Path

import numpy as np
import pytest

from cukit.engine.config import SamplingParams
from cukit.engine.llm import LLM
from cukit.models.weights import load_model

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parents[1] / "golden"


def make_llm(model, **options):
    options = {"max_model_len": 256, "max_num_seqs": 128, "enable_prefix_caching": False} | options
    return LLM.from_model(model, None, **options)


def params(**options):
    return SamplingParams(**{"max_tokens": 6, "seed": 5, "ignore_eos": True, "logprobs": True} | options)


def results(llm, prompts, given, times=3):
    """Tokens and the bits of log-probs of each of several equal calls: plain, captured, replayed."""
    return [
        [
            [(seq.token_ids.tolist(), seq.logprobs.tobytes()) for seq in request.sequences]
            for request in llm.run(prompts, given)
        ]
        for _ in range(times)
    ]


def prompts_of(count, low, high, seed=0):
    rng = np.random.default_rng([seed, count])
    return [rng.integers(3, 200, int(length)).tolist() for length in rng.integers(low, high, count)]


def captured(llm):
    """How many kept passes are graphs."""
    return sum(step._graph is not None for *_, step in llm.core.runner._prefill._passes.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count", [1, 2, 5, 16, 30])
@pytest.mark.parametrize("name", ["qwen3_tiny", "llama_tiny"])
def test_graphs_have_the_bits_of_plain_passes(name, count, dtype):
    model = load_model(GOLDEN / name, device="cuda", dtype=dtype)
    prompts = prompts_of(count, 2, 60)
    given = [params(n=1 + number % 4, seed=number, temperature=[1.0, 0.0, 0.7][number % 3]) for number in range(count)]
    (expected,) = results(make_llm(model, enforce_eager=True), prompts, given, times=1)
    llm = make_llm(model)
    assert results(llm, prompts, given) == [expected] * 3
    tokens = sum(map(len, prompts))
    assert captured(llm) == (tokens <= 1024), "all are called thrice"


@pytest.mark.parametrize("kind", [{}, {"quantization": "int8"}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_graphs_follow_new_weights_and_a_new_cache(kind):
    model = load_model(GOLDEN / "qwen3_tiny", device="cuda", dtype="bfloat16")
    llm, prompts = make_llm(model, **kind), prompts_of(8, 2, 40)
    first = results(llm, prompts, params())
    for parameter in (model.norm.weight, model.layers[0].mlp.down_proj.weight):
        parameter.data[...] *= 2
    llm.reset_prefix_cache()
    changed = results(llm, prompts, params())
    assert changed != first and changed == results(make_llm(model, enforce_eager=True, **kind), prompts, params())
    llm.sleep()
    llm.wake_up()
    assert results(llm, prompts, params()) == changed
    assert captured(llm) == 1


def test_graphs_of_prompts_whose_beginning_is_there():
    model = load_model(GOLDEN / "qwen3_tiny", device="cuda", dtype="bfloat16")
    beginning = prompts_of(1, 64, 65)[0]
    prompts = [beginning + tail for tail in prompts_of(6, 1, 20)]
    (expected,) = results(make_llm(model, enforce_eager=True), prompts, params(), times=1)
    llm = make_llm(model, enable_prefix_caching=True)
    found = results(llm, prompts, params(), times=6)
    assert found == [expected] * 6 and llm.stats.num_cached_tokens >= 5 * 6 * 64
    assert captured(llm)


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 64}, {"max_num_seqs": 5}, {"num_kv_blocks": 40}])
def test_graphs_of_chunks_beside_rows(options):
    """Chunks of prompts and of prompts preempted, with rows that decode in the same steps."""
    model = load_model(GOLDEN / "llama_tiny", device="cuda", dtype="bfloat16")
    prompts = prompts_of(12, 2, 120)
    given = [params(n=1 + number % 3, seed=number, max_tokens=3 + 5 * number) for number in range(12)]
    (expected,) = results(make_llm(model, enforce_eager=True), prompts, given, times=1)
    llm = make_llm(model, **options)
    assert results(llm, prompts, given) == [expected] * 3
    assert captured(llm)


def test_bans_and_penalties_of_a_first_token():
    model = load_model(GOLDEN / "qwen3_tiny", device="cuda", dtype="bfloat16")
    prompts = prompts_of(6, 2, 30)
    given = [
        params(min_tokens=2, stop_token_ids=[number, 7], repetition_penalty=1 + number / 5, n=2) for number in range(6)
    ]
    (expected,) = results(make_llm(model, enforce_eager=True), prompts, given, times=1)
    assert results(make_llm(model), prompts, given) == [expected] * 3


def test_the_arena_takes_what_the_plan_says():
    model = load_model(GOLDEN / "qwen3_tiny", device="cuda", dtype="bfloat16")
    llm = make_llm(model)
    for count in (1, 3, 9, 20, 30):
        results(llm, prompts_of(count, 2, 34), params(n=3))
    assert captured(llm) >= 4
    assert llm.core.runner._graphs._arena.total_bytes == llm.core.plan.step_bytes
