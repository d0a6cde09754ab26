"""AdamW, clipping, loss scaling and schedules, against the formulas written out in float64."""

import math

import ml_dtypes
import numpy as np
import pytest

from cukit.autograd import Parameter
from cukit.backend import backend_for
from cukit.backend.numpy import optimizer as shelf
from cukit.models.store import Store
from cukit.optim import GROWTH_INTERVAL, AdamW, learning_rate_factor

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
    with pytest.raises(ValueError, match="missing"):
        optimizer.load_state_dict({})
    with pytest.raises(ValueError, match=r"matrix.exp_avg has shape \(2,\)"):
        optimizer.load_state_dict(state | {"matrix.exp_avg": np.zeros(2)})


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
