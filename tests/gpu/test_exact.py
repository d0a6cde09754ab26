"""The promise of the CUDA shelf: the log-probability of a sampled token has the same bits from decoding and from the
training forward pass.

Decoding runs with random batch sizes (1 to 256), admission orders, forced preemption, chunked prefill and prefix hits;
`llm.score` packs the same sequences anew. Real models by folder: CUKIT_EXACT_MODELS="folder,folder" pytest -m gpu
tests/gpu/test_exact.py -s
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from cukit.backend import backend_for
from cukit.engine.config import SamplingParams
from cukit.engine.llm import LLM
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.models.weights import load_model

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parents[1] / "golden"
QWEN3_06B = dict(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    tie_word_embeddings=True,
)


def requests(generator, count, vocabulary, longest_prompt, longest_completion):
    """Random prompts, a third of them beginning with the same 64 tokens, and sampling settings of several kinds."""
    shared = generator.integers(3, vocabulary, 64).tolist()
    prompts, params = [], []
    for index in range(count):
        ids = generator.integers(3, vocabulary, int(generator.integers(1, longest_prompt))).tolist()
        prompts.append(shared + ids if index % 3 == 0 else ids)
        params.append(
            SamplingParams(
                n=int(generator.choice([1, 1, 4])),
                temperature=0.7,
                top_p=float(generator.choice([1.0, 0.9])),
                top_k=int(generator.choice([0, 20])),
                max_tokens=int(generator.integers(1, longest_completion)),
                ignore_eos=True,
                seed=index,
                logprobs=True,
            )
        )
    return prompts, params


def count_differences(model, runs, longest_prompt, longest_completion, seed=0, tokenizer=None):
    """(tokens compared, tokens with different bits) over engines of several shapes."""
    generator = np.random.default_rng(seed)
    compared = different = 0
    for num_seqs, num_requests, budget, blocks in runs:
        llm = LLM.from_model(
            model,
            tokenizer,
            max_model_len=longest_prompt + longest_completion + 64,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            num_kv_blocks=blocks,
        )
        prompts, params = requests(generator, num_requests, model.config.vocab_size, longest_prompt, longest_completion)
        outputs = llm.generate(prompts, params)
        sequences, engine = [], []
        for output in outputs:
            for sample in output.outputs:
                sequences.append(output.prompt_token_ids + sample.token_ids)
                engine.append(np.array(sample.logprobs, np.float32))
        for scored, decoded in zip(llm.score(sequences, temperature=0.7), engine):
            scored = np.asarray(scored[len(scored) - len(decoded) :], np.float32)
            compared += len(decoded)
            different += int(np.count_nonzero(scored.view(np.uint32) != decoded.view(np.uint32)))
        print(
            f"  {num_seqs} rows, {num_requests} requests, budget {budget}, blocks {blocks}: {compared} tokens "
            f"so far, {different} differ; "
            f"{llm.stats}"
        )
        llm.close()
    return compared, different


RUNS = [  # rows at once, requests, tokens a step, KV blocks (few: preemption)
    (1, 4, 8192, None),
    (7, 30, 512, None),
    (64, 100, 100, None),
    (256, 300, 8192, None),
    (32, 60, 256, 400),
]


@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen2_tiny", "llama_tiny"])
def test_tiny_models(name):
    compared, different = count_differences(load_model(GOLDEN / name, device="cuda", dtype="bfloat16"), RUNS, 60, 100)
    print(f"{name}: {compared} tokens compared, {different} different")
    assert compared >= 20_000 and different == 0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes(dtype):
    compared, different = count_differences(
        load_model(GOLDEN / "qwen3_tiny", device="cuda", dtype=dtype), RUNS[:3], 60, 100
    )
    print(f"qwen3_tiny in {dtype}: {compared} tokens compared, {different} different")
    assert compared >= 5_000 and different == 0


def test_qwen3_06b_shape():
    model = Decoder(ModelConfig.from_json(QWEN3_06B), backend_for("cuda"), "bfloat16")
    model.init_weights(0)
    compared, different = count_differences(
        model, [(1, 3, 8192, None), (13, 40, 700, None), (256, 500, 8192, None), (48, 100, 512, 900)], 400, 500
    )
    print(f"qwen3-0.6b shape: {compared} tokens compared, {different} different")
    assert compared >= 100_000 and different == 0


@pytest.mark.parametrize("folder", [f for f in os.environ.get("CUKIT_EXACT_MODELS", "").split(",") if f])
def test_real_models(folder):
    from cukit.tokenizer import Tokenizer

    assert json.loads((Path(folder) / "config.json").read_text())
    model = load_model(folder, device="cuda", dtype="bfloat16")
    compared, different = count_differences(
        model,
        [(5, 20, 512, None), (256, 500, 8192, None), (48, 100, 300, 700)],
        300,
        400,
        tokenizer=Tokenizer.from_folder(folder),
    )
    print(f"{folder}: {compared} tokens compared, {different} different")
    assert compared >= 100_000 and different == 0
