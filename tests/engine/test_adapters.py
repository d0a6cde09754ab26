"""Several adapters in one engine: each row as if its adapter were alone, whatever the schedule; keys of the cache; what
is on the device; the model's own adapter, on and off.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cukit import LLM, LoRARequest, SamplingParams
from cukit.backend import backend_for
from cukit.engine.adapters import in_order
from cukit.engine.config import EngineConfig
from cukit.engine.shapes import ModelUse, rollout_items
from cukit.models.adapter_config import TARGETS, AdapterConfig
from cukit.models.adapter_files import load_adapter, save_adapter
from cukit.models.adapters import Adapter
from cukit.models.logprobs import token_logprobs
from cukit.models.row_adapters import RowsInOrder
from cukit.models.weights import load_model

from .helpers import GOLDEN, check_engine, random_prompts, tiny_model

# name -> rank, parts: of different ranks, at different layers, one at some parts of a fused weight
KINDS = {"a": (3, ("q_proj", "v_proj")), "b": (5, TARGETS), "c": (1, ("k_proj", "up_proj", "down_proj"))}
NAMES = [*KINDS, None]
MODELS = ("qwen3_tiny", "qwen2_tiny")


def shaken(model, name, way="beside"):
    rank, targets = KINDS[name]
    adapter = Adapter(model, AdapterConfig(rank, 2 * rank, targets, base="base"), way)
    generator = np.random.default_rng(ord(name))
    for view in adapter.parts().values():
        view[...] = generator.normal(0, 0.4 * view.shape[1] ** -0.5, view.shape).astype(np.float32)
    adapter.refresh()
    return adapter


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """(model name, adapter name) -> its request; and the models that have been trained with one, in float64."""
    folder, requests, trained = tmp_path_factory.mktemp("adapters"), {}, {}
    for base in MODELS:
        for number, name in enumerate(KINDS, 1):
            model = load_model(GOLDEN / base, dtype="float64")
            save_adapter(shaken(model, name), folder / base / name)
            requests[base, name] = LoRARequest(name, number, str(folder / base / name))
            trained[base, name] = model
        requests[base, None], trained[base, None] = None, tiny_model(base)
    return requests, trained


def engine(base="qwen3_tiny", **options):
    given = {"max_model_len": 64, "block_size": 4, "enable_lora": True, "max_loras": 3} | options
    return LLM.from_model(tiny_model(base), None, **given)


def expected(trained, prompt, params, longest=64):
    """Of a request in a roomy engine whose model has that one adapter."""
    llm = LLM.from_model(trained, None, max_model_len=longest, num_kv_blocks=400, async_scheduling=False)
    (request,) = llm.run([prompt], params)
    return request


def check_request(request, trained, longest=64):
    """Its samples are those of its adapter alone, and training's forward pass gives their log-probabilities."""
    alone = expected(trained, request.prompt_ids, request.params, longest)
    for ours, theirs in zip(request.sequences, alone.sequences, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-10)
        if request.params.temperature == 1:
            (scored,) = token_logprobs(trained, [ours.token_ids])
            np.testing.assert_allclose(scored[ours.prompt_length - 1 :], ours.logprobs, atol=1e-10)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("case", [pytest.param(n, marks=[pytest.mark.slow] if n >= 12 else []) for n in range(40)])
def test_random_schedules(adapters, case):
    """Little room, chunked prompts, preemption, n samples, further turns, penalties, aborts; more adapters than may be
    on the device at once.
    """
    rng = np.random.default_rng([11, case])
    base = MODELS[case % 2]
    requests, trained = adapters
    longest, block_size = int(rng.integers(12, 40)), int(rng.choice([1, 4, 8]))
    least = -(-longest // block_size)
    llm = engine(
        base,
        max_model_len=longest,
        block_size=block_size,
        num_kv_blocks=int(least + rng.integers(0, 3 * least)),
        max_num_seqs=int(rng.integers(1, 9)),
        max_num_batched_tokens=int(rng.choice([2, 7, 20, 64])),
        enable_prefix_caching=bool(rng.random() < 0.8),
        max_loras=int(rng.integers(1, 4)),
    )
    core, beginnings = llm.core, random_prompts(2, 20, 21, seed=case)
    left, made, aborted = 8, [], set()
    while left or core.requests:
        if left and (rng.random() < 0.4 or not core.requests):
            left -= 1
            prompt = beginnings[rng.integers(2)][: rng.integers(1, min(20, longest - 2))]
            params = SamplingParams(
                n=int(rng.integers(1, 4)), max_tokens=int(rng.integers(1, longest)), ignore_eos=True,
                temperature=float(rng.choice([0, 1])), seed=int(rng.integers(99)),
                repetition_penalty=float(rng.choice([1, 1, 1.3])),
            )  # fmt: skip
            name = NAMES[rng.integers(len(NAMES))]
            ended = [one for one in made if one[1].finished and one[1].keeps_cache and one[1].request_id not in aborted]
            (adapter,) = core.adapters.chosen(requests[base, name], 1)
            after = None
            if ended and rng.random() < 0.4:
                name, before = ended[-1]
                after, adapter = before.sequences[0], before.adapter
                prompt = [*after.token_ids.tolist(), 5]
            if len(prompt) < longest - 1:
                ids, text = core.check_prompt(prompt, params, 0)
                more = {"keeps_cache": bool(rng.random() < 0.3), "after": after, "adapter": adapter}
                made.append((name, core.add(ids, text, params, **more)))
        if core.requests and rng.random() < 0.03:
            victim = list(core.requests.values())[rng.integers(len(core.requests))]
            aborted.add(victim.request_id)
            core.abort(victim)
        core.step()
        check_engine(llm)
        assert len(core.adapters._loaded) <= core.config.max_loras
    for name, request in made:
        if request.request_id not in aborted:
            check_request(request, trained[base, name], longest)


def test_one_batch_of_all_with_texts_scores_and_streams(adapters):
    requests, trained = adapters
    llm, names = engine(), [*NAMES, *reversed(NAMES)]
    params = SamplingParams(n=2, max_tokens=9, seed=3, ignore_eos=True, logprobs=True)
    prompts, chosen = random_prompts(8, 3, 20), [requests["qwen3_tiny", name] for name in names]
    for request, name in zip(llm.run(prompts, params, lora_request=chosen), names, strict=True):
        check_request(request, trained["qwen3_tiny", name])
    outputs = llm.generate(prompts, params, lora_request=chosen)
    streamed = {
        one.index: one for one in llm.generate(prompts, params, stream=True, lora_request=chosen) if one.finished
    }
    for number, output in enumerate(outputs):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in streamed[number].outputs]
    rows = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    for row, output, name, scored in zip(rows, outputs, names, llm.score(rows, lora_request=chosen), strict=True):
        np.testing.assert_allclose(scored[-9:], output.outputs[0].logprobs, atol=1e-10)
        np.testing.assert_allclose(scored, token_logprobs(trained["qwen3_tiny", name], [row])[0], atol=1e-10)
    (added,) = [llm.add_request(prompts[0], params, lora_request=requests["qwen3_tiny", "b"])]
    while not added.finished:
        llm.step()
    check_request(added, trained["qwen3_tiny", "b"])


def test_a_block_serves_its_own_adapter_alone(adapters):
    """Equal prompts one after the other: the cache has something only for the adapter that made it."""
    requests, trained = adapters
    llm, prompt, params = engine(), list(range(3, 20)), SamplingParams(max_tokens=3, temperature=0.0, logprobs=True)
    for turn in range(2):
        for name in NAMES:
            (output,) = llm.generate([prompt], params, lora_request=requests["qwen3_tiny", name])
            assert output.num_cached_tokens == (16 if turn else 0), (turn, name)
            theirs = expected(trained["qwen3_tiny", name], prompt, params).sequences[0]
            np.testing.assert_allclose(output.outputs[0].logprobs, theirs.logprobs, atol=1e-10)


def test_no_more_adapters_are_on_the_device_than_may_be(adapters):
    """With max_loras=1 the adapters take turns; steps that know one that has gone are forgotten."""
    requests, trained = adapters
    llm, names = engine(max_loras=1, max_cpu_loras=2), ["a", "b", None, "c", "a"]
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    chosen = [requests["qwen3_tiny", name] for name in names]
    seen = []

    def look():
        core = llm.core
        running = {one for one in core.rows.adapters if one is not None}
        seen.append(len(running))
        assert len(core.adapters._loaded) <= 1 >= len(running) and len(core.adapters._known) <= 2
        known = {one.number for key in core.runner._steps for one in key[2] if one is not None}
        assert known <= set(core.adapters._loaded)

    for request, name in zip(llm.run(random_prompts(5, 3, 9), params, look, lora_request=chosen), names, strict=True):
        check_request(request, trained["qwen3_tiny", name])
    assert max(seen) == 1


def test_the_base_goes_on_beside_adapters_that_wait(adapters):
    """An adapter that must wait holds up what came after it, not what runs."""
    requests, _ = adapters
    llm = engine(max_loras=1)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    first, base, second = (
        llm.add_request([1, 2, 3], params, lora_request=requests["qwen3_tiny", name]) for name in ("a", None, "b")
    )
    llm.step()
    assert [one.sequences[0].num_generated for one in (first, base, second)] == [1, 1, 0]
    while not second.finished:
        llm.step()
    assert first.finished and base.finished


def test_a_device_runs_ahead_while_an_adapter_waits(adapters, monkeypatch):
    monkeypatch.setattr(backend_for("cpu"), "is_asynchronous", True)
    requests, _ = adapters
    llm, params = engine(max_loras=1), SamplingParams(max_tokens=9, ignore_eos=True)
    for name in ("a", "b"):
        llm.add_request([1, 2, 3], params, lora_request=requests["qwen3_tiny", name])
    for _ in range(4):
        llm.step()
    assert llm.core._flight is not None and len(llm.core.scheduler.waiting) == 1


def test_prompts_are_computed_adapter_by_adapter(adapters, monkeypatch):
    requests, _ = adapters
    llm, seen = engine(), []
    monkeypatch.setattr("cukit.engine.prefill.in_order", lambda *given: seen.append(in_order(*given)) or seen[-1])
    chosen = [requests["qwen3_tiny", name] for name in ("b", "a", None, "b", "a")]
    llm.generate(random_prompts(5, 3, 9), SamplingParams(max_tokens=1), lora_request=chosen)
    assert [len(found.parts) for found in seen] == [2]


def test_a_score_brings_its_adapter_to_the_device(adapters):
    requests, trained = adapters
    rows, names = random_prompts(4, 3, 20, seed=5), ["b", None, "a", "b"]
    llm = engine(max_loras=1)
    chosen = [requests["qwen3_tiny", name] for name in names]
    for row, name, scored in zip(rows, names, llm.score(rows, lora_request=chosen), strict=True):
        np.testing.assert_allclose(scored, token_logprobs(trained["qwen3_tiny", name], [row])[0], atol=1e-10)


def test_chat_passes_the_adapter_on(adapters, monkeypatch):
    requests, _ = adapters
    llm, seen = engine(), []
    llm.tokenizer = SimpleNamespace(has_chat_template=True, apply_chat_template=lambda *_, **__: [3, 4])
    monkeypatch.setattr(llm, "generate", lambda *given: seen.append(given))
    llm.chat([{"role": "user", "content": "?"}], lora_request=requests["qwen3_tiny", "a"])
    assert seen[0][-1] is requests["qwen3_tiny", "a"]


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("way", ["beside", "merged"])
def test_the_own_adapter_the_base_and_others_in_one_batch(adapters, way):
    """A model whose adapter is trained: requests have it, and inside off() they are the base's."""
    requests, trained = adapters
    model = load_model(GOLDEN / "qwen3_tiny", dtype="float64")
    adapter = shaken(model, "b", way)
    options = {"max_model_len": 64, "block_size": 4, "enable_lora": True, "max_loras": 2}
    llm, params = LLM.from_model(model, None, **options), SamplingParams(n=2, max_tokens=8, seed=2, ignore_eos=True)
    prompt, made = list(range(5, 16)), []
    for _ in range(2):
        made.append(("b", llm.add_request(prompt, params)))
        with adapter.off():
            made.append((None, llm.add_request(prompt, params)))
            made.append(("c", llm.add_request(prompt, params, lora_request=requests["qwen3_tiny", "c"])))
        while llm.core.requests:
            llm.step()
    for name, request in made:
        check_request(request, trained["qwen3_tiny", name])
    with adapter.off():
        (output,) = llm.generate([prompt], params)
        scored = llm.score([prompt])
    base = expected(tiny_model(), prompt, params)
    assert [one.token_ids for one in output.outputs] == [one.completion_ids.tolist() for one in base.sequences]
    np.testing.assert_allclose(scored[0], token_logprobs(tiny_model(), [prompt])[0], atol=1e-12)


@pytest.mark.parametrize(
    "option, given, adapter",
    [
        ("lora_base_on_host", {}, {"way": "merged", "base_on_host": True}),
        ("quantization", {"quantization": "int8"}, {}),
    ],
)
def test_where_the_base_is_not_at_hand_the_trained_adapter_alone_is_served(adapters, option, given, adapter):
    """Its products read merged copies that took the base's place, or copies in 8 bits."""
    requests, _ = adapters
    model = load_model(GOLDEN / "qwen3_tiny", dtype="float32")
    own = Adapter(model, AdapterConfig(3, 6, ("q_proj",)), **adapter)
    llm = LLM.from_model(model, None, max_model_len=64, enable_lora=not given, **given)
    (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
    message = f"with {option} an engine serves the trained adapter alone: leave out {option}"
    with own.off(), pytest.raises(ValueError, match=message):
        llm.generate([[5, 6]])
    with own.off(), pytest.raises(ValueError, match=message):
        llm.core.add(*llm.core.check_prompt([4, 5], SamplingParams(), 0)[:1], None, SamplingParams())
    if not given:
        with pytest.raises(ValueError, match=message):
            llm.generate([[5, 6]], lora_request=requests["qwen3_tiny", "a"])
    assert not llm.core.requests


def test_adapters_of_requests_and_quantization_exclude_each_other():
    with pytest.raises(
        ValueError,
        match="enable_lora multiplies with the model's own weights: leave out quantization=int8, or merge the adapters "
        "that lora_modules or requests name",
    ):
        EngineConfig(enable_lora=True, quantization="int8")


def test_a_further_turn_keeps_its_adapter(adapters):
    requests, _ = adapters
    llm = engine()
    core, params = llm.core, SamplingParams(max_tokens=3, ignore_eos=True)
    adapter = core.adapters.get(requests["qwen3_tiny", "a"])
    ids, _ = core.check_prompt([4, 5, 6], params, 0)
    first = core.add(ids, None, params, keeps_cache=True, adapter=adapter)
    while not first.finished:
        llm.step()
    more = np.append(first.sequences[0].token_ids, 7).astype(np.int32)
    with pytest.raises(ValueError, match="a further turn must have the adapter of the turn before it"):
        core.add(more, None, params, after=first.sequences[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_adapter_has_the_bits_of_the_trained_one(adapters, dtype):
    requests, _ = adapters
    for name in KINDS:
        request = requests["qwen3_tiny", name]
        model, plain = (load_model(GOLDEN / "qwen3_tiny", dtype=dtype) for _ in range(2))
        own = load_adapter(model, request.lora_path)
        llm = LLM.from_model(plain, None, max_model_len=32, enable_lora=True)
        one = llm.core.adapters.get(request)
        llm.core.load_adapters([one])
        for (_, theirs), (name, linear) in zip(own.linears, one._linears, strict=True):
            ours = one.at(linear)
            assert ours.factors.down.tobytes() == theirs.factors.down.tobytes(), name
            assert ours.factors.up.tobytes() == theirs.factors.up.tobytes(), name
        assert all(parameter.requires_grad for parameter in plain.parameters()), "the model stays as it is"


def test_segments_join_neighbours_and_leave_the_base_out():
    class Named:
        def __init__(self, number):
            self.number = number

    one, two = Named(4), Named(9)
    found = in_order([None, one, one, two], np.array([0, 3, 4, 9, 10]))
    assert isinstance(found, RowsInOrder) and found.parts == [(one, slice(3, 9)), (two, slice(9, 10))]
    assert in_order([one, one], np.array([0, 1, 2])).adapter is one
    assert in_order([None], np.array([0, 1])).adapter is None


def test_the_plan_counts_what_may_be_on_the_device(adapters):
    config, be = tiny_model().config, backend_for("cpu")
    use = ModelUse("model", config, "bfloat16")
    items = rollout_items(use, EngineConfig(enable_lora=True, max_loras=3, max_lora_rank=5, max_model_len=64), be)
    (nbytes,) = [item.nbytes for item in items if item.name == "engine: adapters of requests"]
    model = load_model(GOLDEN / "qwen3_tiny", dtype="bfloat16")
    adapter = Adapter(model, AdapterConfig(5, 5, TARGETS))
    assert nbytes == 3 * sum(one.factors.down.nbytes + one.factors.up.nbytes for _, one in adapter.linears)
    plain = rollout_items(use, EngineConfig(max_model_len=64), be)
    assert not any("adapters" in item.name for item in plain)


def test_what_cannot_be_taken_is_said_in_one_line(adapters, tmp_path):
    requests, _ = adapters
    a, b = (requests["qwen3_tiny", name] for name in ("a", "b"))
    llm, prompt = engine(max_lora_rank=4), [[1, 2]]
    other = requests["qwen2_tiny", "a"]
    half = tmp_path / "half"
    shutil.copytree(a.lora_path, half)
    (half / "adapter_model.safetensors").unlink()
    for request, message in (
        (b, "has rank 5: give max_lora_rank=5 or more"),
        (LoRARequest("x", 0, a.lora_path), "lora_int_id must be a whole number of at least 1, got 0"),
        (LoRARequest("x", 7, None), "lora_path must be an adapter's folder or its name on the hub, got None"),
        (LoRARequest("x", 7, ""), "lora_path must be an adapter's folder or its name on the hub, got ''"),
        (LoRARequest("x", 7, str(GOLDEN / "qwen3_tiny")), "is no adapter folder"),
        (LoRARequest("x", 7, "/no/such"), "lora_path: model folder '/no/such' does not exist"),
        (LoRARequest("x", 7, str(half)), "holds no adapter_model.safetensors"),
        (LoRARequest("x", 7, other.lora_path), "does not fit its model"),
        ("a", "lora_request must be a LoRARequest, got str"),
        ([a, a], "2 lora_requests for 1 prompts: give one for all, or one for each"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            llm.generate(prompt, lora_request=request)
        assert "\n" not in str(raised.value) and not llm.core.requests
    llm.generate(prompt, SamplingParams(max_tokens=1), lora_request=a)
    llm.generate(prompt, SamplingParams(max_tokens=1), lora_request=LoRARequest("a", 1, Path(a.lora_path)))
    with pytest.raises(ValueError, match=f"lora_int_id=1 is {a.lora_path} already: give {b.lora_path} another one"):
        llm.generate(prompt, lora_request=LoRARequest("a", 1, b.lora_path))
    with pytest.raises(ValueError, match=r"takes no lora_request \('a'\): make it with enable_lora=True"):
        LLM.from_model(tiny_model(), None, max_model_len=32).generate(prompt, lora_request=a)
    with pytest.raises(ValueError, match="max_cpu_loras must be at least 3, got 2"):
        EngineConfig(max_loras=3, max_cpu_loras=2)
