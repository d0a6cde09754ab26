"""optimizer_in_bwd on a card: the bits of the ordinary update, and what the gradients take.
Run on a machine with a GPU: pytest -m gpu tests/gpu/test_in_backward.py -s
"""

import gc

import pytest
from gpu.test_exact import QWEN3_06B

from cukit.backend import backend_for
from cukit.bench.train import Step, _train
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.optim import AdamW
from cukit.trainers.batch import PackedBatch

pytestmark = pytest.mark.gpu


def trained(in_backward, form="float32", offload=False, checkpointing=True, steps=3):
    """(bits of all weights, bytes beyond weights and states that the pool used at the most)."""
    import cupy
    import numpy as np

    be, pool = backend_for("cuda"), cupy.get_default_memory_pool()
    model = Decoder(ModelConfig.from_json(QWEN3_06B), be, "bfloat16")
    model.init_weights(0)
    model.gradient_checkpointing = checkpointing
    optimizer = AdamW(model.store, 1e-4, state_form=form, seed=3, offload=offload)
    tokens = np.random.default_rng(0).integers(0, 1000, (4, 128))
    batch = PackedBatch.build(list(tokens), np.tile(np.arange(128) >= 64, 4)).to(be)
    step = Step(batch.micro_batches(0, 4096), 512, 256)
    gc.collect()  # what earlier tests left
    held = pool.used_bytes()
    for _ in range(steps):
        _train(model, optimizer, step, in_backward)
    gc.collect()
    be.synchronize()
    pool.free_all_blocks()
    before = pool.total_bytes()
    _train(model, optimizer, step, in_backward)
    taken = pool.total_bytes() - before
    assert optimizer.step_count == steps + 1 and optimizer.skipped == 0
    assert abs(pool.used_bytes() - held) < 64 << 20
    return [be.to_numpy(bucket.data).tobytes() for bucket in model.store.buckets], taken


@pytest.mark.parametrize("form, offload", [("float32", False), ("int8", False), ("bfloat16", True)])
def test_the_bits_are_those_of_the_ordinary_update(form, offload):
    plain, whole = trained(False, form, offload)
    layered, parts = trained(True, form, offload)
    print(f"{form}, offload {offload}: {whole / 1e9:.2f} GB in a step, {parts / 1e9:.2f} GB layer by layer")
    assert layered == plain
    assert whole - parts > 1.2e9, "596 M gradients of 4 bytes, of which an embedding's 156 M and two layers' stay"


def test_without_recomputation_too():
    assert trained(True, checkpointing=False)[0] == trained(False, checkpointing=False)[0]
