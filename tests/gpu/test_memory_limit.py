"""A limit on what this process takes of a card, by the driver's count. Nothing else may use the card.
Run on a machine with a GPU: pytest -m gpu tests/gpu/test_memory_limit.py
"""

import gc

import numpy as np
import pytest

from cukit import SFTConfig, SFTTrainer
from cukit.backend import backend_for
from cukit.backend.card import CONTEXT_BYTES
from cukit.bench.grpo import number_tokenizer
from cukit.bench.subject import SHAPES
from cukit.engine.config import SamplingParams
from cukit.engine.llm import LLM
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit_cli import ending

pytestmark = pytest.mark.gpu
GB, MIB = 10**9, 1 << 20


def used_by_the_driver() -> int:
    from cupy.cuda import runtime

    runtime.deviceSynchronize()
    free, total = runtime.memGetInfo()
    return total - free


@pytest.fixture
def be():
    """The CUDA shelf, its pool empty before and after, no limit left behind."""
    import cupy

    backend = backend_for("cuda")
    backend.synchronize()
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    yield backend
    backend.limit_memory(None)
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def test_arrays_fill_the_limit_and_no_more(be):
    before = used_by_the_driver()
    limit = 8 * GB
    be.limit_memory(limit)
    assert be.memory_limit() == limit
    context = max(before, CONTEXT_BYTES)
    held = []
    with pytest.raises(MemoryError, match="limit set to"):
        while True:
            held.append(be.empty((100 * MIB,), "uint8"))
    assert limit - context - 101 * MIB <= len(held) * 100 * MIB <= limit - context
    assert used_by_the_driver() <= limit
    held.clear()
    whole = be.empty((limit - context - 10 * MIB,), "uint8")
    assert whole.nbytes and used_by_the_driver() <= limit, "blocks that nothing uses make room for a larger one"
    be.limit_memory(None)
    assert be.memory_limit() is None
    more = be.empty((limit,), "uint8")
    assert more.nbytes == limit


def test_a_reservation_and_arrays_share_the_limit(be):
    be.limit_memory(6 * GB)
    reservation = be.Reservation(3 * GB)
    with pytest.raises(MemoryError):
        be.empty((3 * GB,), "uint8")
    reservation.release()
    array = be.empty((3 * GB,), "uint8")
    with pytest.raises(MemoryError, match="memory_limit 6,000,000,000 leaves no room"):
        reservation.restore()
    assert not reservation.resident and used_by_the_driver() <= 6 * GB
    del array
    reservation.restore()
    assert reservation.resident and used_by_the_driver() <= 6 * GB


def test_an_overrun_ends_in_one_line(be, capsys):
    be.limit_memory(3 * GB)
    assert ending(lambda: be.empty((4 * GB,), "uint8")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: out of memory (")


def small(be) -> Decoder:
    model = Decoder(ModelConfig.from_json(SHAPES["qwen3-0.6b"]), be, "bfloat16")
    model.init_weights(0)
    return model


def test_an_engine_plans_by_it_and_keeps_to_it(be):
    limit = 6 * GB
    be.limit_memory(limit)
    most = 0
    with LLM.from_model(small(be), None, max_num_seqs=64, max_model_len=4096) as llm:
        assert llm.core.plan.limit == limit and llm.core.plan.rule == "memory_limit"
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 1000, n).tolist() for n in rng.integers(1, 3000, 96)]
        for _ in range(2):
            llm.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
            most = max(most, used_by_the_driver())
    assert 0.8 * limit < most <= limit


def test_training_under_a_limit_has_the_same_bits(be, tmp_path):
    ends = []
    for limit in ("16GB", None):
        args = SFTConfig(
            output_dir=str(tmp_path / str(limit)),
            max_steps=2,
            max_length=512,
            per_device_train_batch_size=8,
            memory_limit=limit,
            save_steps=0,
            logging_steps=1,
        )
        rows = [{"text": " ".join(["7", "11"] * 250)}] * 16
        trainer = SFTTrainer(model=small(be), args=args, train_dataset=rows, processing_class=number_tokenizer(151_936))
        trainer.train()
        if limit:
            assert trainer.plan.limit == 16 * GB and used_by_the_driver() <= 16 * GB
        ends.append(be.to_numpy(trainer.model.store.buckets[1].data).tobytes())
        del trainer
        gc.collect()
    assert ends[0] == ends[1]
