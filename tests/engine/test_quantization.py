"""An engine whose linear layers have 8 bits: what it computes, when the copies follow the weights, what is planned."""

import numpy as np
import pytest

from cukit.engine.config import EngineConfig, SamplingParams
from cukit.engine.llm import LLM
from cukit.engine.memory import plan_memory
from cukit.engine.shapes import ModelUse
from cukit.models.adapter_config import AdapterConfig
from cukit.models.adapters import Adapter
from cukit.models.decoder import Decoder
from cukit.models.modules import Linear
from cukit.models.quantized import QuantizedWeights
from cukit.models.weights import load_model
from engine.helpers import GOLDEN, TINY_MODELS, random_prompts, tiny_llm, tiny_model
from engine.shapes import SHAPE, card, cpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=True)


def completions(llm, prompts=None, params=GREEDY):
    outputs = llm.generate(prompts or random_prompts(6, 3, 30), params)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


def rounded_model(name, kind):
    """The model with its linear layers rounded and brought back: what a quantised engine computes with."""
    model = load_model(GOLDEN / name, device="cpu", dtype="float64")
    copies = QuantizedWeights(model, kind)
    for linear, (q, scale) in copies._copies.items():
        model.backend.dequantize_weight(linear.weight.data, q, scale)
    return model


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_prompts_and_decoding_compute_with_rounded_weights(name, kind):
    """Tokens and log-probs are those of a model with rounded weights. The float32 scales are all that differs."""
    found = completions(tiny_llm(name, quantization=kind))
    expected = completions(LLM.from_model(rounded_model(name, kind), None, max_model_len=64, block_size=4))
    plain = completions(tiny_llm(name))
    for (tokens, logprobs), (true_tokens, true_logprobs) in zip(found, expected, strict=True):
        assert tokens == true_tokens
        np.testing.assert_allclose(logprobs, true_logprobs, atol=1e-6)
    assert [logprobs for _, logprobs in found] != [logprobs for _, logprobs in plain]
    # how near: 0.01 to 0.03 was seen for int8, 0.10 to 0.23 for fp8; a wrong scale gives more than 1
    first = [abs(ours[1][0] - theirs[1][0]) for ours, theirs in zip(found, plain)]
    assert np.median(first) < (0.1 if kind == "int8" else 0.5)


def test_training_and_scores_read_the_weights_themselves():
    llm, plain = tiny_llm(quantization="fp8"), tiny_llm()
    ids = random_prompts(3, 5, 20, seed=1)
    completions(llm)
    for ours, theirs in zip(llm.score(ids), plain.score(ids)):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_update_reaches_the_copies_in_place(kind):
    model = load_model(GOLDEN / "qwen3_tiny", device="cpu", dtype="float64")
    llm = LLM.from_model(model, None, max_model_len=64, block_size=4, quantization=kind)
    before = completions(llm)
    copies = llm.core.runner._quantized
    addresses = [q.ctypes.data for q, _ in copies._copies.values()]
    for linear in copies._copies:
        linear.weight.data[...] *= -1
    llm.reset_prefix_cache()
    after = completions(llm)
    fresh = completions(LLM.from_model(model, None, max_model_len=64, block_size=4, quantization=kind))
    assert after == fresh and after != before
    assert llm.core.runner._quantized is copies
    assert [q.ctypes.data for q, _ in copies._copies.values()] == addresses


def test_sleep_keeps_the_copies_that_captured_steps_know():
    llm = tiny_llm(quantization="int8")
    before, copies = completions(llm), llm.core.runner._quantized
    llm.sleep()
    llm.wake_up()
    assert completions(llm) == before and llm.core.runner._quantized is copies


@pytest.mark.parametrize("way", ["beside", "merged"])
def test_an_adapter_is_in_what_is_drawn(way):
    """merged: in the rounded copy. beside: its product is added to that of the rounded weight, so nothing is lost."""
    model = load_model(GOLDEN / "qwen3_tiny", device="cpu", dtype="float64")
    llm = LLM.from_model(model, None, max_model_len=64, block_size=4, quantization="int8")
    adapter = Adapter(model, AdapterConfig(r=3, alpha=6, targets=("q_proj", "v_proj", "down_proj")), way)
    for name, view in adapter.parts().items():
        if ".lora_B." in name:
            view[...] = np.random.default_rng(len(name)).standard_normal(view.shape) * 0.1
    adapter.refresh()
    found = completions(llm)
    merged = load_model(GOLDEN / "qwen3_tiny", device="cpu", dtype="float64")
    linears = dict(zip(linear_layers(model), linear_layers(merged), strict=True))
    copies = QuantizedWeights(merged, "int8")
    for linear, other in linears.items():
        q, scale = copies._copies[other]
        if linear.adapter is not None and way == "merged":
            merged.backend.quantize_weight(q, scale, linear.adapter.merged)
        merged.backend.dequantize_weight(other.weight.data, q, scale)
        if linear.adapter is not None and way == "beside":
            other.weight.data[...] += linear.adapter.factors.up @ linear.adapter.factors.down
    expected = completions(LLM.from_model(merged, None, max_model_len=64, block_size=4))
    for (tokens, logprobs), (true_tokens, true_logprobs) in zip(found, expected, strict=True):
        assert tokens == true_tokens
        np.testing.assert_allclose(logprobs, true_logprobs, atol=1e-6)


def linear_layers(model):
    return [owner for name, _, owner in model.walk_parameters() if isinstance(owner, Linear) and "weight" in name]


def test_weights_that_are_not_finite_end_rows_with_error():
    model = load_model(GOLDEN / "qwen3_tiny", device="cpu", dtype="float32")
    model.layers[0].mlp.down_proj.weight.data[3, 4] = np.nan
    llm = LLM.from_model(model, None, max_model_len=64, quantization="fp8")
    with pytest.raises(ValueError, match="not finite"):
        llm.generate([[1, 2, 3]], GREEDY)


def test_the_cpu_copies_no_weight_that_is_rounded(monkeypatch):
    given = []
    model = load_model(GOLDEN / "qwen3_tiny", device="cpu", dtype="bfloat16")
    monkeypatch.setattr(model.backend, "WideCopies", lambda weights: given.extend(weights) or FakeCopies())
    completions(LLM.from_model(model, None, max_model_len=64, quantization="int8"))
    assert {id(x) for x in given} == {
        id(p.data) for name, p in model.named_parameters().items() if "proj.weight" not in name
    }


class FakeCopies:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_options():
    assert EngineConfig().quantization is None and EngineConfig().roundings == []
    with pytest.raises(ValueError, match="quantization must be one of int8, fp8, got 'int4'"):
        EngineConfig(quantization="int4")
    with pytest.raises(ValueError, match="exact=true cannot be kept with quantization=fp8"):
        EngineConfig(quantization="fp8", exact="true")
    assert EngineConfig(quantization="fp8", exact="false").roundings == ["quantization"]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_planner_counts_the_copies(kind):
    model = tiny_model()
    assert isinstance(model, Decoder)
    copies = QuantizedWeights(model, kind)
    held = sum(q.nbytes + scale.nbytes for q, scale in copies._copies.values())
    plan = plan_memory([ModelUse("model", model.config, "float32")], EngineConfig(quantization=kind), cpu)
    assert {item.nbytes for item in plan.items if item.name == "engine: weights in 8 bits"} == {held}
    plain = plan_memory([ModelUse("model", model.config, "bfloat16")], EngineConfig(), cpu)
    rounded = plan_memory([ModelUse("model", model.config, "bfloat16")], EngineConfig(quantization=kind), cpu)
    wide = [next(i.nbytes for i in p.items if i.name == "engine: weights in float32") for p in (plain, rounded)]
    assert wide[0] - wide[1] == 4 * sum(q.size for q, _ in copies._copies.values())


def test_a_card_holds_the_copies_and_one_wide_weight():
    engine = EngineConfig(quantization="int8", max_num_seqs=64, max_model_len=1024)
    items = {item.name: item for item in plan_memory([ModelUse("model", SHAPE, "bfloat16")], engine, card()).items}
    width = SHAPE.intermediate_size
    assert items["engine: one weight of 8 bits in the model's dtype"].nbytes == 2 * width * SHAPE.hidden_size * 2
    assert items["engine: weights in 8 bits"].phase == "always"


def test_the_planner_knows_the_kernels_limits():
    pytest.importorskip("cupy", reason="the launchers import it: pip install 'cukit[compile]'")
    from cukit.backend.cuda import quantized
    from cukit.engine.shapes import CODED_ROWS

    assert quantized.MOST_ROWS == CODED_ROWS
