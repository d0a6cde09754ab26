"""A merged adapter with its base in the host's memory, on a card: bits, what the card holds, copies that run beside.
Run on a machine with a GPU: pytest -m gpu tests/gpu/test_host_base.py -s
"""

import gc
import time

import numpy as np
import pytest
from gpu.test_exact import QWEN3_06B, RUNS, count_differences

from cukit.autograd import no_grad
from cukit.backend import backend_for
from cukit.models.adapter_config import TARGETS, AdapterConfig
from cukit.models.adapters import Adapter, WithoutAdapter
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.models.logprobs import target_logprobs, token_logprobs
from cukit.optim import AdamW

pytestmark = pytest.mark.gpu
ROWS = [list(range(5, 300)), [8, 2, 17], list(range(1000, 1400))]


def shape(be, seed=0):
    model = Decoder(ModelConfig.from_json(QWEN3_06B), be, "bfloat16")
    model.init_weights(seed)
    return model


def merged(be, on_host, targets=TARGETS, rank=32):
    model = shape(be)
    adapter = Adapter(model, AdapterConfig(rank, 2 * rank, targets), "merged", 3, on_host)
    for index, view in enumerate(adapter.parts().values()):
        be.fill_normal(view, (7 << 32) + index, 0.3 * view.shape[1] ** -0.5)
    adapter.refresh()
    return model


def train(model, steps):
    optimizer = AdamW(model.trained_store, 1e-3)
    for _ in range(steps):
        logprobs, _ = target_logprobs(model, ROWS, [np.arange(len(row)) > 0 for row in ROWS])
        loss = logprobs.sum() * -0.01
        loss.backward()
        optimizer.step()
        model.adapter.refresh()


def bits(be, arrays):
    return [be.to_numpy(array).tobytes() for array in arrays]


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj", "v_proj")])
def test_no_bit_differs(targets):
    be, found = backend_for("cuda"), []
    for on_host in (True, False):
        model = merged(be, on_host, targets)
        train(model, 4)
        arrays = [*model.adapter.parts().values(), *(one.merged for _, one in model.adapter.linears)]
        found.append(bits(be, arrays) + [x.tobytes() for x in token_logprobs(model, ROWS)])
        del model, arrays
        gc.collect()
    assert found[0] == found[1]


def test_a_pass_without_the_adapter_is_the_bases():
    be = backend_for("cuda")
    wanted = [x.tobytes() for x in token_logprobs(shape(be), ROWS)]
    model = merged(be, True)
    with_adapter = [x.tobytes() for x in token_logprobs(model, ROWS)]
    assert with_adapter != wanted
    for _ in range(3):
        assert [x.tobytes() for x in token_logprobs(WithoutAdapter(model), ROWS)] == wanted
        assert [x.tobytes() for x in token_logprobs(model, ROWS)] == with_adapter
        train(model, 1)
        with_adapter = [x.tobytes() for x in token_logprobs(model, ROWS)]


def test_decoding_and_training_agree():
    model = merged(backend_for("cuda"), True)
    compared, different = count_differences(model, RUNS[:3], 60, 100)
    assert compared >= 5_000 and different == 0


def test_the_card_holds_each_weight_once():
    import cupy

    be, pool = backend_for("cuda"), cupy.get_default_memory_pool()
    gc.collect()
    before = pool.used_bytes()
    model = shape(be)
    weights = pool.used_bytes() - before
    adapter = Adapter(model, AdapterConfig(32, 64, TARGETS), "merged", 3, True)
    adapted = sum(linear.weight.data.nbytes for linear, _ in adapter.linears)
    factors = sum(view.nbytes for view in adapter.parts().values())
    assert adapter.base.nbytes == adapted > 0.7e9
    assert pool.used_bytes() - before < weights + 2.5 * factors + (64 << 20)
    largest = max(linear.weight.data.nbytes for linear, _ in adapter.linears)
    most, held = 0, pool.used_bytes()
    with no_grad(), adapter.off():
        for linear, one in adapter.linears:
            weight = one.base_weight(linear)
            most = max(most, pool.used_bytes() - held)
            del weight
    assert 0 < most <= 2 * largest + (4 << 20)


def test_copies_run_beside_what_the_device_computes():
    """Eight copies of 64 MiB and twelve products: together they take less than one after the other."""
    be = backend_for("cuda")
    host = [be.host_buffer(64 << 20) for _ in range(8)]
    for number, buffer in enumerate(host):
        buffer[...] = number + 1
    targets = [be.zeros((64 << 20,), "uint8") for _ in host]
    x = be.zeros((8192, 8192), "bfloat16")
    copies = be.SideCopies()

    def copy():
        for target, buffer in zip(targets, host):
            last = copies.upload(target, buffer)
        copies.join(last)

    def compute():
        for _ in range(12):
            be.linear_forward(x, x)

    def seconds(*functions):
        found = []
        for _ in range(4):
            be.synchronize()
            start = time.perf_counter()
            for function in functions:
                function()
            be.synchronize()
            found.append(time.perf_counter() - start)
        return min(found)

    def beside():
        for target, buffer in zip(targets, host):
            last = copies.upload(target, buffer)
        compute()
        copies.join(last)

    apart, together = seconds(copy) + seconds(compute), seconds(beside)
    print(f"copies {seconds(copy):.4f} s, products {seconds(compute):.4f} s, together {together:.4f} s")
    assert together < 0.85 * apart
    for number, target in enumerate(targets):
        assert be.to_numpy(target[::4096]).tolist() == [number + 1] * len(target[::4096])


def test_copies_keep_their_order_with_what_the_device_is_told():
    """A copy comes after what was told before it; what is told after join() comes after the copy."""
    be, copies = backend_for("cuda"), backend_for("cuda").SideCopies()
    size = 16 << 20
    up, down = be.host_buffer(4 * size).view(np.float32), be.host_buffer(4 * size).view(np.float32)
    x = be.zeros((size,), "float32")
    for number in range(1, 30):
        up[...] = number
        x[...] = -1  # told before
        copies.join(copies.upload(x, up))
        x += 0.5  # told after
        copy = copies.download(down, x)
        copies.join(copy)
        x[...] = 99
        be.synchronize()
        assert (down == number + 0.5).all(), number


def test_a_merge_in_the_weights_own_memory_takes_the_copies_time():
    be = backend_for("cuda")
    model = merged(be, True)
    for _ in range(2):
        model.adapter.refresh()
    be.synchronize()
    start = time.perf_counter()
    model.adapter.refresh()
    be.synchronize()
    seconds, nbytes = time.perf_counter() - start, model.adapter.base.nbytes
    print(f"refresh of {nbytes / 1e9:.2f} GB: {seconds * 1e3:.1f} ms, {nbytes / seconds / 1e9:.1f} GB/s")
    assert seconds < 1.0
