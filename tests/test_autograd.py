"""The tape: what recomputation records and keeps, what is freed, and that threads record apart."""

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from check import normal

from cukit import ops
from cukit.autograd import Parameter, Tensor, no_grad, recompute
from cukit.models.logprobs import pack, target_logprobs
from cukit.models.weights import load_model

GOLDEN = Path(__file__).parent / "golden"
ROWS = [[5, 9, 100, 7, 3], [8, 1, 2]]


def gradients(name, checkpointing, frozen=lambda name: False):
    """Parameter name -> gradient (None where there is none) of a loss over ROWS; None instead if there is no graph."""
    model = load_model(GOLDEN / name, dtype="float64")
    model.gradient_checkpointing = checkpointing
    for parameter in model.parameters():
        parameter.requires_grad = not frozen(parameter.name)
    logprobs, _ = target_logprobs(model, ROWS, [np.arange(len(row)) > 0 for row in ROWS])
    if not logprobs.requires_grad:
        return None
    (logprobs * logprobs).sum().backward()
    return {parameter.name: parameter.grad for parameter in model.parameters()}


FREEZES = {
    "the embedding": lambda name: name == "embed_tokens.weight",
    "the first layer": lambda name: name.startswith(("embed_tokens", "layers.0")),
    "all layers": lambda name: name.startswith(("embed_tokens", "layers")),
    "all but norms": lambda name: "norm" not in name,
    "all but one attention": lambda name: not name.startswith("layers.1.self_attn"),
    "all but the first norm": lambda name: name != "layers.0.input_layernorm.weight",
    "all but one head norm": lambda name: name != "layers.1.self_attn.k_norm.weight",
    "one head norm": lambda name: name == "layers.0.self_attn.k_norm.weight",
    "one norm": lambda name: name == "layers.1.post_attention_layernorm.weight",
}


@pytest.mark.parametrize(
    "name, frozen",
    [("qwen3_tiny", case) for case in FREEZES.values()] + [("qwen2_tiny", FREEZES[case]) for case in list(FREEZES)[:6]],
)
def test_e3_frozen_parameters_take_no_gradient_from_others(name, frozen):
    """Recomputation loses no gradient, whatever is frozen: the bits are those without it, and without freezing."""
    free = gradients(name, False)
    plain, again = (gradients(name, checkpointing, frozen) for checkpointing in (False, True))
    for parameter, value in free.items():
        if frozen(parameter):
            assert plain[parameter] is None and again[parameter] is None
        else:
            np.testing.assert_array_equal(again[parameter], plain[parameter], err_msg=parameter)
            np.testing.assert_array_equal(again[parameter], value, err_msg=parameter)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_e3_where_everything_is_frozen_there_is_no_graph(checkpointing):
    assert gradients("qwen3_tiny", checkpointing, lambda name: True) is None


def test_recomputation_without_a_trained_input_or_output():
    """An output that depends on nothing trained may share a call with one that does."""
    w, x = Parameter(normal(4, 4)), Tensor(normal(3, 4))
    trained, constant = recompute(lambda x: (ops.linear(x, w), x * 2.0), [w], x)
    (trained * constant).sum().backward()
    expected = np.einsum("tj,ti->ji", 2 * x.data, x.data)
    np.testing.assert_allclose(w.grad, expected)


def test_a_first_input_that_comes_from_the_others_is_not_kept():
    w, x = Parameter(1 + normal(4, 4)), Parameter(normal(3, 4, seed=1))
    calls = []

    def again(array):
        calls.append(array)
        return array * 2.0

    def function(a, b):
        return ops.linear(a, w), b * b

    def run(recomputed):
        w.zero_grad(), x.zero_grad()
        residual = x * 1.0
        doubled = residual * 2.0
        kept = weakref.ref(doubled.data)
        if recomputed:
            first, second = recompute(function, [w], doubled, residual, first=again)
        else:
            first, second = function(doubled, residual)
        del doubled
        gc.collect()
        alive = kept() is not None
        ((first * first).sum() + second.sum()).backward()
        return alive, w.grad.copy(), x.grad.copy()

    plain, recomputed = run(False), run(True)
    assert plain[0] and not recomputed[0] and len(calls) == 1
    for a, b in zip(plain[1:], recomputed[1:]):
        np.testing.assert_array_equal(a, b)


def test_recomputation_keeps_one_tensor_a_layer(monkeypatch):
    """Matrices that stay alive after the forward pass: the residual stream before each layer and before the last norm,
    and the result.
    """
    model = load_model(GOLDEN / "qwen3_tiny")
    made, num_tokens = [], 17
    for name in model.backend.__all__:
        if name.endswith("_forward"):
            monkeypatch.setattr(model.backend, name, _watched(getattr(model.backend, name), made))
    alive = {}
    for model.gradient_checkpointing in (False, True):
        made.clear()
        hidden = model.forward(*pack(model, [list(range(num_tokens))]))
        gc.collect()
        alive[model.gradient_checkpointing] = [ref() for ref in made if ref() is not None]
        assert hidden.requires_grad
        del hidden
    layers = model.config.num_hidden_layers
    assert [x.shape for x in alive[True]] == [(num_tokens, model.config.hidden_size)] * (1 + layers + 1)
    # without: for each layer two norms, qkv, roped qkv, attention, gate and up, their product, two sums
    assert len(alive[False]) == 1 + 9 * layers + 1


def _watched(function, made):
    """The function, with a weak reference to every matrix that it gives."""

    def call(*args):
        outputs = function(*args)
        for x in outputs if isinstance(outputs, tuple) else (outputs,):
            if x.ndim == 2 and x.shape[1] > 4:  # no statistics, of which there is one a row or a head
                made.append(weakref.ref(x))
        return outputs

    return call


def test_threads_record_apart():
    w, entered, leave = Parameter(np.ones(3)), threading.Event(), threading.Event()
    seen = []

    def other():
        with no_grad():
            entered.set()
            leave.wait(10)
            seen.append((w * 2.0).requires_grad)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    seen.append((w * 2.0).requires_grad)
    leave.set()
    thread.join()
    seen.append((w * 2.0).requires_grad)
    assert seen == [True, False, True]


def test_what_no_rule_needs_is_freed():
    """The inputs of a residual addition: its rule keeps their sum alone."""
    x, r, w = Parameter(normal(5, 4)), Parameter(normal(5, 4, seed=1)), Parameter(normal(4))
    a, b = x * 2.0, r * 3.0
    refs = [weakref.ref(t.data) for t in (a, b)]
    y, _ = ops.add_rms_norm(a, b, w)
    del a, b
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    y.sum().backward()
    assert x.grad is not None and r.grad is not None
