"""AdamW, clipping, loss scaling and schedules, against the formulas written out in float64."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cukit.autograd import Parameter
from cukit.backend import backend_for
from cukit.backend.numpy import optimizer as shelf
from cukit.models.store import Store
from cukit.models.weights import load_model
from cukit.optim import GROWTH_INTERVAL, AdamW
from cukit.trainers.schedule import learning_rate_factor

GOLDEN = Path(__file__).parents[1] / "golden"
HYPER = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)


def parameters(dtype, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Parameter(rng.normal(size=shape).astype(dtype), name) for name, shape in (("matrix", (5, 7)), ("norm", (7,)))
    ]


def adamw(params, **settings):
    return AdamW(Store(backend_for("cpu"), {parameter.name: parameter for parameter in params}), **settings)


def gradients(step):
    rng = np.random.default_rng(100 + step)
    return [rng.normal(size=(5, 7)), rng.normal(size=(7,))]


def reference(weights, num_steps):
    """The same updates in plain float64."""
    weights = [w.astype(np.float64) for w in weights]
    m, v = [0 * w for w in weights], [0 * w for w in weights]
    norms = []
    for step in range(1, num_steps + 1):
        grads = gradients(step)
        norms.append(math.sqrt(sum((g * g).sum() for g in grads)))
        factor = min(1, 1 / (norms[-1] + 1e-6))
        for i, grad in enumerate(grads):
            g = grad * factor
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.95 * v[i] + 0.05 * g * g
            weights[i] = weights[i] * (1 - 1e-2 * (0.1 if i == 0 else 0.0))
            weights[i] = weights[i] - 1e-2 * (m[i] / (1 - 0.9**step)) / (np.sqrt(v[i] / (1 - 0.95**step)) + 1e-8)
    return weights, norms


def train(params, optimizer, steps):
    norms = []
    for step in steps:
        for parameter, grad in zip(params, gradients(step), strict=True):
            buffer = parameter.grad_buffer()
            buffer += grad * optimizer.loss_scale
        norms.append(optimizer.step()[0])
    return norms


@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-14), (np.float32, 2e-6)])
def test_against_the_formula(dtype, tolerance):
    params = parameters(dtype)
    expected, expected_norms = reference([p.data for p in params], 5)
    norms = train(params, adamw(params, **HYPER), range(1, 6))
    np.testing.assert_allclose(norms, expected_norms, rtol=10 * tolerance)
    for parameter, value in zip(params, expected, strict=True):
        np.testing.assert_allclose(parameter.data, value, rtol=0, atol=tolerance)
        assert parameter.dtype == dtype and parameter.grad is None


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_types_have_float32_masters(dtype):
    """Updates far below a half type's resolution add up in the master: the parameter is the master, rounded."""
    params = parameters(dtype)
    expected, _ = reference([p.data.astype(np.float32) for p in params], 5)
    optimizer = adamw(params, **HYPER)
    train(params, optimizer, range(1, 6))
    for parameter, value in zip(params, expected, strict=True):
        master = optimizer.state_dict()[f"{parameter.name}.master"]
        np.testing.assert_allclose(master, value, rtol=0, atol=2e-6)
        rounded = np.empty_like(parameter.data)
        shelf.store_weights(rounded, master)
        np.testing.assert_array_equal(parameter.data, rounded)


def test_a_long_array_is_worked_on_in_pieces(monkeypatch):
    whole, pieces = parameters(np.float32), parameters(np.float32)
    train(whole, adamw(whole, **HYPER), range(1, 4))
    monkeypatch.setattr(shelf, "CHUNK", 3)
    train(pieces, adamw(pieces, **HYPER), range(1, 4))
    np.testing.assert_allclose(pieces[0].data, whole[0].data, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_gradients_are_skipped(bad):
    params = parameters(np.float32)
    optimizer = adamw(params, **HYPER)
    train(params, optimizer, [1])
    before = [p.data.copy() for p in params] + [x.copy() for x in optimizer.state_dict().values()]
    params[0].grad_buffer()[0, 0] = bad
    norm, applied = optimizer.step()
    after = [p.data for p in params] + list(optimizer.state_dict().values())
    assert not applied and not math.isfinite(norm) and optimizer.skipped == 1 and optimizer.step_count == 1
    for index, (x, y) in enumerate(zip(before, after, strict=True)):
        if index != 2:  # the counters
            np.testing.assert_array_equal(x, y)


def test_loss_scale_of_float16():
    params = parameters(np.float16)
    optimizer = adamw(params, **HYPER)
    assert optimizer.loss_scale == 2**16
    params[0].grad_buffer()[0, 0] = np.inf
    optimizer.step()
    assert optimizer.loss_scale == 2**15
    train(params, optimizer, range(GROWTH_INTERVAL))
    assert optimizer.loss_scale == 2**16
    assert adamw(parameters(np.float32)).loss_scale == 1


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_state_goes_round(dtype):
    """5 updates = 3, state saved and loaded into a fresh optimizer, 2 more: equal bits."""
    straight, first, second = (parameters(dtype) for _ in range(3))
    train(straight, adamw(straight, **HYPER), range(1, 6))
    optimizer = adamw(first, **HYPER)
    train(first, optimizer, range(1, 4))
    for parameter, other in zip(second, first, strict=True):
        parameter.data[...] = other.data
    resumed = adamw(second, **HYPER)
    resumed.load_state_dict({name: np.array(x) for name, x in optimizer.state_dict().items()})
    train(second, resumed, range(4, 6))
    for x, y in zip(straight, second, strict=True):
        np.testing.assert_array_equal(x.data, y.data)


def test_a_foreign_state_is_refused():
    optimizer = adamw(parameters(np.float32))
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="missing .*; resume with the model, dtype and use_peft of the run"):
        optimizer.load_state_dict({})
    with pytest.raises(ValueError, match=r"matrix.exp_avg has shape \(2,\)"):
        optimizer.load_state_dict(state | {"matrix.exp_avg": np.zeros(2)})


# ---- states of checkpoints ----


def test_states_go_by_part_names():
    """Free of the layout: the names and shapes of a checkpoint's tensors, whole parameters of older states read too."""
    models = [load_model(GOLDEN / "qwen2_tiny", dtype="bfloat16") for _ in range(2)]
    optimizers = [AdamW(model.store, **HYPER) for model in models]
    rng = np.random.default_rng(0)
    for parameter in models[0].parameters():
        buffer = parameter.grad_buffer()
        buffer += rng.normal(size=parameter.shape)
    optimizers[0].step()
    state = {name: np.array(value) for name, value in optimizers[0].state_dict().items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        shapes = {name.removesuffix(f".{kind}"): x.shape for name, x in state.items() if name.endswith(f".{kind}")}
        assert shapes == {name: part.shape for name, part in models[0].parts().items()}
    assert "model.layers.0.self_attn.k_proj.weight.master" in state and "model.norm.weight.master" not in state
    old = {"optimizer.counters": state["optimizer.counters"]}
    for name, parameter in models[0].named_parameters().items():
        names = [part for part, (owner, _) in models[0].store.parts.items() if owner is parameter]
        for kind in ("exp_avg", "exp_avg_sq", "master"):
            if f"{names[0]}.{kind}" in state:
                old[f"{name}.{kind}"] = np.concatenate([state[f"{part}.{kind}"] for part in names])
    assert "layers.0.self_attn.qkv_proj.bias.exp_avg" in old and old.keys() & state.keys() == {"optimizer.counters"}
    for given in (state, old):
        optimizers[1].step_count = 0
        optimizers[1].load_state_dict(given)
        assert optimizers[1].step_count == 1
        for name, value in optimizers[1].state_dict().items():
            np.testing.assert_array_equal(value, state[name], err_msg=name)
        for array in list(optimizers[1].state_dict().values())[1:]:
            array[...] = 0
    wrong = "layers.0.self_attn.qkv_proj.weight.exp_avg"
    with pytest.raises(ValueError, match=rf"{wrong} has shape \(999, 48\), this model needs"):
        optimizers[1].load_state_dict(old | {wrong: np.zeros((999, 48), np.float32)})


# ---- nothing to learn ----


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_e5_without_a_gradient_nothing_changes(dtype):
    params = parameters(dtype)
    optimizer = adamw(params, **HYPER)
    train(params, optimizer, [1, 2])
    before = [x.data.copy() for x in params] + [np.array(x) for x in optimizer.state_dict().values()]
    assert optimizer.step(1e-2) == (0.0, False)
    after = [x.data for x in params] + list(optimizer.state_dict().values())
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x, y)
    assert (optimizer.step_count, optimizer.skipped) == (2, 0)


def test_e5_one_parameter_without_a_gradient_stays():
    params = parameters(np.float32)
    optimizer = adamw(params, **HYPER)
    before = params[0].data.copy()
    params[1].grad_buffer()[...] = 1
    assert optimizer.step()[1] and np.array_equal(params[0].data, before)
    assert not optimizer.state_dict()["matrix.exp_avg"].any() and optimizer.state_dict()["norm.exp_avg"].all()


# ---- how float32 becomes bfloat16 ----

HIGH = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3FFF, 0x42AA, 0x7EFF, 0x7F7E]


def rounded(bits):
    """(weight's bits, float32 bits) for every low half under the high half `bits`."""
    wide = (np.uint32(bits) << np.uint32(16)) + np.arange(2**16, dtype=np.uint32)
    out = np.empty(2**16, ml_dtypes.bfloat16)
    shelf.store_weights(out, wide.view(np.float32))
    return out.view(np.uint16).astype(np.int64), wide.astype(np.int64)


@pytest.mark.parametrize("sign", [0, 0x8000])
@pytest.mark.parametrize("high", HIGH)
def test_a_master_is_its_weight_plus_a_signed_remainder(high, sign):
    weight, wide = rounded(high | sign)
    remainder = wide - (weight << 16)
    assert remainder.min() == -(2**15) and remainder.max() == 2**15 - 1
    np.testing.assert_array_equal(remainder, wide.astype(np.uint32).astype(np.uint16).view(np.int16))
    # nearest, halves away from zero
    np.testing.assert_array_equal(weight, (high | sign) + (wide % 2**16 >= 2**15))


@pytest.mark.parametrize("sign", [0, 0x8000])
def test_rounding_makes_nothing_infinite_and_keeps_what_is_not_finite(sign):
    weight, _ = rounded(0x7F7F | sign)
    assert (weight == 0x7F7F | sign).all()  # the largest finite bfloat16, whatever the low half
    weight, _ = rounded(0x7F80 | sign)
    assert weight[0] == 0x7F80 | sign
    for nan in (weight[1:], *(rounded(high | sign)[0] for high in (0x7F81, 0x7FBF, 0x7FC0, 0x7FFF))):
        assert ((nan & 0x7FFF) > 0x7F80).all() and ((nan & 0x8000) == sign).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_other_dtypes_are_rounded_to_even(dtype):
    values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 / 3, -1 - 2**-11])
    out = np.empty(4, dtype)
    shelf.store_weights(out, values)
    np.testing.assert_array_equal(out, values.astype(dtype))


# ---- sums over pieces ----


@pytest.mark.parametrize("piece", [0, 1, 3, 8, 776, 4096])
def test_pieces_of_ranks_have_the_bits_of_the_whole(piece):
    pieces, rng = 2520, np.random.default_rng(piece)
    arrays = [(rng.normal(size=pieces * piece) * 10.0 ** rng.integers(-3, 4)).astype(np.float32) for _ in range(2)]
    sums = shelf.sums_of_squares(arrays, pieces)
    assert sums.dtype == np.float64 and sums.shape == (2, pieces)
    np.testing.assert_allclose(sums[1], (arrays[1].astype(float) ** 2).reshape(pieces, -1).sum(1), rtol=1e-13)
    assert shelf.sum_in_order(sums) == pytest.approx(sums.sum(), rel=1e-13)
    for ranks in (2, 3, 7, 9, 12):
        size = pieces * piece // ranks
        shards = [
            shelf.sums_of_squares([x[rank * size : (rank + 1) * size] for x in arrays], pieces // ranks)
            for rank in range(ranks)
        ]
        gathered = np.concatenate(shards, axis=1)
        assert gathered.tobytes() == sums.tobytes() and shelf.sum_in_order(gathered) == shelf.sum_in_order(sums)


def test_a_shards_update_has_the_bits_of_the_whole():
    """Two ranks, each with its pieces of every bucket, against one."""
    model = load_model(GOLDEN / "qwen3_tiny", dtype="bfloat16")
    be, rng = model.backend, np.random.default_rng(3)
    for bucket in model.store.buckets:
        whole = [bucket.data.copy(), bucket.data.astype(np.float32), *rng.random((3, bucket.size), np.float32)]
        parts = [x.copy() for x in whole]
        for ranks, arrays in ((1, whole), (3, parts)):
            for rank in range(ranks):
                data, master, m, v, grad = (x[bucket.shard(rank, ranks)] for x in arrays)
                be.adamw_step(master, m, v, grad, data, 1e-3, 0.9, 0.95, 1e-8, 0.1, 3, 0.5)
        for x, y in zip(whole, parts, strict=True):
            assert x.tobytes() == y.tobytes()


def test_schedules():
    def curve(name):
        return [learning_rate_factor(name, step, 10, 4) for step in range(10)]

    warm_up = [0.25, 0.5, 0.75, 1.0]
    assert curve("constant") == [1.0] * 10
    assert curve("constant_with_warmup") == warm_up + [1.0] * 6
    np.testing.assert_allclose(curve("linear"), warm_up + [1 - k / 6 for k in range(6)])
    np.testing.assert_allclose(curve("cosine"), warm_up + [0.5 + 0.5 * math.cos(math.pi * k / 6) for k in range(6)])
    assert learning_rate_factor("linear", 0, 10) == 1.0
    with pytest.raises(ValueError, match="lr_scheduler_type 'poly'"):
        learning_rate_factor("poly", 5, 10)
