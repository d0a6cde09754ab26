"""AdamW, the rounding of weights and sums of squares on the GPU."""

import math
from pathlib import Path

import numpy as np
import pytest
from check import DTYPES, normal, statistics

from cukit.backend import backend_for, states
from cukit.models.weights import load_model
from cukit.optim import AdamW

pytestmark = pytest.mark.gpu


def state(size, dtype, own_param):
    master, grad = statistics(size, seed=1), statistics(size, seed=2, scale=100.0)
    m, v = statistics(size, seed=3), np.abs(statistics(size, seed=4))
    param = master.astype(dtype) if own_param else None
    return master, m, v, grad, param


@pytest.mark.parametrize("size", [0, 1, 3, 211, 4096, 100_003])
@pytest.mark.parametrize("dtype", [*DTYPES, "master"])
def test_steps_have_numpys_bits(dtype, size):
    """Three steps; "master" is a float32 parameter that is its own master. Only IEEE operations in one order: equal in
    every bit.
    """
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    own_param = dtype != "master"
    *arrays, param = state(size, cpu.dtype_of(dtype) if own_param else np.float32, own_param)
    host = [x.copy() for x in arrays]
    device = [cuda.array(x) for x in arrays]
    host_param, device_param = (param.copy(), cuda.array(param)) if own_param else (host[0], device[0])
    for step in (1, 2, 3):
        settings = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, grad_scale=0.37)
        cpu.adamw_step(*host, host_param, **settings)
        cuda.adamw_step(*device, device_param, **settings)
        for name, got, expected in zip(
            ("master", "m", "v", "grad", "param"), (*device, device_param), (*host, host_param)
        ):
            np.testing.assert_array_equal(cuda.to_numpy(got), expected, err_msg=f"{name} after step {step}")


def test_an_unaligned_view_is_stepped_in_place():
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    *arrays, param = state(1003, cpu.dtype_of("bfloat16"), True)
    whole = [cuda.array(x) for x in (*arrays, param)]
    parts = [x[1:1002] for x in whole]
    host = [x[1:1002].copy() for x in (*arrays, param)]
    settings = dict(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=5, grad_scale=1.0)
    cuda.adamw_step(*parts, **settings)
    cpu.adamw_step(*host, **settings)
    for got, expected, before in zip(whole, host, (*arrays, param)):
        got = cuda.to_numpy(got)
        np.testing.assert_array_equal(got[1:1002], expected)
        assert got[0] == before[0] and got[1002] == before[1002]


# ---- lean states ----

LEAN = ["float32", "bfloat16", "int8"]


def lean_state(size, dtype, weights, form):
    """[master, param (the master itself without one)], [moments, exponents], gradient on the host. Gradients over 8
    decades, so that codes have all exponents.
    """
    master, grad, m = (statistics(size, seed=seed) for seed in (1, 2, 3))
    grad, m = (x * np.float32(10.0) ** np.round(statistics(size, seed=9) * 2 - 2) for x in (grad, m))
    v = m * m
    pair = {"remainder": lambda: [*states.split_master(master)][::-1], "own": lambda: [master, master]}
    pair = pair.get(weights, lambda: [master, master.astype(dtype)])()
    if form == "int8":
        (m, high), (v, low) = states.encode_blocks(m, True), states.encode_blocks(v, False)
        return pair, [m, v, high, low], grad
    kind = backend_for("cpu").dtype_of(form)
    return pair, [m.astype(kind), v.astype(kind)], grad


def on_card(arrays):
    return [backend_for("cuda").array(x) for x in arrays]


def take_step(be, pair, moments, grad, step, offset):
    settings = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, grad_scale=0.37)
    function = be.adamw_step if len(moments) == 2 else be.adamw_step_blocks
    function(pair[0], *moments, grad, pair[1], **settings, seed=2**63 + 11, offset=offset)


WEIGHTS = [("bfloat16", "remainder"), ("bfloat16", "master"), ("float16", "master"), ("float32", "own")]


@pytest.mark.parametrize("size", [0, 1, 3, 211, 256, 4096, 100_003])
@pytest.mark.parametrize("form", LEAN)
@pytest.mark.parametrize("dtype, weights", WEIGHTS)
def test_lean_steps_have_numpys_bits(dtype, weights, form, size):
    """Remainders, moments in bfloat16 and codes; of the first 3 elements of a counter's 4 too."""
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    for offset in (0, 512) if form == "int8" else (0, 512, 7):
        host = lean_state(size, cpu.dtype_of(dtype), weights, form)
        pair = on_card(host[0]) if weights != "own" else on_card(host[0][:1]) * 2
        device = pair, on_card(host[1]), cuda.array(host[2])
        for step in (1, 2, 3):
            take_step(cpu, *host, step, offset)
            take_step(cuda, *device, step, offset)
            for index, (got, expected) in enumerate(zip((*device[0], *device[1]), (*host[0], *host[1]))):
                assert cuda.to_numpy(got).tobytes() == expected.tobytes(), (index, step, offset)


def test_many_arrays_are_stepped_at_once():
    """75 parts of 25 arrays, of all forms together: NumPy's bits in the parts, and nothing changed beside them."""
    cuda, cpu, rng = backend_for("cuda"), backend_for("cpu"), np.random.default_rng(0)
    kept, updates = [], {cpu: [], cuda: []}
    for number in range(25):
        form, (dtype, weights) = LEAN[number % 3], WEIGHTS[number % 4]
        pair, moments, grad = lean_state(int(rng.integers(3, 12)) * 1024, cpu.dtype_of(dtype), weights, form)
        cuts = np.sort(rng.choice(np.arange(1, grad.size // 256), 3, replace=False)) * 256
        device = on_card(pair[:1]) + (on_card(pair[1:]) if pair[1] is not pair[0] else []), on_card(moments)
        for be, (own, rest), gradient in ((cpu, (pair, moments), grad), (cuda, device, cuda.array(grad))):
            for start, stop, decay in zip((0, cuts[0], cuts[2]), (cuts[0], cuts[1], grad.size), (0.0, 0.1, 0.0)):
                part = slice(int(start), int(stop))
                arrays = own[0], *rest[:2], gradient, own[-1]
                updates[be].append(states.Update(*arrays, part, decay, number, 512 * number, *rest[2:]))
        kept.append(([*device[0], *device[1]], [*pair[: len(device[0])], *moments]))
    for be in (cpu, cuda):
        be.AdamWSteps(updates[be], 1e-3)(0.9, 0.95, 1e-8, 3, 0.37)
    for number, (got, expected) in enumerate(kept):
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert cuda.to_numpy(one).tobytes() == other.tobytes(), (number, index)


@pytest.mark.parametrize("form", LEAN)
def test_unaligned_lean_states_are_stepped_in_place(form):
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    host = lean_state(1003, cpu.dtype_of("bfloat16"), "remainder", form)
    shifted = [[], []]
    for arrays, found in zip((host[0], host[1], [host[2]]), (*shifted, [])):
        for x in arrays:
            whole = cuda.zeros((x.size + 2,), x.dtype)
            whole[1:-1] = cuda.array(x)
            found.append(whole)
    pair, moments = ([x[1:-1] for x in arrays] for arrays in shifted)
    take_step(cpu, *host, 5, 256)
    take_step(cuda, pair, moments, cuda.array(host[2]), 5, 256)
    for got, expected in zip((*shifted[0], *shifted[1]), (*host[0], *host[1])):
        got = cuda.to_numpy(got)
        assert got[1:-1].tobytes() == expected.tobytes() and got[0] == got[-1] == 0


@pytest.mark.parametrize("form", LEAN)
def test_masters_beyond_the_limit_are_held_as_on_the_cpu(form):
    """Steps of 6e35 take masters of 3.396e38 past what a weight and its remainder can hold."""
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    _, moments, _ = lean_state(1021, cpu.dtype_of("bfloat16"), "remainder", form)
    moments, grad = [np.zeros_like(x) for x in moments], statistics(1021)
    rng = np.random.default_rng(0)
    master = (rng.choice([-1, 1], 1021) * rng.uniform(3.391e38, 3.396e38, 1021)).astype(np.float32)
    weights, remainder = states.split_master(master)
    host = [remainder, weights], moments, grad
    device = on_card(host[0]), on_card(moments), cuda.array(grad)
    for be, (pair, own, gradient) in ((cpu, host), (cuda, device)):
        step = be.adamw_step_blocks if len(own) == 4 else be.adamw_step
        step(pair[0], *own, gradient, pair[1], 6e35, 0.9, 0.95, 1e-8, 0.0, 1, 1.0, 5, 0)
    held = np.abs(states.join_master(host[0][1], host[0][0])).view(np.uint32) == 0x7F7F7FFF
    assert 10 < held.sum() < 1000  # the case is not empty
    for got, expected in zip((*device[0], *device[1]), (*host[0], *host[1])):
        assert cuda.to_numpy(got).tobytes() == expected.tobytes()


def test_a_remainder_is_a_float32_master_on_the_card():
    """50 updates: zeros, halves, and the largest numbers among others. The card counts denormals as zero, both ways."""
    cuda = backend_for("cuda")
    edges = np.array([0, 0x3F807FFF, 0x3F808000, 0x3F818000, 0x7F7E8000, 0x7F7F7FFF, 1, 0x800000], np.uint32)
    master = np.concatenate([np.concatenate([edges, edges | 0x80000000]).view(np.float32), statistics(5000)])
    weights, remainder = on_card(states.split_master(master))
    master, param = cuda.array(master), cuda.zeros((master.size,), "bfloat16")
    cuda.store_weights(param, master)
    moments = [[cuda.zeros((master.size,), np.float32) for _ in range(2)] for _ in range(2)]
    for step in range(1, 51):
        grad = statistics(master.size, seed=step)
        grad[: 2 * edges.size] = 0
        for pair, own in zip(((master, param), (remainder, weights)), moments):
            take_step(cuda, pair, own, cuda.array(grad), step, 0)
    assert cuda.to_numpy(weights).tobytes() == cuda.to_numpy(param).tobytes()
    joined = states.join_master(cuda.to_numpy(weights), cuda.to_numpy(remainder))
    assert joined.tobytes() == cuda.to_numpy(master).tobytes()


def test_the_block_of_codes_is_the_sources():
    from cukit.backend.cuda.optimizer import STATE_BLOCK

    assert STATE_BLOCK == states.BLOCK


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_as_numpy_rounds(dtype):
    """Every low half under many high halves, infinities, NaN and the largest finite numbers among them."""
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    high = np.array([0, 1, 0x80, 0x387F, 0x3F80, 0x42AA, 0x477F, 0x7EFF, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0], np.uint32)
    high = np.concatenate([high, high | 0x8000])
    values = ((high[:, None] << 16) + np.arange(2**16, dtype=np.uint32)).view(np.float32)
    expected = np.empty(values.shape, cpu.dtype_of(dtype))
    cpu.store_weights(expected, values)
    got = cuda.zeros(values.shape, cuda.dtype_of(dtype))
    cuda.store_weights(got, cuda.array(values))
    got = cuda.to_numpy(got)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(got.view(np.uint16)[numbers], expected.view(np.uint16)[numbers])
    assert np.isnan(got[~numbers].astype(np.float32)).all()


@pytest.mark.parametrize("size", [0, 1, 211, 1000])
@pytest.mark.parametrize("out, given", [("bfloat16", "float16"), ("float16", "bfloat16"), ("float32", "float32")])
def test_weights_of_other_dtypes(out, given, size):
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    values = normal(size).astype(cpu.dtype_of(given))
    expected, got = np.empty(size, cpu.dtype_of(out)), cuda.zeros((size,), cuda.dtype_of(out))
    cpu.store_weights(expected, values)
    cuda.store_weights(got, cuda.array(values))
    np.testing.assert_array_equal(cuda.to_numpy(got), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pieces", [1, 7, 2520])
def test_sums_of_squares(dtype, pieces):
    """Arrays of several dtypes and sizes, an empty one among them: within rounding of NumPy, twice the same bits."""
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    arrays = [normal(pieces * size, seed=7).astype(cpu.dtype_of(dtype)) for size in (1, 0, 3, 8, 211, 776)]
    arrays.insert(2, statistics(pieces * 5))
    device = [cuda.array(x) for x in arrays]
    found, expected = cuda.sums_of_squares(device, pieces), cpu.sums_of_squares(arrays, pieces)
    np.testing.assert_allclose(cuda.to_numpy(found), expected, rtol=1e-13)
    assert cuda.to_numpy(cuda.sums_of_squares(device, pieces)).tobytes() == cuda.to_numpy(found).tobytes()
    total = cuda.sum_in_order(found)
    assert isinstance(total, float) and total == cuda.sum_in_order(found)
    np.testing.assert_allclose(total, cpu.sum_in_order(expected), rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", [1, 3, 8, 776, 1003])
def test_pieces_of_ranks_have_the_bits_of_the_whole(dtype, piece):
    """Whatever a shard's alignment."""
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    pieces = 2520
    x = cuda.array(normal(pieces * piece).astype(cpu.dtype_of(dtype)))
    whole = cuda.to_numpy(cuda.sums_of_squares([x], pieces))
    for ranks in (2, 3, 7, 9, 12):
        size = x.size // ranks
        shards = [
            cuda.to_numpy(cuda.sums_of_squares([x[rank * size : (rank + 1) * size]], pieces // ranks))
            for rank in range(ranks)
        ]
        assert np.concatenate(shards, axis=1).tobytes() == whole.tobytes()
    shifted = cuda.zeros((x.size + 1,), x.dtype)[1:]
    shifted[...] = x
    assert cuda.to_numpy(cuda.sums_of_squares([shifted], pieces)).tobytes() == whole.tobytes()


def test_sums_of_what_is_not_finite_or_not_there():
    cuda = backend_for("cuda")
    assert cuda.sum_in_order(cuda.sums_of_squares([], 10)) == 0.0
    assert cuda.sum_in_order(cuda.sums_of_squares([cuda.array(np.zeros(0, np.float32))], 10)) == 0.0
    x = statistics(5000)
    for bad, check in ((np.nan, math.isnan), (np.inf, math.isinf), (-np.inf, math.isinf)):
        x[4999] = bad
        assert check(cuda.sum_in_order(cuda.sums_of_squares([cuda.array(statistics(10)), cuda.array(x)], 10)))
    large = cuda.array(np.full(100, 3e38, np.float32))
    assert math.isfinite(cuda.sum_in_order(cuda.sums_of_squares([large], 10)))


@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen2_tiny"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", LEAN)
@pytest.mark.parametrize("offload", [False, True])
def test_an_optimizer_step_over_a_store(name, dtype, form, offload):
    """Buckets of several dtypes, one of them partly frozen: NumPy's bits, given its norm. Offloaded or not."""
    steps = [_one_step("cpu", name, dtype, form), _one_step("cuda", name, dtype, form, offload)]
    np.testing.assert_allclose(steps[0][0], steps[1][0], rtol=1e-12)
    assert steps[0][1].keys() == steps[1][1].keys()
    for key, expected in steps[0][1].items():
        np.testing.assert_array_equal(steps[1][1][key], expected, err_msg=key)


def _one_step(device, name, dtype, form, offload=False):
    model = load_model(Path(__file__).parents[1] / "golden" / name, device=device, dtype=dtype)
    model.layers[0].post_attention_layernorm.weight.requires_grad = False
    be = model.backend
    # no clipping: the norm's last digit would be in every bit
    optimizer = AdamW(model.store, 1e-3, weight_decay=0.1, state_form=form, seed=3, offload=offload)
    for step in range(2):
        for index, parameter in enumerate(model.parameters()):
            if (buffer := parameter.grad_buffer()) is not None:
                buffer += be.array(statistics(*parameter.shape, seed=10 * index + step)) * optimizer.loss_scale
        norm, applied = optimizer.step()
        assert applied
    state = {key: np.array(be.to_numpy(value)) for key, value in optimizer.state_dict().items()}
    optimizer.load_state_dict(state)  # a round trip changes nothing
    found = model.parts() | optimizer.state_dict()
    assert all(be.to_numpy(found[key]).tobytes() == value.tobytes() for key, value in state.items())
    return norm, {key: be.to_numpy(value) for key, value in found.items()}


def test_an_array_goes_to_the_host_and_back():
    """The device's copy may be freed at once; what is uploaded later from the same buffer comes after the download."""
    cuda = backend_for("cuda")
    host = cuda.host_buffer(4_000_000).view(np.float32)
    for value in range(20):
        array = cuda.zeros((1_000_000,), np.float32) + value
        cuda.download(host, array)
        del array
        other = cuda.zeros((1_000_000,), np.float32) - 1  # takes the freed memory
        back = cuda.empty((1_000_000,), np.float32)
        cuda.upload(back, host)
        del other
        assert (cuda.to_numpy(back) == value).all() and (host == value).all()
    with pytest.raises(MemoryError, match="no page-locked memory"):
        cuda.host_buffer(2**50)


def test_offloaded_states_leave_the_device():
    """Between updates the pool holds weights alone, and no more at an update than one bucket's states beside them."""
    import cupy

    cuda = backend_for("cuda")
    held = {}
    for offload in (False, True):
        model = load_model(Path(__file__).parents[1] / "golden/qwen3_tiny", device="cuda", dtype="bfloat16")
        cuda.synchronize()
        before = cupy.get_default_memory_pool().used_bytes()
        optimizer = AdamW(model.store, 1e-3, offload=offload)
        for parameter in model.parameters():
            parameter.grad_buffer()[...] = 1
        optimizer.step()
        held[offload] = cupy.get_default_memory_pool().used_bytes() - before
        del model, optimizer
    assert held[False] > 0 and held[True] <= 4096


def test_weights_are_drawn_and_copied_on_the_device():
    models = [
        load_model(Path(__file__).parents[1] / "golden/qwen3_tiny", device=d, dtype="float32") for d in ("cpu", "cuda")
    ]
    for model in models:
        model.init_weights(3)
    for name, part in models[1].parts().items():
        np.testing.assert_allclose(models[1].backend.to_numpy(part), models[0].parts()[name], atol=2e-6)
    copy = models[1].frozen_copy()
    models[1].init_weights(4), models[0].init_weights(4)
    expected = {name: np.array(part) for name, part in models[0].parts().items()}
    models[0].init_weights(3)
    copy.store.mix_from(models[1].store, 0.25)
    for name, part in copy.parts().items():
        mixed = 0.25 * expected[name] + 0.75 * models[0].parts()[name]
        np.testing.assert_allclose(copy.backend.to_numpy(part), mixed, atol=4e-6)


@pytest.mark.slow
def test_more_than_2_to_31_elements():
    cuda = backend_for("cuda")
    size = 2520 * (2**31 // 2520 + 8)
    x = cuda.zeros((size,), np.float32)
    for where in (0, 2**31 - 1, 2**31, size - 1):
        x[where] = 2.0
    assert cuda.sum_in_order(cuda.sums_of_squares([x], 2520)) == 16.0
    master, m, v = (cuda.zeros((size,), np.float32) for _ in range(3))
    cuda.adamw_step(
        master, m, v, x, master, lr=1.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1, grad_scale=1.0
    )
    assert [float(master[i]) for i in (1, 2**31 - 2, size - 2)] == [0.0, 0.0, 0.0]
    np.testing.assert_allclose([float(master[i]) for i in (0, 2**31 - 1, 2**31, size - 1)], -1.0, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_lean_states_of_more_than_2_to_31_elements(form):
    cuda, size = backend_for("cuda"), 2**31 + 1000
    weights, remainder, grad = (
        cuda.zeros((size,), "bfloat16"),
        cuda.zeros((size,), np.int16),
        cuda.zeros((size,), np.float32),
    )
    moments = [cuda.zeros((size,), "bfloat16" if form == "bfloat16" else np.uint8) for _ in range(2)]
    if form == "int8":
        moments += [cuda.zeros((states.blocks_of(size),), np.uint8) for _ in range(2)]
    places = (0, 2**31 - 1, 2**31, size - 1)
    for where in places:
        grad[where] = 2.0
    take_step(cuda, (remainder, weights), moments, grad, 1, 0)

    def value(array, where):
        return float(cuda.to_numpy(array[where : where + 1])[0])

    for where in places:
        np.testing.assert_allclose(value(weights, where), -1e-3, rtol=1e-2)
        assert value(moments[0], where) > 0 and value(moments[1], where) > 0
    assert [value(weights, where) for where in (1, 2**31 - 2, size - 2)] == [0.0, 0.0, 0.0]
