"""Engines of ranks that share a model, on threads as ranks: each draws what one rank draws."""

from threading import get_ident
from types import SimpleNamespace

import numpy as np
import pytest
from parallel import in_order
from parallel.threads import together

from cukit import LLM, SamplingParams
from cukit.backend import backend_for
from cukit.engine import tensor_parallel as engine_module
from cukit.engine.config import EngineConfig
from cukit.engine.memory import planned
from cukit.engine.shapes import ModelUse, logit_columns, parameter_counts, weight_bytes
from cukit.engine.tensor_parallel import least_memory
from cukit.models.tensor_parallel import TensorParallel
from cukit.models.weights import load_model
from engine.helpers import GOLDEN, random_prompts

CPU = backend_for("cpu")
SMALL = {"max_model_len": 64, "block_size": 4}


def answers(tensor=None, name="qwen3_tiny", dtype="float64", **options):
    """(tokens, log-probs) of many kinds of requests, then the scores of their sequences; and the engine's cache."""
    model = load_model(GOLDEN / name, dtype=dtype, tensor=tensor)
    llm = LLM.from_model(model, None, **SMALL | options)
    prompts = random_prompts(6, 3, 30, seed=4)
    prompts[3] = prompts[2] + [5]  # shares a beginning
    params = [
        SamplingParams(temperature=0, max_tokens=20, logprobs=True),
        SamplingParams(n=3, max_tokens=20, logprobs=True),  # seeds of the engine
        SamplingParams(temperature=1.5, top_p=0.8, max_tokens=20, seed=7, logprobs=True),
        SamplingParams(top_k=5, min_tokens=6, stop_token_ids=[3, 4, 5], max_tokens=20, logprobs=True),
        SamplingParams(min_p=0.1, repetition_penalty=1.3, max_tokens=20, logprobs=True),
        SamplingParams(temperature=0, max_tokens=30, logprobs=True),
    ]
    found = llm.generate(prompts, params)
    samples = [one for output in found for one in output.outputs]
    scores = llm.score([[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in found])
    tokens, logprobs = [one.token_ids for one in samples], np.concatenate([one.logprobs for one in samples])
    return tokens, logprobs, np.concatenate(scores), llm.core


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen2_tiny"])
def test_two_ranks_draw_what_one_draws(name, invariant):
    """Prompts in chunks, a cache that is too small for all at once, preemptions; log-probs to rounding."""
    options = {"max_num_batched_tokens": 16, "num_kv_blocks": 20, "max_num_seqs": 5}
    tokens, logprobs, scores, alone = answers(name=name, **options)
    found = together(2, lambda group: answers(TensorParallel(group, invariant), name, **options))
    assert alone.stats.num_preemptions
    for ours, drawn, scored, core in found:
        assert ours == tokens
        np.testing.assert_allclose(drawn, logprobs, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(scored, scores, rtol=1e-11, atol=1e-11)
        assert core.stats == alone.stats
        assert 2 * core.runner.cache_bytes == alone.runner.cache_bytes
        for a, b in zip(drawn, found[0][1], strict=True):
            assert a == b


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"quantization": "int8"}], ids=str)
def test_leaner_engines_too(options):
    """In invariant mode a rank quantises whole rows, as one rank does; else its own columns, so draws may differ."""
    tokens, logprobs, _, _ = answers(**options)
    for ours, drawn, *_ in together(2, lambda group: answers(TensorParallel(group, True), **options)):
        assert ours == tokens
        np.testing.assert_allclose(drawn, logprobs, rtol=1e-11, atol=1e-11)
    first, second = together(2, lambda group: answers(TensorParallel(group), **options)[0])
    assert first == second


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_in_invariant_mode_draws_and_scores_have_the_bits_of_one_rank(dtype, monkeypatch):
    """With a product that adds in order, as the card's exact one; the other mode has other bits."""
    in_order.use_it(monkeypatch)
    tokens, *numbers, _ = answers(dtype=dtype)
    for ours, *found, _ in together(2, lambda group: answers(TensorParallel(group, True), dtype=dtype)):
        assert ours == tokens
        for one, right in zip(found, numbers, strict=True):
            np.testing.assert_array_equal(one, right)
    _, _, scores, _ = together(2, lambda group: answers(TensorParallel(group), dtype=dtype))[0]
    assert len(scores) != len(numbers[1]) or (scores != numbers[1]).any()


# ---- the plan of memory ----


def test_all_ranks_plan_for_the_one_with_the_least_memory():
    def work(group):
        backend = SimpleNamespace(memory_info=lambda: (100 - group.rank, 1000 + group.rank))
        return least_memory(TensorParallel(group), backend)

    assert together(2, work) == [{"free_bytes": 99, "total_bytes": 1000}] * 2
    assert least_memory(None, None) == {}


def test_an_engine_has_as_many_blocks_on_every_rank(monkeypatch):
    free = {}
    monkeypatch.setattr(CPU, "memory_info", lambda: (free[get_ident()],) * 2)

    def work(group):
        free[get_ident()] = 20_000_000 + 100_000 * group.rank
        model = load_model(GOLDEN / "qwen3_tiny", dtype="float32", tensor=TensorParallel(group))
        return planned(EngineConfig(max_num_seqs=1000, max_model_len=64, max_num_batched_tokens=2048), model)[
            0
        ].num_kv_blocks

    first, second = together(2, work)
    assert first == second < 1000 * 64 // 16


def test_the_plan_is_of_a_ranks_part(monkeypatch):
    """Its weights, its heads' cache; half the memory holds a cache of as many tokens."""
    free = [64_000_000]
    monkeypatch.setattr(CPU, "memory_info", lambda: (free[0], free[0]))
    model = load_model(GOLDEN / "qwen3_tiny", dtype="float32")

    def work(group):
        part = load_model(GOLDEN / "qwen3_tiny", dtype="float32", tensor=TensorParallel(group))
        uses = ModelUse("part", part.own_config, part.dtype)
        numbers, norms = parameter_counts(part.own_config)
        assert weight_bytes(uses, CPU) < 0.7 * weight_bytes(ModelUse("whole", model.config, model.dtype), CPU)
        own = [view for view in part.parts().values() if view.ndim > 1]
        assert 0 <= numbers - sum(view.size for view in own) <= 2 * part.config.hidden_size  # odd vocabularies
        return planned(EngineConfig(num_kv_blocks=100), part)[0].kv_bytes

    whole = planned(EngineConfig(num_kv_blocks=100), model)[0].kv_bytes
    assert together(2, work) == [whole // 2] * 2
    config = model.config
    assert (logit_columns(config), logit_columns(config.part_of(2))) == (211, 2 * 211 + 106)


def test_the_plan_has_what_ranks_gather():
    def work(group):
        both = [TensorParallel(group, invariant) for invariant in (False, True)]
        models = [load_model(GOLDEN / "qwen3_tiny", dtype="float32", tensor=tensor) for tensor in both]
        return [planned(EngineConfig(num_kv_blocks=100), model)[0].peak_bytes for model in models]

    for adds_up, gathers in together(2, work):
        assert adds_up < gathers


def test_options_of_llm_reach_the_model(monkeypatch):
    groups = {}
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(engine_module, "world", lambda: groups[get_ident()])

    def work(group):
        groups[get_ident()] = group
        for invariant in (False, True):
            llm = LLM(GOLDEN / "qwen3_tiny", tensor_parallel_size=2, tensor_parallel_invariant=invariant, **SMALL)
            assert (llm.model.tensor.size, llm.model.tensor.invariant) == (2, invariant)
        return llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].token_ids

    first, second = together(2, work)
    assert first == second and len(first) == 5


# ---- what is refused ----


def test_a_run_of_one_process_says_how_to_start_two():
    with pytest.raises(ValueError, match="_size=2 needs 2 processes, and this run has 1: .* mpirun -n 2"):
        LLM(GOLDEN / "qwen3_tiny", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="tensor_parallel_size must be at least 1"):
        LLM(GOLDEN / "qwen3_tiny", tensor_parallel_size=0)


def test_requests_with_adapters_are_refused():
    def refused(group):
        model = load_model(GOLDEN / "qwen3_tiny", tensor=TensorParallel(group))
        with pytest.raises(ValueError, match="enable_lora .* tensor_parallel_size=2"):
            LLM.from_model(model, None, enable_lora=True, **SMALL)

    together(2, refused)
