"""AdamW's states in the host's memory, on a card: bits, what the card holds, the time of an update.
Run on a machine with a GPU: pytest -m gpu tests/gpu/test_offload.py -s
"""

import gc
import time

import pytest
from gpu.test_exact import QWEN3_06B

from cukit.backend import backend_for
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.optim import AdamW

pytestmark = pytest.mark.gpu


def updated(form, offload, steps=4):
    """(bits of weights and states after some updates, seconds of the last, bytes of states, most taken beside)."""
    import cupy

    be, pool = backend_for("cuda"), cupy.get_default_memory_pool()
    model = Decoder(ModelConfig.from_json(QWEN3_06B), be, "bfloat16")
    model.init_weights(0)
    optimizer = AdamW(model.store, 1e-3, weight_decay=0.1, state_form=form, seed=3, offload=offload)
    gc.collect()
    seconds = taken = 0.0
    for step in range(steps):
        for index, parameter in enumerate(model.store.parameters):
            gradient = parameter.grad_buffer()
            be.fill_normal(gradient, (step << 32) + index, 1.0)
        be.synchronize()
        pool.free_all_blocks()
        before, start = pool.total_bytes(), time.perf_counter()
        optimizer.step()
        be.synchronize()
        seconds, taken = time.perf_counter() - start, max(taken, pool.total_bytes() - before)
    states = [array for state in optimizer._states.values() for array in state.arrays.values()]
    bits = [be.to_numpy(bucket.data).tobytes() for bucket in model.store.buckets]
    bits += [be.to_numpy(array).tobytes() if not offload else array.tobytes() for array in states]
    return bits, seconds, sum(array.nbytes for array in states), taken


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_offloaded_updates_have_the_bits_of_those_on_the_card(form):
    here, quick, nbytes, _ = updated(form, False)
    away, slow, _, taken = updated(form, True)
    print(
        f"{form}: {nbytes / 1e9:.2f} GB of states; an update takes {quick * 1e3:.1f} ms on the card, "
        f"{slow * 1e3:.1f} ms offloaded ({2 * nbytes / slow / 1e9:.1f} GB/s both ways), {taken / 1e9:.2f} GB beside"
    )
    assert away == here
    assert taken < 0.45 * nbytes, "an embedding's and a layer's: (156 + 16) of 596 M"
