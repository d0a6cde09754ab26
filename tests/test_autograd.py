"""The tape: what is kept, remade or computed again, what is freed, and that threads record apart."""

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from check import normal

from cukit import ops
from cukit.autograd import Parameter, Remade, Tensor, no_grad, on_the_way_back, recompute, remaking
from cukit.models.config import LEVELS
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
    plain, *others = (gradients(name, level, frozen) for level in LEVELS)
    for parameter, value in free.items():
        for again in others:
            if frozen(parameter):
                assert plain[parameter] is None and again[parameter] is None
            else:
                np.testing.assert_array_equal(again[parameter], plain[parameter], err_msg=parameter)
                np.testing.assert_array_equal(again[parameter], value, err_msg=parameter)


@pytest.mark.parametrize("checkpointing", LEVELS)
def test_e3_where_everything_is_frozen_there_is_no_graph(checkpointing):
    assert gradients("qwen3_tiny", checkpointing, lambda name: True) is None


def test_recomputation_without_a_trained_input_or_output():
    """An output that depends on nothing trained may share a call with one that does."""
    w, x = Parameter(normal(4, 4)), Tensor(normal(3, 4))
    trained, constant = recompute(lambda x: (ops.linear(x, w), x * 2.0), [w], x)
    (trained * constant).sum().backward()
    expected = np.einsum("tj,ti->ji", 2 * x.data, x.data)
    np.testing.assert_allclose(w.grad, expected)


def watched_matrices(backend, monkeypatch) -> list[weakref.ref]:
    """Weak references to every matrix that the forward functions of a backend give from now on."""
    made = []
    for name in backend.__all__:
        if name.endswith("_forward"):
            monkeypatch.setattr(backend, name, _watched(getattr(backend, name), made))
    return made


def test_an_input_that_is_remade_is_not_kept(monkeypatch):
    w, x, norm = Parameter(1 + normal(6, 6)), Parameter(normal(3, 6, seed=1)), Parameter(1 + normal(6))

    def function(h, residual):
        return ops.linear(h, w), residual * residual

    def run(recomputed):
        for parameter in (w, x, norm):
            parameter.zero_grad()
        with monkeypatch.context() as patch, remaking(recomputed):
            made = watched_matrices(x.backend, patch)
            residual = x * 1.0
            h = ops.rms_norm(residual, norm)
            first, second = recompute(function, [w], h, residual) if recomputed else function(h, residual)
            del h
            gc.collect()
            kept = made[0]() is not None
            ((first * first).sum() + second.sum()).backward()
        return kept, *(parameter.grad.copy() for parameter in (w, x, norm))

    plain, recomputed = run(False), run(True)
    assert plain[0] and not recomputed[0]
    for a, b in zip(plain[1:], recomputed[1:]):
        np.testing.assert_array_equal(a, b)


def test_what_waits_for_a_remade_array_gets_it_once_and_in_order():
    """Two products of one norm, one of silu's output, and a product of what a recomputed function gives."""
    w, v, x = Parameter(normal(8, 4)), Parameter(normal(3, 4, seed=1)), Parameter(normal(5, 4, seed=2))
    norm, down = Parameter(1 + normal(4)), Parameter(normal(4, 4, seed=3))

    def run(on):
        for parameter in (w, v, x, norm, down):
            parameter.zero_grad()
        with remaking(on):
            h = ops.rms_norm(x * 1.0, norm)
            y = ops.linear(ops.silu_mul(ops.linear(h, w)), down)
            (again,) = recompute(lambda h: (ops.silu_mul(ops.linear(h, w)),), [w], ops.rms_norm(y, norm))
            ((ops.linear(h, v) * 2.0).sum() + (ops.linear(again, down) * y).sum()).backward()
        return [parameter.grad for parameter in (w, v, x, norm, down)]

    for kept, remade in zip(run(False), run(True)):
        assert kept.any() and kept.tobytes() == remade.tobytes()


@pytest.mark.parametrize("on", [False, True])
def test_a_call_on_the_way_back(on):
    """Between the rules of what comes after and before, once; what is remade stays so."""
    calls, x, w = [], Parameter(normal(3, 4)), Parameter(np.ones(4))
    with remaking(on):
        y = ops.rms_norm(x, w)
        z = on_the_way_back(y, lambda: calls.append(w.grad is None))
    assert z.data is y.data and isinstance(z.saved, Remade) == on
    z.backward(np.ones_like(z.data))
    assert calls == [True] and w.grad is not None and x.grad is not None
    with no_grad():
        assert not on_the_way_back(x, calls.clear).requires_grad and calls


def test_remaking_ends_with_its_block_and_is_a_threads_own():
    x = Parameter(normal(3, 4))

    def is_kept():
        return ops.rms_norm(x * 1.0, Parameter(normal(4))).saved.__class__.__name__ == "Kept"

    with remaking(True):
        seen = [is_kept()]
        thread = threading.Thread(target=lambda: seen.append(is_kept()))
        thread.start(), thread.join()
        with no_grad():
            seen.append(is_kept())
        with pytest.raises(ZeroDivisionError), remaking(False):
            seen.append(is_kept())
            raise ZeroDivisionError
        seen.append(is_kept())
    assert [*seen, is_kept()] == [False, True, True, True, False, True]


def test_levels_keep_what_they_say(monkeypatch):
    """Matrices that stay alive after the forward pass, beside the embedding's output and the result."""
    model = load_model(GOLDEN / "qwen3_tiny")
    num_tokens, alive, hidden_size = 17, {}, model.config.hidden_size
    made = watched_matrices(model.backend, monkeypatch)
    for level in LEVELS:
        model.gradient_checkpointing = level
        made.clear()
        hidden = model.forward(*pack(model, [list(range(num_tokens))]))
        gc.collect()
        alive[level] = [ref() for ref in made if ref() is not None]
        assert hidden.requires_grad
        del hidden
    layers = model.config.num_hidden_layers
    # the residual stream before each layer and before the last norm
    assert [x.shape for x in alive["full"]] == [(num_tokens, hidden_size)] * (1 + layers + 1)
    # for each layer qkv, attention, gate and up, two sums
    assert len(alive["selective"]) == 1 + 5 * layers + 1
    # for each layer also two norms, roped qkv, silu's output
    assert len(alive["none"]) == 1 + 9 * layers + 1


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
