"""Lean states of AdamW: remainders in place of float32 masters, moments in bfloat16 and in codes of 8 bits."""

import ml_dtypes
import numpy as np
import pytest

from cukit.autograd import Parameter
from cukit.backend import backend_for, states
from cukit.backend.numpy import optimizer as shelf
from cukit.models.store import ALIGNMENT, Store
from cukit.optim import AdamW
from cukit.trainers.config import OPTIMIZER_STATES

BF16 = np.dtype(ml_dtypes.bfloat16)
SETTINGS = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_scale=0.5)
SHAPES = {"layers.0.matrix": (33, 17), "layers.0.other": (5, 70), "layers.1.matrix": (4, 9), "norm": (7,)}


def optimizer(dtype, form="float32", seed=5, **settings):
    rng = np.random.default_rng(0)
    parameters = {name: Parameter(rng.normal(size=shape).astype(dtype), name) for name, shape in SHAPES.items()}
    settings = dict(lr=1e-2, weight_decay=0.1, max_grad_norm=1.0) | settings
    return AdamW(Store(backend_for("cpu"), parameters), state_form=form, seed=seed, **settings)


def train(one, steps, bad=()):
    """bad: the steps whose gradients are not finite."""
    for step in steps:
        rng = np.random.default_rng(100 + step)
        for parameter in one.parameters:
            buffer = parameter.grad_buffer()
            buffer += rng.normal(size=parameter.shape) * 10.0 ** rng.uniform(-4, 0, parameter.shape) * one.loss_scale
        if step in bad:
            one.parameters[0].grad_buffer()[1, 1] = np.nan
        one.step()


def weights_of(one):
    return {parameter.name: parameter.data.copy() for parameter in one.parameters}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == np.array(array).tobytes(), name


# ---- master weights as remainders ----

EDGES = [
    0,
    1,
    0x7FFF,
    0x8000,
    0x8001,
    0xFFFF,
    0x10000,
    0x7FFFFF,
    0x800000,
    0x3F807FFF,
    0x3F808000,
    0x3F80FFFF,
    0x3F818000,
]
EDGES += [0x7F7E8000, 0x7F7F0000, 0x7F7F7FFF, 0x7F800000]


def test_a_remainder_has_float32s_bits_over_50_updates():
    """Denormals, ±0, halves between two weights, the largest numbers and infinity among random ones."""
    rng = np.random.default_rng(1)
    edges = np.array(EDGES, np.uint32)
    edges = np.concatenate([edges, edges | 0x80000000]).view(np.float32)
    master = np.concatenate([edges, np.repeat(edges, 3), rng.normal(size=5000).astype(np.float32)])
    master = np.concatenate([master, (rng.normal(size=999) * 10.0 ** rng.uniform(-44, 38, 999)).astype(np.float32)])
    weights, remainder = states.split_master(master)
    param = np.zeros(master.size, BF16)
    shelf.store_weights(param, master)
    assert weights.tobytes() == param.tobytes() and remainder.dtype == np.int16
    moments = [np.zeros((2, master.size), np.float32) for _ in range(2)]
    for step in range(1, 51):
        grad = rng.normal(size=master.size).astype(np.float32) * np.float32(10.0 ** rng.integers(-6, 6))
        grad[: edges.size] = 0  # these only decay
        settings = SETTINGS | {"weight_decay": 0.0 if step % 2 else 0.1}
        shelf.adamw_step(master, *moments[0], grad, param, step=step, **settings)
        shelf.adamw_step(remainder, *moments[1], grad, weights, step=step, **settings)
        assert weights.tobytes() == param.tobytes() and moments[0].tobytes() == moments[1].tobytes(), step
        assert states.join_master(weights, remainder).tobytes() == master.tobytes(), step


@pytest.mark.parametrize("form", OPTIMIZER_STATES)
def test_a_run_with_remainders_is_a_run_with_float32_masters(form):
    """50 updates, three of them skipped: weights, moments, masters and counters."""
    lean, full = optimizer(BF16, form), optimizer(BF16, form)
    for bucket, state in full._states.items():
        if bucket.dtype == BF16:
            assert state.arrays["master"].dtype == np.int16
            state.arrays["master"] = bucket.data.astype(np.float32)
    for one in (lean, full):
        train(one, range(50), bad=(3, 20, 21))
    assert lean.skipped == 3 and lean.step_count == 47
    assert_equal(weights_of(lean), weights_of(full))
    assert_equal(lean.state_dict(), full.state_dict())
    assert lean.state_dict()["norm.master"].dtype == np.float32


def test_every_low_half_comes_back():
    for high in (0x0000, 0x0001, 0x007F, 0x3F80, 0x42AA, 0x7F7E, 0x8000, 0xC2AA, 0xFF7E):
        wide = ((np.uint32(high) << np.uint32(16)) + np.arange(2**16, dtype=np.uint32)).view(np.float32)
        assert states.join_master(*states.split_master(wide)).tobytes() == wide.tobytes()


def test_a_master_beyond_the_limit_is_held_there():
    largest = np.array([0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7F8000, 0x7FC12345], np.uint32).view(np.float32)
    weights, remainder = states.split_master(largest)
    found = states.join_master(weights, remainder)
    assert found[:4].view(np.uint32).tolist() == [0x7F7F7FFF] * 3 + [0xFF7F7FFF] and np.isnan(found[4])
    expected = np.zeros(5, BF16)
    shelf.store_weights(expected, largest)
    assert weights.tobytes() == expected.tobytes()


# ---- noise ----


def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average():
    x = np.float32(1 + 1 / 512)  # a quarter of the way from 1 to the next bfloat16
    noise = np.arange(2**16, dtype=np.uint32)
    found = states.stochastic_bfloat16(np.full(2**16, x), noise).astype(np.float64)
    assert set(found) == {1.0, 1 + 1 / 128} and found.mean() == x
    for value in (0.0, -2.0, 1.5, np.inf, -np.inf, float(np.float32(3.3895314e38))):
        assert (states.stochastic_bfloat16(np.full(2**16, value, np.float32), noise).astype(float) == value).all()
    large = states.stochastic_bfloat16(np.full(2**16, 3.4e38, np.float32), noise)
    assert np.isfinite(large.astype(np.float32)).all()
    assert np.isnan(states.stochastic_bfloat16(np.full(2**16, np.nan, np.float32), noise).astype(np.float32)).all()


def test_noise_is_the_counter_generators():
    """Random123's known answer for key 0 and counter 0; each element has its word, wherever an array begins."""
    assert [f"{word:08x}" for word in shelf._noise(0, 0, 0, 4)] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    whole = shelf._noise(2**63 + 9, 7, 0, 1000)
    for offset, count in ((0, 1), (3, 5), (4, 8), (997, 3), (6, 0)):
        np.testing.assert_array_equal(shelf._noise(2**63 + 9, 7, offset, count), whole[offset : offset + count])
    assert len({*whole.tolist(), *shelf._noise(2**63 + 9, 8, 0, 1000).tolist(), *shelf._noise(9, 7, 0, 1000)}) > 2990


def state_of(size, form, seed=0):
    """(master, moments and exponents, gradient) as arguments of the step function of a form."""
    rng = np.random.default_rng(seed)
    master, m, v, grad = (rng.normal(size=size).astype(np.float32) for _ in range(4))
    v = v * v
    if form == "int8":
        (m, top), (v, bottom) = states.encode_blocks(m, True), states.encode_blocks(v, False)
        return master, [m, v, top, bottom], grad
    return master, [x.astype(BF16) for x in (m, v)], grad


@pytest.mark.parametrize("form, cuts", [("bfloat16", (0, 1, 6, 255, 1003)), ("int8", (0, 256, 512, 1003))])
def test_a_part_that_knows_its_offset_has_the_bits_of_the_whole(form, cuts, monkeypatch):
    step = shelf.adamw_step_blocks if form == "int8" else shelf.adamw_step
    found = []
    for borders in ((0, 1003), cuts):
        master, moments, grad = state_of(1003, form)
        for start, stop in zip(borders, borders[1:]):
            part, blocks = slice(start, stop), slice(start // 256, -(-stop // 256))
            own = [x[part] if x.size == 1003 else x[blocks] for x in moments]
            param = master[part].astype(BF16)
            step(master[part], *own, grad[part], param, step=3, seed=2**40, offset=start, **SETTINGS)
        found.append(b"".join(x.tobytes() for x in (master, *moments)))
        monkeypatch.setattr(shelf, "CHUNK", 256)  # chunks are no borders either
    assert found[0] == found[1]


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_seed_and_bucket_choose_the_noise(form):
    def after_two(seed):
        one = optimizer(np.float32, form, seed)
        for step in range(2):
            for parameter in one.parameters:
                parameter.grad_buffer()[...] = 0.3 + step
            one.step()
        return one.state_dict()

    first, again, other = after_two(5), after_two(5), after_two(6)
    assert_equal(again, first)
    assert first["layers.0.matrix.exp_avg"].tobytes() != other["layers.0.matrix.exp_avg"].tobytes()
    assert (
        first["norm.exp_avg"].tobytes() == other["norm.exp_avg"].tobytes() and first["norm.exp_avg"].dtype == np.float32
    )
    equal = [first[f"layers.{layer}.matrix.exp_avg"].reshape(-1)[:36] for layer in (0, 1)]
    assert equal[0].tobytes() != equal[1].tobytes()


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_noise_goes_by_the_place_in_the_layer(form):
    """Updated alone or in one launch with its neighbour, a matrix gets the same bits."""
    both, alone = (optimizer(BF16, form, max_grad_norm=0.0) for _ in range(2))
    for one in (both, alone):
        for step in range(3):
            for name, parameter in zip(SHAPES, one.parameters):
                if one is both or name == "layers.0.other":
                    parameter.grad_buffer()[...] = np.random.default_rng(step).normal(size=parameter.shape)
            one.step()
    states_of = [one.state_dict() for one in (both, alone)]
    for kind in ("exp_avg", "exp_avg_sq", "master"):
        first, second = (state[f"layers.0.other.{kind}"] for state in states_of)
        assert first.any() and first.tobytes() == second.tobytes(), kind


# ---- codes of 8 bits ----


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_a_bfloat16_and_comes_back(signed):
    codes = np.arange(256, dtype=np.uint8)
    for exponent in (34, 100, 127, 254):
        values = states.decode_blocks(codes, np.array([exponent], np.uint8), signed)
        assert np.isfinite(values).all() and (values.astype(BF16).astype(np.float32) == values).all()
        assert len(set(values.tolist())) == (255 if signed else 256)  # +0 and -0
        magnitude = np.abs(values[values != 0])
        assert magnitude.min() >= np.finfo(np.float32).tiny
        found, top = states.encode_blocks(values, signed)
        assert found.tobytes() == codes.tobytes() and top[0] == exponent
        for low in range(1, 6):  # a block whose largest number has gone
            kept = np.where(np.abs(values) < 2.0 ** (exponent - 127 - low), values, 0)
            back = states.decode_blocks(*states.encode_blocks(kept, signed), signed)
            np.testing.assert_array_equal(back, kept)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", [0, 1, 211, 256, 1003])
def test_codes_are_near_and_right_on_average(signed, size):
    rng = np.random.default_rng(size)
    x = rng.normal(size=size) * 10.0 ** rng.uniform(-4 if signed else -8, 2, size)
    x = (x if signed else np.abs(x)).astype(np.float32)
    codes, exponents = states.encode_blocks(x, signed)
    assert codes.dtype == exponents.dtype == np.uint8 and codes.size == size and exponents.size == -(-size // 256)
    quantum = np.repeat(2.0 ** (exponents.astype(float) - 127 - (17 if signed else 33)), 256)[:size]
    assert (np.abs(states.decode_blocks(codes, exponents, signed) - x) <= np.maximum(np.abs(x) / 16, quantum)).all()
    mean = np.zeros(size)
    for noise in range(2**15, 2**22, 2**16 // 64 + 2):
        mean += states.decode_blocks(*states.encode_blocks(x, signed, np.full(size, noise % 2**16, np.uint32)), signed)
    mean /= len(range(2**15, 2**22, 2**16 // 64 + 2))
    far = np.abs(x) > 2 * quantum
    assert (np.abs(mean - x)[far] <= 0.01 * np.abs(x)[far]).all()


def test_a_second_moment_above_zero_never_becomes_zero():
    x = np.zeros(256, np.float32)
    x[:4] = 1.0, 1e-20, 1e-37, 0.0
    for noise in (0, states.NEAREST, 0xFFFF):
        found = states.decode_blocks(*states.encode_blocks(x, False, np.full(256, noise, np.uint32)), False)
        assert found[0] == 1.0 and 0 < found[1] == found[2] < 1e-9 and not found[3:].any()
    lost = states.decode_blocks(*states.encode_blocks(-x, True), True)
    assert lost[0] == -1.0 and not lost[1:].any()


def test_largest_and_infinite_moments_stay_finite():
    x = np.array([3.4e38, np.inf, 1e30], np.float32)
    for signed in (True, False):
        assert np.isfinite(states.decode_blocks(*states.encode_blocks(x, signed), signed)).all()


def test_a_block_belongs_to_one_parameter_and_one_update():
    assert ALIGNMENT % states.BLOCK == 0
    master, moments, grad = state_of(256, "int8")
    with pytest.raises(AssertionError, match="a block"):
        shelf.adamw_step_blocks(master, *moments, grad, master, step=1, offset=8, **SETTINGS)


def test_a_slow_second_moment_is_followed():
    """β2 = 0.999 changes it by less than half a code a step: rounded to the nearest, it would stand still."""
    size, errors = 2560, {}
    for form in ("bfloat16", "int8"):
        rng = np.random.default_rng(3)
        scale = np.exp(rng.normal(size=size)).astype(np.float32)
        master, moments, _ = state_of(size, form)
        for array in moments:
            array[...] = 0
        exact = np.zeros(size)
        for step in range(1, 1001):
            grad = scale * rng.normal(size=size).astype(np.float32) * (4 if step > 500 else 1)
            exact += (grad.astype(float) ** 2 - exact) * 0.001
            settings = SETTINGS | {"beta2": 0.999, "grad_scale": 1.0, "step": step, "seed": 1}
            (shelf.adamw_step_blocks if form == "int8" else shelf.adamw_step)(
                master, *moments, grad, master, **settings
            )
        v = states.decode_blocks(moments[1], moments[3], False) if form == "int8" else moments[1].astype(np.float32)
        ratio = np.sqrt(v / exact)
        errors[form] = abs(ratio.mean() - 1), ratio.std()
    assert errors["bfloat16"][0] < 0.005 and errors["bfloat16"][1] < 0.03
    assert errors["int8"][0] < 0.02 and errors["int8"][1] < 0.15


# ---- the optimizer ----


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.float64])
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_lean_updates_are_near_float32s(form, dtype):
    lean, full = optimizer(dtype, form), optimizer(dtype)
    start = weights_of(full)
    for one in (lean, full):
        train(one, range(20))
    for name in start:
        moved, difference = (
            x[name].astype(float) - y[name].astype(float)
            for x, y in ((weights_of(full), start), (weights_of(lean), weights_of(full)))
        )
        assert np.sqrt((difference**2).mean()) < (0.2 if form == "int8" else 0.05) * np.sqrt((moved**2).mean()), name


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("form", OPTIMIZER_STATES)
def test_a_resumed_run_has_the_same_bits(form, dtype):
    straight, first, second = (optimizer(dtype, form) for _ in range(3))
    train(straight, range(9), bad=(4,))
    train(first, range(5), bad=(4,))
    for mine, theirs in zip(second.store.buckets, first.store.buckets):
        mine.data[...] = theirs.data
    second.load_state_dict({name: np.array(x) for name, x in first.state_dict().items()})
    train(second, range(5, 9))
    assert_equal(weights_of(second), weights_of(straight))
    assert_equal(second.state_dict(), straight.state_dict())


@pytest.mark.parametrize("written", OPTIMIZER_STATES)
@pytest.mark.parametrize("read", OPTIMIZER_STATES)
def test_a_checkpoint_of_one_form_resumes_in_another(written, read):
    """Exactly, if the form that reads has room for it; else rounded to the nearest. Masters are exact in any case."""
    first, second = optimizer(BF16, written), optimizer(BF16, read)
    train(first, range(4))
    state = {name: np.array(x) for name, x in first.state_dict().items()}
    assert {x.dtype for name, x in state.items() if name.endswith("matrix.exp_avg")} == {
        np.dtype(np.float32) if written == "float32" else BF16
    }
    second.load_state_dict(state)
    room = {"float32": 0, "bfloat16": 2**-8, "int8": 1 / 16}
    lost = room[read] if OPTIMIZER_STATES.index(read) > OPTIMIZER_STATES.index(written) else 0
    for name, found in second.state_dict().items():
        expected = state[name].astype(np.float64)
        if name.endswith(("master", "counters", "norm.exp_avg", "norm.exp_avg_sq")):
            np.testing.assert_array_equal(found, expected, err_msg=name)
        else:
            floor = 2.0**-16 * np.abs(expected).max() if read == "int8" and lost else 0
            assert (np.abs(found.astype(float) - expected) <= np.maximum(lost * np.abs(expected), floor)).all(), name
    assert_equal(weights_of(second), weights_of(first))  # the masters set them
    train(second, range(4, 6))
    assert second.step_count == 6


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("form", OPTIMIZER_STATES)
def test_states_take_the_bytes_that_are_planned(form, dtype):
    one = optimizer(dtype, form)
    masters = {"float32": 0, "float16": 4, "bfloat16": 2}[np.dtype(dtype).name]
    for bucket, state in one._states.items():
        lean = form if len(bucket.slots[0].parameter.shape) > 1 else "float32"
        held = {name: array.nbytes for name, array in state.arrays.items()}
        assert held.pop("master", 0) == masters * bucket.size
        assert sum(held.values()) == pytest.approx(states.MOMENT_BYTES[lean] * bucket.size, abs=2)


def test_forms_have_one_list():
    assert tuple(states.MOMENT_BYTES) == OPTIMIZER_STATES
    with pytest.raises(ValueError, match="optimizer_state 'int4' is not known: choose float32, bfloat16, int8"):
        optimizer(np.float32, "int4")
