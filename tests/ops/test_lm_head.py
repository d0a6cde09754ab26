"""A head's loss in one pass: the bits of two passes for every loss that is known token by token, and finite
differences. What it does where the gradient that comes back is not the one that it was told.
"""

import numpy as np
import pytest
from head_cases import (
    DTYPES,
    ROWS,
    VOCABULARY,
    WIDTH,
    Case,
    assert_same_bits,
    cross_entropy,
    random_policy_loss,
    random_ppo_loss,
    scale_for,
)

from cukit import ops
from cukit.autograd import Parameter, Tensor, no_grad
from cukit.backend import backend_for
from cukit.ops.policy_loss import needs_sequences

cpu = backend_for("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_policy_losses_have_the_bits_of_two_passes(dtype):
    """Random options, temperatures, vocabularies, chunks and scales."""
    scales, moved = [scale_for(dtype), 0.37], 0
    for seed in range(60):
        case = Case(seed, dtype, rows=int(np.random.default_rng(seed).integers(1, ROWS)))
        loss_of, settings = random_policy_loss(case)
        options = dict(temperature=[1.0, 0.7][seed % 2], vocab_size=[None, VOCABULARY - 3][seed // 2 % 2])
        options |= dict(chunk_rows=[3, 5, 4096][seed % 3])
        two, one = (case.run(loss_of, scales[seed % 2], one_pass, **options) for one_pass in (False, True))
        assert_same_bits(two, one, f"{seed} {settings} {options}")
        moved += not np.array_equal(two["dweight"], case.before)
    assert moved > 50


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_has_the_bits_of_two_passes(dtype):
    for seed, chunk in enumerate((1, 4, 23, 100)):
        case = Case(seed, dtype)
        loss_of = cross_entropy(case)
        results = [case.run(loss_of, scale_for(dtype), one_pass, chunk_rows=chunk) for one_pass in (False, True)]
        assert_same_bits(*results, chunk)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ppo_with_a_critic_on_the_same_states_has_the_bits_of_two_passes(dtype):
    """The value loss is taken on all tokens at once; both gradients meet in the hidden states."""
    for seed in range(12):
        case = Case(seed, dtype)
        with_values, values = random_ppo_loss(case, seed), case.array(case.rng.normal(size=(1, WIDTH)))
        two, one = (
            case.run(with_values, scale_for(dtype), one_pass, values=values, chunk_rows=5) for one_pass in (False, True)
        )
        assert_same_bits(two, one, seed)
        assert two["dvalues"].any()


def test_a_frozen_head_gets_no_gradient():
    case = Case(0, "float32")
    loss_of, _ = random_policy_loss(case)
    two, one = (case.run(loss_of, 1.0, one_pass, frozen=True, chunk_rows=5) for one_pass in (False, True))
    assert_same_bits(two, one, "frozen")
    assert one["dweight"] is None and one["dhidden"] is not None


@pytest.mark.parametrize("seed", range(8))
def test_the_gradient_is_that_of_finite_differences(seed):
    case = Case(seed, "float64")
    loss_of, settings = random_policy_loss(case)
    if settings["kind"] == "cispo":  # its factor is a constant, which a difference does not know
        loss_of = cross_entropy(case)
    upstream, step = np.array(1.7), 1e-6
    directions = [case.rng.normal(size=x.shape) for x in (case.hidden, case.weight)]

    def loss_at(shift):
        hidden = Tensor(case.hidden + shift * directions[0], requires_grad=True)
        weight = Parameter(case.weight + shift * directions[1])
        loss, *_ = ops.lm_head_loss(hidden, weight, case.targets, loss_of, upstream, 0.8, VOCABULARY - 3, 5)
        return loss, hidden, weight

    loss, hidden, weight = loss_at(0.0)
    loss.backward(upstream)
    slope = (hidden.grad * directions[0]).sum() + (weight.grad * directions[1]).sum()
    ends = [loss_at(shift)[0].item() for shift in (step, -step)]
    assert slope == pytest.approx(1.7 * (ends[0] - ends[1]) / (2 * step), rel=1e-7)


def products_of(monkeypatch, case, loss_of, one_pass):
    """How often the head is multiplied with all 23 rows."""
    counts, forward = [], cpu.linear_forward

    def counted(x, *more):
        counts.append(len(x))
        return forward(x, *more)

    monkeypatch.setattr(cpu, "linear_forward", counted)
    case.run(loss_of, 1.0, one_pass, chunk_rows=10)
    monkeypatch.undo()
    return sum(counts) / case.rows


def test_the_logits_are_made_once(monkeypatch):
    case = Case(1, "float32")
    loss_of = cross_entropy(case)
    assert products_of(monkeypatch, case, loss_of, False) == 2
    assert products_of(monkeypatch, case, loss_of, True) == 1


CHANGED = {
    "twice the loss": lambda loss, upstream: (loss * 2.0).backward(upstream),
    "the loss twice": lambda loss, upstream: (loss + loss).backward(upstream),
    "an equal array": lambda loss, upstream: loss.backward(upstream.copy()),
    "no array": lambda loss, upstream: loss.backward(),
}


@pytest.mark.parametrize("name", CHANGED)
def test_another_gradient_than_it_was_told_is_refused(name):
    case = Case(2, "float64")
    upstream = np.array(1.0)
    given = (Tensor(case.hidden, requires_grad=True), Parameter(case.weight), case.targets, cross_entropy(case))
    loss, *_ = ops.lm_head_loss(*given, upstream)
    with pytest.raises(ValueError, match="has its gradient already: give backward"):
        CHANGED[name](loss, upstream)


def test_what_is_added_to_the_loss_costs_no_second_pass():
    case = Case(4, "float32")
    loss_of, other = cross_entropy(case), Tensor(np.float32(3.0), requires_grad=True)
    hidden, weight, upstream = (
        Tensor(case.hidden, requires_grad=True),
        Parameter(case.weight),
        np.array(1.0, np.float32),
    )
    loss, *_ = ops.lm_head_loss(hidden, weight, case.targets, loss_of, upstream)
    weight.data[...] = np.nan  # a second pass would read it
    (other * other + loss).backward(upstream)
    assert np.isfinite(hidden.grad).all() and other.grad == 6


def test_a_loss_that_is_not_finite_spoils_every_gradient():
    case = Case(5, "bfloat16")
    hidden, weight, upstream = (
        Tensor(case.hidden, requires_grad=True),
        Parameter(case.weight),
        np.array(1.0, np.float32),
    )
    loss, *_ = ops.lm_head_loss(hidden, weight, case.targets, cross_entropy(case), upstream)
    upstream[...] = np.nan
    loss.backward(upstream)
    assert np.isnan(hidden.grad).all() and hidden.grad.dtype == case.dtype


def test_without_the_tape_there_is_no_gradient():
    case = Case(6, "float32")
    weight, upstream = Parameter(case.weight), np.array(1.0, np.float32)
    with no_grad():
        hidden = Tensor(case.hidden, requires_grad=True)
        found = ops.lm_head_loss(hidden, weight, case.targets, cross_entropy(case), upstream, chunk_rows=5)
    assert weight.grad is None and not found[0].requires_grad
    again = Case(6, "float32")
    assert again.run(cross_entropy(again), 1.0, False, chunk_rows=5)["loss"] == found[0].data


def test_on_logits_sees_each_chunk_before_it_is_overwritten():
    case = Case(7, "float32")
    expected = case.hidden @ case.weight.T
    for upstream in (None, np.array(1.0, np.float32)):
        seen = np.zeros_like(expected)
        ops.lm_head_loss(
            Tensor(case.hidden, requires_grad=True),
            Parameter(case.weight),
            case.targets,
            cross_entropy(case),
            upstream,
            chunk_rows=5,
            on_logits=lambda logits, rows, seen=seen: seen.__setitem__(rows, logits),
        )
        np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_may_take_the_place_of_the_logits(dtype, with_entropy):
    case = Case(8, dtype)
    logits = (case.hidden @ case.weight.T).astype(case.dtype)
    logprobs, entropy, lse = cpu.token_logprobs_forward(logits, case.targets, 0.7, VOCABULARY - 3)
    given = case.targets, lse, entropy, case.column(), case.column() if with_entropy else None, 0.7, VOCABULARY - 3
    apart = cpu.token_logprobs_backward(logits, *given)
    assert cpu.token_logprobs_backward(logits, *given, out=logits) is logits
    assert logits.tobytes() == apart.tobytes() and not apart[:, VOCABULARY - 3 :].any()


def test_which_losses_need_whole_sequences():
    """A token's gradient depends on another token's log-probability exactly where needs_sequences says so."""
    new, old, count = np.linspace(-3, -1, 6), np.linspace(-2.5, -1.2, 6), 0
    advantages, weights, borders = np.array([1, 1, 1, -1, -1, -1.0]), np.full(6, 0.2), np.array([0, 3, 6], np.int32)
    for kind in ("clip", "cispo", "sapo", "vespo"):
        for level in ("token", "sequence", "sequence_token"):
            for threshold in (None, 0.01):
                grads = []
                for shift in (0.0, 0.3):
                    leaf = Tensor(new.copy(), requires_grad=True)
                    leaf.data[[2, 5]] += shift
                    coefficients = {"sapo": (1.0, 1.05), "vespo": (2.0, 3.0, 3.0, 2.0)}.get(kind, ())
                    loss, _ = ops.policy_loss(
                        leaf, old, None, advantages, weights, kind=kind, level=level, cu_seqlens=borders, eps_low=9.0,
                        eps_high=9.0, coefficients=coefficients, off_policy_threshold=threshold, sampled=new + 0.1,
                    )  # fmt: skip
                    loss.backward()
                    grads.append(leaf.grad[[0, 1, 3, 4]])
                moved = not np.array_equal(*grads)
                count += moved
                if moved:
                    assert needs_sequences(kind, level, threshold), (kind, level, threshold)
    assert count > 8 and not needs_sequences("clip", "token", None)


@pytest.mark.parametrize("reads", ["log-probabilities", "entropy alone"])
@pytest.mark.parametrize("temperature, vocab_size", [(1.0, None), (0.6, VOCABULARY - 3)])
def test_it_is_the_loss_on_the_whole_logits(temperature, vocab_size, reads):
    case = Case(9, "float64")
    loss_of = cross_entropy(case)
    if reads == "entropy alone":
        loss_of = lambda logprobs, entropy, rows: (entropy.sum() * 0.3, None)  # noqa: E731
    hidden, weight = Parameter(case.hidden.copy()), Parameter(case.weight.copy())
    logprobs, entropy = ops.token_logprobs(ops.linear(hidden, weight), case.targets, temperature, vocab_size)
    loss, _ = loss_of(logprobs, entropy, None)
    loss.backward(np.array(2.0))
    options = dict(temperature=temperature, vocab_size=vocab_size, chunk_rows=5)
    found = case.run(loss_of, 2.0, True, **options)
    expected = {"loss": loss.data, "logprobs": logprobs.data, "entropy": entropy.data, "dhidden": hidden.grad}
    for name, value in (expected | {"dweight": case.before + weight.grad}).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-14, err_msg=name)
