"""An engine whose KV cache holds E4M3 codes: chunks, shared prefixes and preemption give the same tokens; half the
bytes.
"""

from dataclasses import replace

import numpy as np
import pytest

from cukit.engine.config import EngineConfig, SamplingParams
from cukit.engine.memory import plan_memory
from cukit.engine.shapes import ModelUse
from engine.helpers import TINY_MODELS, random_prompts, tiny_llm
from engine.shapes import SHAPE, card

pytestmark = pytest.mark.usefixtures("order")
FP8 = {"kv_cache_dtype": "fp8"}
SAMPLED = [SamplingParams(temperature=1.0, max_tokens=12, seed=n, n=1 + n % 3, logprobs=True) for n in range(8)]


def run(llm, prompts, params=None):
    return [
        [(one.token_ids, np.array(one.logprobs)) for one in output.outputs]
        for output in llm.generate(prompts, params or SAMPLED)
    ]


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        for (tokens, logprobs), (true_tokens, true_logprobs) in zip(ours, theirs, strict=True):
            assert tokens == true_tokens
            np.testing.assert_allclose(logprobs, true_logprobs, atol=1e-9)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_schedule_changes_nothing(name):
    """A prompt in chunks reads what its first chunks have stored, as one that is computed whole does."""
    prompts = random_prompts(8, 3, 40, seed=3)
    whole = tiny_llm(name, num_kv_blocks=300, **FP8)
    expected = run(whole, prompts)
    assert {cache.dtype for pair in whole.core.runner.kv for cache in pair} == {np.dtype(np.uint8)}
    assert_same(run(tiny_llm(name, max_num_batched_tokens=9, max_num_seqs=3, **FP8), prompts), expected)
    scarce = tiny_llm(name, num_kv_blocks=20, **FP8)
    assert_same(run(scarce, prompts), expected)
    assert scarce.stats.num_preemptions > 0


def test_shared_beginnings_are_found_and_copied():
    beginning = random_prompts(1, 30, 31, seed=4)[0]
    prompts = [beginning + tail for tail in random_prompts(8, 1, 6, seed=5)]
    llm = tiny_llm(**FP8)
    first = run(llm, prompts)
    again = run(llm, prompts)
    assert llm.stats.num_cached_tokens > 0
    assert_same(again, first)
    assert_same(run(tiny_llm(enable_prefix_caching=False, **FP8), prompts), first)


def test_numbers_are_rounded_but_near():
    prompts = random_prompts(8, 20, 40, seed=6)
    greedy = SamplingParams(temperature=0.0, max_tokens=1, logprobs=True)
    rounded, plain = (run(tiny_llm(**options), prompts, greedy) for options in (FP8, {}))
    differences = [abs(a[0][1][0] - b[0][1][0]) for a, b in zip(rounded, plain)]
    assert 0 < np.median(differences) < 0.1


def test_with_quantised_weights_and_after_sleep():
    prompts = random_prompts(8, 3, 20, seed=7)
    llm = tiny_llm(quantization="int8", **FP8)
    first = run(llm, prompts)
    llm.sleep()
    llm.wake_up()
    assert_same(run(llm, prompts), first)


def test_a_block_has_half_the_bytes():
    llm, plain = tiny_llm(num_kv_blocks=50, **FP8), tiny_llm(num_kv_blocks=50)
    assert llm.core.runner.cache_bytes * 8 == plain.core.runner.cache_bytes  # of float64
    plans = [
        plan_memory([ModelUse("model", SHAPE, "bfloat16")], EngineConfig(max_num_seqs=4096, **options), card())
        for options in (FP8, {})
    ]
    assert plans[0].num_kv_blocks / plans[1].num_kv_blocks == pytest.approx(2, rel=1e-3)
    assert plans[0].kv_bytes == pytest.approx(plans[1].kv_bytes, rel=1e-3)


def test_a_card_refuses_a_head_dim_that_its_kernels_do_not_read():
    use = ModelUse("model", replace(SHAPE, head_dim=12), "bfloat16")
    with pytest.raises(
        ValueError, match="kv_cache_dtype=fp8 needs a head_dim that is a multiple of 8 on a card, got 12"
    ):
        plan_memory([use], EngineConfig(**FP8), card())
    plan_memory([use], EngineConfig(), card())


def test_options():
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, fp8, got 'int8'"):
        EngineConfig(kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="exact=true cannot be kept with kv_cache_dtype=fp8"):
        EngineConfig(kv_cache_dtype="fp8", exact="true")
    assert EngineConfig(kv_cache_dtype="fp8", quantization="int8").roundings == ["quantization", "kv_cache_dtype"]
