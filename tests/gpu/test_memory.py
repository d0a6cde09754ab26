"""Memory on a card: what sleeps is free by the driver's count, comes back at its addresses within 0.1 s, and the engine
keeps to its share. Run on a machine with a GPU: pytest -m gpu tests/gpu/test_memory.py
"""

import gc
import time
from pathlib import Path

import numpy as np
import pytest

from cukit.backend import backend_for
from cukit.bench.subject import SHAPES
from cukit.engine.config import EngineConfig, SamplingParams
from cukit.engine.llm import LLM
from cukit.engine.memory import plan_memory
from cukit.engine.shapes import ModelUse, block_bytes
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.models.weights import load_model

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parents[1] / "golden"
GB = 10**9


def free_by_the_driver() -> int:
    from cupy.cuda import runtime

    runtime.deviceSynchronize()
    return runtime.memGetInfo()[0]


@pytest.fixture
def be():
    """The CUDA shelf, its pool empty before and after."""
    import cupy

    backend = backend_for("cuda")
    backend.synchronize()
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    yield backend
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def test_reserved_memory_is_taken_given_back_and_taken_again(be):
    before, nbytes = free_by_the_driver(), 3 * GB + 12345
    reservation = be.Reservation(nbytes)
    unit = 2 << 20
    size = -(-nbytes // unit) * unit
    slack = 64 << 20  # page tables and the like
    for _ in range(3):
        assert reservation.resident and abs(before - free_by_the_driver() - size) < slack
        array = reservation.array(512, (1000, 1000), "float32")
        last = reservation.array(nbytes - 1, (1,), "int8")
        address = array.data.ptr
        assert not be.to_numpy(array).any() and not be.to_numpy(last).any()
        array[...], last[...] = 7, 7
        assert be.to_numpy(array).min() == 7 and be.to_numpy(last)[0] == 7
        reservation.release()
        assert not reservation.resident and abs(before - free_by_the_driver()) < slack
        reservation.restore()
        assert reservation.array(512, (1,), "float32").data.ptr == address
    del reservation, array, last
    gc.collect()
    assert abs(before - free_by_the_driver()) < slack


def test_e15_twelve_gigabytes_wake_in_a_tenth_of_a_second(be):
    reservation = be.Reservation(12 * GB)
    for _ in range(3):
        be.synchronize()
        start = time.perf_counter()
        reservation.release()
        be.synchronize()
        asleep = time.perf_counter()
        reservation.restore()
        be.synchronize()
        awake = time.perf_counter()
        assert asleep - start < 0.1 and awake - asleep < 0.1, (asleep - start, awake - asleep)


def test_a_graph_outlives_the_memory_it_reads_and_writes(be):
    reservation = be.Reservation(1 << 20)
    x, y = (reservation.array(offset, (1024,), "float32") for offset in (0, 4096))

    def function():
        y[...] = x * 2 + 1
        return y

    step = be.Graphs().graphed(function)
    for number in range(4):
        x[...] = number
        assert be.to_numpy(step()).tolist() == [number * 2 + 1] * 1024
    reservation.release()
    other = be.zeros((1 << 20,), "int8")  # takes what was given back
    reservation.restore()
    x[...] = 5
    assert be.to_numpy(step()).tolist() == [11] * 1024
    assert not be.to_numpy(other).any()


def test_a_full_card_gives_a_memory_error_and_nothing_is_lost(be):
    before = free_by_the_driver()
    with pytest.raises(MemoryError, match="gpu_memory_utilization"):
        be.Reservation(before + 2 * GB)
    gc.collect()
    assert abs(free_by_the_driver() - before) < 64 << 20


def test_memory_that_the_pool_holds_unused_is_freed_where_the_card_is_full(be):
    free = free_by_the_driver()
    held = be.empty((free // 2,), "int8")
    del held
    assert free_by_the_driver() < 0.6 * free, "the pool keeps it"
    reservation = be.Reservation(free * 3 // 4)
    assert reservation.resident


def test_e15_sleep_gives_the_cache_to_the_driver_and_waking_brings_the_same_draws(be):
    model = load_model(GOLDEN / "qwen3_tiny", device="cuda", dtype="bfloat16")
    blocks = 4 * GB // block_bytes(model.config, model.dtype, 16)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True, logprobs=True)
    prompts = [[1 + i, 2, 3] for i in range(9)]
    with LLM.from_model(model, None, max_model_len=64, num_kv_blocks=blocks) as llm:

        def outputs():
            return [
                (sample.token_ids, sample.logprobs) for out in llm.generate(prompts, params) for sample in out.outputs
            ]

        first, _, awake = outputs(), outputs(), free_by_the_driver()  # the second call captures graphs
        for _ in range(2):
            llm.sleep()
            assert free_by_the_driver() - awake > 0.97 * 4 * GB
            start = time.perf_counter()
            llm.wake_up()
            be.synchronize()
            assert time.perf_counter() - start < 0.1
            assert abs(free_by_the_driver() - awake) < 0.1 * GB
            assert outputs() == first


def large_model(be) -> Decoder:
    model = Decoder(ModelConfig.from_json(SHAPES["qwen3-0.6b"]), be, "bfloat16")
    model.init_weights(0)
    return model


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_e16_the_engine_keeps_to_its_share_of_the_whole_device(be, share):
    """Weights, cache, graphs, partial results of long rows: all within gpu_memory_utilization of the card."""
    from cupy.cuda import runtime

    free, total = runtime.memGetInfo()
    others = total - free  # with this process's context, which is within the share too
    model, most = large_model(be), 0
    options = {"gpu_memory_utilization": share, "max_num_seqs": 64, "max_model_len": 8192}
    with LLM.from_model(model, None, **options) as llm:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 1000, n).tolist() for n in [8000, *rng.integers(1, 600, 63)]]
        for _ in range(2):
            llm.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
            most = max(most, total - free_by_the_driver())
    assert most <= share * total + others
    assert most > 0.8 * share * total or llm.config.num_kv_blocks == 64 * 512, "and uses it"


def test_e16_a_plan_counts_the_decode_steps_partial_results(be):
    """Rows of 32,768 tokens: what the first decode step takes beside the cache is what the plan says."""
    import cupy

    model, pool = large_model(be), cupy.get_default_memory_pool()
    options = {"max_num_seqs": 64, "max_model_len": 32_768, "num_kv_blocks": 4096}
    plan = plan_memory([ModelUse("model", model.config, model.dtype, loaded=True)], EngineConfig(**options), be)
    sizes = {item.name: item.nbytes for item in plan.items if "decode step" in item.name}
    with LLM.from_model(model, None, **options) as llm:
        before = pool.used_bytes()
        for _ in range(2):  # plainly, then captured
            prompts = [[5] * 20_000, *([i + 1] for i in range(63))]
            llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
        taken = pool.used_bytes() - before
    partials = sizes["engine: decode step, partial results of long rows"]
    assert partials == 64 * 16 * 128 * (128 + 2) * 4
    assert partials <= taken <= 1.1 * sum(sizes.values()) + (64 << 20)


@pytest.mark.parametrize("rows, cols", [(3, 5), (700, 64), (40_000, 96), (151_936, 1024)])
def test_rows_that_repeat_take_the_memory_of_few(rows, cols):
    import cupy as cp

    from cukit.backend.cuda.repeated import repeated_rows

    block = np.random.default_rng(0).standard_normal((512, cols)).astype(np.float16)
    cp.get_default_memory_pool().free_all_blocks()
    free = cp.cuda.runtime.memGetInfo()[0]
    array = repeated_rows(block, rows)
    assert array.shape == (rows, cols) and free - cp.cuda.runtime.memGetInfo()[0] < 64 << 20
    found = array.get()
    assert np.array_equal(found, block[np.arange(rows) % 512])
    assert (cp.asarray(found) == array).all()
