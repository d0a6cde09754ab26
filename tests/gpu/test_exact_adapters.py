"""The promise of test_exact.py for models with an adapter, computed either way, and for batches with rows of several
adapters. Run on a machine with a GPU:

    pytest -m gpu tests/gpu/test_exact_adapters.py -s

Real models by folder: CUKIT_EXACT_MODELS="folder,folder".
"""

import os
from pathlib import Path

import numpy as np
import pytest
from gpu.test_exact import QWEN3_06B, RUNS, count_differences, requests

from cukit import LoRARequest
from cukit.autograd import no_grad
from cukit.backend import backend_for
from cukit.engine.config import SamplingParams
from cukit.engine.llm import LLM
from cukit.models.adapter_config import TARGETS, AdapterConfig
from cukit.models.adapter_files import load_adapter, merge_into, save_adapter
from cukit.models.adapters import WAYS, Adapter, WithoutAdapter
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.models.logprobs import pack, pack_tokens, target_logprobs, token_logprobs
from cukit.models.scores import packed_scores, score_rows
from cukit.models.weights import load_model
from cukit.optim import AdamW

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parents[1] / "golden"
ADAPTERS = {"lora_qwen3": "qwen3_tiny", "lora_qwen2": "qwen2_tiny", "lora_llama": "llama_tiny"}


def shaken(model, way, rank, targets=TARGETS, seed=0):
    """An adapter whose B is not zero any more."""
    adapter = Adapter(model, AdapterConfig(rank, 2 * rank, targets), way, seed)
    move(adapter, seed)
    return adapter


def move(adapter, seed):
    for index, view in enumerate(adapter.parts().values()):
        adapter.backend.fill_normal(view, (seed << 32) + index, 0.3 * view.shape[1] ** -0.5)
    adapter.refresh()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen2_tiny", "llama_tiny"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tiny_models(name, way, dtype):
    model = load_model(GOLDEN / name, device="cuda", dtype=dtype)
    shaken(model, way, 5, TARGETS if name == "qwen3_tiny" else ("q_proj", "v_proj", "down_proj"))
    compared, different = count_differences(model, RUNS[:3] if dtype != "bfloat16" else RUNS, 60, 100)
    print(f"{name} in {dtype}, {way}: {compared} tokens compared, {different} different")
    assert compared >= 5_000 and different == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", [8, 32])
def test_qwen3_06b_shape(way, rank):
    model = Decoder(ModelConfig.from_json(QWEN3_06B), backend_for("cuda"), "bfloat16")
    model.init_weights(0)
    shaken(model, way, rank)
    runs = [(1, 3, 8192, None), (13, 40, 700, None), (256, 500, 8192, None), (48, 100, 512, 900)]
    compared, different = count_differences(model, runs, 400, 500)
    print(f"qwen3-0.6b shape, {way}, r = {rank}: {compared} tokens compared, {different} different")
    assert compared >= 100_000 and different == 0


MIXED = [(8, TARGETS), (32, ("q_proj", "v_proj")), (5, ("k_proj", "o_proj", "gate_proj", "down_proj"))]


def count_mixed(make_model, folder, runs, longest_prompt, longest_completion):
    """(tokens compared, tokens with different bits) of batches with rows of three adapters and of none, beside the
    training pass of a model that has the row's adapter alone.
    """
    trained, named = [make_model()], [None]
    for number, (rank, targets) in enumerate(MIXED, 1):
        trained.append(make_model())
        save_adapter(shaken(trained[-1], "beside", rank, targets, seed=number), folder / str(number))
        named.append(LoRARequest(str(number), number, str(folder / str(number))))
    generator, plain = np.random.default_rng(3), make_model()
    compared = different = 0
    for num_seqs, num_requests, budget, blocks, max_loras in runs:
        options = {"enable_lora": True, "max_loras": max_loras, "max_lora_rank": 32, "num_kv_blocks": blocks}
        longest = longest_prompt + longest_completion + 64
        options |= {"max_model_len": longest, "max_num_seqs": num_seqs, "max_num_batched_tokens": budget}
        llm = LLM.from_model(plain, None, **options)
        vocabulary = plain.config.vocab_size
        prompts, params = requests(generator, num_requests, vocabulary, longest_prompt, longest_completion)
        owners = generator.integers(0, 4, num_requests)
        outputs = llm.generate(prompts, params, lora_request=[named[owner] for owner in owners])
        for owner in range(4):
            samples = [
                (output.prompt_token_ids + one.token_ids, np.array(one.logprobs, np.float32))
                for output in (outputs[place] for place in np.flatnonzero(owners == owner))
                for one in output.outputs
            ]
            rows = [ids for ids, _ in samples]
            if not rows:
                continue
            scores = token_logprobs(trained[owner], rows, 0.7)
            again = llm.score(rows, temperature=0.7, lora_request=named[owner])
            for (_, decoded), scored, second in zip(samples, scores, again, strict=True):
                scored = np.asarray(scored[len(scored) - len(decoded) :], np.float32)
                compared += len(decoded)
                different += int(np.count_nonzero(scored.view(np.uint32) != decoded.view(np.uint32)))
                assert np.array_equal(scored, second[len(second) - len(decoded) :])
        shape = f"{num_seqs} rows, {num_requests} requests, budget {budget}, blocks {blocks}, max_loras {max_loras}"
        print(f"  {shape}: {compared} tokens so far, {different} differ; {llm.stats}")
        llm.close()
    return compared, different


@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen2_tiny", "llama_tiny"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_batches_of_several_adapters(name, dtype, tmp_path):
    runs = [(1, 4, 8192, None, 1), (7, 30, 512, None, 3), (64, 100, 100, None, 2), (32, 60, 256, 400, 3)]
    compared, different = count_mixed(
        lambda: load_model(GOLDEN / name, device="cuda", dtype=dtype), tmp_path, runs, 60, 100
    )
    print(f"{name} in {dtype}, mixed: {compared} tokens compared, {different} different")
    assert compared >= 5_000 and different == 0


def test_batches_of_several_adapters_in_the_qwen3_06b_shape(tmp_path):
    def make():
        model = Decoder(ModelConfig.from_json(QWEN3_06B), backend_for("cuda"), "bfloat16")
        model.init_weights(0)
        return model

    runs = [(13, 40, 700, None, 3), (256, 400, 8192, None, 3), (48, 100, 512, 900, 2)]
    compared, different = count_mixed(make, tmp_path, runs, 400, 500)
    print(f"qwen3-0.6b shape, mixed: {compared} tokens compared, {different} different")
    assert compared >= 100_000 and different == 0


@pytest.mark.parametrize("way", WAYS)
def test_the_own_adapter_and_the_base_in_one_batch(way):
    """Requests inside off() are the base's, in the same steps as those of the adapter that is trained."""
    model, plain = (load_model(GOLDEN / "qwen3_tiny", device="cuda", dtype="bfloat16") for _ in range(2))
    adapter = shaken(model, way, 8)
    llm = LLM.from_model(model, None, max_model_len=128, max_num_seqs=16)
    params = SamplingParams(n=3, max_tokens=50, seed=3, ignore_eos=True)
    for _ in range(3):  # called plainly, captured, replayed
        own = [llm.add_request(prompt, params) for prompt in ([5, 9, 100], [7, 3])]
        with adapter.off():
            base = [llm.add_request(prompt, params) for prompt in ([5, 9, 100], [11, 12, 13])]
        while llm.core.requests:
            llm.step()
        for trained, requests_of in ((model, own), (plain, base)):
            samples = [one for request in requests_of for one in request.sequences]
            for one, scored in zip(samples, token_logprobs(trained, [one.token_ids for one in samples]), strict=True):
                assert np.array_equal(scored[one.prompt_length - 1 :], one.logprobs)
    llm.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("folder", [f for f in os.environ.get("CUKIT_EXACT_MODELS", "").split(",") if f])
def test_real_models(folder, way):
    from cukit.tokenizer import Tokenizer

    model = load_model(folder, device="cuda", dtype="bfloat16")
    shaken(model, way, 32)
    runs = [(5, 20, 512, None), (256, 500, 8192, None), (48, 100, 300, 700)]
    compared, different = count_differences(model, runs, 300, 400, tokenizer=Tokenizer.from_folder(folder))
    print(f"{folder}, {way}: {compared} tokens compared, {different} different")
    assert compared >= 100_000 and different == 0


@pytest.mark.parametrize("way", WAYS)
def test_an_update_reaches_captured_steps(way):
    """One engine over three updates, so that its graphs replay with copies that were made anew in place."""
    model = load_model(GOLDEN / "qwen3_tiny", device="cuda", dtype="bfloat16")
    adapter = shaken(model, way, 8)
    llm = LLM.from_model(model, None, max_model_len=128, max_num_seqs=16)
    params = SamplingParams(n=4, max_tokens=60, temperature=1.0, seed=3, ignore_eos=True, logprobs=True)
    prompts, seen = [[5, 9, 100], [7, 3], [11, 12, 13, 14]], set()
    for update in range(3):
        for _ in range(2):  # called plainly, captured, replayed
            outputs = llm.generate(prompts, params)
        samples = [
            (output.prompt_token_ids + one.token_ids, one.logprobs) for output in outputs for one in output.outputs
        ]
        for scored, (_, decoded) in zip(llm.score([ids for ids, _ in samples]), samples):
            assert np.array_equal(scored[len(scored) - len(decoded) :], np.array(decoded, np.float32))
        seen.add(str(samples))
        move(adapter, update + 1)
        llm.reset_prefix_cache()
    assert len(seen) == 3
    llm.close()


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_pefts(name, way):
    """float32 on the card beside PEFT's float64, from the folder that PEFT wrote."""
    model, truth = load_model(GOLDEN / ADAPTERS[name], device="cuda", dtype="float32"), np.load(GOLDEN / f"{name}.npz")
    adapter = load_adapter(model, GOLDEN / name, way)
    rows = [ids[:length].tolist() for ids, length in zip(truth["input_ids"], truth["lengths"])]
    logprobs, _ = target_logprobs(model, rows, [np.arange(len(row)) > 0 for row in rows])
    (logprobs.sum() * (-1.0 / logprobs.shape[0])).backward()
    for part, view in adapter.store.part_views(lambda bucket: bucket.grad).items():
        np.testing.assert_allclose(model.backend.to_numpy(view), truth[f"grad/{part}"], atol=1e-4, err_msg=part)
    optimizer = AdamW(model.trained_store, 0.01, max_grad_norm=1.0)
    assert optimizer.step()[1]


REWARDS = {"lora_reward_llama": "llama_reward", "lora_reward_qwen3": "qwen3_tiny"}


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_reward_models_scores_and_gradients_are_pefts(name, way):
    """float32 on the card beside PEFT's float64; the score head is trained too."""
    model = load_model(GOLDEN / REWARDS[name], device="cuda", dtype="float32", head="score")
    truth, adapter, be = np.load(GOLDEN / f"{name}.npz"), load_adapter(model, GOLDEN / name, way), model.backend
    rows = [ids[:length].tolist() for ids, length in zip(truth["input_ids"], truth["lengths"])]
    (scores,) = packed_scores(model, pack_tokens(be, rows), be.array(score_rows(rows)))
    np.testing.assert_allclose(be.to_numpy(scores.data), truth["scores"], atol=1e-4)
    margins = truth["scores"][0::2] - truth["scores"][1::2]
    weights = np.repeat(-1 / (1 + np.exp(margins)) / 2, 2) * np.tile([1, -1], 2)
    scores.backward(be.array(weights.astype(np.float32)))
    for part, view in adapter.store.part_views(lambda bucket: bucket.grad).items():
        np.testing.assert_allclose(be.to_numpy(view), truth[f"grad/{part}"], atol=1e-4, err_msg=part)
    optimizer = AdamW(model.trained_store, 0.01, max_grad_norm=1.0)
    assert optimizer.step()[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_merged_is_the_merged_folder_bit_for_bit_and_off_is_the_base(dtype):
    rows = [[5, 9, 100, 7, 3], list(range(3, 60))]

    def logits(model):
        with no_grad():
            return model.backend.to_numpy(model.logits(model.forward(*pack(model, rows))).data)

    base, merged, folder = (load_model(GOLDEN / "qwen2_tiny", device="cuda", dtype=dtype) for _ in range(3))
    load_adapter(merged, GOLDEN / "lora_qwen2", "merged")
    merge_into(folder, GOLDEN / "lora_qwen2")
    assert logits(merged).tobytes() == logits(folder).tobytes() != logits(base).tobytes()
    off = token_logprobs(WithoutAdapter(merged), rows)
    assert all(map(np.array_equal, off, token_logprobs(base, rows)))
