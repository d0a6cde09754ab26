"""The levels of gradient_checkpointing on a GPU: one set of bits, and memory as the planner counts it. Run there:

pytest -m gpu tests/gpu/test_levels.py -s
"""

import gc
from dataclasses import replace

import numpy as np
import pytest
from models.test_levels import ADAPTERS, DTYPES, GOLDEN, NAMES, adapted, assert_one_set_of_bits

from cukit.backend import backend_for
from cukit.bench.measure import memory_in_use, peak_memory
from cukit.bench.subject import SHAPES
from cukit.engine.shapes import LayerBytes
from cukit.models.adapters import WAYS
from cukit.models.config import LEVELS, ModelConfig
from cukit.models.decoder import Decoder
from cukit.models.logprobs import pack_tokens, packed_logprobs
from cukit.models.weights import load_model

pytestmark = pytest.mark.gpu
SHAPE = ModelConfig.from_json(SHAPES["qwen3-0.6b"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_language_models(name, dtype):
    assert_one_set_of_bits(load_model(GOLDEN / name, device="cuda", dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_models_of_scores(dtype):
    assert_one_set_of_bits(load_model(GOLDEN / "qwen3_reward", device="cuda", dtype=dtype, head="score"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters(config, way, dtype):
    assert_one_set_of_bits(adapted(config, way, "cuda", dtype))


def step(model, rows):
    """One forward and backward pass; gradients are added to what is there."""
    wanted = [np.arange(len(row)) >= len(row) // 2 for row in rows]
    logprobs, _ = packed_logprobs(model, pack_tokens(model.backend, rows, wanted))
    logprobs.sum().backward()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_widths_of_qwen3_06b(dtype):
    """Three layers, rows of several lengths, a total that is no bucket."""
    be, generator = backend_for("cuda"), np.random.default_rng(0)
    model = Decoder(replace(SHAPE, num_hidden_layers=3), be, dtype)
    model.init_weights(0)
    rows = [generator.integers(0, SHAPE.vocab_size, length).tolist() for length in (711, 1, 300, 1030, 57)]
    found = {}
    for level in LEVELS:
        model.gradient_checkpointing = level
        model.store.zero_grad()
        step(model, rows)
        found[level] = [be.to_numpy(parameter.grad).tobytes() for parameter in model.parameters()]
    assert found["none"] == found["selective"] == found["full"]


def test_memory_is_what_the_planner_counts():
    """Of what arrays take at the highest moment, what differs between levels; 12 layers decide where that is."""
    import cupy

    be, layers, tokens = backend_for("cuda"), 12, 8192
    model = Decoder(replace(SHAPE, num_hidden_layers=layers, vocab_size=4096), be, "bfloat16")
    model.init_weights(0)
    rows = np.random.default_rng(0).integers(0, 4096, (16, 512)).tolist()
    peaks = {}
    for level in LEVELS:
        model.gradient_checkpointing = level
        step(model, rows)  # compiles kernels, makes gradients
        gc.collect()
        be.synchronize()
        cupy.get_default_memory_pool().free_all_blocks()
        peaks[level] = peak_memory(be, lambda: step(model, rows), memory_in_use(be))
    one = LayerBytes.of(SHAPE, be.dtype_of("bfloat16"), np.dtype(np.float32))
    planned = {level: tokens * (layers * one.kept[level] + one.again[level] + one.passing[level]) for level in LEVELS}
    print({level: (peaks[level] / 1e9, planned[level] / 1e9) for level in LEVELS})
    for level in LEVELS[1:]:
        saved, counted = peaks["none"] - peaks[level], planned["none"] - planned[level]
        assert abs(saved - counted) < 0.03 * planned["none"], (level, saved / 1e9, counted / 1e9)
