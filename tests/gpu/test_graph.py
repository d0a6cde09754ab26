"""Steps replayed as CUDA graphs. Run on a machine with a GPU: pytest -m gpu tests/gpu/test_graph.py"""

from pathlib import Path

import numpy as np
import pytest

from cukit.backend import backend_for
from cukit.engine.config import SamplingParams
from cukit.engine.llm import LLM
from cukit.models.weights import load_model

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parents[1] / "golden"


def test_a_replay_reads_the_inputs_of_its_moment():
    be = backend_for("cuda")
    x, w = (
        be.zeros((8, 64), "bfloat16"),
        be.array(np.random.default_rng(0).standard_normal((32, 64)).astype(be.dtype_of("bfloat16"))),
    )
    calls = []

    def function():
        calls.append(None)
        return be.linear_forward(x, w)

    step = be.Graphs().graphed(function)
    for number in range(5):
        x[...] = number
        result = be.to_numpy(step())
        np.testing.assert_array_equal(result, be.to_numpy(be.linear_forward(x, w)))
    assert len(calls) == 2, "called plainly once, captured once, then replayed"


def test_a_step_that_cannot_be_captured_goes_on_without(caplog):
    be = backend_for("cuda")
    x = be.zeros((4,), "float32")

    def function():
        x[...] = float(be.to_numpy(x).sum()) / 4 + 1  # waits for the device, which a capture refuses
        return x

    step = be.Graphs().graphed(function)
    for number in range(4):
        assert be.to_numpy(step()).tolist() == [number + 1] * 4
    assert caplog.text.count("without a CUDA graph") == 1


def engine_results(llm, seed=0):
    """Tokens and the bits of log-probs of requests of many kinds, three times over: steps are called, captured and
    replayed.
    """
    generator, found = np.random.default_rng(seed), []
    for _ in range(3):
        prompts = [generator.integers(3, 200, int(n)).tolist() for n in generator.integers(1, 60, 70)]
        params = [
            SamplingParams(
                n=int(generator.choice([1, 2])),
                temperature=float(generator.choice([0, 0.7, 1.0])),
                top_k=int(generator.choice([0, 9])),
                min_tokens=int(generator.choice([0, 0, 0, 4])),
                max_tokens=int(n),
                seed=i,
                logprobs=True,
            )
            for i, n in enumerate(generator.integers(4, 60, 70))
        ]
        found.append(
            [
                [(s.token_ids, np.array(s.logprobs, np.float32).tobytes()) for s in out.outputs]
                for out in llm.generate(prompts, params)
            ]
        )
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 5}, {"num_kv_blocks": 60}])
def test_graphs_change_no_bit(options, dtype):
    model = load_model(GOLDEN / "qwen3_tiny", device="cuda", dtype=dtype)
    options = {"max_model_len": 128, "max_num_seqs": 64} | options
    eager = engine_results(LLM.from_model(model, None, enforce_eager=True, **options))
    assert engine_results(LLM.from_model(model, None, **options)) == eager


def test_graphs_follow_new_weights_and_a_new_cache():
    model = load_model(GOLDEN / "qwen3_tiny", device="cuda", dtype="bfloat16")
    llm = LLM.from_model(model, None, max_model_len=128, max_num_seqs=8)
    first = engine_results(llm)
    model.norm.weight.data[...] *= 2
    llm.reset_prefix_cache()
    changed = engine_results(llm)
    assert changed != first and changed == engine_results(
        LLM.from_model(model, None, max_model_len=128, max_num_seqs=8, enforce_eager=True)
    )
    llm.sleep()
    llm.wake_up()
    assert engine_results(llm) == changed
