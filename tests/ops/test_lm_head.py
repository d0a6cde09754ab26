"""A head's loss in one pass: the bits of two passes for every loss that is known token by token, and finite
differences. What it does where the gradient that comes back is not the one that it was told.
"""

import numpy as np
import pytest

from cukit import ops
from cukit.autograd import Parameter, Tensor, no_grad
from cukit.backend import backend_for
from cukit.ops.policy_loss import MAX_LOG_RATIO, needs_sequences

cpu = backend_for("cpu")
ROWS, WIDTH, VOCABULARY = 23, 8, 41
DTYPES = ["float32", "bfloat16", "float16", "float64"]


class Case:
    """Hidden states, a weight, targets, and columns of the tokens, all random; a loss by its settings."""

    def __init__(self, seed, dtype, rows=ROWS):
        rng = self.rng = np.random.default_rng([seed, rows])
        self.dtype = cpu.dtype_of(dtype)
        self.precise = cpu.accumulator(self.dtype)
        self.hidden = (0.4 * rng.normal(size=(rows, WIDTH))).astype(self.dtype)
        self.weight = rng.normal(size=(VOCABULARY, WIDTH)).astype(self.dtype)
        self.before = rng.normal(size=(VOCABULARY, WIDTH)).astype(self.precise)  # gradient of other passes
        self.targets = rng.integers(0, VOCABULARY - 3, rows).astype(np.int32)
        self.rows = rows

    def column(self, around=0.0, size=1.0):
        return (around + size * self.rng.normal(size=self.rows)).astype(self.precise)

    def run(self, loss_of, scale, one_pass, values=None, frozen=False, **settings):
        """Everything that a run gives, as bytes by name."""
        hidden, weight = Tensor(self.hidden.copy(), requires_grad=True), Parameter(self.weight.copy())
        weight.requires_grad = not frozen
        if not frozen:
            weight.grad = self.before.copy()
        states, leaf = hidden * 1, None  # made by an op, as a decoder's are
        upstream = np.array(scale, self.precise)
        if values is not None:
            leaf = Parameter(values.copy())
            loss_of = loss_of(ops.score(states, leaf))
        given = (states, weight, self.targets, loss_of, upstream if one_pass else None)
        loss, more, logprobs, entropy = ops.lm_head_loss(*given, **settings)
        loss.backward(upstream)
        assert np.isfinite(hidden.grad.astype(np.float64)).all()
        found = {"loss": loss.data, "stats": more, "logprobs": logprobs, "entropy": entropy}
        found |= {"dhidden": hidden.grad, "dweight": weight.grad, "dvalues": None if leaf is None else leaf.grad}
        return {
            name: None if x is None else (np.asarray(x).dtype, np.asarray(x).tobytes()) for name, x in found.items()
        }


def part_of(column, rows):
    return column if column is None or rows is None else column[rows]


def random_policy_loss(case):
    """(loss_of, settings as text) of random options that keep a token's term its own."""
    rng, pick = case.rng, lambda *choices: choices[case.rng.integers(len(choices))]  # noqa: E731
    kind, beta, entropy_coef = pick("clip", "cispo", "sapo"), pick(0.0, 0.3), pick(0.0, 0.05)
    settings = dict(kind=kind, eps_low=pick(0.05, 0.2), eps_high=pick(0.1, 0.3), delta=pick(None, 1.2), beta=beta)
    settings |= dict(kl_estimator=pick("k1", "k2", "k3"), bias_kl=pick(False, True), level="token")
    settings |= dict(coefficients=(1.0, 1.05) if kind == "sapo" else ())
    columns = dict(old=case.column(-3.7), ref=case.column(-3.7), advantages=case.column(), sampled=case.column(-3.7))
    columns |= dict(weights=case.column() ** 2 / case.rows, factors=pick(None, case.column() ** 2))
    columns["weights"][rng.random(case.rows) < 0.2] = 0  # tokens that take no part

    def loss_of(logprobs, entropy, rows):
        old, ref, advantages, sampled, weights, factors = (part_of(column, rows) for column in columns.values())
        loss, stats = ops.policy_loss(
            logprobs, old, ref if beta else None, advantages, weights, factors=factors, sampled=sampled, **settings
        )
        if entropy_coef:
            chosen = entropy if factors is None else entropy * factors
            loss = loss - chosen.sum() * entropy_coef
        return loss, stats

    return loss_of, settings


def cross_entropy(case):
    weights = case.column() ** 2 / case.rows
    return lambda logprobs, entropy, rows: (-(logprobs * part_of(weights, rows)).sum(), None)


def assert_same_bits(first, second, what):
    for name, value in first.items():
        assert value == second[name], f"{name}: {what}"


def scale_for(dtype):
    return 2.0**10 if dtype == "float16" else 1.0


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
        moved += two["dweight"][1] != case.before.tobytes()
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
        columns = [case.column(-3.7), case.column(), case.column(-3.7), case.column(), case.column()]
        columns.append(case.column() ** 2 / case.rows)
        settings = dict(eps_low=0.2, eps_high=0.3, vf_coef=0.1, cliprange_value=[0.2, None][seed % 2])
        settings |= dict(
            dual_clip=[None, 1.5][seed % 2], entropy_coef=[0.0, 0.01][seed // 2 % 2], beta=[0.0, 0.2][seed % 2]
        )

        def with_values(values, columns=columns, settings=settings):
            def loss_of(logprobs, entropy, rows):
                own = values if rows is None else Tensor(values.data[rows])
                return ops.ppo_loss(logprobs, own, entropy, *(part_of(x, rows) for x in columns), **settings)

            return loss_of

        values = case.rng.normal(size=(1, WIDTH)).astype(case.precise)
        two, one = (
            case.run(with_values, scale_for(dtype), one_pass, values=values, chunk_rows=5) for one_pass in (False, True)
        )
        assert_same_bits(two, one, seed)
        assert two["dvalues"] is not None


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
    "twice the loss": lambda loss: loss * 2.0,
    "the loss twice": lambda loss: loss + loss,
    "a part of it": lambda loss: loss * 0.25 + 3.0,
    "nothing of it": lambda loss: loss * 0.0,
}


@pytest.mark.parametrize("name", CHANGED)
def test_another_gradient_than_it_was_told_is_made_good(name):
    """To rounding: a caller may multiply the loss afterwards."""
    case, grads = Case(2, "float64"), []
    loss_of, _ = random_policy_loss(case)
    for one_pass in (False, True):
        hidden, weight = Tensor(case.hidden, requires_grad=True), Parameter(case.weight)
        upstream = np.array(3.0)
        given = (hidden, weight, case.targets, loss_of, upstream if one_pass else None)
        loss, *_ = ops.lm_head_loss(*given, chunk_rows=5)
        CHANGED[name](loss).backward(upstream)
        grads.append((hidden.grad, weight.grad))
    for two, one in zip(*grads):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-12)


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
    assert case.run(cross_entropy(Case(6, "float32")), 1.0, False)["loss"][1] == np.asarray(found[0].data).tobytes()


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
    assert count > 8 and not needs_sequences("clip", "token", None) and MAX_LOG_RATIO > 0
