"""Engines with weights or a KV cache of 8 bits on a card: graphs, small pools, chunks, updates, adapters.

Run: pytest -m gpu tests/gpu/test_quantized_engine.py
"""

from pathlib import Path

import numpy as np
import pytest
from engine.helpers import check_engine

from cukit.engine.config import SamplingParams
from cukit.engine.llm import LLM
from cukit.models.adapter_config import AdapterConfig
from cukit.models.adapters import Adapter
from cukit.models.weights import load_model

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parents[1] / "golden"
OPTIONS = [
    {"quantization": "int8"},
    {"quantization": "fp8"},
    {"kv_cache_dtype": "fp8"},
    {"quantization": "fp8", "kv_cache_dtype": "fp8"},
]
PROMPTS = [list(range(12, 12 + length)) for length in (3, 40, 1, 17, 33, 8, 25, 60)]
SETTINGS = [SamplingParams(max_tokens=20 + n, seed=n, n=1 + n % 4, ignore_eos=True, logprobs=True) for n in range(8)]


def load(name="qwen3_tiny", dtype="bfloat16", device="cuda"):
    return load_model(GOLDEN / name, device=device, dtype=dtype)


def make_llm(model, **options):
    """Steps of at most 16 tokens, so that every product of 8 bits gives a row the same bits."""
    return LLM.from_model(model, None, **{"max_model_len": 128, "max_num_batched_tokens": 16} | options)


def outcome(llm, settings=SETTINGS):
    requests = llm.run(PROMPTS, settings)
    return [[(s.token_ids.tolist(), s.logprobs.tobytes()) for s in request.sequences] for request in requests]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_graphs_small_pools_and_chunks_change_no_bit(options, dtype):
    model = load(dtype=dtype)
    expected = outcome(make_llm(model, enforce_eager=True, **options))
    llm = make_llm(model, **options)
    for _ in range(3):  # plainly, captured, replayed; prompts are found in the cache
        assert outcome(llm) == expected
    assert llm.stats.num_cached_tokens > 0
    check_engine(llm)
    small = make_llm(model, num_kv_blocks=12, **options)
    assert outcome(small) == expected and small.stats.num_preemptions > 0
    assert outcome(make_llm(model, max_num_batched_tokens=9, max_num_seqs=6, **options)) == expected


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["qwen3_tiny", "llama_tiny"])
def test_first_tokens_have_the_cpus_logprobs(name, options):
    """float32, greedy: the log-prob of the first token is that of the NumPy shelf. A number that a sum's last bit takes
    to the neighbouring code of the cache costs up to 1/16 of itself, so that is wider.
    """
    first = SamplingParams(temperature=0.0, max_tokens=1, logprobs=True)
    found, expected = (
        [
            request.sequences[0].logprobs[0]
            for request in make_llm(load(name, "float32", device), **options).run(PROMPTS, first)
        ]
        for device in ("cuda", "cpu")
    )
    tolerance = 0.1 if "kv_cache_dtype" in options else 2e-3
    np.testing.assert_allclose(found, expected, atol=tolerance)


def test_biases_are_added_and_a_head_dim_of_12_has_no_fp8_cache():
    first = SamplingParams(temperature=0.0, max_tokens=1, logprobs=True)
    found, expected = (
        [
            request.sequences[0].logprobs[0]
            for request in make_llm(load("qwen2_tiny", "float32", device), quantization="fp8").run(PROMPTS, first)
        ]
        for device in ("cuda", "cpu")
    )
    np.testing.assert_allclose(found, expected, atol=2e-3)
    with pytest.raises(ValueError, match="multiple of 8 on a card, got 12"):
        make_llm(load("qwen2_tiny"), kv_cache_dtype="fp8")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_captured_steps_see_an_update(kind):
    model = load()
    llm = make_llm(model, quantization=kind)
    for _ in range(3):
        before = outcome(llm)
    for layer in model.layers:
        layer.mlp.down_proj.weight.data *= -1
    llm.reset_prefix_cache()
    after = outcome(llm)
    assert after != before
    assert after == outcome(make_llm(model, quantization=kind, enforce_eager=True))


@pytest.mark.parametrize("way", ["beside", "merged"])
def test_adapters(way):
    model = load()
    adapter = Adapter(model, AdapterConfig(r=4, alpha=8, targets=("q_proj", "v_proj", "down_proj")), way)
    llm = make_llm(model, quantization="int8")
    before = [outcome(llm) for _ in range(3)][0]
    for name, view in adapter.parts().items():
        if ".lora_B." in name:
            drawn = np.random.default_rng(len(name)).standard_normal(view.shape) * 0.2
            view[...] = model.backend.array(drawn.astype(view.dtype))
    adapter.refresh()
    llm.reset_prefix_cache()
    after = outcome(llm)
    assert after != before and after == outcome(make_llm(model, quantization="int8", enforce_eager=True))


def test_prompts_in_steps_of_many_rows():
    """Above 16 rows prompts multiply with weights in the model's dtype: near, not the same bits."""
    model = load(dtype="float32")
    first = SamplingParams(temperature=0.0, max_tokens=1, logprobs=True)
    prompts = [[number, *range(3, 100)] for number in range(8)]
    found, expected = (
        [r.sequences[0].logprobs[0] for r in make_llm(model, quantization="int8", **o).run(prompts, first)]
        for o in ({"max_num_batched_tokens": 2048}, {})
    )
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_many_rows_decode():
    """Without prompts from the cache, whose rest has other rows than the whole, and so other bits."""
    llm = make_llm(
        load(), quantization="int8", max_num_seqs=300, max_num_batched_tokens=2048, enable_prefix_caching=False
    )
    many = SamplingParams(n=300, max_tokens=6, seed=1, ignore_eos=True, logprobs=True)
    found = [[s.token_ids.tolist() for s in llm.run([PROMPTS[1]], many)[0].sequences] for _ in range(3)]
    assert found[0] == found[1] == found[2]
